"""Tiny runs of `align --stream` and their folders, for the tests of streaming."""

import torch

from hf_memmix.conversion import convert_model, save_student
from hf_memmix.training.streaming import align_by_streaming
from tiny_runs import SMALL_RUN, random_rows
from tiny_teachers import tiny_teacher

# without clipping, whose norm is over all layers in memory and over one layer here
TRAINER = {"logging_steps": 1, "disable_tqdm": True, "max_grad_norm": 0.0}
OPTIONS = {**SMALL_RUN, "learning_rate": 3e-3, "trainer": TRAINER}


def models(folder, family="llama", mixer="gka", keep="none", dtype=torch.float32, **options):
    """Folders `student` and `teacher` of a tiny pair of three layers."""
    tiny_teacher(family, 3).to(dtype).save_pretrained(folder / "teacher")
    save_student(convert_model(folder / "teacher", mixer, keep, **options), folder / "student")


def stream(folder, **changes):
    """The result of a run from `folder / "student"` and `folder / "teacher"` to `folder / "out"`."""
    given = {"student": folder / "student", "teacher": folder / "teacher", "data": random_rows()}
    given |= {"out": folder / "out", "spool": folder / "spool", "steps": 6}
    return align_by_streaming(**given | OPTIONS | changes)


def losses(result):
    """The logged losses in float64."""
    return torch.tensor([row["loss"] for row in result["log"]], dtype=torch.float64)
