"""The arms of SmolLM2: steps that are planned from speed, and one arm from the choice of layers to its table."""

import time
from types import SimpleNamespace

import numpy
import pytest

from hf_memmix.training.experiments.common import harness
from hf_memmix.training.experiments.smollm2 import arms, arms_report
from tiny_teachers import tiny_teacher, tiny_text, tiny_tokenizer

ENVIRONMENT = {"hardware": "a CPU", "commit": "abc"}


@pytest.fixture(scope="module")
def args(tmp_path_factory):
    folder, tokenizer = tmp_path_factory.mktemp("arms"), tiny_tokenizer()
    for write in (tiny_teacher(layers=3), tokenizer):
        write.save_pretrained(folder / "teacher")
    text = tiny_text(300)
    tokens = numpy.asarray(tokenizer(text)["input_ids"] * 4, dtype=numpy.uint16)
    for split in ("train", "heldout", "domain"):
        numpy.save(folder / f"{split}.npy", tokens)
    for split in ("dev", "heldout"):
        (folder / f"{split}.txt").write_text(text)
    sizes = {"batch_size": 1, "block_size": 16, "length": 96, "lengths": [96], "samples": 1, "measured_tokens": 64}
    choice = {"choice_samples": 1, "choice_tokens": 96, "window": 4, "sinks": 1, "kept": 1, "seed": 0}
    free = {"free_prompts": 2, "free_tokens": 3, "text": folder / "dev.txt"}
    asked = {"arms": ["window 64", "gka"], "given_steps": "", "budget": 40.0, "deadline": float("inf")}
    return SimpleNamespace(
        teacher=folder / "teacher", data=folder, out=folder / "a.json", **sizes, **choice, **free, **asked
    )


def with_options(args, **changed):
    return SimpleNamespace(**(vars(args) | changed))


@pytest.fixture
def timed():
    """The finished rows before the first arm; one arm could not be timed."""
    teacher = {"step": "teacher", "arm": "teacher", "choice": {"keep": [1]}, "measuring_seconds": 1.0}
    speed = {"step": "speed", "arm": "window 64", "keep": [1], "align": 0.5, "distill": 0.5}
    return [teacher, speed, speed | {"arm": "gka", "align": 1.0, "distill": 1.5}]


def test_all_arms_have_equal_steps_that_fill_the_budget(args, timed):
    rows = arms.rows_to_run(timed, args)
    assert [row["arm"] for row in rows] == args.arms and {row["distill"] / row["align"] for row in rows} == {2}
    rest = args.budget - 2 * (arms.SLOWER + arms.CONVERSION)
    (steps,) = {row["align"] for row in rows}
    assert rest - 5.5 < steps * (0.5 + 2 * 0.5 + 1.0 + 2 * 1.5) <= rest
    assert arms.rows_to_run(timed[:2], args)[1] == {"step": "speed", "arm": "gka", "keep": [1]}
    failed = [*timed[:2], {"step": "speed", "arm": "gka", "keep": [1], "error": "no memory"}]
    assert [row["arm"] for row in arms.rows_to_run(failed, args)] == ["window 64"]


def test_an_arm_begins_only_if_it_can_end(args, timed):
    (row,) = arms.rows_to_run(timed, with_options(args, deadline=time.time() + 60, given_steps="10,20"))[:1]
    assert (row["align"], row["distill"]) == (10, 20)
    short = with_options(args, deadline=time.time() + 28)
    assert [row["arm"] for row in arms.rows_to_run(timed, short)] == ["window 64"]
    assert not arms.rows_to_run(timed, with_options(args, deadline=time.time() + 1))


def test_an_arm_is_trained_and_measured_beside_its_teacher(args):
    args = with_options(args, given_steps="6,7", arms=["gka"])
    rows = []
    while waiting := [row for row in arms.rows_to_run(rows, args) if not any(harness.matches(r, row) for r in rows)]:
        outcome = arms.run(waiting[0], args)
        parts = [outcome] if isinstance(outcome, dict) else outcome
        rows.append({**waiting[0], **{key: value for part in parts for key, value in part.items()}})
    teacher, arm = rows
    assert arm["keep"] == teacher["choice"]["keep"] and arm["tokens"] == 13 * 16 and arm["heldout_kl"] > 0
    assert arm["recall"][0]["teacher"]["choice"] == teacher["fact_96_choice"]
    results = {"rows": rows, "settings": {"lengths": [96], "window": args.window}, "environment": ENVIRONMENT}
    assert f"| gka | {arm['state_bytes']:,} | {arm['heldout_kl']:.3f} |" in arms_report.table(results)
