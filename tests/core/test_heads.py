"""Models with other heads than that of a language model: classifiers of sequences and tokens, question answering."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Trainer,
    TrainingArguments,
)

from hf_memmix import lora_target_modules
from testing import MIXERS, assert_same, in_turn, random_ids, randomize, tiny_config, tiny_model

HEADS = {
    "sequence": AutoModelForSequenceClassification,
    "token": AutoModelForTokenClassification,
    "question": AutoModelForQuestionAnswering,
}
# labels of a batch of rows of the length T, by the arguments of the head
LABELS = {
    "sequence": lambda rows, length: {"labels": torch.arange(rows) % 3},
    "token": lambda rows, length: {"labels": torch.arange(rows * length).view(rows, length) % 3},
    "question": lambda rows, length: {
        "start_positions": torch.ones(rows).long(),
        "end_positions": torch.full((rows,), 2),
    },
}
over_heads = pytest.mark.parametrize("head", HEADS)


def outputs(model, head, ids, mask=None):
    """Scores [B, labels] of a sequence classifier; [B, T, scores] of the other heads."""
    out = model(ids, attention_mask=mask)
    return torch.stack([out.start_logits, out.end_logits], -1) if head == "question" else out.logits


@torch.no_grad()
@over_heads
@pytest.mark.parametrize("family", ("llama", "gpt2"))
@pytest.mark.parametrize("side", ("left", "right"))
def test_a_padded_row_is_the_row_alone(family, head, side, tmp_path):
    """Also after saving and loading."""
    labels = {} if head == "question" else {"num_labels": 3}
    model = randomize(HEADS[head].from_config(tiny_config(family, "odd", **labels))).eval()
    ids = random_ids(2, 9)
    own = slice(3, None) if side == "left" else slice(0, 6)
    pads = slice(0, 3) if side == "left" else slice(6, None)
    ids[0, pads] = 0
    mask = (ids != 0).long()
    padded, alone = outputs(model, head, ids, mask), outputs(model, head, ids[:1, own])
    assert_same(padded[:1] if head == "sequence" else padded[:1, own], alone)
    assert padded.shape[-1] == (2 if head == "question" else 3)
    model.save_pretrained(tmp_path)
    again = HEADS[head].from_pretrained(tmp_path)
    assert type(again) is type(model)
    assert_same(outputs(again, head, ids, mask), padded, tolerance=0)


@torch.no_grad()
@in_turn(mixer=MIXERS, head=HEADS)
def test_the_loss_counts_the_labels_of_padded_rows(mixer, head):
    """Of every mixer; tokens with the label -100 do not count."""
    config = tiny_config("llama", "odd", mixer, **({} if head == "question" else {"num_labels": 3}))
    model = randomize(HEADS[head].from_config(config)).eval()
    ids, mask = random_ids(3, 9), torch.ones(3, 9).long()
    mask[0, :3] = mask[1, 6:] = 0
    ids[mask == 0] = 0
    labels = LABELS[head](3, 9)
    if head == "token":
        labels["labels"][mask == 0] = -100
    scores = outputs(model, head, ids, mask)
    alone = [outputs(model, head, row[None, own.bool()])[0] for row, own in zip(ids, mask, strict=True)]
    for row, own, want in zip(scores, mask, alone, strict=True):
        assert_same(row if head == "sequence" else row[own.bool()], want)
    # of a question, the start and the end are classes of their own
    parts = scores.unbind(-1) if head == "question" else [scores.flatten(0, -2)]
    pairs = zip(parts, labels.values(), strict=True)
    want = torch.stack([torch.nn.functional.cross_entropy(part, wanted.flatten()) for part, wanted in pairs]).mean()
    assert_same(model(ids, attention_mask=mask, **labels).loss, want)


@torch.no_grad()
@over_heads
@pytest.mark.parametrize("family", ("llama", "gpt2"))
def test_a_head_on_a_converted_language_model(family, head, tmp_path):
    """All weights of the language model are found; only the head is new."""
    tiny_model(family, "odd").save_pretrained(tmp_path)
    language_model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    model, loading = HEADS[head].from_pretrained(tmp_path, output_loading_info=True)
    assert loading["missing_keys"] and not any("layers" in key or ".h." in key for key in loading["missing_keys"])
    ids = random_ids(2, 9)
    got, want = (m.base_model(ids).last_hidden_state for m in (model.eval(), language_model))
    assert_same(got, want, tolerance=0)


@pytest.mark.product_rows(r"(?!token\])")  # the heads differ in what the tests above compare
@over_heads
def test_a_head_learns_by_the_trainer_with_lora(head, tmp_path):
    from peft import LoraConfig, PeftModel, TaskType, get_peft_model

    tasks = {"sequence": TaskType.SEQ_CLS, "token": TaskType.TOKEN_CLS, "question": TaskType.QUESTION_ANS}
    tiny_model("llama", "odd").save_pretrained(tmp_path / "model")
    model = HEADS[head].from_pretrained(tmp_path / "model", **({} if head == "question" else {"num_labels": 3}))
    lora = LoraConfig(task_type=tasks[head], r=4, target_modules=lora_target_modules(model))
    tuned = get_peft_model(model, lora)
    ids, labels = random_ids(4, 9), LABELS[head](4, 9)
    mask = torch.ones_like(ids)
    mask[:, 7:] = 0
    rows = [{"input_ids": ids[i], "attention_mask": mask[i]} | {k: v[i] for k, v in labels.items()} for i in range(4)]
    options = {"max_steps": 20, "learning_rate": 1e-2, "per_device_train_batch_size": 4, "report_to": "none"}
    options |= {"use_cpu": True, "logging_steps": 1, "disable_tqdm": True, "save_strategy": "no"}
    trainer = Trainer(tuned, TrainingArguments(tmp_path / "run", **options), train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.8 * losses[0]
    tuned.eval().save_pretrained(tmp_path / "adapter")
    base = HEADS[head].from_pretrained(tmp_path / "model", **({} if head == "question" else {"num_labels": 3}))
    again = PeftModel.from_pretrained(base, tmp_path / "adapter")
    with torch.no_grad():  # the adapter has the head, too
        assert_same(outputs(again, head, ids, mask), outputs(tuned, head, ids, mask))
