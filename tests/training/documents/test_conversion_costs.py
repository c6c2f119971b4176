"""What a conversion costs: the rule behind the hours, and the page that shows them."""

import re
import shlex
import sys

import pytest
import typer

from hf_memmix.commands import app
from hf_memmix.conversion.records import CHECKOUT
from hf_memmix.training.documents import conversion_costs
from hf_memmix.training.documents.conversion_costs import DISTILLED, SHAPES, TIMED, Costs
from hf_memmix.training.documents.measurements import read

PAGE = (CHECKOUT / "training/convert_your_model.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def costs():
    return Costs(CHECKOUT)


def test_the_rule_gives_what_was_measured(costs):
    """Both stages of the launches are met exactly, and the timed step without the factor."""
    measured = read("multi_gpu")["launches"]["1b_single"]["stages"]
    for stage, row in measured.items():
        assert 1 / costs.seconds_per_token(DISTILLED, "gka", stage) == pytest.approx(row["tokens_per_second"])
    for mixer, row in costs.train.items():
        alone = costs._uncorrected(TIMED, mixer) - costs.teacher["kernel_ms"] / 1e3 / 2048
        assert alone == pytest.approx(row["ms"] / 1e3 / (8 * 2048)) == pytest.approx(1 / row["tokens_s"], rel=1e-3)
    assert 1 < costs.factor < 2, "a pipeline is slower than the sum of its parts, but not another program"


def test_larger_models_and_more_tokens_cost_more(costs):
    for mixer in costs.mixers:
        for stage in ("align", "distill"):
            hours = [costs.hours(shape, mixer, stage, 1e8) for shape in SHAPES]
            assert hours == sorted(hours) and hours[0] > 0
            assert costs.hours(SHAPES[0], mixer, stage, 2e8) == pytest.approx(2 * hours[0])
            growth = SHAPES[2].parameters / SHAPES[0].parameters
            assert 0.5 * growth < hours[2] / hours[0] <= growth * 1.001, "at most as the parameters"


def test_the_timed_shape_is_that_of_the_benchmark(monkeypatch):
    """`kernels/benchmarks` is no package. The longest position has no effect on the time."""
    monkeypatch.syspath_prepend(str(CHECKOUT / "kernels/benchmarks"))
    monkeypatch.delitem(sys.modules, "benchmark_generate", raising=False)
    shape = __import__("benchmark_generate").SHAPE
    sizes = shape.keys() - {"max_position_embeddings"}
    assert {name: TIMED.fields[name] for name in sizes} == {name: shape[name] for name in sizes}
    assert {name: TIMED.fields[name] for name in sizes - {"vocab_size"}}.items() <= DISTILLED.fields.items()


def test_without_the_teachers_forward_there_is_no_rule(monkeypatch):
    rows = [row for row in read("models") if row["phase"] != "prefill"]
    monkeypatch.setattr(conversion_costs, "read", lambda name, root: rows)
    with pytest.raises(ValueError, match="no prefill of attention"):
        Costs(CHECKOUT)


def commands():
    return [
        shlex.split(line) for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()
    ]


def test_the_commands_of_the_page_have_these_options():
    known, used = typer.main.get_command(app).commands, []
    for program, name, *words in commands():
        assert program == "memmix" and name in known
        options = {option: parameter for parameter in known[name].params for option in parameter.opts}
        given = [word for word in words if word.startswith("--")]
        assert set(given) <= set(options), (name, given)
        required = {parameter.name for parameter in known[name].params if parameter.required}
        arguments = {parameter.name for parameter in known[name].params if parameter.param_type_name == "argument"}
        assert required - arguments <= {options[word].name for word in given}, name
        used.append(name)
    assert {"convert", "plan", "align", "select", "distill", "report", "eval"} == set(used)


def test_the_links_of_the_page_exist():
    for target in re.findall(r"\]\(([^)#]+)(?:#[\w-]+)?\)", PAGE):
        assert target.startswith("http") or (CHECKOUT / "training" / target).exists(), target


def test_the_readme_leads_to_the_page():
    for document in ("README.md", "training/README.md", "conversion/README.md"):
        text = (CHECKOUT / document).read_text(encoding="utf-8")
        assert "convert_your_model.md" in text, document
