"""What a conversion will do and how much memory it needs, computed from the teacher's config.json alone.

Teacher and student are built and converted on torch's meta device, where tensors have shapes but no values. So the
fates of tensors and the numbers of parameters are those of the real conversion. No weights are loaded or written.
"""

import time
from pathlib import Path

from transformers import PreTrainedModel

import hf_memmix
from hf_memmix.conversion.convert import convert_model
from hf_memmix.conversion.families import attention_module
from hf_memmix.conversion.loading import meta_teacher
from hf_memmix.conversion.streaming.conversion_cost import streaming_cost
from hf_memmix.serving.footprint import layer_kv_bytes, state_bytes
from hf_memmix.swap import memory_mixers

__all__ = ["CONTEXTS", "estimate", "meta_teacher", "parameter_bytes"]

CONTEXTS = (4096, 32768, 131072)
# further bytes for each trained fp32 parameter: its gradient and the two moments of AdamW
TRAINING_BYTES = 12


def estimate(
    teacher: PreTrainedModel,
    mixer: str | None = None,
    keep=None,
    contexts: tuple[int, ...] = CONTEXTS,
    *,
    place: str | Path | None = None,
    **options,
) -> dict:
    """What `convert_model` would make of this teacher, and its cost. `options`: its further arguments.

    Args:
        place: a folder on the disk that will hold the student: also measure what a conversion by streaming costs on
            this machine, which takes seconds.

    Returns:
        `mixer` (None if there are several), `layers` (mixer of each layer, or "attention"), `options` (of the mixer;
        with several mixers, by mixer), `windows` (`window` and `sinks` of each kind of window, alone or beside a
        memory, with its `layers`), `counts` and `kinds` of the tensors
        (`ConversionReport`), `parameters` (numbers for teacher, student, mixers), `dtype`, `state` (one row per
        context length: bytes of one sequence in the teacher's cache and in the student's) and `weights` (bytes of
        parameters, gradients and optimizer states, without activations, of the stages "convert", "align" and
        "distill"; the last one has a second copy of the teacher). With `place` also `streaming`, see
        `streaming_cost`.

    Raises:
        ValueError: as in `convert_model`.
    """
    start = time.perf_counter()
    student = convert_model(teacher.to("meta"), mixer, keep, **options)
    planning = 2 * (time.perf_counter() - start)  # building the teacher takes as long
    report = student.conversion_report
    mixers = memory_mixers(student)
    parameters = {"teacher": teacher.num_parameters(), "student": student.num_parameters()}
    parameters["mixers"] = sum(p.numel() for m in mixers.values() for p in m.parameters())
    attention = sum(p.numel() for i in report.converted for p in attention_module(teacher, i).parameters())
    stored, own = parameter_bytes(teacher), parameters["student"] * 4
    weights = {
        # in memory together: the teacher, copies of its attention, and the student in fp32
        "convert": stored + own + attention * teacher.dtype.itemsize,
        "align": stored + own + TRAINING_BYTES * parameters["mixers"],
        "distill": stored + own + TRAINING_BYTES * parameters["student"],
    }
    memory = sum(state_bytes(m, teacher.dtype) for m in mixers.values())
    state = []
    for length in contexts:
        kv = [layer_kv_bytes(teacher.config, i, length, teacher.dtype) for i in range(len(student.config.mixer_types))]
        state.append({"context": length, "teacher": sum(kv), "student": memory + sum(kv[i] for i in report.kept)})
    measured = {} if place is None else {"streaming": streaming_cost(teacher, student, Path(place), planning)}
    return measured | {
        "mixer": report.mixer,
        "layers": report.layers,
        "options": student.config.mixers if report.mixer is None else student.config.mixers[report.mixer],
        "windows": _windows(student.config),
        "counts": report.counts(),
        "kinds": report.kinds(),
        "parameters": parameters,
        "dtype": str(teacher.dtype).removeprefix("torch."),
        "state": state,
        "weights": weights,
    }


def _windows(config: hf_memmix.MemMixConfig) -> list[dict]:
    found = {}
    for layer, options in config.windows().items():
        found.setdefault((options.window, options.sinks), []).append(layer)
    return [{"window": size, "sinks": first, "layers": layers} for (size, first), layers in found.items()]


def parameter_bytes(model: PreTrainedModel) -> int:
    """Bytes of a model's parameters. Tied parameters are counted once."""
    return sum(p.numel() * p.element_size() for p in model.parameters())
