"""What `align` by streaming costs: bytes of the spool, passes over the tokens, memory.

Bytes follow from shapes. Memory is measured: one step of one layer of each mixer, with random hidden states.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from hf_memmix.conversion.estimate import TRAINING_BYTES
from hf_memmix.conversion.families import attention_module
from hf_memmix.conversion.streaming.checkpoint import Checkpoint
from hf_memmix.operating_system import peak_memory, reset_peak
from hf_memmix.training.recipe import Recipe
from hf_memmix.training.streaming.layer_training import order_of_rows, take_mixer, train_mixer
from hf_memmix.training.streaming.rows import Rows
from hf_memmix.training.streaming.spool import Spool
from hf_memmix.training.streaming.teacher import StreamedTeacher
from hf_memmix.training.streaming.walk import Walk
from hf_memmix.training.trainer_arguments import uses_bf16


def streaming_cost(
    student: PreTrainedModel,
    teacher: StreamedTeacher,
    start: Path,
    rows: Rows,
    spool: Spool,
    recipe: Recipe,
    walk: Walk,
    processes: int,
    measure: bool,
) -> dict:
    """The cost of a walk.

    Args:
        student: on "meta".
        start: the folder of the student.
        measure: also measure the memory, which takes seconds.

    Returns:
        `rows` and `tokens` in the spool, `layers` that are trained, `passes` of each mixer over these tokens,
        `buffers` (number of files with hidden states at a time), `buffer_bytes` and `spool_bytes`, `weights` (bytes on
        the device: the largest teacher layer, and parameters, gradients and AdamW's moments of the largest mixer), and
        with `measure` `peak_memory`, bytes of `device` (None on a CPU) and `host`.
    """
    size, buffers = spool.nbytes(teacher.model.dtype), walk.buffers(processes)
    parameters = [sum(p.numel() for p in attention_module(student, i).parameters()) for i in walk.train]
    weights = {
        "teacher_layer": max((teacher.layer_bytes(i) for i in walk.steps()), default=0),
        "mixer": (4 + TRAINING_BYTES) * max(parameters, default=0),  # in fp32
    }
    cost = {
        "rows": len(rows),
        "tokens": len(rows) * spool.shape[0],
        "layers": walk.train,
        "passes": rows.passes,
        "buffers": buffers,
        "buffer_bytes": size,
        "spool_bytes": buffers * size,
        "weights": weights,
    }
    if measure:
        cost["peak_memory"] = _measured(student, teacher, start, rows, spool.shape, recipe, walk)
    return cost


def _measured(student, teacher: StreamedTeacher, start: Path, rows: Rows, shape, recipe: Recipe, walk: Walk) -> dict:
    """Peak memory of one step and one batch of the walk, of the first layer of each mixer."""
    kinds = student.config.mixer_types
    layers = {kinds[layer]: layer for layer in reversed(walk.train)}.values()
    on_gpu = teacher.device.type == "cuda"
    recipe = replace(recipe, steps=1, warmup_steps=0, gradient_accumulation=1)
    reset_peak()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(teacher.device)
    with tempfile.TemporaryDirectory(prefix="memmix-measure-") as name:
        folder, length = Path(name), recipe.batch_size
        some = Rows(_First(rows, length), recipe, order_of_rows(student, length, recipe, folder))
        spool = Spool(folder, length, shape)
        for layer in layers:
            values = torch.randn(length, *shape, generator=torch.Generator().manual_seed(0))
            spool.write(layer, [values.to(teacher.model.dtype)])
            with teacher.layer(layer), spool.read(layer) as hidden:
                for places, ids, positions in some.batches(length, teacher.device):
                    batch = hidden.read(range(places.start, places.stop), teacher.device)
                    with torch.autocast(teacher.device.type, torch.bfloat16, enabled=uses_bf16(recipe)):
                        teacher.advance(layer, batch, ids, positions)
                mixer = take_mixer(student, layer, Checkpoint(start))
                train_mixer(student, teacher, layer, some, hidden, recipe, 1, folder)
                mixer.to("meta")
            spool.remove(layer)
    return {
        "device": torch.cuda.max_memory_reserved(teacher.device) if on_gpu else None,
        "host": peak_memory(),
    }


class _First:
    """The first `length` rows, repeated if there are fewer."""

    def __init__(self, rows: Rows, length: int):
        self._items = [rows.tokens[i % len(rows)] for i in range(length)]

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, row: int) -> dict:
        return self._items[row]
