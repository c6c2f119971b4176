"""The experiment on mixtures: which rows run when, what `select` may use, and its table."""

from types import SimpleNamespace

import pytest

from hf_memmix.training.experiments.mixtures import mixtures
from hf_memmix.training.experiments.mixtures.report import by_layout, section

ARGS = SimpleNamespace(mixers=("gka", "coffee"), seeds=2)
SCORES = {"gka": [0.1, 0.2, 0.3], "coffee": [0.3, 0.25, 0.9]}
SIZES = {"gka": 100, "coffee": 10}


def aligned(seed):
    rows = [{"stage": "align", "mixer": mixer, "seed": seed, "layer_bytes": SIZES[mixer]} for mixer in ARGS.mixers]
    return [row | {"ranking": {"layers": [{"score": s} for s in SCORES[row["mixer"]]]}} for row in rows]


def trained(layout, seed, kl, types):
    fields = {
        "dev_kl": kl,
        "heldout_kl": kl,
        "heldout_ppl_ratio": 1 + kl,
        "heldout_top1_agreement": 0.5,
        "finite": True,
    }
    fields |= {
        "answers_nll": 2.0,
        "answers_nll_teacher": 1.5,
        "types": types,
        "state_bytes": sum(map(SIZES.get, types)),
    }
    return {"stage": "distill", "layout": layout, "seed": seed} | fields


def test_one_seed_after_the_other():
    first = mixtures.rows_to_run([], ARGS)
    assert [(row["stage"], row["mixer"], row["seed"]) for row in first] == [
        ("align", "gka", 0),
        ("align", "coffee", 0),
    ]
    single = [trained("gka", 0, 0.3, ["gka"] * 3), trained("coffee", 0, 0.4, ["coffee"] * 3)]
    rows = mixtures.rows_to_run([*aligned(0), *single], ARGS)
    layouts = [row["layout"] for row in rows if row["stage"] == "distill"]
    assert layouts == ["gka", "coffee", "echo", *mixtures.UNIFORM, *mixtures.CHOSEN]
    chosen = {row["layout"]: row["types"] for row in rows if "types" in row}
    # all, then half of the 300 bytes of the best single mixer
    assert chosen == {"select": ["gka"] * 3, "select, half": ["coffee", "coffee", "gka"]}
    assert [row["seed"] for row in rows if row["stage"] == "align"] == [0, 0, 1, 1]
    without = mixtures.rows_to_run([*aligned(0), single[0]], ARGS)
    assert not any(row.get("layout") in mixtures.CHOSEN for row in without)


def test_the_table_has_the_mean_over_seeds_and_the_best_layout_first():
    rows = [trained("coffee", 0, 0.4, ["coffee"] * 3), trained("select", 0, 0.1, ["gka", "coffee", "coffee"])]
    rows += [trained("select", 1, 0.3, ["coffee", "gka", "coffee"]), {"stage": "distill", "layout": "ska", "seed": 0}]
    rows[-1] |= {"error": "it failed"}
    settings = {"mixers": ["gka", "coffee"], "align_steps": 3, "distill_steps": 2, "batch_size": 4, "block_size": 8}
    results = {"rows": rows, "settings": settings | {"seeds": 2}}
    results["environment"] = {"hardware": "a machine", "commit": "abc"}
    assert list(by_layout(results)) == ["select", "coffee"]
    text = section(results)
    assert "| select | GCC, CGC | 120 B | 1.200 ± 0.141 | 0.2000 ± 0.1414 | 50.0 ± 0.0 % | 0.500 ± 0.000 |" in text
    assert "| coffee | CCC | 30 B | 1.400 (1 seed) |" in text and "ska, seed 0: it failed" in text
    assert "G gka, C coffee. 3 steps of align and 2 of distill, 32 tokens each" in text


def test_mixtures_stay_within_the_bytes():
    assert mixtures.choice(aligned(0), 0, 210) == ["gka", "coffee", "gka"]
    with pytest.raises(ValueError, match="state_bytes is 29 B, but the smallest mixture"):
        mixtures.choice(aligned(0), 0, 29)
