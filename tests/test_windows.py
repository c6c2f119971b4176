"""Windows and macOS: everything is imported, converts, generates and trains without Triton and POSIX-only modules."""

import ast
import subprocess
import sys

import pytest

from child import child_env
from package_modules import MODULES, within
from tiny_teachers import tiny_teacher
from windows import IN_OS, IN_SIGNAL
from windows import MODULES as POSIX_MODULES

SCRIPT = """
import os
import sys
from pathlib import Path

import windows

folder = Path(sys.argv[1])
windows.become(folder)

import importlib
import pkgutil

import torch
from transformers import AutoModelForCausalLM

import hf_memmix, hf_memmix.conversion, hf_memmix.training, hf_memmix_kernels

imported = 0
for package in (hf_memmix_kernels, hf_memmix, hf_memmix.conversion, hf_memmix.training):
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + ".", onerror=lambda name: None):
        if {"vllm", "experiments"}.isdisjoint(found.name.split(".")):  # these are for Linux only
            try:
                importlib.import_module(found.name)
                imported += 1
            except ModuleNotFoundError as error:  # the files with Triton's kernels
                assert package is hf_memmix_kernels and error.name.split(".")[0] == "triton", found.name
assert imported > 200, imported

from child import forked
from hf_memmix.commands import app
from hf_memmix.training.train import distill
from streaming_runs import stream
from tiny_runs import SMALL_RUN, random_rows
from typer.testing import CliRunner

# converted by streaming, from files
def convert(*more):
    arguments = ["convert", "--teacher", folder / "teacher", "--mixer", "gka", "--out", folder / "student", *more]
    return CliRunner().invoke(app, [*map(str, arguments)])

run = convert()
assert run.exit_code == 0, run.output
run = convert("--overwrite")
assert run.exit_code == 0, run.output

# loaded, which maps the files: they cannot be replaced now
model = AutoModelForCausalLM.from_pretrained(folder / "student")
ids = torch.arange(8)[None]
kept = model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None)
mapped = windows.is_held(str(folder / "student"))
run = convert("--overwrite")
text = " ".join(run.output.split())
assert (run.exit_code == 1 and "close it" in text) if mapped else run.exit_code == 0, text
again = AutoModelForCausalLM.from_pretrained(folder / "student")
assert torch.equal(again.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None), kept)
model.save_pretrained(folder / "saved")

# a cache in a file
cache = model(ids, use_cache=True).past_key_values
cache.save_pretrained(folder / "memory")
cache.save_pretrained(folder / "memory")

# two steps of training, in memory and by streaming; the second process of a run folder is refused
teacher = AutoModelForCausalLM.from_pretrained(folder / "teacher")
assert distill(model.train(), teacher, random_rows(), folder / "run", steps=2, **SMALL_RUN)["steps"] == 2
del model, teacher, again
stream(folder, steps=2)

from hf_memmix.training import run_lock

def lock():
    try:
        run_lock.run_lock(folder / "locked").__enter__()
    except ValueError as error:
        sys.exit(7 if "another process works in" in str(error) and f"process {parent} on" in str(error) else 1)

parent = os.getpid()
with run_lock.run_lock(folder / "locked"):
    second = forked(lock)
    second.join()
    assert second.exitcode == 7
assert not run_lock.lock_file(folder / "locked").exists()
print(sorted(path.name for path in folder.iterdir()))
"""


def of_posix(tree):
    """What only POSIX systems have, and texts whose encoding the system would choose: (line, name)."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="os" | "signal")) if node.attr in {*IN_OS, *IN_SIGNAL}:
                yield node.lineno, node.attr
            case ast.Import(names=names) if POSIX_MODULES.intersection(alias.name.split(".")[0] for alias in names):
                yield node.lineno, names[0].name
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in POSIX_MODULES:
                yield node.lineno, module
            case ast.Call(func=ast.Attribute(attr="read_text" | "write_text")):
                if "encoding" not in {keyword.arg for keyword in node.keywords}:
                    yield node.lineno, node.func.attr


def test_one_module_has_what_differs_between_systems():
    found = {
        (name.removeprefix("hf_memmix."), what)
        for name, _, file in MODULES.values()
        if not within(name, "hf_memmix.training.experiments") and name != "hf_memmix.operating_system"
        for _, what in of_posix(ast.parse(file.read_text()))
        if what.split(".")[0] != "triton"  # has a test of its own
    }
    optional = {("commands.generate", "readline"), ("hf_memmix_kernels._environment", "posix")}
    # native code is compiled on POSIX systems only
    native = {("hf_memmix_kernels._native", name) for name in ("getuid", "killpg", "SIGKILL", "register_at_fork")}
    assert found == native | optional


@pytest.mark.product  # a new process that imports everything
@pytest.mark.skipif(sys.platform != "linux", reason="the stand-in for Windows reads /proc")
def test_everything_runs_without_what_only_posix_has(tmp_path):
    tiny_teacher("llama", 3).save_pretrained(tmp_path / "teacher")
    environment = child_env(PYTHONWARNDEFAULTENCODING="1", CUDA_VISIBLE_DEVICES="", ACCELERATE_USE_CPU="1")
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, env=environment, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.splitlines()[-1] == str(["memory", "out", "run", "saved", "student", "teacher"])
