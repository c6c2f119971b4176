"""Echo's experiments in two steps each, and that questions are answered alike token by token."""

import argparse
import copy
import json
import math
from types import SimpleNamespace

import pytest
import torch

from hf_memmix.training.experiments.common.fit import MODELS, build
from hf_memmix.training.experiments.echo import ablation as echo_ablation
from hf_memmix.training.experiments.echo import feed_forward
from hf_memmix.training.experiments.echo import suite as echo_suite
from hf_memmix.training.experiments.echo import transfer as echo_transfer
from hf_memmix.training.experiments.echo.tasks import TASKS, draw_examples

SMALL = {"steps": 2, "batch": 4, "length": 64, "pairs": [2, 4], "lengths": [64], "sequences": 2, "lrs": [1e-3]}
SMALL |= {"lr": 1e-3, "seeds": 2, "models": list(echo_suite.MODELS), "variants": list(echo_ablation.VARIANTS)}
SMALL |= {"deadline": math.inf}


@pytest.fixture
def args(monkeypatch):
    monkeypatch.setattr(echo_suite, "BATCHES_PER_DRAW", 2)
    monkeypatch.setattr(echo_suite, "PAIRS", (2, 4))
    return argparse.Namespace(**SMALL)


def whole(parts):
    """What the harness makes of the parts of a row."""
    return {key: value for part in parts for key, value in part.items()}


def test_transfer(args):
    planned = echo_transfer.rows_to_run([], args)
    assert [(row["model"], row["seed"]) for row in planned] == [
        (name, seed) for name in ("ska", "attention", "ssm") for seed in (0, 1)
    ]
    rows = [{**row, **whole(echo_transfer.run(row, args))} for row in planned if row["seed"] == 0]
    for row in rows:
        assert row["finite"] and {cell[0] for cell in row["cells"]} == set(TASKS)
        assert row["decode_agreement"] == 1
    assert ["refreshed" in row for row in rows] == [True, False, False]
    assert json.loads(json.dumps(rows)) == rows


def test_ablation(args):
    assert len(echo_ablation.rows_to_run([], args)) == 2 * len(echo_ablation.VARIANTS)
    args.variants, args.seeds = ["no action mask", "chunks of 1"], 1
    rows = [{**row, **whole(echo_ablation.run(row, args))} for row in echo_ablation.rows_to_run([], args)]
    assert all(row["finite"] for row in rows) and ["refreshed" in row for row in rows] == [True, False]


def test_variants_change_what_the_model_computes():
    """Every variant of the ablation gives other answers with the same weights."""
    examples = draw_examples("system_prompt", 2, 96, 8, torch.Generator().manual_seed(0))
    found = []
    for variant in echo_ablation.VARIANTS.values():
        model = echo_suite.build("ska", 0, variant.layers, **variant.ska)
        open_outputs(model)
        with torch.no_grad():
            found.append(echo_suite.value_logits(model, examples, variant.masked))
    for i, a in enumerate(found):
        assert all((a - b).abs().max() > 1e-5 for b in found[:i])


def open_outputs(model):
    """SKA layers start with a zero output; the last token of noise before the question is all they would need."""
    for name, parameter in model.named_parameters():
        if name.endswith("o_proj.weight") and not parameter.any():
            torch.nn.init.normal_(parameter, std=0.05)


def test_refreshing_changes_a_model_and_decoding_does_not():
    model = echo_suite.build("ska", 0)
    open_outputs(model)
    assert echo_suite.decode_agreement(model, True, 48, 4, 4) == 1
    examples = draw_examples("system_prompt", 2, 64, 4, torch.Generator().manual_seed(0))
    refreshed = copy.deepcopy(model)
    echo_suite.set_ska(refreshed, refresh_every=1)
    with torch.no_grad():
        a, b = (echo_suite.value_logits(m, examples, True) for m in (model, refreshed))
    assert (a - b).abs().max() > 1e-4


def test_feed_forwards_have_equal_parameters(easy_text):
    """But for the one that is as wide as SwiGLU; every one trains, and eigenvalues do not decay."""
    args = SimpleNamespace(
        hidden_size=256, layers=1, heads=4, batch_tokens=64, tokens=128, lrs=[1e-3], deadline=math.inf, text=easy_text
    )
    found = {}
    for row in feed_forward.rows_to_run([], args):
        found[row["feed_forward"]] = feed_forward.run(row | {"context": 32}, args)
    counts = {name: result["parameters"] for name, result in found.items()}
    assert all(math.isfinite(result["perplexity"]) for result in found.values())
    wide = counts.pop("Koopman, a third fewer")
    assert max(counts.values()) < 1.002 * min(counts.values()) and wide < 0.99 * min(counts.values())
    model = build(args, *MODELS["mamba2"], vocab=64, context=32, seed=0)
    feed_forward.replace_feed_forwards(model, "Koopman")
    *_, spared = feed_forward.groups_of(model)
    assert any(p is model.model.layers[0].mlp.spectrum for p in spared["params"]) and spared["weight_decay"] == 0
