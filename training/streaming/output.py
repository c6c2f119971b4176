"""Trained mixers of single layers as files, and the student folder that is made of them."""

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from hf_memmix.conversion.convert import WRITE_AGAIN, write_beside
from hf_memmix.conversion.families import attention_prefix
from hf_memmix.conversion.hashes import open_sealed, save_sealed
from hf_memmix.conversion.loading import check_finite_tensor, meta_teacher
from hf_memmix.conversion.saving import atomic_folder, explain_write_errors, replace_file
from hf_memmix.conversion.streaming.checkpoint import Checkpoint
from hf_memmix.conversion.streaming.matching import as_saved, find_stored
from hf_memmix.conversion.streaming.shards import ShardWriter
from hf_memmix.conversion.streaming.stream import write_description
from hf_memmix.mixers import MemoryMixer
from hf_memmix.training.streaming.spool import FULL

AGAIN = "remove this file and run the same command again: it trains this layer again"


class TrainedLayers:
    """The files of the layers that have been trained, `layer-<i>.safetensors` in fp32, with their records."""

    def __init__(self, folder: Path):
        self.folder = folder

    def file(self, layer: int) -> Path:
        """The file of a layer."""
        return self.folder / f"layer-{layer}.safetensors"

    def write(self, layer: int, mixer: MemoryMixer, record: dict) -> None:
        """Write a layer and its record (`log` and `seconds`), atomically."""
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in mixer.state_dict().items()}
        with explain_write_errors(self.file(layer), FULL), replace_file(self.file(layer)) as part:
            save_sealed(tensors, part, record)

    def record(self, layer: int) -> dict | None:
        """The record of a layer; None if the layer has not been trained. Raises ValueError if it was changed."""
        if not self.file(layer).is_file():
            return None
        with open_sealed(self.file(layer), AGAIN) as file:
            return file.record

    def tensors(self, layer: int) -> dict[str, Tensor]:
        """The tensors of a layer, by their names in the mixer. Raises ValueError if one is not as it was written."""
        with open_sealed(self.file(layer), AGAIN) as file:
            return {name: file.read(name) for name in file.names}

    def check(self, layer: int) -> bool:
        """Whether a layer has been trained. Reads its whole file and raises ValueError if it was changed."""
        return self.record(layer) is not None and bool(self.tensors(layer))


def write_student(
    start: Path, trained: TrainedLayers, layers: list[int], out: Path, tokenizer=None, overwrite: bool = False
) -> None:
    """Write the student `start` with the mixers of trained layers to a folder: the files that `align` writes.

    One mixer is in memory at a time. All other tensors are copied in pieces.

    Raises:
        ValueError: the folder cannot be written.
    """
    student = meta_teacher(start)
    prefixes = {attention_prefix(student, layer) + ".": layer for layer in layers}
    written = as_saved(student)
    with Checkpoint(start) as checkpoint, explain_write_errors(out, WRITE_AGAIN):
        found = find_stored(student, checkpoint.tensors, repr(str(start)))

        def copied(name: str) -> Iterator[Tensor]:
            for piece in checkpoint.pieces(found[name][0]):
                values = piece.to(written[name].dtype)
                check_finite_tensor(values, name, repr(str(start)))
                yield values

        with atomic_folder(out, overwrite) as folder:
            write_description(student, folder)
            with ShardWriter(folder, written, student.num_parameters()) as writer:
                for prefix, layer in prefixes.items():
                    for name, tensor in trained.tensors(layer).items():
                        writer.write(prefix + name, [tensor.to(written[prefix + name].dtype)])
                for name in written:
                    if not name.startswith(tuple(prefixes)):
                        writer.write(name, copied(name))
            write_beside(student, folder, tokenizer)
