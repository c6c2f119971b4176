"""The teacher's training script: a few steps on a small text leave a loadable model; unusable text is refused."""

import hashlib
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_memmix.assets import asset_path
from hf_memmix.conversion.records import commit
from hf_memmix.training.drills import first_tokens, material_of, unseen_of
from hf_memmix.training.evaluation.probes import Material
from hf_memmix.training.experiments.bundled import measure_teacher, pretrain_teacher
from hf_memmix.training.experiments.bundled.recall import DrilledWindows

TINY = {"vocab_size": 300, "context": 32, "hidden_size": 32, "intermediate_size": 48, "layers": 2, "heads": 2}
TINY |= {"kv_heads": 1}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    chapters = [f"In chapter {i} the ship sailed on, and {i * 7} men sang.\n\nThen came night." for i in range(60)]
    path.write_text("".join(f"{chapter}\n<|endoftext|>\n" for chapter in chapters))
    return path


def pretrain(text: Path, out: Path, **more) -> None:
    pretrain_teacher.main(text, text, text, out / "model", out / "m.json", **TINY, **more)


DRILLED = {"vocab_size": 1024, "context": 192, "short_context": 96, "short_epochs": 1, "drills": True, "muon_lr": 0.02}


@pytest.fixture(scope="module")
def drilled(tmp_path_factory):
    """A teacher that was trained for a moment on the bundled texts and drills, and its texts."""
    out = tmp_path_factory.mktemp("drilled")
    for name, size in (("train", 150_000), ("dev", 150_000), ("heldout", 383_510)):
        (out / f"{name}.txt").write_text(asset_path(f"{name}.txt").read_text("utf-8")[:size], "utf-8")
    texts = [out / f"{name}.txt" for name in ("train", "dev", "heldout")]
    options = TINY | DRILLED | {"epochs": 2, "batch_size": 16, "dev_samples": 1, "log_every": 1}
    pretrain_teacher.main(*texts, out / "model", out / "m.json", **options)
    return out


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("teacher")
    pretrain(text, out, max_steps=5, batch_size=4, log_every=1)
    return out


def test_five_steps_leave_a_loadable_bf16_model_and_a_record(trained):
    model = AutoModelForCausalLM.from_pretrained(trained / "model")
    tokenizer = AutoTokenizer.from_pretrained(trained / "model")
    record = json.loads((trained / "m.json").read_text())
    assert model.dtype == torch.bfloat16 and model.config.vocab_size == len(tokenizer)
    assert [row["step"] for row in record["steps"]] == [1, 2, 3, 4, 5]
    assert record["parameters"] == model.num_parameters() and record["commit"] == commit()
    prompt = tokenizer("The ship", return_tensors="pt", return_token_type_ids=False)
    assert model.generate(**prompt, max_new_tokens=4).shape[1] > prompt["input_ids"].shape[1]


def test_recorded_heldout_perplexity_is_that_of_the_saved_files(trained, text):
    model = AutoModelForCausalLM.from_pretrained(trained / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(trained / "model")
    record = json.loads((trained / "m.json").read_text())
    total, count = 0.0, 0
    for window in torch.tensor(tokenizer(text.read_text())["input_ids"]).split(32):
        if len(window) > 1:
            total += model(input_ids=window[None], labels=window[None]).loss.item() * (len(window) - 1)
            count += len(window) - 1
    assert record["heldout"]["text"]["sha256"] == hashlib.sha256(text.read_bytes()).hexdigest()
    assert math.exp(total / count) == pytest.approx(record["heldout"]["perplexity"], rel=1e-3)


def test_tokenizer_is_lossless_and_end_of_text_takes_its_line(trained):
    tokenizer = AutoTokenizer.from_pretrained(trained / "model")
    odd = 'Naïve "quotes" --\n\n  two spaces; 42 ünknown ☃'
    assert tokenizer.decode(tokenizer(odd)["input_ids"], clean_up_tokenization_spaces=False) == odd
    joined = tokenizer("night.\n<|endoftext|>\nIn")["input_ids"]
    end = [tokenizer.eos_token_id]
    assert joined == tokenizer("night.")["input_ids"] + end + tokenizer("In")["input_ids"]
    assert tokenizer.bos_token_id == tokenizer.eos_token_id != tokenizer.pad_token_id


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no text"),
        (b" \n<|endoftext|>\n", "holds no text"),
        (b"some text\0more", "NUL bytes"),
        (b"\x89PNG\xff\xfe", "not UTF-8"),
        (None, "does not exist"),
        (b"too short", "fewer than two windows of 32"),
    ],
)
def test_unusable_text_is_refused_before_anything_is_written(tmp_path, content, message):
    path = tmp_path / "bad.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        pretrain(path, tmp_path)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"seconds": 0}, "0 is too small; give more than 0"),
        ({"seconds": -3.0}, "-3.0 is too small; give more than 0"),
        ({"muon_lr": 0.0}, "0.0 is too small; give more than 0"),
        ({"drills": True, "probe_every": 0}, "0 is too small; give at least 1"),
        ({"drills": True, "drill_every": -1}, "-1 is too small; give at least 1"),
        ({"drills": True, "answer_weight": -1.0}, "-1.0 is too small; give at least 0"),
        ({"epochs": 0}, "0 is too small; give at least 1"),
        ({"dropout": 1.0}, "1.0 is too large; give less than 1"),
        ({"short_epochs": 1, "short_context": 64}, "64 is above --context 32; give at most that"),
        ({"drill_every": 4}, "4 has no effect without --drills; add --drills"),
        ({"answer_weight": 0.5}, "0.5 has no effect without --drills; add --drills"),
        ({"probe_every": 2}, "2 has no effect without --drills; add --drills"),
        ({"start": Path("missing")}, "'missing' holds no config.json; give the folder of a teacher"),
        ({"start": asset_path("tiny_gka")}, "tiny_gka' is a memmix.*; give the folder of a Llama"),
        ({"start": asset_path("tiny_teacher")}, "300 is not the 4096 of --start .*; leave it out"),
    ],
)
def test_bad_options_are_refused_before_the_texts_are_read(options, message, tmp_path):
    with pytest.raises(typer.BadParameter, match=message) as error:
        pretrain(tmp_path / "missing.txt", tmp_path, **options)
    assert error.value.param_hint.startswith("--") and "\n" not in str(error.value)


def test_a_time_limit_with_several_processes_is_refused(text, tmp_path, monkeypatch):
    monkeypatch.setattr(pretrain_teacher, "Accelerator", lambda **_: SimpleNamespace(num_processes=2))
    with pytest.raises(ValueError, match="--seconds is 5 with 2 processes, .*; give --max-steps or --epochs"):
        pretrain(text, tmp_path, seconds=5)


def test_dropout_acts_in_training_only(text):
    args = SimpleNamespace(**TINY)
    tokenizer = pretrain_teacher.train_tokenizer(text.read_text(), args.vocab_size, args.context)
    model = pretrain_teacher.build_model(args, tokenizer)
    pretrain_teacher.add_dropout(model, 0.5)
    ids = torch.arange(16)[None]
    assert not torch.equal(model.train()(ids).logits, model(ids).logits)
    assert torch.equal(model.eval()(ids).logits, model(ids).logits)


def test_drills_stand_beside_the_text_and_recall_is_recorded(drilled):
    record = json.loads((drilled / "m.json").read_text())
    first, second = record["epochs"]
    assert first["dev_answers"] > 0 and set(second["dev_recall"]) == {"niah", "mqar"}
    assert set(second["dev_recall"]["niah"]) == {"96", "192"}
    assert all(row["train_answers"] > 0 for row in record["steps"])
    # an epoch has the same number of tokens of text with both window lengths, and as many of drills
    assert first["step"] == second["step"] - first["step"]
    assert record["tokens_seen"] == second["step"] * 2 * 16 * 192
    assert record["best_epoch"] == 1 + (
        second["dev_loss"] + second["dev_answers"] < first["dev_loss"] + first["dev_answers"]
    )
    assert [(row["task"], row["length"]) for row in record["recall"]["unseen"]][:2] == [("niah", 128), ("mqar", 128)]
    assert set(record["arguments"]) >= {"drills", "muon_lr", "short_epochs"}


def test_a_run_goes_on_from_an_earlier_teacher_and_has_drills_beside_every_few_windows(drilled):
    texts = [drilled / f"{name}.txt" for name in ("train", "dev", "heldout")]
    options = DRILLED | {
        "vocab_size": None,
        "short_epochs": 0,
        "epochs": 1,
        "max_steps": 2,
        "batch_size": 16,
        "samples": 0,
    }
    options |= {"start": drilled / "model", "lr": 0.0, "muon_lr": 1e-9, "drill_every": 4, "answer_weight": 0.5}
    pretrain_teacher.main(*texts, drilled / "again", drilled / "again.json", **options)
    before, record = (json.loads((drilled / name).read_text()) for name in ("m.json", "again.json"))
    assert record["tokens_seen"] == 2 * (16 + 4) * 192
    best = before["epochs"][before["best_epoch"] - 1]
    assert record["epochs"][0]["dev_loss"] == pytest.approx(best["dev_loss"], abs=2e-3)  # the weights were rounded
    assert record["arguments"]["start"] == "model" and record["parameters"] == before["parameters"]
    assert record["arguments"]["hidden_size"] == 32 and record["arguments"]["vocab_size"] == 1024


def test_a_teacher_is_measured_from_its_folder(drilled, tmp_path):
    measure_teacher.main(tmp_path / "m.json", drilled / "model", drilled / "heldout.txt", samples=16)
    found, record = (json.loads(path.read_text()) for path in (tmp_path / "m.json", drilled / "m.json"))
    assert found["recall"] == record["recall"] and found["heldout"] == record["heldout"]
    weights = (drilled / "model" / "model.safetensors").read_bytes()
    assert found["teacher"]["sha256"] == hashlib.sha256(weights).hexdigest()


def test_a_row_depends_on_its_index_and_epoch_only_and_has_no_unseen_word_as_key(drilled):
    tokenizer = AutoTokenizer.from_pretrained(drilled / "model")
    heldout = (drilled / "heldout.txt").read_text()
    ids = pretrain_teacher.encode(tokenizer, (drilled / "train.txt").read_text())
    material = material_of(tokenizer, ids, heldout)
    rows = DrilledWindows(pretrain_teacher.ShiftedWindows(ids, 200), material, seed=0)
    text, drills, weights = rows.__getitems__([3, 4])
    assert torch.equal(text[0], ids[600:800]) and text.shape == drills.shape == weights.shape == (2, 200)
    assert weights.sum() > 0 and torch.equal(rows.drills(3)[0], drills[0]) and not torch.equal(*drills)
    rows.epoch = 1
    assert not torch.equal(rows.drills(3)[0], drills[0])
    few = DrilledWindows(rows.windows, material, seed=0, every=2).__getitems__([3, 4, 5])
    assert few[0].shape == (3, 200) and few[1].shape == few[2].shape == (2, 200)
    assert pretrain_teacher.tokens_of(few) == 5 * 200 and pretrain_teacher.tokens_of(few[0]) == 3 * 200
    shut = first_tokens(unseen_of(Material(tokenizer, heldout)))
    assert not shut & first_tokens(material) and not shut & set(material.tokens)


def test_drills_without_room_or_words_are_refused(drilled, text):
    tokenizer = AutoTokenizer.from_pretrained(drilled / "model")
    windows = pretrain_teacher.ShiftedWindows(torch.arange(200), 64)
    with pytest.raises(ValueError, match="rows of at least 96 tokens"):
        DrilledWindows(windows, None, seed=0)
    with pytest.raises(ValueError, match="give a longer text"):
        ids = pretrain_teacher.encode(tokenizer, text.read_text())
        material_of(tokenizer, ids, (drilled / "heldout.txt").read_text())


def test_muon_trains_the_matrices_of_the_layers_and_decays_as_adamw(text):
    args = SimpleNamespace(**TINY, lr=3e-3, muon_lr=None, weight_decay=1.0)
    model = pretrain_teacher.build_model(args, pretrain_teacher.train_tokenizer(text.read_text(), 300, 32))
    (adam,) = pretrain_teacher.optimizers_of(model, args)
    assert sum(len(group["params"]) for group in adam.param_groups) == len(list(model.parameters()))
    args.muon_lr = 0.02
    rest, muon = pretrain_teacher.optimizers_of(model, args)
    (group,) = muon.param_groups
    assert group["lr"] * group["weight_decay"] == pytest.approx(3e-3)
    assert len(group["params"]) == 2 * 7 and all(p.ndim == 2 for p in group["params"])
    assert rest.param_groups[0]["params"] == [model.model.embed_tokens.weight]


def test_the_learning_rate_follows_the_steps_or_the_time_whichever_is_further(monkeypatch):
    rate = pretrain_teacher.rate_at
    none = pretrain_teacher.Clock(None)
    assert [rate(step, none, 10, 110) for step in (0, 5, 10, 60, 110)] == pytest.approx([0, 0.5, 1, 0.5, 0])
    now = iter((100.0, 100.0, 125.0, 150.0))
    monkeypatch.setattr(pretrain_teacher.time, "time", lambda: next(now))
    clock = pretrain_teacher.Clock(50.0)
    assert rate(10, clock, 10, 110) == 1
    assert rate(11, clock, 10, 110) == pytest.approx(0.5) and rate(12, clock, 10, 110) == pytest.approx(0)
