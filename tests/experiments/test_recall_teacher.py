"""The recall teacher: drills, optimizer, probes, the control with windows, and the grid's rows and tables."""

import math
import random
from types import SimpleNamespace

import numpy
import pytest
import torch

from hf_memmix.assets import asset_path
from hf_memmix.conversion import convert_model, load_model
from hf_memmix.training.experiments.bundled.language_model import without_masks
from hf_memmix.training.experiments.bundled.muon import orthogonal
from hf_memmix.training.experiments.common.fit import fit
from hf_memmix.training.experiments.recall_teacher import grid, probing, texts
from tiny_runs import changed, weights


def test_muon_makes_singular_values_nearly_equal():
    torch.manual_seed(0)
    for shape in ((3, 16, 40), (2, 40, 16)):
        matrices = torch.randn(shape)
        found = orthogonal(matrices)
        assert found.shape == shape
        values = torch.linalg.svdvals(found)
        assert values.min() > 0.6
        assert values.max() < 1.3
        # the singular vectors stay: U S V^T becomes about U V^T
        u, _, v = torch.linalg.svd(matrices, full_matrices=False)
        assert torch.nn.functional.cosine_similarity(found.flatten(1), (u @ v).flatten(1)).min() > 0.95


def test_attention_without_masks_is_the_same(tiny):
    ids = torch.randint(100, 2000, (2, 40), generator=torch.Generator().manual_seed(0))
    student = convert_model(tiny, layers={"gka": [0, 5], "attention": "rest"}).eval()
    with torch.no_grad():
        expected = [model(ids, use_cache=False).logits for model in (tiny, student)]
        with without_masks(tiny, student):
            found = [model(ids, use_cache=False).logits for model in (tiny, student)]
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))
    assert tiny.config._attn_implementation == student.config._attn_implementation == "sdpa"


def test_mqar_asks_every_pair_once_at_its_length(probes):
    sample = probing.pairs_then_queries(probes, 600, random.Random(0))
    assert len(sample.ids) == 600
    assert len(sample.answers) == probing.PAIRS
    assert sorted(answer.depth for answer in sample.answers) == [i / 31 for i in range(32)]
    for answer in sample.answers:
        value = sample.ids[answer.start : answer.stop]
        assert any(sample.ids[i : i + len(value)] == value for i in range(300))
    assert probing.pairs_then_queries(probes, 100, random.Random(0)) is None
    assert 128 not in probing.drawn({"drills": probes}, [128, 512], 1, ("mqar_32",))["mqar_32"]


def test_probes_with_the_words_of_drills(probes, material, tmp_path):
    texts.write_words(tmp_path, material.keys, material.values)
    ours = texts.with_drill_words(probes, tmp_path)
    assert ours.filler is probes.filler
    assert set(ours.values) <= set(material.values)
    assert set(ours.keys) <= set(material.keys)
    first = [tokens[0] for _, tokens in ours.keys + ours.values]
    assert len(first) == len(set(first))


@pytest.fixture(scope="module")
def tiny():
    return load_model(asset_path("tiny_teacher"), dtype=torch.float32).eval()


ARGS = SimpleNamespace(layouts=(*grid.LAYOUTS, *grid.MIXTURES), seed_list=(0, 1))


def aligned(layout, seed=0, **fields):
    return {"stage": "align", "layout": layout, "seed": seed, "finite": True, "ranking": {"layers": []}} | fields


def test_students_wait_for_their_mixers_and_pure_ones_come_first():
    first = grid.rows_to_run([], ARGS)
    assert [row["layout"] for row in first[:9]] == [*grid.FIRST]  # these start at once
    assert first[9] == {"stage": "teacher"}
    assert {row.get("seed", 0) for row in first} == {0}
    done = [aligned("gka"), aligned("coffee", finite=False), aligned("ska", ranking=None)]
    rows = [row for row in grid.rows_to_run(done, ARGS) if row["stage"] == "distill"]
    assert {row["layout"] for row in rows} == {"gka", "ska"}
    assert [(row["layout"], row["keep"]) for row in rows][:4] == [("gka", 0), ("ska", 0), ("gka", 3), ("ska", 3)]
    assert not any(row["how"] == "select" for row in rows if row["layout"] == "ska")
    done = [aligned(name) for name in grid.LAYOUTS]
    seed = [row for row in grid.rows_to_run(done, ARGS) if row["stage"] == "distill"]
    assert [(row["layout"], row["keep"]) for row in seed[:18]] == [(n, k) for k in (0, 3) for n in grid.FIRST]
    assert {row["seed"] for row in grid.rows_to_run(done + seed[:17], ARGS) if "seed" in row} == {0}
    assert {row["seed"] for row in grid.rows_to_run(done + seed[:18], ARGS) if "seed" in row} == {0, 1}
    everything = grid.rows_in_order(ARGS)
    cells = {(row["layout"], row["keep"], row["how"]) for row in everything if row["stage"] == "distill"}
    assert {("gka", keep, how) for keep in (1, 3, 6) for how in ("uniform", "select")} <= cells
    assert len(everything) == len({tuple(row.items()) for row in everything})


def test_a_mixture_waits_for_the_mixers_of_its_seed_and_spends_the_bytes_of_one(tmp_path, monkeypatch):
    done = [aligned(name, seed) for seed, names in ((0, grid.MIXED), (1, grid.MIXED[:-1])) for name in names]
    mixed = [row for row in grid.rows_to_run(done, ARGS) if row.get("how") == "mixture"]
    assert {(row["layout"], row["seed"]) for row in mixed} == {(name, 0) for name in grid.MIXTURES}
    sizes = {"gka": 2, "lattice": 1, "mamba2": 1, "coffee": 1, "ska": 1}
    scores = {"gka": [1, 1, 1, 1], "lattice": [2, 5, 2, 2], "mamba2": [9, 0, 9, 9], "coffee": [9] * 4, "ska": [8] * 4}

    def ranking(row, args):
        return {"layers": [{"score": s} for s in scores[row["layout"]]], "layer_bytes": sizes[row["layout"]]}

    monkeypatch.setattr(grid, "ranking_of", ranking)
    found = {row["layout"]: grid.mixture(row, 4, None) for row in mixed}
    assert found["select, bytes of gka"] == ["gka", "mamba2", "gka", "gka"]
    assert found["select, bytes of lattice"] == ["lattice", "mamba2", "lattice", "lattice"]
    assert set(found["echo"]) == {"mamba2", "ska"}


def test_align_trains_mixers_and_distill_trains_all_with_their_own_rates(tiny, tmp_path, monkeypatch):
    ids = torch.randint(100, 2000, (4, 96), generator=torch.Generator().manual_seed(0))
    numpy.save(tmp_path / "rows.npy", ids.numpy().astype(numpy.uint16))
    sizes = {
        "align_steps": 6,
        "distill_steps": 6,
        "batch_size": 2,
        "block_size": 96,
        "eager": (),
        "deadline": math.inf,
    }
    args, seen = SimpleNamespace(data=tmp_path, **sizes), []
    monkeypatch.setattr(grid, "fit", lambda *given, **options: seen.append(options) or fit(*given, **options))
    student = convert_model(tiny, layers={"gka": [0, 5], "attention": "rest"})
    mixers = {name for name in student.state_dict() if any(f"layers.{layer}.self_attn" in name for layer in (0, 5))}
    start = weights(student)
    losses = dict(grid.trained(student, tiny, "align", 0, args)["curve"])
    assert losses[5] < losses[1] and losses[6] < losses[2]  # the same rows: a step takes two of four
    aligned, moved = weights(student), changed(student, start)
    assert moved and moved <= mixers
    losses = dict(grid.trained(student, tiny, "distill", 0, args)["curve"])
    assert losses[5] < losses[1] and losses[6] < losses[2]
    assert changed(student, aligned) - mixers
    rates = [[group["lr"] for group in options["groups"]] for options in seen]
    assert rates == [[grid.RATES["align"]["learning_rate"]], list(grid.RATES["distill"].values())]
    assert [sum(p.numel() for p in group["params"]) for group in seen[1]["groups"]] == [
        sum(p.numel() for name, p in student.named_parameters() if (name in mixers) == inside)
        for inside in (True, False)
    ]
    assert [options["graphed"] for options in seen] == [True, True]
    args.eager = ("gka",)
    grid.trained(student, tiny, "align", 0, args)
    assert seen[2]["graphed"] is False


def test_kept_layers_are_spread_or_have_the_highest_scores():
    assert grid.kept_layers(0, "uniform", {}, 12) == []
    assert grid.kept_layers(3, "uniform", {}, 12) == [2, 6, 10]
    assert grid.kept_layers(6, "uniform", {}, 12) == [1, 3, 5, 7, 9, 11]
    ranking = {"layers": [{"layer": i, "rank": 12 - i} for i in range(12)]}
    assert grid.kept_layers(3, "select", ranking, 12) == [9, 10, 11]
