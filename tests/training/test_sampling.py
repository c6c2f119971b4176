"""Answers of the teacher as training data."""

import json

import pytest
import torch

from cli_runner import SMALL, memmix, result_of
from hf_memmix.conversion import convert_model, save_student
from hf_memmix.training import sampling
from hf_memmix.training.recipe import Sampling
from tiny_teachers import chat_tokenizer, tiny_teacher


@pytest.fixture
def at(tmp_path):
    """A teacher that ends most of its answers soon, and eight prompts of different lengths."""
    teacher = tiny_teacher("llama", layers=2, vocab_size=300)
    # any of 60 tokens ends an answer, as Llama 3 has several such tokens
    teacher.generation_config.update(do_sample=True, temperature=1.5, eos_token_id=[2, *range(100, 160)])
    save_student(teacher, tmp_path / "teacher", chat_tokenizer())
    save_student(convert_model(teacher, "gka"), tmp_path / "student", chat_tokenizer())
    rows = [{"prompt": "who " + "is " * n} for n in range(8)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def sample(at, out, *more):
    prompts = ["--teacher", at / "teacher", "--prompts", at / "prompts.jsonl", "--text-field", "prompt"]
    return memmix("sample-teacher", *prompts, "--out", at / out, "--max-new-tokens", 12, "--batch-size", 2, *more)


def rows_of(folder):
    return [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]


def test_answers_are_data_to_distill_on(at):
    record = result_of(sample(at, "sampled", "--json"))
    rows = rows_of(at / "sampled")
    assert record["rows"] == len(rows) and record["rows"] + record["left_out"] == 8 and record["rows"] > 2
    assert record["generation"]["temperature"] == 1.5 and record["generation"]["max_new_tokens"] == 12
    for row in rows:
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
        assert "<|" not in row["messages"][1]["content"]
    pair = ["--student", at / "student", "--teacher", at / "teacher"]
    text = ["--text", at / "sampled" / "answers.jsonl", "--loss", "answers"]
    assert memmix("distill", *pair, *text, *SMALL, "--out", at / "distilled").exit_code == 0


def test_an_interrupted_run_continues_as_the_same_run(at, monkeypatch):
    whole = result_of(sample(at, "whole", "--json"))
    plain, calls = sampling._answers, []

    def third_fails(*args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return plain(*args)

    monkeypatch.setattr(sampling, "_answers", third_fails)
    assert sample(at, "broken").exit_code == 130
    with (at / ".broken.run" / "answers.jsonl").open("a") as file:
        file.write('{"half a ro')
    answers = at / ".broken.run" / "answers.jsonl"
    content = answers.read_bytes()
    answers.write_bytes(content[:20])
    cut = sample(at, "broken")
    assert cut.exit_code == 1 and "20 bytes" in cut.output and "--no-resume" in cut.output
    answers.write_bytes(content)
    other = sample(at, "broken", "--seed", 1)
    assert other.exit_code == 1 and "seed was 0, is 1" in other.output and "--no-resume" in other.output
    again = result_of(sample(at, "broken", "--json"))
    assert len(calls) == 5 and again["rows"] == whole["rows"] and again["generation"] == whole["generation"]
    assert rows_of(at / "broken") == rows_of(at / "whole")
    assert not (at / ".broken.run").exists()
    result_of(sample(at, "broken", "--seed", 1, "--overwrite", "--json"))
    assert rows_of(at / "broken") != rows_of(at / "whole")


def test_a_run_without_answers_can_be_asked_for_more(at):
    """--top-p samples, also where the teacher's configuration takes the likeliest token; without sampling it has no
    effect.
    """
    config = at / "teacher" / "generation_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": 5, "do_sample": False}))
    none = sample(at, "out", "--max-new-tokens", 1, "--temperature", 0)
    assert none.exit_code == 1 and "none of 8" in none.output and not (at / ".out.run").exists()
    ignored = sample(at, "out", "--temperature", 0, "--top-p", 0.5)
    assert ignored.exit_code == 1 and "top-p" in ignored.output
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": list(range(3, 200))}))
    record = result_of(sample(at, "out", "--top-p", 0.5, "--json"))
    assert record["generation"]["do_sample"] and record["generation"]["top_p"] == 0.5


def test_marks_of_thoughts_stay_and_the_end_of_a_turn_ends(tmp_path, monkeypatch):
    """The tokenizer's end of a turn ends an answer, also if the generation config names another token."""
    tokenizer, teacher = chat_tokenizer(), tiny_teacher("llama", layers=1, vocab_size=300)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>"]})
    teacher.generation_config.eos_token_id = 5
    said = torch.tensor([[tokenizer.convert_tokens_to_ids("<think>"), 70, tokenizer.eos_token_id, 71]])
    monkeypatch.setattr(teacher, "generate", lambda input_ids, **options: torch.cat([input_ids, said], 1))
    asked = sampling.prompts_of(["who?"], tokenizer)
    sampling.sample_teacher(teacher, tokenizer, asked, tmp_path / "out", Sampling(max_new_tokens=4))
    assert rows_of(tmp_path / "out")[0]["messages"][1]["content"] == "<think>" + tokenizer.decode([70])


def test_a_padded_prompt_is_answered_as_alone(at):
    greedy = ["--temperature", 0, "--max-new-tokens", 12]
    sample(at, "batched", *greedy)
    sample(at, "alone", *greedy, "--batch-size", 1)
    assert rows_of(at / "batched") == rows_of(at / "alone") != []


def test_conversations_end_with_the_new_answer(at):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "old"}]
    rows = [{"messages": turns}, {"messages": [*turns, {"role": "user", "content": "b"}]}] * 4
    (at / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sample(at, "sampled", "--text-field", "messages")
    for row in rows_of(at / "sampled"):
        asked, answer = row["messages"][:-1], row["messages"][-1]
        assert asked in ([turns[0]], rows[1]["messages"]) and answer["role"] == "assistant" != answer["content"]
    (at / "prompts.jsonl").write_text(json.dumps({"messages": turns[1:]}))
    refused = sample(at, "other", "--text-field", "messages")
    assert refused.exit_code == 1 and "line 1 of" in refused.output


def test_a_base_model_continues_texts(tmp_path):
    tokenizer = chat_tokenizer(None)
    save_student(tiny_teacher("llama", layers=2, vocab_size=300), tmp_path / "teacher", tokenizer)
    (tmp_path / "prompts.jsonl").write_text('{"text": "the cat"}\n{"text": "he"}\n')
    options = ["--prompts", tmp_path / "prompts.jsonl", "--max-new-tokens", 4, "--out", tmp_path / "out"]
    record = result_of(memmix("sample-teacher", "--teacher", tmp_path / "teacher", *options, "--json"))
    rows = rows_of(tmp_path / "out")
    assert record["rows"] == 2 and rows[0]["text"].startswith("the cat") and len(rows[0]["text"]) > len("the cat")
    too_long = memmix(
        "sample-teacher", "--teacher", tmp_path / "teacher", *options, "--max-new-tokens", 500, "--overwrite"
    )
    assert too_long.exit_code == 1 and "256 tokens" in too_long.output
