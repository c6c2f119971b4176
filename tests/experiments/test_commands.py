"""Every experiment's command: its options are the settings of the committed results, and unknown names are refused."""

import ast
import importlib
import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from hf_memmix.training.experiments import report
from hf_memmix.training.experiments.baselines import language as baselines_language
from hf_memmix.training.experiments.common import harness
from hf_memmix.training.experiments.common.harness import load_results, matches
from hf_memmix.training.experiments.echo import ablation as echo_ablation
from hf_memmix.training.experiments.echo import transfer
from hf_memmix.training.experiments.gka import recall
from hf_memmix.training.experiments.gka_vision import digits
from hf_memmix.training.experiments.lattice import ablation as lattice_ablation
from hf_memmix.training.experiments.results import path_of

FOLDER = Path(report.__file__).parent
PACKAGE = "hf_memmix.training.experiments"
# experiments by the names of their results, and the file of results if it has another name
HARNESSED = {
    "baselines_language": (baselines_language, None),
    "lattice_ablation": (lattice_ablation, None),
    "recall": (recall, None),
    "gka_vision_digits": (digits, "digits"),
    "echo_transfer": (transfer, None),
    "echo_ablation": (echo_ablation, None),
}
MODULES = {
    ".".join([PACKAGE, *file.relative_to(FOLDER).with_suffix("").parts]): file for file in sorted(FOLDER.rglob("*.py"))
}
SCRIPTS = [name for name, file in MODULES.items() if "\n    typer.run(main)\n" in file.read_text()]


def invoke(module, *command):
    app = typer.Typer()
    app.command()(module.main)
    return CliRunner().invoke(app, [str(part) for part in command])


@pytest.mark.parametrize("name", SCRIPTS)
def test_help(name):
    result = invoke(importlib.import_module(name), "--help")
    assert result.exit_code == 0 and "--" in result.output


@pytest.fixture(params=HARNESSED)
def given(request, tmp_path, monkeypatch):
    """What the command of an experiment gives to the harness if it is called with its default options."""
    module, file = HARNESSED[request.param]
    seen = []
    monkeypatch.setattr(harness, "execute", lambda *given, **about: seen.append(given))
    for imported in ("describe_training_text", "text_record", "load_digits"):
        monkeypatch.setattr(module, imported, lambda path: {}, raising=False)
    needed = [option for option in ("text", "teacher", "data", "images") if option in module.main.__annotations__]
    paths = [part for option in needed for part in (f"--{option}", tmp_path / "text.npy")]
    result = invoke(module, "--out", tmp_path / "new.json", *paths)
    assert result.exit_code == 0, result.output
    (given,) = seen
    assert given[0] == request.param and Path(given[1]) == Path(module.__file__) and callable(module.run)
    return *given, json.loads(path_of(file or request.param).read_text())


def test_the_options_are_the_settings_of_the_committed_results(given):
    """By name, so that a run can be resumed; values may have been given by hand. Lists are repeated options."""
    name, _, args, _, committed = given
    assert load_results(args, name)["settings"].keys() == committed["settings"].keys()


def test_rows_are_planned_at_every_stage(given):
    """Before the first row; after rows that failed, in training or in measuring; and after all committed rows."""
    _, _, args, rows_to_run, committed = given
    first = rows_to_run([], args)
    assert first
    stages = {
        "at the start": [],
        "after an error": [row | {"error": "no memory"} for row in first],
        "without a measurement": [row | {"finite": True, "error": "no memory"} for row in first],
        "after a loss that is not finite": [row | {"finite": False} for row in first],
        "at the end": committed["rows"],
    }
    for stage, done in stages.items():
        rows = rows_to_run(done, args)
        waiting = [json.dumps(row, sort_keys=True) for row in rows if not any(matches(known, row) for known in done)]
        assert rows and len(set(waiting)) == len(waiting), stage


@pytest.mark.parametrize("name, option", [("recall", "--models"), ("echo_ablation", "--variants")])
def test_unknown_names_are_refused(name, option, tmp_path):
    result = invoke(HARNESSED[name][0], "--out", tmp_path / "new.json", option, "nothing")
    assert result.exit_code == 2 and "'nothing' is unknown" in result.output


def test_no_experiment_imports_the_script_of_another():
    """What two experiments share is in `common/`; what two scripts of a folder share is in a module without a main.

    `bundled/`, which makes texts and models, is shared, too.
    """
    shared = ("bundled", "tables")
    files = {name: file for name, file in MODULES.items() if file.parent != FOLDER and file.parent.name not in shared}
    # common.text is a module that all share, with a command to tokenise a text
    scripts = {*SCRIPTS} & files.keys() - {f"{PACKAGE}.common.text"}
    wrong = []
    for importer, file in files.items():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and within(node.module, PACKAGE):
                targets = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                rooms = {name.split(".")[3] for name in targets if name in files}
                if not rooms <= {file.parent.name, "common"} or (importer in scripts and scripts & set(targets)):
                    wrong.append((importer, targets))
    assert not wrong


def within(name, package):
    return name is not None and (name == package or name.startswith(package + "."))


def test_every_result_has_a_table():
    assert HARNESSED.keys() <= report.TABLES.keys()
    with pytest.raises(ValueError, match="none of 'tea'"):
        report.shown(report.TABLES, [{"experiment": "tea"}])


@pytest.mark.parametrize("name", MODULES)
def test_every_module_imports(name):
    importlib.import_module(name)
