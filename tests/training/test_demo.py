"""`make demo` on a shorter schedule: what it writes, and that its figures are measurements."""

import hashlib
import itertools
import json

import pytest
import torch
from rich.console import Console
from rich.progress import Progress
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, TrainerControl, TrainerState

from hf_memmix.assets import asset_path
from hf_memmix.conversion import convert_model
from hf_memmix.training import demo
from hf_memmix.training.evaluation import context_cost


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 97}
    teacher = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, head_dim=32)).eval()
    return teacher, convert_model(teacher, mixer="gka"), convert_model(teacher, mixer="gka", keep=[1])


@torch.inference_mode()
def test_a_filled_cache_decodes_like_one_of_its_length(models):
    for model in models:
        for limit in (None, 310):
            cache = context_cost.filled_cache(model, 300, max_cache_len=limit)
            assert [int(cache.get_seq_length(layer)) for layer in range(2)] == [300, 300]
            out = model(torch.zeros(1, 1, dtype=torch.long), position_ids=torch.tensor([[300]]), past_key_values=cache)
            assert out.logits.isfinite().all()
    row = context_cost.context_cost(models[1], 64, steps=2)
    assert row["context"] == 64 and row["ms_per_token"] > 0 and row["cache"] in ("dynamic", "static")


def test_bytes_of_the_cache(models):
    teacher, student, hybrid = models
    sizes = {
        model: [context_cost.cache_bytes(context_cost.filled_cache(model, n)) for n in (256, 512)] for model in models
    }
    per_token = 2 * 2 * 32 * 4  # layers, keys and values, head_dim, fp32
    assert sizes[teacher] == [256 * per_token, 512 * per_token]
    assert sizes[student][0] == sizes[student][1]
    assert sizes[hybrid][1] - sizes[hybrid][0] == 256 * per_token // 2


def test_the_time_of_a_step_waits_for_every_kind_of_gpu(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.accelerator, "synchronize", calls.append)
    for device in ("cpu", "cuda", "mps", "xpu"):
        context_cost._synchronize(torch.device(device))
    assert calls == [torch.device(device) for device in ("cuda", "mps", "xpu")]


@pytest.fixture
def short_text(tmp_path, monkeypatch):
    """The demo trains on the beginning of its text: most of its time here would go into tokens that no step reads."""
    short = tmp_path / "train.txt"
    short.write_text(asset_path("train.txt").read_text(encoding="utf-8")[:100_000], encoding="utf-8")
    monkeypatch.setattr(demo, "asset_path", lambda name: short if name == short.name else asset_path(name))


@pytest.mark.product  # a whole command; its parts have tests
def test_demo_end_to_end(tmp_path, short_text, monkeypatch):
    monkeypatch.setattr(context_cost, "ROUNDS", 1)
    # the rows of drills are longer; the transformer cannot read the longest probes
    sizes = {"align_steps": 2, "distill_steps": 1, "batch_size": 1, "block_size": 64, "text_tokens": 200}
    sizes |= {"probe_lengths": (96, 128, 4096), "probe_samples": 1, "contexts": (512, 4096), "new_tokens": 6}
    with Progress(console=Console(quiet=True)) as progress:
        results = demo.run_demo(tmp_path, progress, demo.Sizes(**sizes), demo.Recipe(drills=False))
    assert results == json.loads((tmp_path / "results.json").read_text())
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "student" / "model.safetensors").exists()
    assert results["new_process_agrees"]
    content = asset_path("heldout.txt").read_bytes()
    assert results["text"]["sha256"] == hashlib.sha256(content).hexdigest()
    assert results["quality"]["tokens"] == 196  # 200 in blocks of 64, whose first tokens nothing predicts
    assert results["quality"]["student_ppl"] > 1
    rows = results["recall"]["rows"]
    assert [(row["task"], row["length"]) for row in rows] == [
        (task, n) for task in ("niah", "mqar") for n in (96, 128)
    ]
    assert all(0 <= row[role] <= 1 for row in rows for role in ("teacher", "student"))
    ours, theirs = results["context_cost"]["student"], results["context_cost"]["teacher"]
    assert ours[0]["cache_bytes"] == ours[1]["cache_bytes"] < theirs[1]["cache_bytes"]

    console = Console(record=True, width=120, quiet=False, file=(tmp_path / "shown.txt").open("w"))
    demo.show(results, tmp_path, console)
    shown = console.export_text()
    assert f"{results['quality']['student_ppl']:.2f}" in shown
    assert f"{theirs[1]['cache_bytes']:,}" in shown
    assert "needle recalled, % at 96 / 128 tokens" in shown
    assert "no recall to keep" not in shown  # the bundled transformer finds needles
    results["recall"]["rows"] = [row | {"teacher": 0.0} for row in rows]
    demo.show(results, tmp_path, console)
    assert "no recall to keep" in console.export_text()


def test_the_bar_of_a_stage_ends_full_when_its_time_is_up(monkeypatch):
    monkeypatch.setattr(demo, "STAGE_SECONDS", -1)
    state, control = TrainerState(global_step=0, max_steps=100), TrainerControl()
    with Progress(console=Console(quiet=True)) as progress:
        bar = demo.ProgressBar(progress, "distill")
        bar.on_train_begin(None, state, control)
        state.global_step = 72
        bar.on_step_end(None, state, control)
        bar.on_train_end(None, state, control)
        assert control.should_training_stop and progress.finished and progress.tasks[0].completed == 72


def test_a_transformer_in_several_files_is_refused_before_any_work(tmp_path):
    with Progress(console=Console(quiet=True)) as progress, pytest.raises(ValueError, match="safetensors is missing"):
        demo.run_demo(tmp_path / "out", progress, teacher_folder=tmp_path)


def test_with_drills_half_of_the_rows_are_drills(short_text):
    tokenizer = AutoTokenizer.from_pretrained(asset_path("tiny_teacher"))
    text = demo.training_rows(tokenizer, 128, None)
    both = demo.training_rows(tokenizer, 128, asset_path("heldout.txt").read_text(encoding="utf-8"))
    assert len(both) == 2 * len(text) and torch.equal(both.blocks[: len(text)], text.blocks)
    ends = (both.blocks[len(text) :] == tokenizer.eos_token_id).sum(1)
    assert (ends >= 1).all()  # each drill ends with the end-of-text token


def test_recall_of_the_demo_is_a_row_per_task():
    recall = {"samples": 2, "tasks": demo.PROBES, "rows": []}
    for task, n in itertools.product(demo.PROBES, (128, 256)):
        recall["rows"].append({"task": task, "length": n, "teacher": 1.0, "student": n / 1000})
    assert demo.recall_rows(recall)[0] == ["needle recalled, % at 128 / 256 tokens", "100 / 100", "13 / 26"]
    assert not demo.recalls_nothing(recall)
    # no length fits
    assert demo.recall_of({}, None, (), (), 1) == []
    assert demo.recall_rows(recall | {"rows": []}) == [] and demo.recalls_nothing(recall | {"rows": []})
