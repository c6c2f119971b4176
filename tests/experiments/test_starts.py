"""The table of starts: each one builds, the default is what a conversion gives, dev text picks who is aligned."""

import argparse
import json

import torch

from hf_memmix.conversion import convert_model
from hf_memmix.training.experiments.conversion import starts as init_table
from hf_memmix.training.experiments.conversion.starts import DEFAULT, STARTS
from testing import every_third
from tiny_teachers import tiny_teacher

CASES = [(mixer, name) for mixer in STARTS for name in STARTS[mixer]]


@every_third(("mixer", "name"), CASES)
def test_a_start_builds_and_is_another_than_the_default(mixer, name):
    teacher, ids = tiny_teacher(layers=2), torch.randint(3, 64, (1, 80), generator=torch.Generator().manual_seed(0))
    student = init_table.build(teacher, mixer, STARTS[mixer][name], seed=0)
    default = convert_model(teacher, mixer, "none")
    with torch.no_grad():
        ours, theirs = student(ids).logits, default(ids).logits
    assert ours.isfinite().all()
    assert torch.equal(ours, theirs) == (name == DEFAULT)


def test_the_closest_starts_and_the_default_are_aligned():
    args = argparse.Namespace(mixers=["gla"], seeds=2, steps=5, contenders=1)
    first = init_table.rows_to_run([], args)
    assert {entry["steps"] for entry in first} == {0}
    assert [entry["seed"] for entry in first if entry["start"] == "random gates"] == [0, 1]
    done = [entry | {"dev": [0.5 if entry["start"] == "gate 2" else 0.9] * 2} for entry in first]
    later = [entry for entry in init_table.rows_to_run(done, args) if entry not in first]
    assert later == [{"mixer": "gla", "start": name, "seed": 0, "steps": 5} for name in (DEFAULT, "gate 2")]


def test_a_row_runs_before_and_after_training():
    args = argparse.Namespace(measured_tokens=70, block_size=32)
    results = [init_table.run({"mixer": "gla", "start": DEFAULT, "seed": 0, "steps": steps}, args) for steps in (0, 2)]
    assert all(len(result[text]) == 6 for result in results for text in ("dev", "heldout"))
    assert results[0] != results[1] and json.dumps(results)
