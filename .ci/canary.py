"""Which of the newest libraries hf_memmix works with, as a table: `make canary`.

    .venv-canary/bin/python .ci/canary.py            upgrades its own environment, then runs CHECKS
    .venv/bin/python .ci/canary.py door [VERSION]    tests/core/test_door.py with the newest transformers (or VERSION)
                                                     beside this environment; nothing that fails is an error

Environment variables: PRE=1 also takes pre-releases. TORCH=newest also takes torch, Triton and NumPy, several GB;
without it they stay as in constraints.txt.
"""

import os
import re
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
OF_TORCH = ("torch", "triton", "numpy")  # the newest NumPy breaks the interpreter of an older Triton
DOOR = "tests/core/test_door.py"
SECONDS = 120  # of each part of `door`, which must not hold up CI
# tests that use a library; transformers: the door, generation of every family with the mixers in turn, and training
CHECKS = {
    "transformers": [DOOR, "tests/core/test_moved_library.py", "tests/core/test_families.py"],
    "huggingface_hub": ["tests/test_cli_publish.py", "tests/core/test_saving.py"],
    "accelerate": ["tests/core/test_offload.py", "tests/training/test_runs.py"],
    "peft": ["tests/core/test_training.py", "tests/training/test_merge.py"],
    "trl": ["tests/training/test_trl.py"],
    "datasets": ["tests/training/test_data.py"],
    "lm_eval": ["tests/test_cli_run.py"],
    "torchao": ["tests/core/test_quantization.py"],
    "bitsandbytes": ["tests/core/test_quantization.py"],
    "gguf": ["tests/conversion/test_gguf_file.py"],
    "safetensors": ["tests/conversion/test_loading.py"],
    "typer": ["tests/test_cli.py"],
    "torch": ["tests/core/test_compile.py"],
}
WHOLE = ["tests/training/test_trl.py", "tests/test_cli_run.py"]  # their tests are those of `make test-all`


def pins() -> dict[str, str]:
    """The versions of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def newest(package: str) -> str | None:
    """The newest version that pip finds, or None if its index is out of reach."""
    command = [*PIP, "index", "versions", package, "--retries", "0", "--timeout", "10"]
    try:
        found = subprocess.run(
            command + ["--pre"] * wants_pre(), capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    named = re.match(r"\S+ \((\S+?)(\+\S+)?\)", found.stdout)
    return named and named[1]


def wants_pre() -> bool:
    return os.environ.get("PRE") == "1"


def wants_torch() -> bool:
    return os.environ.get("TORCH") == "newest"


def installed(package: str) -> str:
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return "-"


def upgrade():
    """Install the newest of everything that hf_memmix or its tests need, also outside the ranges of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [
        *project["dependencies"],
        *(x for n, xs in project["optional-dependencies"].items() if n != "vllm" for x in xs),
    ]
    names = {re.match(r"[\w-]+", one)[0] for one in needed} - {"hf-memmix"}
    kept = [] if wants_torch() else [f"{name}=={pins()[name]}" for name in OF_TORCH if installed(name) != "-"]
    names -= {re.split("==", one)[0] for one in kept}
    command = [*PIP, "install", "--quiet", "--upgrade", "--upgrade-strategy", "eager", *sorted(names), *kept]
    subprocess.run(command + ["--pre"] * wants_pre(), check=True)


def results(
    files: list[str], folder: Path, timeout: float | None = None, **variables: str
) -> dict[str, list[str] | int]:
    """By file of tests: how many passed, or the names of those that failed. A file that was not run is missing."""
    report = folder / "report.xml"
    options = ["-q", "-p", "no:cacheprovider", "-o", "junit_family=xunit1", f"--junitxml={report}"]
    environment = {"HF_MEMMIX_ANY_VERSION": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **variables}
    report.unlink(missing_ok=True)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    (folder / "output").write_text(run.stdout + run.stderr, encoding="utf-8")
    if not report.exists():
        return {}
    passed, failed = defaultdict(int), defaultdict(list)
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.get("file") or case.get("classname", "").replace(".", "/") + ".py"
        if case.find("failure") is not None or case.find("error") is not None:
            failed[name].append(case.get("name"))
        elif case.find("skipped") is None:
            passed[name] += 1
    return {**passed, **failed}


def told(files: list[str], found: dict) -> str:
    """A cell of the table: passes, or what has moved."""
    if missing := [file for file in files if file not in found]:
        return f"not run: {missing[0]}"
    broken = [name for file in files if isinstance(found[file], list) for name in found[file]]
    if not broken:
        return f"passes ({sum(found[file] for file in files)} tests)"
    return f"{len(broken)} failed: {', '.join(broken[:3])}{', ...' if len(broken) > 3 else ''}"


def show(rows: list[tuple[str, ...]]):
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def door(wanted: str | None):
    """Never raises and never ends with an error: the newest release is not what CI accepts or refuses."""
    pinned = pins()
    with ThreadPoolExecutor() as pool:
        latest = dict(zip(CHECKS, pool.map(newest, CHECKS), strict=True))
    wanted = wanted or latest["transformers"]
    if wanted is None:
        print("canary: the package index is out of reach, so the newest releases are not known")
        return
    answers = {
        name: "is the pinned one" if latest[name] == pinned.get(name) else "newer: make canary" for name in CHECKS
    }
    if wanted != installed("transformers"):
        with tempfile.TemporaryDirectory() as scratch:
            command = [*PIP, "install", "--quiet", "--target", f"{scratch}/site", f"transformers=={wanted}"]
            try:
                subprocess.run(command, capture_output=True, timeout=SECONDS, check=True)
                paths = os.pathsep.join([f"{scratch}/site", *filter(None, [os.environ.get("PYTHONPATH")])])
                answers["transformers"] = told([DOOR], results([DOOR], Path(scratch), SECONDS, PYTHONPATH=paths))
            except subprocess.TimeoutExpired as error:
                answers["transformers"] = f"not tried: {error.cmd[2]} took longer than {SECONDS} s"
            except subprocess.CalledProcessError:
                answers["transformers"] = "not tried: pip cannot install it"
            latest["transformers"] = wanted
    rows = [(name, pinned.get(name, "-"), latest[name] or "?", answer) for name, answer in answers.items()]
    show([("canary", "pinned", "newest", "door"), *rows])


def everything() -> int:
    """Upgrade, run all checks, and print the table. Returns 1 if something failed."""
    upgrade()
    pinned = pins()
    with tempfile.TemporaryDirectory() as scratch:
        everyday = sorted({file for files in CHECKS.values() for file in files} - {*WHOLE})
        found = results(["-n", "2", *everyday], Path(scratch))
        found |= results(["-n", "2", "-m", "product and not slow and not hub", *WHOLE], Path(scratch))
        if not found:
            print((Path(scratch) / "output").read_text(encoding="utf-8")[-3000:])
    rows = [(name, pinned.get(name, "-"), installed(name), told(files, found)) for name, files in CHECKS.items()]
    show([("library", "pinned", "newest", "result"), *rows])
    return int(any("passes" not in row[-1] for row in rows))


if __name__ == "__main__":
    if sys.argv[1:2] == ["door"]:
        door(sys.argv[2] if len(sys.argv) > 2 else None)
    else:
        sys.exit(everything())
