"""Takes mixers from trained students in place of new ones, one layer at a time, without loading the students."""

from collections.abc import Sequence
from pathlib import Path

import torch

from hf_memmix.conversion.loading import check_finite_tensor, check_weight_files, read_config
from hf_memmix.conversion.streaming.checkpoint import Checkpoint
from hf_memmix.conversion.taken_mixers import load_mixer, no_mixer
from hf_memmix.errors import UserError
from hf_memmix.mixers import MemoryMixer, new_layer


class TrainedMixers:
    """The mixers of trained students, e.g. of aligned ones without attention.

    Each layer takes the mixer of the first student that has one of the same kind in this layer.

    Raises:
        ValueError: a folder holds no converted model, or its weights are not safetensors.
    """

    def __init__(self, folders: Sequence[Path]):
        self._students = []
        for folder in folders:
            config = read_config(folder)
            if getattr(config, "mixer_types", None) is None:
                raise UserError(f"{str(folder)!r} is no converted model, so there are no mixers to take")
            if check_weight_files(folder):
                raise UserError(f"{str(folder)!r} holds pickled weights; save the student as safetensors")
            self._students.append((folder, config, Checkpoint(folder)))

    def load(self, mixer: MemoryMixer, prefix: str) -> None:
        """Load the trained values of one layer into a mixer, in place; `prefix`: of its tensors, e.g. with a dot.

        Raises:
            ValueError: in this layer, all students have attention or a mixer of another kind or other options, or a
                value is not finite.
        """
        layer = mixer.layer_idx
        able = [one for one in self._students if layer in one[1].memory_layers]
        if not able:
            raise no_mixer(layer)
        own = (one for one in able if one[1].mixer_types[layer] == mixer.name)
        folder, config, checkpoint = next(own, able[0])
        with checkpoint:
            names = [name for name in checkpoint.tensors if name.startswith(prefix)]
            values = {name.removeprefix(prefix): checkpoint.read(name) for name in names}
        for name, value in values.items():
            check_finite_tensor(value, prefix + name, repr(str(folder)))
        with torch.device("meta"):
            trained = new_layer(config.mixer_types[layer], config, layer)
        load_mixer(mixer, values, trained)
