"""Help and refusals come at once: neither torch nor transformers is imported before the arguments are checked."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli_runner import memmix
from hf_memmix.assets import asset_path
from hf_memmix.mixer_names import BUILT_IN, mixer_names
from hf_memmix.mixers import MIXERS

ROOT = Path(__file__).parents[1]
HEAVY = ["torch", "transformers", "numpy", "hf_memmix.configuration_memmix", "hf_memmix.conversion.loading"]
# the console script, several times in one process
SCRIPT = """
import contextlib, functools, io, json, sys
import hf_memmix_cli, typer.main

typer.main.get_command = functools.cache(typer.main.get_command)  # each call would make all commands again
told = []

def heavy_after(*arguments):
    sys.argv = ["memmix", *arguments]
    printed, messages = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(messages), contextlib.suppress(SystemExit):
        hf_memmix_cli.main()
    told.append(messages.getvalue())
    return [printed.getvalue().replace("\\n", " "), [name for name in HEAVY if name in sys.modules]]
"""


def printed_by(code, **env):
    code = f"HEAVY = {HEAVY}\n{SCRIPT}\n{code}"
    command = [sys.executable, "-c", code]
    env = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"} | env
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert not any(words in done.stderr for words in ("Failed to load", "register_constant")), (
        "see library_messages.py"
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


TEACHER, STUDENT = "{teacher}", "{student}"
FROM = ["--teacher", TEACHER]
PAIR = [*FROM, "--student", STUDENT]
TEXT, OUT = ["--text", "{text}"], ["--out", "{new}"]
MIXTURE = ["--mixers", "gka,ska", "--train-text", "{text}"]
NO_MODEL, NO_TEXT = "'{none}' is not a model folder: it does not exist", "text file '{none}' does not exist"
TRAINING = [
    ([*PAIR, *OUT, "--text", "{none}"], NO_TEXT),
    (["--teacher", "{none}", "--student", STUDENT, *TEXT, *OUT], NO_MODEL),
    ([*FROM, "--student", "{none}", *TEXT, *OUT], NO_MODEL),
    ([*FROM, *TEXT, *OUT], "neither --student nor --plan is given"),
    ([*FROM, "--plan", "{none}", *TEXT, *OUT], "there is no plan"),
    ([*PAIR, *TEXT, *OUT, "--recipe", "nosuch"], "no recipe 'nosuch'"),
    ([*PAIR, *TEXT, *OUT, "--recipe", "{bomb}"], "its aliases stand for more than 100,000 values"),
    ([*PAIR, *TEXT, *OUT, "--steps", "0"], "steps is 0; it must be at least 1"),
    ([*PAIR, *TEXT, *OUT, "--device", "tpu"], "--device is 'tpu'"),
    ([*PAIR, *TEXT, *OUT, "--report-to", "nosuch"], "--report-to is 'nosuch', which is not a tracker"),
    ([*PAIR, *TEXT, *OUT, "--recipe", "{frozen}"], "every learning rate of the recipe is 0"),
    ([*PAIR, *TEXT, "--out", "{full}"], "exists and is not empty"),
    ([*PAIR, *TEXT, "--out", "{full}", "--overwrite"], "was not written by memmix"),
    ([*PAIR, *TEXT, "--out", TEACHER, "--overwrite"], "which is read"),
    ([*FROM, "--student", TEACHER, *TEXT, *OUT], "the student is a plain 'llama' model"),
    (["--teacher", STUDENT, "--student", STUDENT, *TEXT, *OUT], "the teacher is a converted model"),
]
CHOICES = [
    ([*FROM, "--mixer", "nosuch"], "mixer 'nosuch' is unknown"),
    ([*FROM, "--mixer", ""], "mixer '' is unknown"),  # e.g. --mixer "$MIXER" where MIXER is not set
    ([*FROM, "--keep-layers", "9"], "there are layers 0 to 5"),
    ([*FROM, "--keep-layers", "0-999999999999"], "there are layers 0 to 5"),
    ([*FROM, "--keep-count", "x"], "--keep-count is 'x'"),
    ([*FROM, "--keep-count", "1", "--keep-layers", "0"], "give one of them"),
    (["--teacher", "{none}"], NO_MODEL),
    (["--teacher", STUDENT], "the teacher is a converted model"),
    (["--teacher", "{gguf}"], "holds weights quantized by 'gguf'"),
    (["--teacher", "{deep}"], "nested more than 100 levels deep"),
]
LAYERS = [
    (["--layers", "nosuch=rest"], "'nosuch', which is not a mixer"),
    (["--layers", "gka=rest", "--mixer", "ska"], "--mixer also chooses the mixers"),
    (["--layers", "ska=1 gka=1 mamba2=rest"], "--layers gives layer 1 to ska and to gka"),
    (["--layers", "ska=9 mamba2=rest"], "--layers of ska is '9'; it names layers 9"),
    (["--layers", "ska=1"], "--layers leaves layers 0,2-5 without a mixer"),
    (["--layers", "echo", "--keep-layers", "0"], "--layers also says"),
    (["--option", "x"], "is not NAME=VALUE"),
    (["--option", ".ridge=1.0"], "is not NAME=VALUE"),
    (["--option", "seed=3"], "with an option of the mixer"),
    (["--option", "ridge=[1"], "'[1' is not a value"),
    (["--option", "ridge=1.0", "--option", "ridge=2.0"], "--option gives ridge twice"),
    (["--option", "window.sinks=1", "--option", "sinks=2"], "window.sinks"),
    (["--option", "lattice.slots=3"], "has options of 'lattice', but no layer uses it"),
    (["--keep-without-rope", "x"], "--keep-without-rope is 'x'"),
    (["--keep-without-rope", "all"], "no layer keeps its attention"),
    (["--keep-layers", "1", "--keep-without-rope", "1-2"], "layers [2]"),
]
# by command: wrong arguments, and a part of the message
WRONG = {
    "plan": [(["--gpu-memory", "24GiB", *more], told) for more, told in CHOICES]
    + [([*FROM, "--gpu-memory", size], f"--gpu-memory is '{size}'") for size in ("24 apples", "0", "24", "-24GiB")]
    + [([*FROM, "--gpu-memory", "24GiB", "--tokens", "0"], "--tokens is '0'")]
    + [([*FROM, "--gpu-memory", "24GiB", *more], told) for more, told in LAYERS]
    + [([*FROM, "--gpu-memory", "24GiB", "--length", "9999999"], "the teacher was made for")]
    + [([*FROM, "--gpu-memory", "24GiB", "--tokens", "x"], "--tokens is 'x'")],
    "convert": [([*OUT, *more], told) for more, told in CHOICES]
    + [([*FROM, *OUT, *more], told) for more, told in LAYERS]
    + [
        (FROM, "give a folder for the student with --out"),
        ([*FROM, "--out", "{full}"], "exists and is not empty; remove it, choose another folder, or replace it"),
        ([*FROM, "--out", "{full}", "--overwrite"], "was not written by memmix"),
        ([*FROM, "--out", "{text}/s"], "is a file; give a folder"),
        ([*FROM, *OUT, "--keep-count", "6"], "keeps all 6 layers"),
        ([*FROM, *OUT, "--plan", "{none}"], "there is no plan"),
        ([*FROM, *OUT, "--trained", "{none}"], NO_MODEL),
        ([*FROM, *OUT, "--context", "0"], "should be greater than or equal to 1"),
        ([*FROM, *OUT, "--context", "9"], "--context belongs to --dry-run"),
    ],
    "import-hmf": [
        (["{none}", "{new}"], NO_MODEL),
        ([TEACHER, "{full}"], "exists and is not empty"),
        ([TEACHER, "{new}"], "model_type 'llama' is not of the GKA release"),
    ],
    "doctor": [(["--nosuch"], "--nosuch")],
    "import-gguf": [
        (["{none}", "{new}"], "no GGUF file"),
        (["{text}", "{new}"], "not a GGUF file"),
        (["{gguf}", "{full}"], "exists and is not empty"),
        (["{gguf}", "{new}", "--dtype", "int4"], "int4"),
    ],
    "align": [
        *TRAINING,
        ([*PAIR, *TEXT, *OUT, "--layers", "99"], "names layers 99"),
        ([*PAIR, *TEXT, *OUT, "--spool", "{new}"], "--spool belongs to --stream"),
        ([*PAIR, *TEXT, *OUT, "--dry-run"], "--dry-run belongs to --stream"),
        ([*PAIR, *TEXT, *OUT, "--stream", "--plan", "p.json"], "--student and --plan are both given"),
        ([*PAIR, *TEXT, *OUT, "--stream", "--save-every", "5"], "--save-every is not for --stream"),
    ]
    + [(["--stream", *more], told) for more, told in TRAINING],
    "distill": TRAINING,
    "merge": [
        (["{none}", "--student", STUDENT, *OUT], NO_MODEL),
        ([STUDENT, "--student", "{none}", *OUT], NO_MODEL),
        ([STUDENT, "--student", STUDENT, "--out", "{full}"], "exists and is not empty"),
        ([STUDENT, "--student", TEACHER, *OUT], "the student is a plain 'llama' model"),
    ],
    "cache-teacher": [
        (["--teacher", "{none}", *TEXT, *OUT], NO_MODEL),
        ([*FROM, "--text", "{none}", *OUT], NO_TEXT),
        ([*FROM, *TEXT, *OUT, "--recipe", "nosuch"], "no recipe 'nosuch'"),
        ([*FROM, *TEXT, *OUT, "--device", "tpu"], "--device is 'tpu'"),
        ([*FROM, *TEXT, *OUT, "--top-k", "0"], "should be greater than or equal to 1"),
        ([*FROM, *TEXT, *OUT, "--top-k", "9999"], "--top-k is 9999, but the teacher has 4096"),
        (["--teacher", STUDENT, *TEXT, *OUT], "the teacher is a converted model"),
    ],
    "sample-teacher": [
        (["--teacher", "{none}", "--prompts", "{text}", *OUT], NO_MODEL),
        ([*FROM, "--prompts", "{none}", *OUT], NO_TEXT),
        ([*FROM, "--prompts", "{text}", "--text-field", "x", *OUT], "--text-field is 'x'"),
        ([*FROM, "--prompts", "{text}", "--out", "{full}"], "exists and is not empty"),
        ([*FROM, "--prompts", "{text}", *OUT, "--top-p", "0.5", "--temperature", "0"], "top-p is 0.5"),
        ([*FROM, "--prompts", "{text}", *OUT, "--seed", "5", "--temperature", "0"], "seed is 5"),
        ([*FROM, "--prompts", "{text}", *OUT, "--temperature", "1e-300"], "temperature is 1e-300"),
    ],
    "generate": [
        (["--prompt", "a", "--model", "{none}"], NO_MODEL),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "a", "--device", "tpu"], "--device is 'tpu'"),
        (["--prompt", "a", "--device-map", "x"], "it can be auto"),
        (["--prompt", "a", "--temperature", "-1"], "should be greater than or equal to 0"),
        (["--prompt", "a", "--temperature", "0", "--top-p", "0.5"], "--top-p is 0.5"),
        (["--prompt", "a", "--temperature", "1e-300"], "temperature is 1e-300; give at least 1e-06"),
        (["--prompt", "a", "--temperature", "0", "--seed", "0"], "--seed is 0"),
    ],
    "report": [
        (["--student", "{none}", *FROM, *TEXT], NO_MODEL),
        ([*PAIR, "--text", "{none}"], NO_TEXT),
        ([*PAIR, *TEXT, "--device", "cuda:x"], "--device is 'cuda:x'"),
        (["--student", TEACHER, *FROM, *TEXT], "the student is a plain 'llama' model"),
    ],
    "eval": [
        (["{none}", *OUT], NO_MODEL),
        ([STUDENT, *OUT, "--tasks", "nosuch"], "task 'nosuch' is unknown"),
        ([STUDENT, *OUT, "--lengths", "x"], "--lengths is 'x'"),
        ([STUDENT, *OUT, "--lengths", "64,0"], "--lengths is '64,0'; lengths are at least 1"),
        ([STUDENT, *OUT, "--teacher", "{none}"], NO_MODEL),
        ([STUDENT, *OUT, "--chat", "--tasks", "mqar"], "'mqar' asks nothing"),
        ([STUDENT, *OUT, "--generate", "2"], "add --teacher"),
        ([STUDENT, *OUT, "--text", "{none}"], NO_TEXT),
        ([STUDENT, "--out", "{full}"], "exists and is not empty"),
    ],
    "select": [([*OUT, *more], told) for more, told in CHOICES]
    + [
        ([*FROM, *OUT, "--tasks", "nosuch"], "task 'nosuch' is unknown"),
        ([*FROM, *OUT, "--mixers", "gka,nosuch", "--train-text", "{text}"], "mixer 'nosuch' is unknown"),
        ([*FROM, *OUT, "--mixers", "gka,ska"], "give --train-text"),
        ([*FROM, *OUT, "--mixers", "gka,ska", "--train-text", "{none}"], NO_TEXT),
        ([*FROM, *OUT, "--student", TEACHER], "without memory layers"),
        ([*FROM, *OUT, "--mixers", "gka,gka", "--train-text", "{text}"], "names 'gka' twice"),
        ([*FROM, *OUT, *MIXTURE, "--mixer", "gka"], "--mixer also"),
        ([*FROM, *OUT, *MIXTURE, "--student", TEACHER], "--student also"),
        ([*FROM, *OUT, *MIXTURE, "--keep-layers", "7"], "names layers 7"),
        ([*FROM, *OUT, *MIXTURE, "--state-bytes", "x"], "--state-bytes is 'x'"),
        ([*FROM, *OUT, *MIXTURE, "--recipe", "distill"], "is for distill, not for align"),
        ([*FROM, *OUT, "--state-bytes", "1MiB"], "--state-bytes is a budget of a mixture"),
        ([*FROM, *OUT, "--decode-ms", "1"], "--decode-ms is a budget"),
        ([*FROM, *OUT, "--context", "9"], "--context is the context of a mixture"),
        ([*FROM, *OUT, "--recipe", "align"], "--recipe belongs to the alignment of candidates"),
        ([*FROM, *OUT, "--student", STUDENT, "--student", STUDENT, "--steps", "2"], "--steps belongs to"),
        ([*FROM, *OUT, "--stand-in", "gka"], "--stand-in is 'gka'"),
        ([*FROM, *OUT, "--stand-in", "window", "--context", "9"], "--context"),
        ([*FROM, *OUT, "--stand-in", "window", "--recipe", "align"], "--recipe"),
        ([*FROM, *OUT, "--stand-in", "window", "--keep-layers", "0"], "--keep-layers"),
        ([*FROM, *OUT, "--stand-in", "window", "--mixers", "gka"], "--mixers"),
        ([*FROM, *OUT, "--stand-in", "window", "--student", STUDENT], "--student"),
        ([*FROM, *OUT, "--stand-in", "window", "--keep-count", "7"], "there are 6 layers"),
        ([*FROM, *OUT, "--stand-in", "window", "--keep-count", "6"], "keeps all 6 layers"),
        ([*FROM, *OUT, "--stand-in", "window", "--window", "0"], "should be greater than or equal to 1"),
        ([*FROM, *OUT, "--mixer", "gka", "--window", "32"], "--window 32 belongs"),
        ([*FROM, *OUT, "--student", STUDENT, "--sinks", "0"], "--sinks 0 belongs"),
        ([*FROM, *OUT, "--keep-layers", "0", "--drop"], "--drop"),
        ([*FROM, *OUT, "--student", "{none}"], NO_MODEL),
        ([*FROM, "--out", "{text}"], "exists; keep it"),
        *(([*FROM, "--out", "{new}" + end, "--overwrite"], "give a JSON file") for end in (".png", ".mixers")),
    ],
    "card": [
        ([STUDENT, "--report", "{none}", "--base-model", "a/b", "--license", "mit"], "'{none}'"),
        (["{none}", "--report", "{none}", "--base-model", "a/b", "--license", "mit"], NO_MODEL),
        ([TEACHER, "--report", "{none}", "--base-model", "a/b", "--license", "mit"], "is not a converted model"),
    ],
    "push": [(["{none}", "a/b"], NO_MODEL), ([TEACHER, "a/b"], "is not a converted model")],
    "run": [(["no-such-program"], "there is no program 'no-such-program'")],
    "serve": [(["{none}"], NO_MODEL), (["--states-space", "4", "{none}"], "--states-space belongs to --states")],
}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """The files and folders that the wrong arguments name."""
    root = tmp_path_factory.mktemp("places")
    names = {name: root / name for name in ("none", "new", "full", "deep", "gguf", "text", "bomb", "frozen")}
    for name in ("full", "deep", "gguf"):
        names[name].mkdir()
    (names["full"] / "thesis.tex").write_text("years of work")
    (names["deep"] / "config.json").write_text('{"a":' * 3000 + "1" + "}" * 3000)
    (names["gguf"] / "model.gguf").write_bytes(b"GGUF")
    names["text"].write_text("a text")
    names["frozen"].write_text("learning_rate: 0.0\nrest_learning_rate: 0.0\n")
    lines = [f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]" for old, new in itertools.pairwise("abcdefghi")]
    names["bomb"].write_text("\n".join(["a: &a [1, 2]", *lines]))
    return names | {"teacher": asset_path("tiny_teacher"), "student": asset_path("tiny_gka")}


def test_wrong_arguments_are_refused_before_anything_heavy_is_imported(places):
    """Every command; the whole table in one process, as each leaves nothing imported."""
    from hf_memmix.commands import app

    assert WRONG.keys() == {command.name for command in app.registered_commands}
    rows = [
        ([command, *(part.format(**places) for part in arguments)], message.format(**places))
        for command, table in WRONG.items()
        for arguments, message in table
    ]
    code = f"""
heavy = [arguments for arguments in {[arguments for arguments, _ in rows]!r} if heavy_after(*arguments)[1]]
print(json.dumps([told, heavy]))
"""
    told, heavy = printed_by(code)
    different = [
        (arguments, message, text)
        for (arguments, message), text in zip(rows, told, strict=True)
        if message not in " ".join(text.replace("│", " ").split())
        or not any(line.strip().startswith(("error: ", "Usage: ")) for line in text.splitlines())
        or "Traceback" in text
    ]
    assert not different, different[0]
    assert not heavy, f"the first one with an import: {heavy[0]}"
    assert (places["full"] / "thesis.tex").is_file()


def test_a_dry_run_and_a_plan_import_no_code_that_trains(places):
    teacher = ["--teacher", str(places["teacher"])]
    code = f"""
def ours():
    return sorted(n for n in sys.modules if f"{{n}}.".startswith(("hf_memmix.training.", "transformers.trainer.")))

heavy_after("convert", *{teacher!r}, "--dry-run", "--option", "nosuch=3")
refused_early = "nosuch" in told.pop() and "hf_memmix.configuration_memmix" not in sys.modules
heavy_after("convert", *{teacher!r}, "--dry-run")
after_dry_run = ours()
heavy_after("plan", *{teacher!r}, "--gpu-memory", "24GiB")
print(json.dumps([told, refused_early, after_dry_run, ours()]))
"""
    told, refused_early, after_dry_run, after_plan = printed_by(code)
    assert refused_early and not any(told) and not after_dry_run
    needed = ("hf_memmix.training.planning", "hf_memmix.training.teachers", "hf_memmix.training.quantized")
    assert "hf_memmix.training.planning.stage_settings" in after_plan
    assert [name for name in after_plan if not name.startswith(needed)] == ["hf_memmix.training"]


def test_the_names_of_mixers_are_known_without_importing_them():
    assert set(BUILT_IN) == {name for name, cls in MIXERS.items() if cls.__module__.startswith("hf_memmix.mixers.")}
    assert set(mixer_names()) == set(MIXERS)


def test_version_names_what_a_defect_report_needs():
    done = memmix("--version")
    assert done.exit_code == 0 and done.stdout.startswith("memmix ")
    assert all(name in done.stdout for name in ("torch", "transformers", "Python"))


def test_shell_completion_is_offered():
    assert "--install-completion" in memmix("--help").stdout
