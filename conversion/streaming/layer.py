"""Converts one layer of a model whose other weights are not in memory."""

from collections.abc import Callable
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from hf_memmix.conversion.families import attention_module, attention_prefix, decoder_layers, extract_attention
from hf_memmix.conversion.fresh import new_mixer
from hf_memmix.conversion.from_attention import start_of
from hf_memmix.conversion.initialise import initialise_mixer
from hf_memmix.mixers import MemoryMixer


def build_mixer(
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    layer: int,
    seed: int,
    attention: dict[str, torch.Tensor],
    change: Callable[[MemoryMixer], None] | None = None,
) -> dict[str, torch.Tensor]:
    """The tensors of the mixer of one layer, by their names in the student.

    Args:
        teacher, student: both on "meta", where they stay; the student has its `conversion_report`.
        seed: seed of the parameters that have no counterpart in the attention.
        attention: the state dict of the layer's attention. It is emptied, to free its memory.
        change: called with the filled mixer.
    """
    module = attention_module(teacher, layer)
    module.load_state_dict(attention, assign=True)
    attention.clear()
    weights = extract_attention(teacher, layer)
    module.to("meta")

    prefix, kind = attention_prefix(student, layer), student.config.mixer_types[layer]
    dtypes = {name: parameter.dtype for name, parameter in attention_module(student, layer).named_parameters()}
    copied = [
        target
        for row in student.conversion_report.tensors
        if row["layer"] == layer and row["fate"] == "used"
        for target in row["targets"]
    ]
    mixer = new_mixer(student.config, layer, seed, without=copied)
    for name, parameter in mixer.named_parameters():
        parameter.data = parameter.data.to(dtypes[name])
    setattr(decoder_layers(student)[layer], prefix.rpartition(".")[2], mixer)
    again = replace(student.conversion_report, tensors=[], fresh=[])  # the student has its report already
    initialise_mixer(student, layer, start_of(kind), weights, again)
    if change is not None:
        change(mixer)
    tensors = {f"{prefix}.{name}": tensor for name, tensor in mixer.state_dict().items()}
    mixer.to("meta")
    return tensors
