"""What the ops know about GPUs: which of them run the kernels, what a launch asks, and that all of it was compiled."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gpu_targets import TARGETS

from hf_memmix_kernels import _device, _dispatch
from hf_memmix_kernels._device import Device
from hf_memmix_kernels.lattice.sizes import levels_precision

ROOT = Path(__file__).parents[2]
COMPILED = json.loads((ROOT / "kernels/benchmarks/results/gpu_generations.json").read_text(encoding="utf-8"))
KEYS = ("triton", "arch", "op", "size", "dtype")
T4, B200, MI300X = Device("sm_75", 64 * 1024, 40), TARGETS["sm_100"], TARGETS["gfx942"]
INPUT = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, device=torch.device("cuda", 0))


def compiles(row):
    """Whether all kernels of a row compile and fit the GPU's shared memory."""
    return not (row.get("crashed") or row.get("error") or row["failed"]) and row["shared"] <= row["limit"]


@pytest.fixture
def machine(monkeypatch):
    """A function that gives this machine a GPU; the ops then choose their path for it."""
    caches = _dispatch._obstacle, _dispatch._runs, _dispatch._warn_once

    def use(device: Device, triton: str = "3.6.0"):
        monkeypatch.delenv("HF_MEMMIX_BACKEND", raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.version, "hip", None if device.nvidia else "6.4")
        monkeypatch.setattr(_device, "of_index", lambda index: device)
        monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=triton))
        monkeypatch.setattr(_dispatch, "_has_triton", lambda: True)
        for function in caches:
            function.cache_clear()

    yield use
    for function in caches:
        function.cache_clear()


def test_ops_run_where_their_kernels_compile():
    """On the GPU and with the Triton of every row of the committed JSON."""
    rows = COMPILED
    kinds = {(row["op"].split()[0], row["size"], row["arch"], row["triton"]) for row in rows}
    assert {arch for _, _, arch, _ in kinds} == set(TARGETS)
    for kind in sorted(kinds):
        op, size, arch, triton = kind
        found = [r for r in rows if (r["op"].split()[0], r["size"], r["arch"], r["triton"]) == kind]
        version = tuple(map(int, triton.split(".")[:2]))
        runs = _device.obstacle(op, TARGETS[arch], version, size) is None
        assert runs == all(map(compiles, found)), (kind, [r for r in found if not compiles(r)])
    assert all(row["limit"] == TARGETS[row["arch"]].shared for row in rows)


def test_every_op_was_compiled():
    folders = {path.parent.name for path in Path(_device.__file__).parent.glob("*/launch.py")}
    assert {row["op"].split()[0] for row in COMPILED} == folders


@pytest.mark.product  # its parts have tests
def test_a_row_of_the_json_is_what_the_script_finds(tmp_path):
    out, wanted = tmp_path / "rows.json", ["sm_86", "gfx942"]
    script = ROOT / "kernels" / "benchmarks" / "gpu_generations.py"
    command = [sys.executable, script, "--out", out, "--archs", *wanted, "--ops", "short_conv", "--dtypes", "float32"]
    folders = os.pathsep.join(str(ROOT / name) for name in ("tests/kernels", "tests"))
    environment = {**os.environ, "PYTHONPATH": folders, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = json.loads(out.read_text())
    assert sorted(row["arch"] for row in rows) == sorted(wanted) and all(map(compiles, rows))
    committed = {tuple(row[key] for key in KEYS): row for row in COMPILED}
    for row in rows:
        known = committed.get(tuple(row[key] for key in KEYS))  # this may be another version of Triton
        assert known is None or known == row


@pytest.mark.parametrize(
    ("device", "triton", "reason"),
    [
        (T4, "3.9.0", "from sm_80"),
        (B200, "3.6.0", r"Triton >= \d.*3\.6 is installed"),
        (TARGETS["sm_86"], "3.9.0", "heads of 256 need .* KiB of shared memory, sm_86 has 99 KiB"),
    ],
    ids=["T4", "B200", "A10"],
)
def test_an_op_without_kernels_for_a_gpu_says_so_once(machine, device, triton, reason, monkeypatch):
    machine(device, triton)
    with pytest.warns(UserWarning, match=f"gka runs its torch path, which is slower: .*{reason}") as seen:
        assert not any(_dispatch.use_triton(INPUT, "gka", size) for size in (256, 256))
    assert len(seen) == 1 and "\n" not in str(seen[0].message)
    monkeypatch.setenv("HF_MEMMIX_BACKEND", "triton")
    with pytest.raises(ValueError, match=reason):
        _dispatch.use_triton(INPUT, "gka", 256)


@pytest.mark.parametrize("device", [TARGETS["sm_90"], TARGETS["sm_86"]], ids=["H200", "A10"])
def test_kernels_run_without_a_word(machine, device):
    machine(device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _dispatch.use_triton(INPUT, "gka", 128) and _dispatch.use_triton(INPUT, "lattice")
        assert not _dispatch.use_triton(SimpleNamespace(is_cuda=False, dtype=torch.float32), "gka")


def test_on_amd_kernels_hold_no_ptx(machine, monkeypatch):
    """One warning for all ops, and plain products in place of TF32."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    machine(MI300X)
    with pytest.warns(UserWarning, match="compile for AMD GPUs, but were never run on one") as seen:
        assert _dispatch.use_triton(INPUT, "gla") and _dispatch.use_triton(INPUT, "coffee")
    assert len(seen) == 1
    x = SimpleNamespace(is_cuda=True, get_device=lambda: 0)
    assert _device.compiled(x) and not _device.has_ptx(x)
    assert _device.dot_precision("tf32x3") == "ieee"
    machine(TARGETS["sm_90"])
    assert _device.has_ptx(x) and _device.dot_precision("tf32x3") == "tf32x3"


def test_launches_follow_the_shared_memory(machine, monkeypatch):
    """Lattice's windows by levels keep TF32 on an H200, and need less memory where there is little."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x = SimpleNamespace(is_cuda=True, get_device=lambda: 0, dtype=torch.bfloat16)
    for arch, form in {"sm_90": "tf32", "sm_80": "tf32", "sm_86": "tf32x3", "gfx942": "ieee"}.items():
        machine(TARGETS[arch])
        assert levels_precision(x) == form


def test_the_facts_are_those_of_torch(monkeypatch):
    facts = SimpleNamespace(
        major=8,
        minor=6,
        gcnArchName="gfx90a:sramecc+:xnack-",
        shared_memory_per_block=65536,
        shared_memory_per_block_optin=101376,
        multi_processor_count=84,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: facts)
    of_index = _device.of_index.__wrapped__
    monkeypatch.setattr(torch.version, "hip", None)
    assert of_index(0) == Device("sm_86", 101376, 84) and of_index(0).capability == 86
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert of_index(0) == Device("gfx90a", 65536, 84) and not of_index(0).nvidia


def test_the_interpreter_launches_as_on_an_h200():
    assert _device.device_of(torch.zeros(1)) == TARGETS["sm_90"] == _device.H200
