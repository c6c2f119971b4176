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
from hf_memmix.training.experiments.coffee import ih0, images, pixels, tables
from hf_memmix.training.experiments.coffee import language as coffee_language
from hf_memmix.training.experiments.common import language, text
from hf_memmix.training.experiments.common.harness import load_results, matches
from hf_memmix.training.experiments.conversion import context_use, kept_layers, starts
from hf_memmix.training.experiments.conversion import table as conversion_table
from hf_memmix.training.experiments.echo import ablation as echo_ablation
from hf_memmix.training.experiments.echo import mqar, scratchpad, transfer
from hf_memmix.training.experiments.gka import figure3a, recall, solvers, variants
from hf_memmix.training.experiments.gka_vision import batch_norm, digits, throughput
from hf_memmix.training.experiments.lattice import ablation as lattice_ablation
from hf_memmix.training.experiments.lattice import as_written
from hf_memmix.training.experiments.lattice import language as lattice_language
from hf_memmix.training.experiments.mixtures import mixtures
from hf_memmix.training.experiments.recall_teacher import corpus, distillation_rows, grid, teacher
from hf_memmix.training.experiments.results import path_of
from hf_memmix.training.experiments.several_gpus import compare_launches

FOLDER = Path(report.__file__).parent
# experiment: its module, and the one that calls the harness
HARNESSED = {
    "lattice_language": (lattice_language, language),
    "coffee_language": (coffee_language, language),
    "baselines_language": (baselines_language, language),
    "lattice_ablation": (lattice_ablation, lattice_ablation),
    "enc_as_written": (as_written, as_written),
    "recall": (recall, recall),
    "gka_figure3a": (figure3a, figure3a),
    "gka_solvers": (solvers, solvers),
    "gka_vision_digits": (digits, digits),
    "echo_transfer": (transfer, transfer),
    "echo_ablation": (echo_ablation, echo_ablation),
    "echo_mqar": (mqar, mqar),
    "conversion_table": (conversion_table, conversion_table),
    "init_table": (starts, starts),
    "compare_plans": (kept_layers, kept_layers),
    "mixtures": (mixtures, mixtures),
    "recall_grid": (grid, grid),
}
FILES = {"gka_vision_digits": "digits", "recall_grid": "grid"}  # the other files have the names of their experiments
SCRIPTS = [
    *(module for module, _ in HARNESSED.values()),
    ih0,
    images,
    tables,
    variants,
    pixels,
    throughput,
    batch_norm,
    scratchpad,
    text,
    compare_launches,
    context_use,
    corpus,
    teacher,
    distillation_rows,
    report,
]


def invoke(module, *command):
    app = typer.Typer()
    app.command()(module.main)
    return CliRunner().invoke(app, [str(part) for part in command])


@pytest.mark.parametrize("module", SCRIPTS, ids=lambda module: module.__name__.partition("experiments.")[2])
def test_help(module):
    result = invoke(module, "--help")
    assert result.exit_code == 0 and "--" in result.output


@pytest.fixture(params=HARNESSED)
def given(request, tmp_path, monkeypatch):
    """What the command of an experiment gives to the harness if it is called with its default options."""
    module, caller = HARNESSED[request.param]
    seen = []
    monkeypatch.setattr(caller, "execute", lambda *given, **about: seen.append(given) or {"rows": []})
    for imported in ("describe_training_text", "text_record", "load_digits"):
        monkeypatch.setattr(caller, imported, lambda path: {}, raising=False)
    needed = [option for option in ("text", "teacher", "data", "images") if option in module.main.__annotations__]
    paths = [part for option in needed for part in (f"--{option}", tmp_path / "text.npy")]
    command = ["--out", tmp_path / "new.json", *paths]
    result = invoke(module, *command)
    assert result.exit_code == 0, result.output
    (given,) = seen
    assert given[0] == request.param and Path(given[1]) == Path(module.__file__) and callable(module.run)
    return given


def test_the_options_are_the_settings_of_the_committed_results(given):
    """By name, so that a run can be resumed; values may have been given by hand. Lists are repeated options."""
    name, _, args, _ = given
    committed = json.loads(path_of(FILES.get(name, name)).read_text())["settings"]
    assert load_results(args, name)["settings"].keys() == committed.keys()


def test_rows_are_planned_at_every_stage(given):
    """Before the first row; after rows that failed, in training or in measuring; and after all committed rows."""
    name, _, args, rows_to_run = given
    first = rows_to_run([], args)
    assert first
    stages = {
        "at the start": [],
        "after an error": [row | {"error": "no memory"} for row in first],
        "without a measurement": [row | {"finite": True, "error": "no memory"} for row in first],
        "after a loss that is not finite": [row | {"finite": False} for row in first],
        "at the end": json.loads(path_of(FILES.get(name, name)).read_text())["rows"],
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
    prefix = "hf_memmix.training.experiments"
    found = [file for file in FOLDER.glob("*/*.py") if file.parent.name not in ("bundled", "tables")]
    files = {f"{prefix}.{file.parent.name}.{file.stem}": file for file in found}
    scripts = {name for name, file in files.items() if "typer.run(main)" in file.read_text()}
    scripts.remove(f"{prefix}.common.text")  # a module that all share, with a command to tokenise a text
    assert len(scripts) >= 13
    wrong = []
    for importer, file in files.items():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and within(node.module, prefix):
                targets = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                rooms = {name.split(".")[3] for name in targets if name in files}
                if not rooms <= {file.parent.name, "common"} or (importer in scripts and scripts & set(targets)):
                    wrong.append((importer, targets))
    assert not wrong


def within(name, package):
    return name is not None and (name == package or name.startswith(package + "."))


def test_every_result_has_a_report():
    for name in HARNESSED:
        assert name in report.EXPERIMENTS
    found = json.loads(path_of("recall").read_text())
    assert report.report([found]) == report.EXPERIMENTS["recall"].table(found)
    with pytest.raises(ValueError, match="coffee_ih0 has no table"):
        report.report([json.loads(path_of("coffee_ih0").read_text())])


def test_every_module_imports():
    for file in sorted(FOLDER.rglob("*.py")):
        importlib.import_module(
            ".".join(["hf_memmix.training.experiments", *file.relative_to(FOLDER).with_suffix("").parts])
        )
