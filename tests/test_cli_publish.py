"""`memmix card` and `memmix push`: figures come from measurements of these weights, an upload is one whole commit."""

import json
import os
import subprocess
import sys
from shutil import copytree, rmtree

import huggingface_hub
import pytest
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

from cli_runner import memmix, result_of
from hf_memmix.conversion import convert_model, save_student
from hf_memmix.conversion.written import check_replaceable
from hf_memmix.training.card import student_card, weights_of
from hub_stand_in import TOKEN, hub
from tiny_teachers import CHAT, chat_tokenizer, tiny_teacher, tiny_text, tiny_tokenizer

ABOUT = ["--base-model", "me/teacher", "--license", "apache-2.0"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A converted model with everything that is measured of it."""
    folder = tmp_path_factory.mktemp("publish")
    tiny_teacher("llama", layers=2).save_pretrained(folder / "teacher")
    tiny_tokenizer().save_pretrained(folder / "teacher")
    (folder / "text.txt").write_text(tiny_text(300))
    teacher, text = ["--teacher", folder / "teacher"], ["--text", folder / "text.txt"]
    beside = ["--mixer", "gka", "--option", "gka.local_window=4"]
    result_of(memmix("convert", *teacher, "--out", folder / "s0", "--keep-layers", "1", *beside, "--json"))
    steps = ["--steps", "2", "--batch-size", "2", "--block-size", "16", "--json"]
    model = folder / "student"
    stage = result_of(memmix("align", "--student", folder / "s0", *teacher, *text, "--out", model, *steps))
    (folder / "align.json").write_text(json.dumps(stage))
    report = result_of(memmix("report", "--student", model, *teacher, *text, "--block-size", "32", "--json"))
    (folder / "report.json").write_text(json.dumps(report))
    few = ["--tasks", "niah,common_words", "--lengths", "64", "--samples", "2", "--json"]
    result_of(memmix("eval", model, *teacher, *text, "--out", folder / "eval", *few))
    return folder


@pytest.fixture
def folder(measured, tmp_path):
    """The measured folder with a model of its own, which a test may change."""
    for path in measured.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "student").unlink()
    (tmp_path / "student").mkdir()
    for path in (measured / "student").iterdir():
        (tmp_path / "student" / path.name).write_bytes(path.read_bytes())
    return tmp_path


def write_card(folder, *more):
    return memmix("card", folder / "student", "--report", folder / "report.json", *ABOUT, *more)


@pytest.fixture
def push(folder, monkeypatch):
    """`memmix push` of the folder's model to a server. The library has read these settings when it was imported."""

    def run(endpoint, *more, token=TOKEN):
        settings = {"ENDPOINT": endpoint, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}
        settings["HF_TOKEN_PATH"] = str(folder / "home" / "token")
        for name, value in settings.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        if token is not None:
            monkeypatch.setenv("HF_TOKEN", token)
        huggingface_hub.close_session()  # no connection of an earlier call is used again
        return memmix("push", folder / "student", "me/small", *more)

    return run


def test_the_card_holds_the_measurements(folder):
    measurements = ["--probes", folder / "eval" / "probes.json", "--stage", folder / "align.json"]
    run = write_card(folder, *measurements, "me/small")
    assert run.exit_code == 0, run.output
    card = ModelCard.load(folder / "student" / "README.md")
    report = json.loads((folder / "report.json").read_text())
    stage = json.loads((folder / "align.json").read_text())
    probes = json.loads((folder / "eval" / "probes.json").read_text())
    assert card.data.base_model == "me/teacher" and card.data.license == "apache-2.0"
    assert card.data.tags == ["hf_memmix", "gka", "linear-attention", "sliding-window-attention", "distillation"]
    assert card.data.eval_results[0].metric_value == round(report["student_ppl"], 3)
    expected = [
        f"| teacher (hash {report['teacher']['weights'][:12]}) | 2 of 2 | {report['teacher_ppl']:.2f} |",
        f"| this model | 1 of 2 | {report['student_ppl']:.2f} |",
    ]
    expected += [f"{report['ppl_ratio']:.4f}", report["text"][0]["sha256"][:12], report["weights"], "Gated KalmaNet"]
    expected += [f"| align | 2 | {stage['tokens']:,} | {stage['last_loss']:.4f} |", 'from_pretrained("me/small"']
    expected += [f"{row['student']['gain']:.2f} ±" for row in probes["summary"]] + [
        "the last 4 tokens and the first one"
    ]
    assert [figure for figure in expected if figure not in card.content] == []
    assert "{{" not in card.content and "[More Information Needed]" not in card.content
    run = write_card(folder)
    assert run.exit_code == 1 and "exists" in run.output
    assert write_card(folder, "--overwrite").exit_code == 0
    file = folder / "student" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"mixer_types": ["window", "attention"]}))
    run = write_card(folder, "--overwrite")
    assert run.exit_code == 1 and "other weights or another config.json" in run.output
    (folder / "report.json").unlink()
    (folder / "report.json").write_text(json.dumps(report | {"weights": weights_of(folder / "student")}))
    assert write_card(folder, "--overwrite").exit_code == 0
    tags = ModelCard.load(folder / "student" / "README.md").data.tags
    assert tags == ["hf_memmix", "window", "sliding-window-attention", "distillation"]
    assert "probe" not in (folder / "student" / "README.md").read_text()


def test_the_card_says_what_the_windows_of_each_layer_read(tmp_path):
    """Defaults depend on the window of the layer's attention; where they differ, the configuration holds null."""
    teacher = tiny_teacher("gpt_oss", layers=4, sliding_window=6)  # in layers 0 and 2
    numbers = dict.fromkeys(("student_ppl", "teacher_ppl", "ppl_ratio", "top1_agreement", "kl", "tokens"), 1)
    where = dict.fromkeys(("hardware", "torch", "transformers"), "one")
    report = numbers | {"environment": where, "text": [{"file": "text", "sha256": ""}], "block_size": 8}
    for options, expected in (
        (
            {"mixer": "window"},
            "It reads the last 6 tokens (layers 0,2) or the last 512 tokens and the first one (layers",
        ),
        ({"mixer": "window", "keep": [0, 2]}, "It reads the last 512 tokens and the first one, whose keys"),
        (
            {"mixer": "gka", "local_window": 6},
            "the last 6 tokens (layers 0,2) or the last 6 tokens and the first one (lay",
        ),
        ({"mixer": "gka", "local_window": 5}, "exact attention reads the last 5 tokens and the first one, whose keys"),
    ):
        save_student(convert_model(teacher, **options), tmp_path / "student", overwrite=True)
        text = student_card(tmp_path / "student", report, base_model="me/teacher", license="mit")
        assert expected in text, text


@pytest.mark.parametrize(
    ("file", "option", "change", "message"),
    [
        ("report.json", "--report", {"student_ppl": "12"}, 'student_ppl is "12", not a number'),
        ("report.json", "--report", {"text": "a.txt"}, 'text is "a.txt", not a list'),
        ("report.json", "--report", {"text": [{"file": "a"}]}, "text[0].sha256 is missing"),
        ("report.json", "--report", {"environment": {}}, "environment.hardware is missing"),
        ("report.json", "--report", {"tokens": True}, "tokens is true, not a whole number"),
        ("align.json", "--stage", {"last_loss": None}, "last_loss is null, not a number"),
        ("eval/probes.json", "--probes", {"models": {}}, "models.student is missing"),
        (
            "eval/probes.json",
            "--probes",
            {"summary": [{"task": "niah", "chance": 1}]},
            "summary[0].teacher is missing",
        ),
        ("plan.json", "--plan", {"layers": [{"layer": 0}]}, "layers[0].rank is missing"),
    ],
)
def test_a_measurement_that_was_edited_is_one_clear_line(folder, file, option, change, message):
    plan = {"mixer": "gka", "keep": [1], "num_layers": 2, "layers": [{"layer": 0, "rank": 1, "score": 0.5}]}
    (folder / "plan.json").write_text(json.dumps(plan))
    edited = folder / "edited.json"
    edited.write_text(json.dumps(json.loads((folder / file).read_text()) | change))
    run = write_card(folder, option, edited)
    assert run.exit_code == 1 and run.output.splitlines()[-1].startswith(f"error: '{edited}': {message}"), run.output


def change_weights(model):
    file = model / "model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values()))[0] += 1
    save_file(tensors, file, {"format": "pt"})


def test_measurements_of_other_weights_are_refused(folder):
    change_weights(folder / "student")
    run = write_card(folder)
    assert run.exit_code == 1 and "was measured with other weights" in run.output.splitlines()[-1]
    (folder / "broken.json").write_text("[]")
    for report, message in (
        ("none.json", "give the JSON file of a measurement"),
        ("broken.json", "lacks teacher_ppl"),
    ):
        run = memmix("card", folder / "student", "--report", folder / report, *ABOUT)
        assert run.exit_code == 1 and message in run.output.splitlines()[-1]
    run = memmix("card", folder / "teacher", "--report", folder / "report.json", *ABOUT)
    assert run.exit_code == 1 and "is not a converted model" in run.output
    assert not (folder / "student" / "README.md").exists()


def test_measurements_of_two_teachers_are_refused(folder):
    """Each names its own. A base model in the Hub's cache that is another one is told: it may be a copy."""
    report, probes = (json.loads((folder / name).read_text()) for name in ("report.json", "eval/probes.json"))
    assert report["teacher"]["weights"] == probes["models"]["teacher"]["weights"] == weights_of(folder / "teacher")
    assert report["teacher"]["folder"] == "teacher" and report["weights"] == weights_of(folder / "student")
    probes["models"]["teacher"]["weights"] = "0" * 64
    (folder / "others.json").write_text(json.dumps(probes))
    run = write_card(folder, "--probes", folder / "others.json")
    assert run.exit_code == 1 and "measured with two teachers" in run.output.splitlines()[-1]
    assert not (folder / "student" / "README.md").exists()
    (folder / "unnamed.json").write_text(json.dumps({k: v for k, v in report.items() if k != "teacher"}))
    run = memmix("card", folder / "student", "--report", folder / "unnamed.json", *ABOUT)
    assert run.exit_code == 1 and "lacks teacher" in run.output.splitlines()[-1]


def test_the_hash_of_a_teacher_with_pickled_weights(folder, tmp_path_factory):
    pickled = tmp_path_factory.mktemp("pickled")
    (pickled / "config.json").write_bytes((folder / "teacher" / "config.json").read_bytes())
    with pytest.raises(ValueError, match="holds no weights"):
        weights_of(pickled)
    hashes = {weights_of(folder / "teacher")}
    for content in (b"some", b"others"):
        (pickled / "pytorch_model.bin").write_bytes(content)
        hashes.add(weights_of(pickled))
    assert len(hashes) == 3


def test_a_base_model_that_is_not_the_teacher_is_told(folder, monkeypatch):
    snapshot = folder / "cached"
    monkeypatch.setattr("hf_memmix.training.card.try_to_load_from_cache", lambda *name: str(snapshot / "config.json"))
    for change, told in ((None, False), (change_weights, True), (lambda cached: rmtree(cached), False)):
        if not snapshot.exists():
            copytree(folder / "teacher", snapshot)
        if change is not None:
            change(snapshot)
        run = write_card(folder, "--overwrite")
        assert run.exit_code == 0 and ("warning: me/teacher in the Hub's cache" in run.stderr) == told, run.output


def test_push_is_one_commit_of_model_and_card(folder, push):
    assert write_card(folder, "me/small").exit_code == 0
    (folder / "student" / "checkpoint-3").mkdir()
    (folder / "student" / "checkpoint-3" / "optimizer.pt").write_bytes(b"large")
    (folder / "student" / ".secret").write_text("not for others")
    with hub() as server:
        run = push(server.url, "--private", "--json")
        assert run.exit_code == 0, run.stderr
        assert json.loads(run.stdout)["repo"] == "me/small" and server.private == {"me/small": True}
        uploaded = server.repos["me/small"]
        mine = {p.name: p.read_bytes() for p in (folder / "student").iterdir() if p.is_file() and p.name[0] != "."}
        assert uploaded == mine and {"README.md", "config.json", "model.safetensors"} <= uploaded.keys()
        assert [(name, revision) for name, revision, _, _ in server.commits] == [("me/small", "main")]
        assert len(server.objects) == 1, "the weights go through LFS, the rest with the commit"
        run = push(server.url, "--message", "again")  # the repository exists already
        assert run.exit_code == 0 and server.commits[-1][2] == "again"
        assert sum(line.startswith("PUT") for line in server.log) == 1, "weights that are there are not sent again"


@pytest.mark.product  # a new process
def test_push_reads_its_settings_from_the_environment(folder):
    assert write_card(folder, "me/small").exit_code == 0
    with hub() as server:
        env = os.environ | {"HF_ENDPOINT": server.url, "HF_TOKEN": TOKEN, "HF_HOME": str(folder / "home")}
        env |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        command = [sys.executable, "-m", "hf_memmix_cli", "push", str(folder / "student"), "me/small"]
        run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        assert run.returncode == 0 and [commit[0] for commit in server.commits] == ["me/small"], run.stderr


def test_a_model_without_its_card_is_not_uploaded(folder):
    def refused(message):
        run = memmix("push", folder / "student", "me/small")
        assert run.exit_code == 1 and message in run.output.splitlines()[-1]

    run = memmix("push", folder / "nowhere", "me/small")
    assert run.exit_code == 1 and "is not a model folder" in run.output
    refused("has no card")
    (folder / "student" / "README.md").write_text("# by hand\n")
    refused("is not a card of memmix card")
    run = write_card(folder, "--overwrite")
    assert run.exit_code == 1 and "is not a card of memmix, so it is not replaced" in run.output
    (folder / "student" / "README.md").unlink()
    assert write_card(folder).exit_code == 0
    check_replaceable(folder / "student")  # the card is a file of ours
    assert write_card(folder, "--overwrite").exit_code == 0
    change_weights(folder / "student")
    refused("describes other weights")


def test_a_refusal_by_the_hub_is_one_clear_line(folder, push):
    def mistake(run, message):
        last = run.stderr.splitlines()[-1]
        assert run.exit_code == 1 and last.startswith("error:") and message in last, run.stderr
        assert "Traceback" not in run.stderr

    assert write_card(folder).exit_code == 0
    with hub() as server:
        mistake(push(server.url, token=None), "there is no token")
        assert server.log == [], "nothing was asked of the Hub"
        mistake(push(server.url, token="hf_wrong"), "the token is not valid there")
        server.refuse["/api/models/me/small/commit"] = (403, "You need write access")
        mistake(push(server.url), "You need write access; the token may not write there")
        assert server.repos == {"me/small": {}}
    mistake(push(server.url), "cannot be reached")


def test_a_dry_run_names_the_files_and_sends_nothing(folder, push):
    assert write_card(folder, "me/small").exit_code == 0
    (folder / "student" / ".secret").write_text("not for others")
    with hub() as server:
        run = push(server.url, "--dry-run", "--json", token=None)
        assert run.exit_code == 0 and server.log == [], run.stderr
    mine = {p.name: p.stat().st_size for p in (folder / "student").iterdir() if p.name[0] != "."}
    assert json.loads(run.stdout) == {"repo": "me/small", "revision": "main", "files": mine, "dry_run": True}
    run = memmix("push", folder / "student", "me/small", "--dry-run")
    assert "model.safetensors" in run.stdout and "nothing was sent" in run.stdout and ".secret" not in run.stdout
    (folder / "student" / "README.md").unlink()
    assert "has no card" in memmix("push", folder / "student", "me/small", "--dry-run").output


def test_a_card_refuses_invalid_names(folder):
    about = {"--base-model": "me/teacher", "--license": "mit", "--language": "en"}
    for option, value in (
        ("--base-model", "../../etc"),
        ("--base-model", "me/teacher\nlicense: mit"),
        ("--license", "mit\ntags: [x]"),
        ("--license", ""),
        ("--language", "en\n- de"),
        (None, "/etc/passwd"),
    ):
        options = [part for pair in (about | ({option: value} if option else {})).items() for part in pair]
        repo = "me/small" if option else value
        run = memmix("card", folder / "student", repo, "--report", folder / "report.json", *options)
        assert run.exit_code == 1 and "Traceback" not in run.output and "give " in run.output, (option, run.output)
        assert f"is {value!r}" in run.output and not (folder / "student" / "README.md").exists()


def test_all_missing_options_are_named_at_once(folder):
    run = memmix("card", folder / "student", "--license", "mit")
    assert run.exit_code == 2 and "--report" in run.output and "--base-model" in run.output
    assert "'--license" not in run.output


def test_the_example_of_a_card_runs(folder, monkeypatch, capsys):
    """Of a base model, and of one with a chat template: there it gives the model's answer to a question."""
    monkeypatch.chdir(folder)
    for template in (None, CHAT):
        if template is not None:
            chat_tokenizer(template).save_pretrained("student")
            config = json.loads((folder / "student" / "tokenizer_config.json").read_text())
            assert "chat_template" in config or (folder / "student" / "chat_template.jinja").exists()
            larger = tiny_teacher("llama", layers=2, vocab_size=300)
            monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *a, m=larger, **k: m)
        assert write_card(folder, "--overwrite").exit_code == 0
        content = (folder / "student" / "README.md").read_text()
        code = content.partition("```python\n")[2].partition("```")[0]
        assert ("apply_chat_template" in code) == (template is not None)
        exec(code, {})
        assert capsys.readouterr().out.strip()


def test_a_card_refuses_the_plan_of_another_model(folder):
    rows = [{"layer": layer, "rank": 1 + layer, "score": 0.5} for layer in range(2)]
    own = {"layers": rows, "keep": [1], "mixer": "gka", "num_layers": 2}
    for change in ({"keep": [0]}, {"mixer": "coffee"}, {"num_layers": 3}):
        (folder / "plan.json").write_text(json.dumps(own | change))
        run = write_card(folder, "--plan", folder / "plan.json")
        assert run.exit_code == 1 and f"the plan has {next(iter(change))}" in run.output.splitlines()[-1]
    (folder / "plan.json").write_text(json.dumps(own))
    assert write_card(folder, "--plan", folder / "plan.json").exit_code == 0
