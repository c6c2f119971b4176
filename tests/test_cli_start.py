"""`memmix --help` answers at once: neither torch nor transformers is imported before a command runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli_runner import memmix
from hf_memmix.assets import asset_path

ROOT = Path(__file__).parents[1]
HEAVY = ["torch", "transformers", "numpy", "hf_memmix.configuration_memmix", "hf_memmix.conversion"]
# the console script, several times in one process
SCRIPT = """
import contextlib, io, json, sys
import hf_memmix_cli

def heavy_after(*arguments):
    sys.argv = ["memmix", *arguments]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        hf_memmix_cli.main()
    return [printed.getvalue().replace("\\n", " "), [name for name in HEAVY if name in sys.modules]]
"""


def printed_by(code, **env):
    code = f"HEAVY = {HEAVY}\n{SCRIPT}\n{code}"
    command = [sys.executable, "-c", code]
    env = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"} | env
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert not any(words in done.stderr for words in ("Failed to load", "register_constant")), (
        "see torchao_messages.py"
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_help_and_version_import_nothing_heavy():
    code = """
from_help = heavy_after("--help")
from hf_memmix.commands import COMMANDS
asked = [["--version"], *([name, "--help"] for name in [*COMMANDS, "run"]), ["nosuch"], ["convert"]]
print(json.dumps([from_help, *(heavy_after(*arguments) for arguments in asked)]))
"""
    answers = printed_by(code)
    assert [heavy for _, heavy in answers if heavy] == []
    assert all(name in answers[0][0] for name in ("convert", "distill", "push", "run")) and len(answers) > 12
    assert "transformers" in answers[1][0] and answers[1][0].startswith("memmix ")
    assert all("Usage: memmix" in text for text, _ in answers[2:-2])


@pytest.mark.product  # a new process
def test_a_command_registers_the_models_before_it_runs():
    folder = str(asset_path("tiny_gka"))
    code = f"""
arguments = ["generate", "--model", {folder!r}, "--prompt", "the", "--max-new-tokens", "1", "--json"]
text, heavy = heavy_after(*arguments)
import hf_memmix
print(json.dumps([text, heavy, hf_memmix.__version__, hf_memmix.memmix_config.__name__]))
"""
    text, heavy, version, name = printed_by(code)
    assert json.loads(text)["new_tokens"] == 1 and heavy == HEAVY
    assert version and name == "memmix_config"


def test_version_names_what_a_defect_report_needs():
    done = memmix("--version")
    assert done.exit_code == 0 and done.stdout.startswith("memmix ")
    assert all(name in done.stdout for name in ("torch", "transformers", "Python"))


def test_shell_completion_is_offered():
    assert "--install-completion" in memmix("--help").stdout
