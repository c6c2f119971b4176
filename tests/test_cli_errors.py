"""One line for what a user can cause, a traceback for a defect: both sides."""

import contextlib
import json
import os
from pathlib import Path

import pytest
import torch
import typer
from transformers import AutoConfig, AutoTokenizer

from cli_runner import memmix
from hf_memmix.commands import app, errors, serve
from hf_memmix.conversion import layers_to_keep
from hf_memmix.errors import UserError
from hf_memmix.training.text_files import documents


def outcome(cause, capsys):
    """How a command reports an exception: ("line", the message), or ("defect", the exception)."""

    def command():
        cause()

    try:
        errors.one_line_errors(command)()
    except typer.Exit as stopped:
        assert stopped.exit_code == 1
        return "line", capsys.readouterr().err
    except Exception as error:
        return "defect", error
    raise AssertionError("nothing was raised")


def mistakes(tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))

    def inside_with_and_finally():
        with contextlib.nullcontext():
            raise UserError("the value is 3; give 2")

    def a_whole_book():
        raise UserError(f"the value is {list(range(10**6))}; give 2")

    def too_large():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore")

    return {
        "a value that we refuse": (lambda: layers_to_keep("x", 3), "keep is 'x'"),
        "a value that we refuse in a with block": (inside_with_and_finally, "the value is 3; give 2"),
        "a value that fills books": (a_whole_book, "characters) ..."),
        "a file that is not there": (lambda: open(tmp_path / "nowhere"), "No such file"),
        "a folder that transformers cannot read": (lambda: AutoConfig.from_pretrained(broken), "no_such_model"),
        "a package that is missing": (lambda: __import__("no_such_package"), "pip install"),
        "memory": (too_large, "not enough memory (CUDA out of memory. Tried to allocate 2.00 GiB)"),
    }


def defects():
    def lookup():
        return {}["key"]

    def in_our_code():
        raise ValueError("not written for users")

    return {
        "a wrong conversion in our code": in_our_code,
        "a wrong shape": lambda: torch.zeros(2) @ torch.zeros(3),
        "a ValueError of torch": lambda: torch.distributions.Normal(torch.zeros(1), -torch.ones(1), True),
        "a wrong type": lambda: len(3),
        "a missing key": lookup,
        "a missing attribute": lambda: torch.no_such_name,
        "a module of ours": lambda: __import__("hf_memmix.no_such_module"),
        "a wrong argument of from_pretrained": lambda: AutoTokenizer.from_pretrained(no_such_argument=1),
    }


def test_mistakes_of_a_user_are_one_line(tmp_path, capsys):
    for name, (cause, message) in mistakes(tmp_path).items():
        kind, told = outcome(cause, capsys)
        assert kind == "line" and told.startswith("error:") and message in told and "Traceback" not in told, name
        assert len(told) < 2200, name


def test_what_the_commands_reach_is_written_for_users():
    """A ValueError keeps its traceback, so no module that a user's values reach raises one."""
    root = Path(errors.__file__).parents[2]
    inner = ("cache", "serving/vllm", "padding.py", "prompt_graph.py", "layout_hooks.py", "given_cache.py")
    files = [file for name in ("hf_memmix", "conversion", "training") for file in (root / name).rglob("*.py")]
    users = {file.relative_to(root).as_posix() for file in files if "raise ValueError(" in file.read_text()}
    inner = tuple(f"hf_memmix/{name}" for name in inner)  # their callers are programs
    assert not [name for name in users if not name.startswith(inner) and "/experiments/" not in name]


def test_the_advice_to_install_works_in_a_checkout():
    advice = errors.install_advice("train,eval")
    assert advice.startswith(f"pip install '{Path(errors.__file__).parents[2]}[train,eval]'")


def test_defects_keep_their_traceback(capsys):
    for name, cause in defects().items():
        kind, error = outcome(cause, capsys)
        assert kind == "defect" and error.__traceback__ is not None, name


def test_a_reader_that_has_ended_is_no_mistake(monkeypatch, capsys):
    """As in `memmix generate ... | head`: typer ends the program without a message."""
    end, start = os.pipe()
    os.close(end)
    pipe = os.fdopen(start, "w")
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", pipe)
        kind, error = outcome(lambda: print("a line"), capsys)
    with pytest.raises(BrokenPipeError):
        pipe.close()
    assert kind == "defect" and isinstance(error, BrokenPipeError) and capsys.readouterr().err == ""


def test_another_broken_pipe_is_one_line(capsys):
    def send():
        raise BrokenPipeError(32, "the server has ended")

    kind, text = outcome(send, capsys)
    assert kind == "line" and "the server has ended" in text


def test_every_command_reports_in_one_line():
    """Every command is decorated, except those that start another program; `serve` checks before, in `prepare`."""
    for command in app.registered_commands:
        wrapped = command.callback.__wrapped__ if hasattr(command.callback, "__wrapped__") else None
        assert wrapped is not None or command.name in ("run", "serve"), command.name
    assert serve.prepare.__wrapped__


def test_a_seed_that_torch_does_not_take_is_a_usage_error():
    run = memmix("generate", "--prompt", "a", "--max-new-tokens", "1", "--seed", 2**64)
    assert run.exit_code == 2 and "Invalid value for '--seed'" in run.output


def test_text_that_is_not_unicode_is_one_clear_line(tmp_path):
    prompt = os.fsdecode(b"caf\xe9")  # as the shell of a latin-1 terminal gives it
    run = memmix("generate", "--prompt", prompt, "--max-new-tokens", "1")
    assert run.exit_code == 1 and run.output.startswith("error: --prompt is not UTF-8 (character 3")
    (tmp_path / "rows.jsonl").write_text('{"text": "good"}\n{"text": "half a pair \\ud83d here"}\n')
    with pytest.raises(ValueError, match=r"line 2 of .*rows.jsonl.*half a surrogate pair at character 12 \(\\ud83d\)"):
        list(documents(tmp_path / "rows.jsonl"))
    (tmp_path / "rows.jsonl").write_text('{"text": "a whole pair \\ud83d\\ude00"}\n')
    assert list(documents(tmp_path / "rows.jsonl")) == ["a whole pair \U0001f600"]
