"""The conversion of one model folder, from its safetensors files to those of the student."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from hf_memmix.conversion.families import attention_module, attention_prefix
from hf_memmix.conversion.loading import (
    check_finite_tensor,
    check_weight_files,
    meta_teacher,
    read_config,
    refuse_untied_head,
)
from hf_memmix.conversion.streaming.checkpoint import Checkpoint
from hf_memmix.conversion.streaming.layer import build_mixer
from hf_memmix.conversion.streaming.matching import NotStreamable, match
from hf_memmix.conversion.streaming.shards import ShardWriter
from hf_memmix.conversion.streaming.trained import TrainedMixers
from hf_memmix.mixers import MemoryMixer
from hf_memmix.operating_system import release_memory

Progress = Callable[[int, int], None]  # of bytes done and all bytes
Fill = Callable[[MemoryMixer], None]


class ConversionStream:
    """Everything that is known about a conversion before a weight is read.

    `teacher`, `student`: the two models on "meta"; the student has its `conversion_report`.

    Args:
        folder: a teacher.
        convert: makes the student on "meta" from the teacher on "meta", e.g. a partial `convert_model`.

    Raises:
        NotStreamable: the folder holds a teacher that must be loaded as a whole.
        ValueError: as in `load_model` and `convert`.
    """

    def __init__(self, folder: Path, convert: Callable[[PreTrainedModel], PreTrainedModel]):
        config = read_config(folder)
        if check_weight_files(folder):
            raise NotStreamable("its weights are pickled (pytorch_model.bin); a copy in safetensors can be streamed")
        if getattr(config, "quantization_config", None):
            raise NotStreamable("transformers must dequantize its weights")
        self.folder, self._name = folder, repr(str(folder))
        self.checkpoint = Checkpoint(folder)
        self.teacher = meta_teacher(folder)
        self.student = convert(self.teacher)
        self._converted = self.student.conversion_report.converted
        self._matches = match(self.teacher, self.student, self.checkpoint.tensors, self._converted, self._name)

    def write(
        self,
        folder: Path,
        seed: int,
        trained: TrainedMixers | None = None,
        fill: Fill | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Write the student's configurations and weights into an existing folder.

        Args:
            seed: seed of the parameters that have no counterpart in the teacher.
            trained: mixers to take in place of new ones.
            fill: called with every mixer before it is written, after a trained one was taken.

        Raises:
            ValueError: a weight is not finite, tied weights differ, or there is not enough space.
        """
        write_description(self.student, folder)
        matches = self._matches
        sizes = {name: tensor.nbytes for name, tensor in matches.written.items()}
        done, total = 0, sum(sizes.values())
        with self.checkpoint, ShardWriter(folder, matches.written, self.student.num_parameters()) as writer:
            self._check_ties()
            for step in self._steps():
                if isinstance(step, int):
                    written = self._write_mixer(step, writer, seed, partial(self._fill, trained, fill))
                else:
                    writer.write(step, self._copied(step))
                    written = [step]
                done += sum(sizes[name] for name in written)
                if progress is not None:
                    progress(done, total)

    def _steps(self) -> list[int | str]:
        """Names of tensors to copy and indices of layers to convert, in the order in which the teacher is stored."""

        def place(name: str) -> tuple[str, int]:
            tensor = self.checkpoint.tensors[name]
            return tensor.file.name, tensor.start

        steps = {name: place(source) for name, source in self._matches.copied.items()}
        steps |= {i: min(place(source) for source in names.values()) for i, names in self._matches.attention.items()}
        return sorted(steps, key=steps.__getitem__)

    def _copied(self, name: str) -> Iterator[torch.Tensor]:
        """The values of a tensor outside the mixers, piece by piece, in the student's dtype."""
        dtype = self._matches.written[name].dtype
        for piece in self.checkpoint.pieces(self._matches.copied[name]):
            values = piece.to(dtype)
            check_finite_tensor(values, name, self._name)
            yield values

    def _check_ties(self) -> None:
        """Raise ValueError if tensors that the model ties are stored twice and differ."""
        for one, other in self._matches.ties:
            pieces = zip(self.checkpoint.pieces(one), self.checkpoint.pieces(other), strict=True)
            if not all(torch.equal(a, b) for a, b in pieces):
                refuse_untied_head(self._name)

    def _fill(self, trained: TrainedMixers | None, fill: Fill | None, mixer: MemoryMixer) -> None:
        if trained is not None:
            trained.load(mixer, attention_prefix(self.student, mixer.layer_idx) + ".")
        if fill is not None:
            fill(mixer)

    def _write_mixer(self, layer: int, writer: ShardWriter, seed: int, fill: Fill) -> list[str]:
        """Build and write the mixer of one layer. Returns the names of its tensors."""
        sources, values = self._matches.attention[layer], {}
        for name, parameter in attention_module(self.teacher, layer).state_dict().items():
            values[name] = self.checkpoint.read(sources[name]).to(parameter.dtype)
            check_finite_tensor(values[name], sources[name], self._name)
        tensors = build_mixer(self.teacher, self.student, layer, seed, values, fill)
        for name, tensor in tensors.items():
            writer.write(name, [tensor])
        names = list(tensors)
        del tensor, tensors
        release_memory()
        return names


def write_description(model: PreTrainedModel, folder: Path) -> None:
    """Write the files that `save_pretrained` writes beside the weights, e.g. config.json."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # it would count no weight files
    try:
        model.save_pretrained(folder, state_dict={})
    finally:
        if shown:
            logging.enable_progress_bar()
