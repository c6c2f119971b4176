"""The students of the recall teacher: their layouts, how their memory starts, and how they are measured."""

import functools
from pathlib import Path

import numpy
import torch

from hf_memmix.conversion import load_model, report
from hf_memmix.conversion.from_attention.half_lives import start_decay
from hf_memmix.training.experiments.common import baselines  # noqa: F401, registers "gla"
from hf_memmix.training.experiments.common.fit import autocast
from hf_memmix.training.experiments.common.harness import device
from hf_memmix.training.experiments.recall_teacher.probing import drawn, recall_of
from hf_memmix.training.experiments.recall_teacher.texts import probe_materials, tokens_of

# the name of a layout: mixer, its options, and the half-lives of its memory at the start in tokens (None: the default)
LAYOUTS = {
    "gka": ("gka", {}, None),
    "gla": ("gla", {}, None),
    "lattice": ("lattice", {}, None),
    "mamba2": ("mamba2", {}, None),
    "coffee": ("coffee", {}, None),
    "ska": ("ska", {}, None),
    "window-64": ("window", {"window": 64}, None),
    "window-256": ("window", {"window": 256}, None),
    "gka, long": ("gka", {}, (16.0, 4096.0)),
    "gla, long": ("gla", {}, (16.0, 4096.0)),
    "mamba2, long": ("mamba2", {}, (16.0, 4096.0)),
}


def start_decay_of_gates(mixer, half_lives: tuple[float, float]) -> None:
    start_decay(mixer, half_lives, mixer.a_proj)


@torch.no_grad()
def start_decay_of_mamba2(mixer, half_lives: tuple[float, float]) -> None:
    mixer.A_log.copy_(mixer.decay_of(half_lives)[0])


START_DECAY = {
    "gka": start_decay_of_gates,
    "gla": start_decay_of_gates,
    "mamba2": start_decay_of_mamba2,
}


def measured(model, teacher, args) -> dict:
    """Perplexity ratio, KL and agreement on held-out text and on the held-out domain, and recall."""
    result = {}
    for text in ("heldout", "domain"):
        tokens = torch.from_numpy(tokens_of(args.data, text)[: args.measured_tokens].astype(numpy.int64))
        with autocast():
            compared = report(model, teacher, tokens, block_size=1024)
        result |= {f"{text}_{name}": compared[name] for name in ("ppl_ratio", "kl", "top1_agreement")}
    return result | {"recall": recall_of(model, sequences(args.data, tuple(args.lengths), args.samples))}


@functools.cache
def teacher_of(folder: Path):
    """The teacher in `folder`."""
    return load_model(folder, dtype=torch.float32).to(device()).eval()


@functools.cache
def sequences(data: Path, lengths: tuple[int, ...], samples: int) -> dict:
    return drawn(probe_materials(data), lengths, samples)
