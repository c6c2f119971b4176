"""Variants of GKA: what each changes, that the models of a task have equal size, and the table of a run."""

import argparse
import functools
import json
import math

import numpy
import pytest
import torch

from hf_memmix.swap import memory_mixers
from hf_memmix.training.experiments.common import fit
from hf_memmix.training.experiments.common.fit import build
from hf_memmix.training.experiments.common.text import train_tokens
from hf_memmix.training.experiments.gka import variants
from hf_memmix.training.experiments.gka.variants import TASKS, VARIANTS, Task, rows_to_run, sizes_of
from hf_memmix.training.experiments.gka.variants_report import plot, section

SETTINGS = {
    "batch_tokens": 128, "tokens": 256, "recall_tokens": 256, "context": 32, "cells": [[32, 4]], "seeds": [0],
    "tasks": ["recall", "text"], "variants": list(VARIANTS), "deadline": math.inf,
}  # fmt: skip


@pytest.fixture
def args(tmp_path, monkeypatch):
    numpy.save(tmp_path / "text.npy", (numpy.arange(2000) % 50).astype(numpy.uint16))
    monkeypatch.setattr(fit, "measured_tokens", lambda name: torch.arange(200) % 50)
    train_tokens.cache_clear()
    for name in TASKS:
        monkeypatch.setitem(TASKS, name, Task(hidden_size=32, layers=1, heads=2, lr=3e-3))
    return argparse.Namespace(**SETTINGS, text=tmp_path / "text.npy")


def test_rows_of_a_seed_come_before_those_of_the_next(args):
    args.seeds, args.variants = [0, 1], ["s = D", "s = D/2"]
    rows = rows_to_run([], args)
    assert [row["seed"] for row in rows] == [0] * 4 + [1] * 4
    assert [row["variant"] for row in rows[:4]] == ["s = D", "s = D/2"] * 2
    assert rows[0]["task"] == "recall" and rows[0]["pairs"] == 4 and rows[2]["context"] == 32


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


@pytest.mark.parametrize(
    ("name", "recall", "text"), [("s = D", 8192, 32768), ("s = D/2", 3072, 12288), ("s = D/4", 1280, 5120)]
)
def test_state_of_a_sketch(name, recall, text, args):
    """Numbers of H and U per layer, at the sizes of the experiment: 2 heads of 32, 4 heads of 64."""
    for task, floats in ((Task(64, 2, 2, 0), recall // 2), (Task(256, 4, 4, 0), text)):
        assert fit.memory_of(*_model(task, name, args))[0] == floats


def _model(task, name, args):
    own, options = sizes_of(task, VARIANTS[name], args)
    return own, "gka", options


def test_every_row_runs_and_stands_in_the_table(args, tmp_path):
    """Each variant is another model, so its loss is another one; a rate alone changes it too."""
    args.variants = [
        "s = D", "s = D/4", "as in Figure 3a", "slow decay", "half the heads", "rate x 0.5", "q starts as k",
        "constant ridge 0.25", "attention last", "DEC, own projection of q, rate x 0.5",
    ]  # fmt: skip
    rows = [row | variants.run(row, args) | {"commit": "c"} for row in rows_to_run([], args)]
    assert json.loads(json.dumps(rows)) == rows and all(row["finite"] for row in rows)
    for kind in TASKS:
        assert len({row["dev_loss"] for row in rows if row["task"] == kind}) == len(args.variants)
    half = next(row for row in rows if row["variant"] == "rate x 0.5")
    assert half["lr"] == 1.5e-3 and half["options"] == {}
    environment = {"hardware": "h", "commit": "c"}
    settings = {**SETTINGS, "variants": args.variants}
    results = {"settings": settings, "environment": environment, "rows": rows}
    table = section([results])
    plain, last = (
        next(r for r in rows if r["task"] == "text" and r["variant"] == v) for v in ("s = D", "attention last")
    )
    above = f"{100 * (last['perplexity'] / plain['perplexity'] - 1):+.1f} %"
    assert (
        f"| attention last | 0.003 | {last['perplexity']:.2f} (1 seed) | {last['perplexity']:.2f} |" in table
        and f"| {above} |" in table
    )
    for word in ("32 tokens, 4 pairs", "perplexity at 32", "s = D/4", "half the heads", "(1 seed)", "| 100 |"):
        assert word in table, word
    plot([results], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
    rows[0] |= {"curve": [[5, 8.3], [10, 7.9], [15, 7.4], [20, 3.0]]}
    rows[-1] |= {"gradient_norms": [9.0, 1.0, 3.5, 2.0, 1.0]}
    assert (
        "| s = D | 0.003 |" in section([results])
        and "| 75 |" in section([results])
        and "| 3.50 |" in section([results])
    )
    rows[0] |= {"finite": False}
    assert "Failed: s = D (recall, seed 0)" in section([results])


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


def test_q_and_k_start_equal(args):
    variant = VARIANTS["q starts as k"]
    own, options = sizes_of(TASKS["recall"], variant, args)
    model = build(own, variant.layers(1), options, vocab=64, context=32, seed=0)
    (mixer,) = memory_mixers(model).values()
    assert not torch.equal(mixer.q_proj.weight, mixer.k_proj.weight)
    variant.prepare(model)
    assert torch.equal(mixer.q_proj.weight, mixer.k_proj.weight)


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("attention first", ["attention", "gka", "gka", "gka"]),
        ("attention second and last", ["gka", "attention", "gka", "attention"]),
        ("attention in all layers", ["attention"] * 4),
        ("s = D", ["gka"] * 4),
    ],
)
def test_hybrids_have_attention_in_the_named_layers(name, layers):
    assert VARIANTS[name].layers(4) == layers


def test_a_constant_ridge_is_solved_exactly_with_exact_gradients(args):
    """Against `torch.linalg.solve` per token in float64. Few keys, so 30 iterations converge."""
    own, options = sizes_of(TASKS["recall"], VARIANTS["constant ridge 0.25"], args)
    model = build(own, "gka-constant-ridge", options, vocab=64, context=32, seed=0).double()
    (mixer,) = memory_mixers(model).values()
    x = torch.randn(2, 40, own.hidden_size, dtype=torch.double)
    tokens = mixer.project(x, None)
    y, states = mixer.scan(tokens, None)
    q, k, v, log_decay, beta, _ = mixer.memory_inputs(tokens, None, None, None)
    dim = q.shape[-1]
    H = U = torch.zeros(2, q.shape[2], dim, dim, dtype=torch.double)
    expected = []
    for t in range(40):
        decay, weight = log_decay[:, t].exp()[..., None, None], beta[:, t].square()[..., None, None]
        key = k[:, t][..., None, :]
        H = decay * H + weight * key.mT * key
        U = decay * U + weight * v[:, t][..., None] * key
        found = torch.linalg.solve(H + 0.25 * torch.eye(dim, dtype=torch.double), q[:, t][..., None])[..., 0]
        mixed = q[:, t] + tokens["alpha"][:, t][..., None] * (found - q[:, t])
        expected.append((U @ mixed[..., None])[..., 0] * dim**-0.5)
    expected = torch.stack(expected, 1)
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(states["U"], U)
    weights = torch.randn_like(y)
    parameters = [p for name, p in mixer.named_parameters() if not name.startswith(("o_proj", "g_proj", "o_norm"))]
    got, want = (torch.autograd.grad((o * weights).sum(), parameters, retain_graph=True) for o in (y, expected))
    for mine, exact in zip(got, want, strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-5, atol=1e-6)
