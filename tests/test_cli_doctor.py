"""`memmix doctor`: it reports what is here, and works where the library refuses to."""

import tomllib
from pathlib import Path

import pytest
import torch

from cli_runner import memmix, result_of
from hf_memmix import environment, versions
from hf_memmix.commands import doctor
from hf_memmix_kernels import _native
from hf_memmix_kernels._paths import OPS, path_of


def test_it_reports_this_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_MEMMIX_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "a secret")
    record = result_of(memmix("doctor", "--json"))
    # a wheel of PyPI names its CUDA in `torch.__version__` alone
    assert torch.__version__.startswith(record["packages"]["torch"]) and record["refusal"] is None
    cpu = record["devices"][0]
    assert set(cpu["ops"]) == set(OPS) and len(record["devices"]) == 1 + torch.cuda.device_count()
    assert {row["path"] for row in cpu["ops"].values()} <= {"native", "torch"}
    assert "HF_MEMMIX_CACHE" in record["settings"] and "HF_TOKEN" not in record["settings"]
    shown = memmix("doctor")
    assert shown.exit_code == 0 and "a secret" not in shown.output
    assert all(name in shown.stdout for name in (*doctor.PACKAGES, *OPS, record["packages"]["torch"]))


def test_a_path_is_named_with_its_reason(monkeypatch):
    monkeypatch.setenv("HF_MEMMIX_BACKEND", "torch")
    assert path_of("gka") == ("torch", "HF_MEMMIX_BACKEND=torch")
    monkeypatch.delenv("HF_MEMMIX_BACKEND")
    found = path_of("an op without native code")  # every op of today has some
    assert found[0] == "torch" and found[1]

    def fails(op, needed):
        raise _native.NativeError("no compiler here")

    monkeypatch.setattr(_native, "library", fails)
    assert path_of("gka") == ("torch", "no compiler here")


@pytest.mark.parametrize(("package", "found"), [("transformers", "5.99.0"), ("torch", "2.1.0")])
def test_it_works_outside_the_tested_range(monkeypatch, package, found):
    """Nothing of the library is imported then; the command that repairs it is printed."""
    monkeypatch.setattr(versions, "version", lambda name: found if name == package else "5.20.0")
    monkeypatch.setattr(doctor, "_machine", lambda: pytest.fail("imports the library"))
    monkeypatch.delenv(environment.ANY_VERSION, raising=False)
    run = memmix("doctor")
    assert (
        run.exit_code == 1 and found in run.output and f"pip install '{versions.requirement(package)}'" in run.output
    )


def test_extras_are_those_of_the_package():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for name, extra in doctor.PACKAGES.items():
        if extra is not None:
            wanted = [line.replace("-", "_") for line in project["optional-dependencies"][extra]]
            assert any(line.startswith(f"{name}>=") for line in wanted), name


def test_missing_packages_of_an_extra_are_named(monkeypatch):
    known = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name in ("peft", "gguf") else known(name))
    advice = result_of(memmix("doctor", "--json"))["advice"]
    assert any("peft" in line and "[train]" in line for line in advice)
    assert any("gguf" in line and "[gguf]" in line for line in advice)
