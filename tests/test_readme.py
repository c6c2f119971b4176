"""README.md: its snippets run, its commands exist, its figures are those of the committed measurements."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from hf_memmix.commands import serve

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
GENERATE = (ROOT / "hf_memmix" / "generate.md").read_text(encoding="utf-8")
HUB_ID = "Qwen/Qwen3-0.6B"  # the page converts it; offline, the bundled teacher takes its place
ASSETS = ROOT / "hf_memmix" / "assets"
OFFLINE = {
    HUB_ID: ASSETS / "tiny_teacher",
    **{name: ASSETS / name for name in ("train.txt", "dev.txt", "heldout.txt")},
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# the commands of the README train for minutes; the test runs the same ones for a moment
SHORT = {
    "select": ["--length", "256", "--samples", "1", "--max-tokens", "256"],
    "align": ["--steps", "1", "--batch-size", "1", "--block-size", "128"],
    "distill": ["--steps", "1", "--batch-size", "1", "--block-size", "128"],
    "report": ["--max-tokens", "64"],
    "generate": ["--max-new-tokens", "4"],
}


def commands(first):
    lines = [line for kind, text in BLOCKS if kind == "bash" for line in text.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.split()[:1] == [first]]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run code in an empty folder. Not in a process of its own: importing takes longer than most snippets."""
    monkeypatch.chdir(tmp_path)
    return lambda code: exec(compile(code, "<page>", "exec"), {"__name__": "__main__"})


@pytest.mark.product  # a whole command; its parts have tests
def test_python_blocks_run_in_order(tmp_path, run):
    blocks = [text for kind, text in BLOCKS if kind == "python"]
    assert blocks[0].startswith("import hf_memmix") and blocks[0].count(f'from_pretrained("{HUB_ID}"') == 2
    assert len(blocks[0].splitlines()) <= 10
    run("\n".join(blocks).replace(HUB_ID, str(ASSETS / "tiny_teacher")))
    assert {"config.json", "tokenizer.json"} <= {path.name for path in (tmp_path / "student").iterdir()}


def test_python_blocks_of_the_page_about_generation_run_in_order(tmp_path, run):
    run("\n".join(re.findall(r"^```python\n(.*?)^```", GENERATE, flags=re.MULTILINE | re.DOTALL)))
    assert (tmp_path / "document_state").exists()


@pytest.mark.product  # all commands of the README
def test_memmix_commands_run_in_order(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from hf_memmix.commands import app

    (tmp_path / "hf_memmix").symlink_to(ROOT / "hf_memmix")
    monkeypatch.chdir(tmp_path)
    # no server: vLLM has an environment of its own (make serve-test)
    monkeypatch.setattr(serve, "prepare", lambda model, *arguments, **options: (model, []))
    started = []
    monkeypatch.setattr(serve.os, "execv", lambda program, arguments: started.append(arguments))
    for _, name, *words in commands("memmix"):
        words = [word if name == "card" else str(OFFLINE.get(word, word)) for word in words]
        words, _, written = (" ".join(words)).partition(" > ") if ">" in words else (words, "", "")
        words = shlex.split(words) if written else words
        result = CliRunner().invoke(app, [name, *words, *SHORT.get(name, [])])
        assert result.exit_code == 0, f"{name} {shlex.join(words)}: {result.output}\n{result.exception!r}"
        if written:
            Path(written).write_text(result.stdout)
    assert [arguments[-3:] for arguments in started] == [["hf_memmix/assets/tiny_gka", "--port", "8001"]]


def test_make_targets_exist():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert commands("make")
    for command in commands("make"):
        assert command[1] in targets


def test_every_block_is_tested():
    assert {kind for kind, _ in BLOCKS} == {"python", "bash"}
    for kind, text in BLOCKS:
        if kind == "bash":
            assert {line.split()[0] for line in text.splitlines() if line.strip()} <= {"make", "memmix", "pip"}


def test_install_command_names_extras_that_exist():
    ((pip, install, what),) = commands("pip")
    assert (pip, install) == ("pip", "install")
    extras = re.fullmatch(r"\.\[([\w,-]+)\]", what)[1].split(",")
    assert set(extras) <= set(PROJECT["optional-dependencies"])


def test_versions_are_those_of_the_package():
    def told(pattern):
        return set(re.findall(pattern, README))

    dependencies = " ".join(PROJECT["dependencies"])
    oldest, too_new = re.search(r"transformers>=5\.(\d+),<5\.(\d+)", dependencies).groups()
    assert told(r"transformers 5\.(\d+) \w+ 5\.(\d+)") == {(oldest, str(int(too_new) - 1))}
    assert told(r"torch >= ([\d.]*\d)") == {*re.findall(r"torch>=([\d.]+)", dependencies)}
    assert told(r"Python >= ([\d.]*\d)") == {PROJECT["requires-python"].removeprefix(">=")}
