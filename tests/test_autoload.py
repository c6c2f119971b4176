"""The harness and TRL read converted models by themselves once the package is installed."""

import json
import os
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

import hf_memmix_autoload
from hf_memmix.assets import asset_path

ROOT = Path(__file__).parents[1]
LOAD = "from transformers import AutoConfig, AutoModelForCausalLM as A; print(type(A.from_pretrained({!r})).__name__)"


@pytest.fixture
def installed(tmp_path):
    """An environment in which pip has installed the entry point of pyproject.toml."""
    info = tmp_path / "site" / "autoload_under_test-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: autoload-under-test\nVersion: 1\n")
    group, points = "torch.backends", tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    (info / "entry_points.txt").write_text(f"[{group}]\nhf_memmix = {points[group]['hf_memmix']}\n")
    path = os.pathsep.join([str(tmp_path / "site"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}


def run(code, env, **options):
    return subprocess.run([sys.executable, *code], env=env, capture_output=True, text=True, timeout=300, **options)


@pytest.mark.parametrize(
    "first", ["import torch, sys; sys.modules['trl'] = sys", "import sys; sys.modules['trl'] = sys"]
)
def test_a_host_reads_a_converted_model_without_import_or_trust(installed, first):
    code = f"{first}; import torch; {LOAD.format(str(asset_path('tiny_gka')))}"
    done = run(["-c", code], installed, stdin=subprocess.DEVNULL)
    assert done.stdout.strip() == "MemMixLlamaForCausalLM", done.stderr


def test_other_programs_are_left_alone(installed):
    code = "import torch, sys, transformers; transformers.AutoModelForCausalLM; print('hf_memmix' in sys.modules)"
    assert run(["-c", code], installed).stdout.strip() == "False"
    code = "import torch, sys; sys.modules['trl'] = sys; import transformers; transformers.AutoModelForCausalLM;"
    code += "print('hf_memmix' in sys.modules)"
    assert run(["-c", code], installed | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}).stdout.strip() == "False"


def test_registers_once():
    before = list(sys.meta_path)
    hf_memmix_autoload.register()  # hf_memmix is imported already
    assert sys.meta_path == before


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-evaluation-harness is not installed")
def test_the_harness_scores_a_local_task(installed, tmp_path):
    """`lm_eval --model hf --model_args pretrained=DIR`, the command as it stands in the README."""
    rows = [{"prompt": "And the king said unto", "choices": [" him", " banana"], "answer": 0}] * 4
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"task": "memmix_local", "dataset_path": "json", "test_split": "train", "output_type": "multiple_choice"}
    task |= {"dataset_kwargs": {"data_files": str(tmp_path / "rows.jsonl")}, "doc_to_text": "{{prompt}}"}
    task |= {"doc_to_choice": "{{choices}}", "doc_to_target": "answer", "metric_list": [{"metric": "acc"}]}
    (tmp_path / "memmix_local.yaml").write_text(json.dumps(task))  # YAML is a superset
    arguments = ["--model", "hf", "--model_args", f"pretrained={asset_path('tiny_gka')}", "--device", "cpu"]
    arguments += ["--include_path", str(tmp_path), "--tasks", "memmix_local", "--output_path", str(tmp_path / "out")]
    done = run(["-m", "lm_eval", *arguments], installed, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    (result,) = (tmp_path / "out").rglob("results*.json")
    assert json.loads(result.read_text())["results"]["memmix_local"]["acc,none"] == 1.0
