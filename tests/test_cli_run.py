"""`memmix run PROGRAM`: a program that knows nothing of hf_memmix loads converted models."""

import json
import os
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from cli_runner import memmix
from hf_memmix.assets import asset_path

ROOT = Path(__file__).parents[1]
# what a program of somebody else does: it was written without hf_memmix in mind
PROGRAM = """
import sys
from transformers import AutoModelForCausalLM

def main():
    print(sys.argv)
    if "--fail" in sys.argv:
        raise ValueError("a mistake inside the program")
    print(type(AutoModelForCausalLM.from_pretrained(sys.argv[1])).__name__)
    return 3
"""


@pytest.fixture
def site(tmp_path):
    """An environment in which pip has installed `stand-in` with the console script `stand_in`."""
    info = tmp_path / "site" / "stand_in-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stand-in\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[console_scripts]\nstand_in = stand_in_program:main\n")
    (tmp_path / "site" / "stand_in_program.py").write_text(PROGRAM)
    path = os.pathsep.join([str(tmp_path / "site"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    home = {"HF_HOME": str(tmp_path / "home"), "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    return os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | home


def run(arguments, env, **options):
    code = "import hf_memmix_cli; hf_memmix_cli.main()"
    command = [sys.executable, "-c", code, "run", *map(str, arguments)]
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL, **options
    )


@pytest.mark.product  # a new process
def test_a_program_loads_a_converted_model_and_keeps_its_arguments_and_its_exit_code(site):
    model = str(asset_path("tiny_gka"))
    done = run(["stand_in", model, "--help", "-x=1"], site)
    assert done.stdout.splitlines() == [str(["stand_in", model, "--help", "-x=1"]), "MemMixLlamaForCausalLM"]
    assert done.returncode == 3


def test_errors_of_the_program_keep_their_traceback(site, monkeypatch):
    monkeypatch.syspath_prepend(site["PYTHONPATH"].partition(os.pathsep)[0])
    monkeypatch.setattr(sys, "argv", sys.argv)
    done = memmix("run", "stand_in", "x", "--fail")
    assert isinstance(done.exception, ValueError) and str(done.exception) == "a mistake inside the program"


def test_a_program_that_is_not_installed_is_one_clear_line():
    done = memmix("run", "no_such_program", "--tasks", "x")
    assert done.exit_code == 1 and "Traceback" not in done.output
    assert done.output.startswith("error: there is no program 'no_such_program'")


@pytest.mark.product  # a new process
def test_importing_torch_imports_nothing_of_ours():
    """hf_memmix has no entry point that torch or transformers would call in programs which do not use it."""
    code = "import sys, torch, transformers; transformers.AutoModelForCausalLM;"
    code += "import json; print(json.dumps([name for name in sys.modules if 'memmix' in name]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=ROOT)
    found = [name for name in json.loads(done.stdout) if "__editable__" not in name]
    assert found == [], done.stderr
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert list(project["entry-points"]) == ["vllm.general_plugins"]  # read by vLLM, not by torch


@pytest.mark.product  # a program of another library
@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-evaluation-harness is not installed")
def test_the_harness_scores_a_local_task(site, tmp_path):
    """`memmix run lm_eval --model hf --model_args pretrained=DIR`."""
    rows = [{"prompt": "And the king said unto", "choices": [" him", " banana"], "answer": 0}] * 4
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"task": "memmix_local", "dataset_path": "json", "test_split": "train", "output_type": "multiple_choice"}
    task |= {"dataset_kwargs": {"data_files": str(tmp_path / "rows.jsonl")}, "doc_to_text": "{{prompt}}"}
    task |= {"doc_to_choice": "{{choices}}", "doc_to_target": "answer", "metric_list": [{"metric": "acc"}]}
    (tmp_path / "memmix_local.yaml").write_text(json.dumps(task))  # YAML is a superset
    arguments = ["--model", "hf", "--model_args", f"pretrained={asset_path('tiny_gka')}", "--device", "cpu"]
    arguments += ["--include_path", str(tmp_path), "--tasks", "memmix_local", "--output_path", str(tmp_path / "out")]
    done = run(["lm_eval", *arguments], site)
    assert done.returncode == 0 and "neither marked as CausalLM" not in done.stderr, done.stderr
    (result,) = (tmp_path / "out").rglob("results*.json")
    assert json.loads(result.read_text())["results"]["memmix_local"]["acc,none"] == 1.0
