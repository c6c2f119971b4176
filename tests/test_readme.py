"""README.md: its snippets run, its commands exist, its figures are those of the committed measurements."""

import math
import re
import shlex
import statistics
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from hf_memmix.commands import serve
from hf_memmix.serving import capacity
from hf_memmix.training.documents import choice_tables
from hf_memmix.training.documents.measurements import read
from hf_memmix.training.documents.readme_tables import documents, render
from hf_memmix.training.experiments.recall_teacher.probing import mean_recall
from hf_memmix.training.experiments.recall_teacher.report import groups
from hf_memmix.training.recipe import load_recipe
from testing import FAMILIES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
HUB_ID = "Qwen/Qwen3-0.6B"  # the first block converts it; offline, the bundled teacher takes its place
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# the commands of the README train for minutes; the test runs the same ones for a moment
SHORT = {
    "align": ["--steps", "1", "--batch-size", "1", "--block-size", "32"],
    "distill": ["--steps", "1", "--batch-size", "1", "--block-size", "32"],
    "report": ["--max-tokens", "64"],
    "generate": ["--max-new-tokens", "4"],
}


def commands(first):
    lines = [line for kind, text in BLOCKS if kind == "bash" for line in text.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.split()[:1] == [first]]


def test_python_blocks_run_in_order(tmp_path):
    blocks = [text for kind, text in BLOCKS if kind == "python"]
    assert blocks[0].startswith("import hf_memmix") and blocks[0].count(f'from_pretrained("{HUB_ID}"') == 2
    assert len(blocks[0].splitlines()) <= 10
    code = "\n".join(blocks).replace(HUB_ID, str(ROOT / "hf_memmix/assets/tiny_teacher"))
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "student" / "config.json").exists()


def test_memmix_commands_run_in_order(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from hf_memmix.commands import app

    (tmp_path / "hf_memmix").symlink_to(ROOT / "hf_memmix")
    monkeypatch.chdir(tmp_path)
    # no server: vLLM has an environment of its own (make serve-test)
    monkeypatch.setattr(capacity, "check_installation", lambda: None)
    started = []
    monkeypatch.setattr(serve.os, "execv", lambda program, arguments: started.append(arguments))
    names = [command[1] for command in commands("memmix")]
    assert names == ["convert", "convert", "align", "distill", "report", "generate", "serve"]
    for command in commands("memmix"):
        assert HUB_ID not in command, "the test runs offline"
        result = CliRunner().invoke(app, command[1:] + SHORT.get(command[1], []))
        assert result.exit_code == 0, f"{shlex.join(command)}: {result.output}\n{result.exception!r}"
    assert [arguments[-3:] for arguments in started] == [command[2:] for command in commands("vllm")]


def test_times_of_the_distil_block_are_those_of_the_measurements():
    """Tokens from the recipes and the options of the block, times and speeds from the committed JSON."""
    per_token = {stage["stage"]: stage["seconds"] / stage["tokens"] for stage in read("demo", ROOT)["stages"]}
    launches = read("multi_gpu", ROOT)["launches"]
    speed = {stage: row["tokens_per_second"] for stage, row in launches["1b_single"]["stages"].items()}
    full = {stage: load_recipe(stage) for stage in ("align", "distill")}
    full = {stage: recipe.steps * recipe.tokens_per_step for stage, recipe in full.items()}
    short = {}
    for command in commands("memmix"):
        if command[1] in full:
            options = dict(zip(command[2::2], command[3::2], strict=True))
            short[command[1]] = math.prod(int(options[name]) for name in ("--steps", "--batch-size", "--block-size"))
    assert set(short.values()) == {100 * 4 * 256}  # the demo trains on as much, unless its time limit ends a stage
    demo = {stage: per_token[stage] * tokens for stage, tokens in short.items()}
    hours = sum(full[stage] * per_token[stage] for stage in full) / 3600
    text = " ".join(README.split())
    for told in (
        f"reads {short['align'] / 1e6:.1f}M tokens here",
        f"takes {demo['align']:.0f} s (`align`) and {demo['distill']:.0f} s (`distill`)",
        f"read {full['align'] / 1e6:.1f}M and {full['distill'] / 1e6:.1f}M tokens",
        f"model of {launches['1b_single']['parameters'] / 1e9:.1f}B parameters",
        f"in {full['align'] / speed['align'] / 60:.0f} and {full['distill'] / speed['distill'] / 60:.0f} minutes",
        f"its {speed['align']:,} and {speed['distill']:,} tokens/s",
        f"about {hours:.0f} hours",
    ):
        assert told in text, told


def test_make_targets_exist():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert commands("make")
    for command in commands("make"):
        assert command[1] in targets


def test_every_block_is_tested():
    tested = {"python", "bash", ""}  # without a language: trees, no code
    assert {kind for kind, _ in BLOCKS} == tested
    for kind, text in BLOCKS:
        if kind == "bash":
            assert {line.split()[0] for line in text.splitlines() if line.strip()} <= {"make", "memmix", "pip", "vllm"}


def test_install_command_names_extras_that_exist():
    ((pip, install, what),) = commands("pip")
    assert (pip, install) == ("pip", "install")
    extras = re.fullmatch(r"\.\[([\w,-]+)\]", what)[1].split(",")
    assert set(extras) <= set(PROJECT["optional-dependencies"])


def test_versions_are_those_of_the_package():
    (transformers,) = (name for name in PROJECT["dependencies"] if name.startswith("transformers"))
    oldest, newest = re.fullmatch(r"transformers>=5\.(\d+),<5\.(\d+)", transformers).groups()
    assert f"transformers 5.{oldest} to 5.{int(newest) - 1}" in README
    assert f"transformers 5.{oldest} and 5.{int(newest) - 1}" in README
    (torch,) = (name for name in PROJECT["dependencies"] if name.startswith("torch"))
    assert f"{torch.replace('>=', ' ')} or newer" in README
    assert f"Python {PROJECT['requires-python'].removeprefix('>=')} or newer" in README


def test_number_of_tested_families():
    assert f"{len(FAMILIES)} decoder families" in " ".join(README.split())


def test_advice_on_mixers_follows_from_the_measurements():
    """What the mixer table and the text below it say, from the students of the recall teacher."""
    found = groups(read("recall_grid", ROOT))

    def mean(name, key):
        return statistics.fmean(row[key] for row in found[0, "uniform", name])

    def needles(name):
        return statistics.fmean(mean_recall(row["recall"], "niah", 1024) for row in found[0, "uniform", name])

    text = " ".join(README.split())
    assert (
        "every mixer is within a third of the transformer's perplexity but `coffee` and `ska`, and only `gka`" in text
    )
    near = {name for name in choice_tables.MIXERS if mean(name, "heldout_ppl_ratio") < 4 / 3}
    assert near == set(choice_tables.MIXERS) - {"coffee", "ska"}
    assert {name for name in choice_tables.MIXERS if needles(name) > 0.05} == {"gka"}
    memory = choice_tables.memory_of_mixers(ROOT)
    assert min(choice_tables.MIXERS, key=memory.get) == "coffee" and 0.45 < memory["lattice"] / memory["gka"] < 0.55
    shape = choice_tables.recall_teacher_shape(ROOT)
    assert shape.num_parameters() == read("recall_teacher", ROOT)["parameters"]


@pytest.mark.parametrize("path", documents(ROOT), ids=lambda path: str(path.relative_to(ROOT)))
def test_figures_are_those_of_the_measurements(path):
    text = path.read_text(encoding="utf-8")
    assert render(text, ROOT) == text, "run python -m hf_memmix.training.documents.readme_tables"


def test_tables_are_refused_without_their_end_or_by_an_unknown_name():
    assert "<!-- begin kernels -->" in README
    with pytest.raises(ValueError, match="must hold <!-- begin kernels --> and after it"):
        render(README.replace("<!-- end kernels -->", ""), ROOT)
    with pytest.raises(ValueError, match="no table 'tea'; choose from demo"):
        render("<!-- begin tea -->\n<!-- end tea -->", ROOT)
    with pytest.raises(ValueError, match="has no row of tea"):
        render("<!-- begin op tea -->\n<!-- end op tea -->", ROOT)


def test_links_of_the_readme_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target
    for path in re.findall(r"`((?:hf_memmix|kernels|conversion|training|tests|model_cards)/[\w./-]+)`", README):
        assert (ROOT / path).exists(), path
