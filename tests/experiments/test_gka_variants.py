"""Variants of GKA: what each changes, and that the models of a task have equal size."""

import argparse
import functools
import math

import pytest
import torch

from hf_memmix.swap import memory_mixers
from hf_memmix.training.experiments.common.fit import build
from hf_memmix.training.experiments.gka import variants
from hf_memmix.training.experiments.gka.variants import TASKS, VARIANTS, Task, rows_to_run, sizes_of

SETTINGS = {
    "batch_tokens": 128, "tokens": 256, "recall_tokens": 256, "context": 32, "cells": [[32, 4]], "seeds": [0],
    "tasks": ["recall", "text"], "variants": list(VARIANTS), "deadline": math.inf,
}  # fmt: skip


@pytest.fixture
def args(easy_text, monkeypatch):
    for name in TASKS:
        monkeypatch.setitem(TASKS, name, Task(hidden_size=32, layers=1, heads=2, lr=3e-3))
    return argparse.Namespace(**SETTINGS, text=easy_text)


@functools.cache
def parameters(variant: str) -> int:
    """The number of parameters of a variant's model."""
    task = Task(64, 2, 2, 1e-3)
    own, options = sizes_of(task, VARIANTS[variant], argparse.Namespace(**SETTINGS))
    layers = VARIANTS[variant].layers(task.layers)
    return build(own, layers, options, vocab=128, context=32, seed=0).num_parameters()


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_have_equal_parameters(name):
    assert abs(parameters(name) / parameters("s = D") - 1) < 0.005


def test_a_slow_decay_is_that_of_the_model_that_is_trained(args, monkeypatch):
    seen = []
    monkeypatch.setattr(variants, "train_recall", lambda *given: seen.append(given[-1]) or {})
    variants.run({"task": "recall", "variant": "slow decay", "length": 32, "pairs": 4, "seed": 0}, args)
    own, options = sizes_of(TASKS["recall"], VARIANTS["slow decay"], args)
    model = build(own, "gka", options, vocab=64, context=32, seed=0)
    seen[0](model)
    for mixer in memory_mixers(model).values():
        rates = torch.nn.functional.softplus(mixer.dt_bias) * mixer.A_log.exp()
        torch.testing.assert_close(math.log(2) / rates, torch.tensor([64.0, 4096.0]), rtol=1e-3, atol=0)
        assert not mixer.a_proj.weight.any()


def test_every_variant_is_another_model(args):
    """So its loss is another one; a rate alone changes it too."""
    args.variants = ["s = D", "s = D/4", "half the heads", "rate x 0.5", "q starts as k", "attention last"]
    rows = [row | variants.run(row, args) for row in rows_to_run([], args)]
    assert all(row["finite"] for row in rows)
    for kind in TASKS:
        assert len({row["dev_loss"] for row in rows if row["task"] == kind}) == len(args.variants)
