"""Builds students before their weights are filled: no weight is drawn at random that is replaced afterwards.

The random values of a mixer depend on the seed, the layer and the name of the parameter alone. So a conversion that
builds one layer at a time draws the same values as a conversion of the whole model in memory.
"""

import hashlib
from collections.abc import Collection

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers import initialization as init

from hf_memmix._transformers import fill_one
from hf_memmix.configuration_memmix import MemMixConfig
from hf_memmix.mixers import MemoryMixer, new_layer
from hf_memmix.swap import memory_mixers


def new_student(config: MemMixConfig, seed: int, device: str = "cpu") -> PreTrainedModel:
    """A student in fp32 whose mixers have their initial values; all other weights must be filled by the caller.

    device: "cpu", or "meta" for shapes without values.
    """
    with torch.device(device), init.no_init_weights():
        student = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    student.tie_weights()  # the library does it together with the weights
    if device != "meta":
        for mixer in memory_mixers(student).values():
            draw_weights(mixer, seed)
    return student


def new_mixer(config: MemMixConfig, layer: int, seed: int, without: Collection[str] = ()) -> MemoryMixer:
    """The mixer of one layer, in fp32 on the CPU, with the values that it has in `new_student`.

    without: names of parameters that the caller fills; their values are undefined.
    """
    with torch.device("cpu"), init.no_init_weights():
        mixer = new_layer(config.mixer_types[layer], config, layer).float()
    draw_weights(mixer, seed, without)
    return mixer


def draw_weights(mixer: MemoryMixer, seed: int, without: Collection[str] = ()) -> None:
    """Initialise the parameters of a mixer, one after the other, each with its own seed.

    The global random generator does not change.
    """
    for name, _ in mixer.named_parameters():
        if name in without:
            continue
        own = hashlib.sha256(f"{seed} {mixer.layer_idx} {name}".encode()).digest()
        with torch.random.fork_rng(devices=[]), fill_one(mixer, name):
            torch.manual_seed(int.from_bytes(own[:7], "big"))
            mixer.init_weights()
