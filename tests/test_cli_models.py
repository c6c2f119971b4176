"""Where models come from and where they train: Hub ids, devices, trackers, launchers."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

from child import child_env
from cli_runner import memmix, result_of
from hf_memmix.assets import asset_path
from hf_memmix.commands import checks, devices
from tiny_teachers import tiny_teacher, tiny_text, tiny_tokenizer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """A machine without network whose Hub cache holds `me/teacher`."""
    import huggingface_hub.constants

    root = tmp_path / "hub" / "models--me--teacher"
    tiny_teacher("llama", layers=2).save_pretrained(root / "snapshots" / COMMIT)
    tiny_tokenizer().save_pretrained(root / "snapshots" / COMMIT)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(tiny_text(200))
    return tmp_path


def test_models_by_their_name_on_the_hub(cached):
    assert result_of(memmix("convert", "--teacher", "me/teacher", "--out", "student", "--json"))["kept"] == []
    options = ["--teacher", "me/teacher", "--text", "text.txt", "--block-size", "16", "--max-tokens", "32", "--json"]
    report = result_of(memmix("report", "--student", "student", *options))
    assert report["folder"] == "student" and report["student_ppl"] > 0
    run = memmix("generate", "--model", "me/teacher", "--prompt", "the cat", "--max-new-tokens", "1", "--json")
    assert result_of(run)["model"] == "me/teacher"


def test_a_folder_comes_before_the_hub(cached):
    (cached / "me" / "teacher").mkdir(parents=True)
    run = memmix("convert", "--teacher", "me/teacher", "--out", "student")
    assert run.exit_code == 1 and "'me/teacher' is not a model folder" in run.output


@pytest.mark.parametrize("option", ["--teacher", "--student"])
def test_a_name_that_is_neither_a_folder_nor_on_the_hub_is_one_clear_line(cached, option):
    models = {"--teacher": "me/teacher", "--student": str(asset_path("tiny_gka"))} | {option: "me/missing"}
    arguments = [part for pair in models.items() for part in pair]
    run = memmix("align", *arguments, "--text", "text.txt", "--out", "s")
    assert run.exit_code == 1 and "Traceback" not in run.output
    last = run.output.splitlines()[-1]
    assert (
        "'me/missing' is not a folder on this machine" in last and "HF_HUB_OFFLINE" in last and "hf download" in last
    )


def test_what_has_not_the_form_of_a_hub_id_is_a_folder(cached):
    for name in ("gpt2", "./me", "../me", "a/b/c", "/me/teacher", "me/teacher/"):
        path = cached.__class__(name)
        if name != "me/teacher/":  # a path drops the last slash
            assert checks.model_folder(path) == path
    assert checks.model_folder(None) is None


@pytest.mark.parametrize(
    ("device", "count", "visible", "expected"),
    [
        ("cpu", 2, None, ""),
        ("cuda", 2, None, None),
        ("cuda:1", 2, None, "1"),
        ("cuda:1", 2, "5,7", "7"),
        (None, 0, "3", "3"),
    ],
)
def test_a_device_is_the_only_one_that_trainer_sees(monkeypatch, device, count, visible, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    devices.choose_device(device)
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == expected
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_device_of_amd_follows_its_own_variable(monkeypatch):
    """torch and the driver read it first; NVIDIA's variable counts where it is not set."""
    monkeypatch.setattr("torch.version.hip", "6.4")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    names = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    for given, device, expected in (
        ({"HIP_VISIBLE_DEVICES": "2,3"}, "cuda:1", "3"),
        ({"HIP_VISIBLE_DEVICES": "2,3", "CUDA_VISIBLE_DEVICES": "5,7"}, "cuda:1", "3"),
        ({"CUDA_VISIBLE_DEVICES": "5,7"}, "cuda:1", "7"),
        ({}, "cuda:1", "1"),
        ({"HIP_VISIBLE_DEVICES": "2,3"}, "cpu", ""),
    ):
        for name in names:
            monkeypatch.delenv(name, raising=False)
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        devices.choose_device(device)
        assert [os.environ.get(name) for name in names] == [expected, expected]
        for name in names:
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("gpu", "give cpu, cuda"),
        ("cuda:x", "give cpu"),
        ("cpu:1", "give cpu"),
        ("cuda:3", "shows 0 GPUs"),
    ],
)
def test_wrong_devices_are_refused(monkeypatch, device, message):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(ValueError, match=f"--device is '{device}'.*{message}"):
        devices.choose_device(device)


CHOSEN = """
    import json, sys, torch
    from hf_memmix.commands import app, select_mixture, train

    asked, devices = [], []
    torch.cuda.is_available = lambda: asked.append(1) or False
    def chosen(device):
        assert not asked
        devices.append(device)
        sys.exit(7)
    select_mixture.choose_device = train.choose_device = chosen
    for arguments in json.loads(sys.argv[1]):
        try:
            app(arguments)
        except SystemExit as error:
            assert error.code == 7, arguments
    print(devices)
"""


@pytest.mark.product  # a new process
def test_the_device_is_chosen_before_cuda_is_asked_for_its_gpus(cached):
    """CUDA reads CUDA_VISIBLE_DEVICES when it is first asked; then every GPU is visible until the process ends."""
    given = ["--teacher", "snapshots", "--device", "cuda:1", "--text", "text.txt", "--out"]
    align = ["--student", str(asset_path("tiny_gka")), *given, "s"]
    select = ["select", "--mixers", "gka,mamba2", "--train-text", "text.txt", *given, "plan.json"]
    commands = [["align", *align], ["align", "--stream", *align], select]
    (cached / "snapshots").symlink_to(cached / "hub" / "models--me--teacher" / "snapshots" / COMMIT)
    command = [sys.executable, "-c", textwrap.dedent(CHOSEN), json.dumps(commands)]
    run = subprocess.run(command, env=child_env(), capture_output=True, text=True, timeout=300)
    assert run.returncode == 0 and run.stdout.split("\n")[-2] == str(["cuda:1"] * 3), run.stderr[-2000:]


def test_several_processes_without_a_gpu_are_refused_with_the_reason(cached, monkeypatch):
    """What `accelerate launch --config_file training/accelerate/ddp.yaml` starts on a machine without a GPU."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    student = str(asset_path("tiny_gka"))
    align = ["align", "--teacher", "me/teacher", "--student", student, "--text", "text.txt", "--out", "s"]
    run = memmix(*align)
    assert run.exit_code == 1 and "2 processes" in run.output and "training/accelerate/cpu.yaml" in run.output
    assert "the launcher gives each process its device" in memmix(*align, "--device", "cpu").output
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    devices.check_processes()


def test_a_tracker_that_is_not_installed_is_named(cached, monkeypatch):
    monkeypatch.setattr("transformers.integrations.integration_utils.is_clearml_available", lambda: False)
    student = str(asset_path("tiny_gka"))
    align = ["align", "--teacher", "me/teacher", "--student", student, "--text", "text.txt", "--out", "s"]
    run = memmix(*align, "--report-to", "clearml")
    assert (
        run.exit_code == 1
        and "--report-to is 'clearml', which is not installed" in run.output
        and "Traceback" not in run.output
    )


def test_a_tracker_receives_the_logs(cached, monkeypatch):
    from transformers import TrainerCallback
    from transformers.integrations import integration_utils

    received = []

    class Tracker(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            received.append((state.global_step, json.dumps(sorted(logs))))

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "wandb", Tracker)
    monkeypatch.setattr(integration_utils, "is_wandb_available", lambda: True)
    result_of(memmix("convert", "--teacher", "me/teacher", "--out", "s0", "--json"))
    align = ["align", "--teacher", "me/teacher", "--student", "s0", "--text", "text.txt", "--out", "s1"]
    options = ["--steps", "4", "--batch-size", "2", "--block-size", "16", "--logging-steps", "2"]
    trackers = ["--report-to", "wandb", "--report-to", "wandb"]  # twice is once
    run = memmix(*align, *options, *trackers)
    assert run.exit_code == 0, run.output
    assert [step for step, names in received if '"loss"' in names] == [1, 2, 4]


@pytest.mark.product_rows(r"None")  # one of several examples stays
@pytest.mark.parametrize("chosen", [None, "logs"])
def test_tensorboards_files_outlive_the_folder_of_checkpoints(cached, monkeypatch, chosen):
    """Where the user has chosen no folder, they lie beside the output; those in the run folder vanish with it."""
    from transformers import TrainerCallback
    from transformers.integrations import integration_utils

    class Writer(TrainerCallback):
        """As the library's callback: it reads the variable when it is made."""

        def __init__(self):
            self.folder = devices.os.environ.get("TENSORBOARD_LOGGING_DIR")

        def on_log(self, args, state, control, **kwargs):
            folder = cached.__class__(self.folder or f"{args.output_dir}/runs")
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "events").touch()

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "tensorboard", Writer)
    monkeypatch.setattr(integration_utils, "is_tensorboard_available", lambda: True)
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", chosen or "")
    if chosen is None:
        monkeypatch.delenv("TENSORBOARD_LOGGING_DIR")
    result_of(memmix("convert", "--teacher", "me/teacher", "--out", "s0", "--json"))
    align = ["align", "--teacher", "me/teacher", "--student", "s0", "--text", "text.txt", "--out", "s1"]
    run = memmix(*align, "--steps", "1", "--batch-size", "2", "--block-size", "16", "--report-to", "tensorboard")
    assert run.exit_code == 0 and f"TensorBoard's files: {chosen or cached / 's1.tensorboard'}" in run.stderr
    assert (cached / (chosen or "s1.tensorboard") / "events").is_file()


@pytest.mark.product_rows(r"wandb")  # one of several examples stays
@pytest.mark.parametrize("tracker", ["codecarbon", "wandb"])
def test_files_of_codecarbon_outlive_the_folder_of_checkpoints(cached, monkeypatch, tracker):
    """Its callback writes into the folder of checkpoints. Who has not asked for it gets no file and no folder."""
    from transformers import TrainerCallback
    from transformers.integrations import integration_utils

    class Emissions(TrainerCallback):
        def on_train_end(self, args, state, control, **kwargs):
            if tracker == "codecarbon":
                (cached.__class__(args.output_dir) / "emissions.csv").write_text(f"{state.max_steps}")

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, tracker, Emissions)
    monkeypatch.setattr(integration_utils, f"is_{tracker}_available", lambda: True)
    result_of(memmix("convert", "--teacher", "me/teacher", "--out", "s0", "--json"))
    before = {path.name for path in cached.iterdir()}
    align = ["align", "--teacher", "me/teacher", "--student", "s0", "--text", "text.txt", "--out", "s1"]
    align += ["--batch-size", "2", "--block-size", "16", "--report-to", tracker]
    kept = cached / "s1.codecarbon"
    for steps in ("1", "2"):
        run = memmix(*align, "--steps", steps, "--overwrite")
        assert run.exit_code == 0 and (f"CodeCarbon's files: {kept}" in run.stderr) == (tracker == "codecarbon")
    if tracker == "codecarbon":
        assert {path.name: path.read_text() for path in kept.iterdir()} == {
            "emissions.csv": "1",
            "emissions-2.csv": "2",
        }
    new = {path.name for path in cached.iterdir()} - before
    assert new == ({"s1", "s1.codecarbon"} if tracker == "codecarbon" else {"s1"})
