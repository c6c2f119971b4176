"""The repository layout and the wheel: nothing shadows another package, nothing is left out."""

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXPERIMENTS = ROOT / "training" / "experiments"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGE_DIRS = PYPROJECT["tool"]["setuptools"]["package-dir"]


def run(*command, cwd, **env):
    return subprocess.run(
        command, cwd=cwd, env=os.environ | env, capture_output=True, text=True, timeout=600, check=False
    )


def test_kernels_folder_is_not_a_package():
    """With an `__init__.py` it would be taken for the optional PyPI package `kernels` that transformers imports."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "kernels" / "torch-ext" / "__init__.py").exists()
    assert not (ROOT / "conftest.py").exists()


def test_setup_and_pyproject_agree_on_the_roots():
    text = (ROOT / "setup.py").read_text()
    for name, folder in PACKAGE_DIRS.items():
        assert f'"{name}": "{folder}"' in text


@pytest.mark.parametrize("folder", PACKAGE_DIRS.values())
def test_every_folder_with_modules_is_a_package(folder):
    """A folder without `__init__.py` works in an editable install and is missing from the wheel."""
    # a bundled model folder holds the file that loads it with trust_remote_code: data, not a module
    folders = {file.parent for file in (ROOT / folder).rglob("*.py") if file.parent.parent.name != "assets"}
    missing = [str(f.relative_to(ROOT)) for f in folders if not (f / "__init__.py").exists()]
    assert not missing


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """A wheel of the files under version control (and the new ones), built with the installed setuptools."""
    source = tmp_path_factory.mktemp("source")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    out = tmp_path_factory.mktemp("wheel")
    result = run(
        sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source), cwd=out
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return next(out.glob("*.whl"))


@pytest.mark.product  # a whole command; its parts have tests
def test_wheel_holds_every_module_and_data_file(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    suffixes = {".py", ".yaml"}
    missing = []
    for package, folder in PACKAGE_DIRS.items():
        for file in (ROOT / folder).rglob("*"):
            if EXPERIMENTS in file.parents:
                continue
            wanted = file.suffix in suffixes or (ROOT / "hf_memmix" / "assets") in file.parents
            if file.is_file() and wanted and "__pycache__" not in file.parts:
                name = f"{package.replace('.', '/')}/{file.relative_to(ROOT / folder).as_posix()}"
                if name not in names:
                    missing.append(name)
    assert not missing


@pytest.mark.product  # a whole command; its parts have tests
def test_wheel_holds_no_experiments(wheel):
    """They run in a checkout, which holds their results."""
    assert (EXPERIMENTS / "report.py").is_file()
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if "experiments/" in name or "/results/" in name]


@pytest.mark.product  # a whole command; its parts have tests
def test_wheel_holds_nothing_else(wheel):
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "hf_memmix",
        "hf_memmix_kernels",
        "hf_memmix_cli.py",
    }


def test_a_package_added_after_an_editable_install_is_found(tmp_path):
    """The editable install maps folders, so a new file is found without a new installation."""
    source, site = tmp_path / "source", tmp_path / "site"
    for folder in PACKAGE_DIRS.values():
        (source / folder).mkdir(parents=True)
        (source / folder / "__init__.py").touch()
    (source / "hf_memmix" / "__init__.py").write_text('__version__ = "0.0.0"')
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "hf_memmix_cli.py"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    site.mkdir()
    build = f"from setuptools import build_meta; build_meta.build_editable({str(site)!r})"
    result = run(sys.executable, "-c", build, cwd=source)
    assert result.returncode == 0, result.stderr
    zipfile.ZipFile(next(site.glob("*.whl"))).extractall(site)

    names = []
    for package, folder in PACKAGE_DIRS.items():
        (source / folder / "added").mkdir()
        for file in ("__init__.py", "deep.py"):
            (source / folder / "added" / file).touch()
        names.append(f"{package}.added.deep")
    # -S keeps the surrounding environment's own installation out
    code = f"import site; site.addsitedir({str(site)!r}); import {', '.join(names)}"
    for folder in (source, tmp_path):
        result = run(sys.executable, "-S", "-c", code, cwd=folder)
        assert result.returncode == 0, result.stderr
