"""The teacher's training script: a few steps on a small text leave a loadable model; unusable text is refused."""

import hashlib
import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_memmix.assets import asset_path
from hf_memmix.conversion import convert_model, load_model
from hf_memmix.conversion.records import commit
from hf_memmix.training.drills import first_tokens, material_of, unseen_of
from hf_memmix.training.evaluation.probes import Material
from hf_memmix.training.experiments.bundled import measure_teacher, pretrain_teacher
from hf_memmix.training.experiments.bundled.language_model import without_masks
from hf_memmix.training.experiments.bundled.muon import orthogonal
from hf_memmix.training.experiments.bundled.pretrain_teacher import STAGES, Sizes, Stage, train
from hf_memmix.training.experiments.bundled.recall import DrilledWindows

SMALL = {"hidden_size": 32, "intermediate_size": 48, "layers": 2, "heads": 2, "kv_heads": 1}
TINY = Sizes(vocab_size=300, context=32, rows=4, **SMALL)
DRILLED = Sizes(vocab_size=1024, context=192, short_context=96, **SMALL)


@pytest.fixture(scope="module")
def text():
    chapters = [f"In chapter {i} the ship sailed on, and {i * 7} men sang.\n\nThen came night." for i in range(60)]
    return "".join(f"{chapter}\n<|endoftext|>\n" for chapter in chapters)


@pytest.fixture(scope="module")
def drilled(tmp_path_factory):
    """A teacher that was trained for a moment on the bundled texts and drills, and its texts."""
    out = tmp_path_factory.mktemp("drilled")
    sizes = {"train": 150_000, "dev": 150_000, "heldout": 383_510}
    texts = {name: asset_path(f"{name}.txt").read_text("utf-8")[:size] for name, size in sizes.items()}
    for name, content in texts.items():
        (out / f"{name}.txt").write_text(content, "utf-8")
    stage = Stage(2, 3e-3, 1.0, 0.02, drills=True, short_epochs=1, drill_every=1)
    train(stage, texts, out / "model", None, out / "m.json", DRILLED)
    return out


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("teacher")
    texts = dict.fromkeys(("train", "dev", "heldout"), text)
    train(replace(STAGES["first"], epochs=1), texts, out / "model", None, out / "m.json", TINY)
    return out


def test_an_epoch_leaves_a_loadable_bf16_model_and_a_record(trained):
    model = AutoModelForCausalLM.from_pretrained(trained / "model")
    tokenizer = AutoTokenizer.from_pretrained(trained / "model")
    record = json.loads((trained / "m.json").read_text())
    assert model.dtype == torch.bfloat16 and model.config.vocab_size == len(tokenizer)
    assert record["epochs"][0]["step"] == record["steps"][-1]["step"] > 5
    assert record["parameters"] == model.num_parameters() and record["commit"] == commit()
    prompt = tokenizer("The ship", return_tensors="pt", return_token_type_ids=False)
    assert model.generate(**prompt, max_new_tokens=4).shape[1] > prompt["input_ids"].shape[1]


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
    [(b" \n<|endoftext|>\n", "holds no text"), (b"some text\0more", "NUL bytes"), (None, "does not exist")],
)
def test_unusable_text_is_refused(tmp_path, content, message):
    path = tmp_path / "bad.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        pretrain_teacher.read_documents(path)


def test_drills_stand_beside_the_text_and_recall_is_recorded(drilled):
    record = json.loads((drilled / "m.json").read_text())
    first, second = record["epochs"]
    assert first["dev_answers"] > 0 and set(second["dev_recall"]) == {"niah", "mqar"}
    assert set(second["dev_recall"]["niah"]) == {"96", "192"}
    assert all(row["train_answers"] > 0 for row in (first, second))
    # an epoch has the same number of tokens of text with both window lengths, and as many of drills
    assert first["step"] == second["step"] - first["step"]
    assert record["tokens_seen"] == second["step"] * 2 * 16 * 192
    assert record["best_epoch"] == 1 + (
        second["dev_loss"] + second["dev_answers"] < first["dev_loss"] + first["dev_answers"]
    )


def test_a_teacher_is_measured_from_its_folder(drilled, tmp_path):
    measure_teacher.main(tmp_path / "m.json", drilled / "model", drilled / "heldout.txt", samples=1)
    found = json.loads((tmp_path / "m.json").read_text())
    assert [(row["task"], row["length"]) for row in found["recall"]["unseen"]][:2] == [("niah", 128), ("mqar", 128)]
    assert found["heldout"]["perplexity"] > 1
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
    shut = first_tokens(unseen_of(Material(tokenizer, heldout)))
    assert not shut & first_tokens(material) and not shut & set(material.tokens)


def test_muon_trains_the_matrices_of_the_layers_and_decays_as_adamw(text):
    model = pretrain_teacher.build_model(TINY, pretrain_teacher.train_tokenizer(text, 300, 32))
    (adam,) = pretrain_teacher.optimizers_of(model, Stage(1, 3e-3, 1.0))
    assert sum(len(group["params"]) for group in adam.param_groups) == len(list(model.parameters()))
    rest, muon = pretrain_teacher.optimizers_of(model, Stage(1, 3e-3, 1.0, muon_lr=0.02))
    (group,) = muon.param_groups
    assert group["lr"] * group["weight_decay"] == pytest.approx(3e-3)
    assert len(group["params"]) == 2 * 7 and all(p.ndim == 2 for p in group["params"])
    assert rest.param_groups[0]["params"] == [model.model.embed_tokens.weight]


def test_muon_makes_singular_values_nearly_equal():
    torch.manual_seed(0)
    for shape in ((3, 16, 40), (2, 40, 16)):
        matrices = torch.randn(shape)
        found = orthogonal(matrices)
        assert found.shape == shape
        values = torch.linalg.svdvals(found)
        assert values.min() > 0.6
        assert values.max() < 1.3
        # the singular vectors stay: U S V^T becomes about U V^T
        u, _, v = torch.linalg.svd(matrices, full_matrices=False)
        assert torch.nn.functional.cosine_similarity(found.flatten(1), (u @ v).flatten(1)).min() > 0.95


def test_attention_without_masks_is_the_same():
    tiny = load_model(asset_path("tiny_teacher"), dtype=torch.float32).eval()
    ids = torch.randint(100, 2000, (2, 40), generator=torch.Generator().manual_seed(0))
    student = convert_model(tiny, layers={"gka": [0, 5], "attention": "rest"}).eval()
    with torch.no_grad():
        expected = [model(ids, use_cache=False).logits for model in (tiny, student)]
        with without_masks(tiny, student):
            found = [model(ids, use_cache=False).logits for model in (tiny, student)]
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))
    assert tiny.config._attn_implementation == student.config._attn_implementation == "sdpa"
