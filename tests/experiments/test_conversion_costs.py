"""What a conversion costs: the rule behind the hours."""

import sys

import pytest

from hf_memmix.conversion.records import CHECKOUT
from hf_memmix.training.experiments.common.llamas import DISTILLED, TIMED
from hf_memmix.training.experiments.results import read
from hf_memmix.training.experiments.tables.costs import Costs


@pytest.fixture(scope="module")
def costs():
    return Costs()


def test_the_rule_gives_what_was_measured(costs):
    """Both stages of the launches are met exactly, and the timed step without the factor."""
    measured = read("multi_gpu")["launches"]["1b_single"]["stages"]
    for stage, row in measured.items():
        assert 1 / costs.seconds_per_token(DISTILLED, "gka", stage) == pytest.approx(row["tokens_per_second"])
    for mixer, row in costs.train.items():
        alone = costs._uncorrected(TIMED, mixer) - costs.teacher["kernel_ms"] / 1e3 / 2048
        assert alone == pytest.approx(row["ms"] / 1e3 / (8 * 2048)) == pytest.approx(1 / row["tokens_s"], rel=1e-3)
    assert 1 < costs.factor < 2, "a pipeline is slower than the sum of its parts, but not another program"


def test_the_timed_shape_is_that_of_the_benchmark(monkeypatch):
    """`kernels/benchmarks` is no package. The longest position has no effect on the time."""
    monkeypatch.syspath_prepend(str(CHECKOUT / "kernels/benchmarks"))
    monkeypatch.delitem(sys.modules, "llama", raising=False)
    shape = __import__("llama").SHAPE
    sizes = shape.keys() - {"max_position_embeddings"}
    assert {name: TIMED.fields[name] for name in sizes} == {name: shape[name] for name in sizes}
    assert {name: TIMED.fields[name] for name in sizes - {"vocab_size"}}.items() <= DISTILLED.fields.items()
