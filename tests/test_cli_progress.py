"""What a job without a terminal writes: whole lines, at the start, at the end and every 30 seconds."""

import os
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from cli_runner import SMALL, memmix, result_of
from hf_memmix.commands import progress
from hf_memmix.commands.training_reports import progress_callback
from tiny_teachers import tiny_teacher, tiny_text, tiny_tokenizer


def test_the_first_the_last_and_the_newest_state_are_shown():
    shown = []
    lines = progress.Lines("align: step", shown.append, seconds=3600)
    for step in range(1, 100):
        lines.advance(step, 100, f"loss {step}")
    assert shown == ["align: step 1 of 100, loss 1"]
    lines.advance(100, 100, "loss 100")
    lines.close()
    assert shown[1:] == ["align: step 100 of 100, loss 100"]
    lines.close()
    assert len(shown) == 2


def test_a_line_is_printed_while_a_step_takes_long():
    shown = []
    lines = progress.Lines("distill: step", shown.append, seconds=0.05)
    lines.advance(0, 50)
    lines.advance(10, 50, "loss 2.0")
    limit = time.monotonic() + 20
    while len(shown) < 4 and time.monotonic() < limit:
        time.sleep(0.01)
    lines.close()
    assert shown[0] == "distill: step 0 of 50"
    assert re.fullmatch(r"distill: step 10 of 50, loss 2\.0, \d:\d\d:\d\d left", shown[2]), shown


def test_nothing_is_printed_before_there_is_a_state():
    shown = []
    progress.Lines("x", shown.append).close()
    assert shown == []


def test_only_the_first_process_of_a_launch_prints(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    with progress.progress("align: step") as advance:
        advance(1, 2)
    assert capsys.readouterr().err == ""


def test_time_left_is_of_this_call_not_of_the_steps_before_a_resume(monkeypatch):
    shown, now = [], [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    lines = progress.Lines("x", shown.append, seconds=3600)
    lines.advance(500, 1000)
    now[0] = 110.0
    lines.advance(510, 1000)
    lines.close()
    assert shown == ["x 500 of 1000", "x 510 of 1000, 0:08:10 left"]


def test_the_estimate_does_not_grow_while_a_step_runs(monkeypatch):
    shown, now = [], [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    lines = progress.Lines("x", shown.append, seconds=3600)
    lines.advance(0, 10)
    now[0] = 120.0
    lines.advance(2, 10)
    for now[0] in (120.0, 125.0, 130.0, 300.0):
        lines._print()
    lines.close()
    left = [line.rpartition(", ")[2] for line in shown[1:]]
    assert left == ["0:01:20 left", "0:01:15 left", "0:01:10 left", "0:01:10 left"]


def test_a_rate_is_one_that_was_measured():
    texts = [progress.rate_text(*pair) for pair in ((0, 5.0), (64, 0.0), (16, 40.0), (64, 10.0), (12_345, 1.0))]
    assert texts == ["", "", "0.4 tokens/s", "6.4 tokens/s", "12,345 tokens/s"]


class Every(progress.Lines):
    """Shows every state."""

    def advance(self, done, total, note=""):
        super().advance(done, total, note)
        if self._newest != self._shown:
            self._print()


@pytest.mark.product_rows(r"align")  # align and distill share this code
@pytest.mark.parametrize("stage", ["align", "distill"])
def test_a_training_in_a_log_file_says_step_loss_speed(stage, tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr(progress, "Lines", lambda title, show: Every(title, lines.append))
    tiny_teacher("llama", layers=2).save_pretrained(tmp_path / "teacher")
    tiny_tokenizer().save_pretrained(tmp_path / "teacher")
    (tmp_path / "text.txt").write_text(tiny_text(800))
    teacher = ["--teacher", tmp_path / "teacher"]
    result_of(memmix("convert", *teacher, "--mixer", "gka", "--out", tmp_path / "s0", "--json"))
    lines.clear()
    options = ["--student", tmp_path / "s0", "--text", tmp_path / "text.txt", "--out", tmp_path / "s1"]
    run = memmix(stage, *teacher, *options, *SMALL, "--json", "--logging-steps", "3", "--device", "cpu")
    result = result_of(run)
    assert run.stderr.splitlines()[:2] == [
        "loading torch and transformers",
        f"reading and tokenising {tmp_path / 'text.txt'}",
    ]
    logged = {entry["step"]: f"{entry['loss']:.4f}" for entry in result["log"]}
    assert list(logged) == [1, 3] and lines[0] == f"{stage}: step 0 of 3"
    shown = [
        re.fullmatch(rf"{stage}: step (\d) of 3, loss (\d+\.\d{{4}}), [\d,]+ tokens/s.*", line) for line in lines[1:]
    ]
    assert None not in shown, lines
    newest = {int(line[1]): line[2] for line in reversed(shown)}  # the first line of each step
    assert sorted(newest) == [1, 2, 3]
    # the loss of the second step, which no log has
    assert newest[1] == logged[1] and newest[2] not in logged.values()


def test_the_loss_is_that_of_the_newest_step_also_between_two_logs():
    shown = []
    report = progress_callback(lambda done, total, note: shown.append((done, note.partition(",")[0])), 32)
    state = SimpleNamespace(global_step=0, max_steps=3, newest_loss=None)
    report.on_train_begin(None, state, None)
    for state.global_step, state.newest_loss in ((1, 0.5), (2, 0.25)):
        report.on_step_end(None, state, None)
        if state.global_step == 1:
            report.on_log(None, state, None, logs={"loss": 0.5})
    assert shown == [(0, ""), (1, "loss 0.5000"), (1, "loss 0.5000"), (2, "loss 0.2500")]


@pytest.mark.parametrize("columns", [None, "80"])
def test_lines_are_not_wrapped_where_there_is_no_terminal(columns):
    """Also where the shell that started the job has exported the width of its window."""
    env = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    env |= {} if columns is None else {"COLUMNS": columns}
    long = "/a/long/path" * 20
    code = (
        "import importlib.util as u, sys; sys.modules['hf_memmix'] = u.module_from_spec(u.find_spec('hf_memmix'));"
        "from hf_memmix.commands.common import err, out; from rich.table import Table;"  # torch is not imported
        f"[console.print('written to {long}') for console in (out, err)];"
        f"table = Table('name'); table.add_row('{long}'); out.print(table)"
    )
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert run.stdout.startswith(f"written to {long}\n") and run.stderr == f"written to {long}\n", run
    assert sum(long in line for line in run.stdout.splitlines()) == 2
