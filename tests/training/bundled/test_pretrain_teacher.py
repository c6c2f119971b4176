"""The teacher's training script: a few steps on a small text leave a loadable model; unusable text is refused."""

import hashlib
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_memmix.training.bundled import pretrain_teacher

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
    assert record["parameters"] == model.num_parameters()
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


def test_dropout_acts_in_training_only(text):
    args = SimpleNamespace(**TINY)
    tokenizer = pretrain_teacher.train_tokenizer(text.read_text(), args.vocab_size, args.context)
    model = pretrain_teacher.build_model(args, tokenizer)
    pretrain_teacher.add_dropout(model, 0.5)
    ids = torch.arange(16)[None]
    assert not torch.equal(model.train()(ids).logits, model(ids).logits)
    assert torch.equal(model.eval()(ids).logits, model(ids).logits)
