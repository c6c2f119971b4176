"""Answers of the teacher as training data."""

import json

import pytest

from cli_runner import SMALL, memmix, result_of
from hf_memmix.conversion import convert_model, save_student
from hf_memmix.training import sampling
from tiny_teachers import chat_tokenizer, tiny_teacher


@pytest.fixture
def at(tmp_path):
    """A teacher that ends most of its answers soon, and eight prompts of different lengths."""
    teacher = tiny_teacher("llama", layers=2, vocab_size=300)
    # any of 60 tokens ends an answer, as Llama 3 has several such tokens
    teacher.generation_config.update(do_sample=True, temperature=1.5, eos_token_id=[2, *range(100, 160)])
    save_student(teacher, tmp_path / "teacher", chat_tokenizer())
    save_student(convert_model(teacher), tmp_path / "student", chat_tokenizer())
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
    other = sample(at, "broken", "--seed", 1)
    assert other.exit_code == 1 and "seed was 0, is 1" in other.output and "--no-resume" in other.output
    again = result_of(sample(at, "broken", "--json"))
    assert len(calls) == 5 and again["rows"] == whole["rows"] and again["generation"] == whole["generation"]
    assert rows_of(at / "broken") == rows_of(at / "whole")
    assert not (at / ".broken.run").exists()
    result_of(sample(at, "broken", "--seed", 1, "--overwrite", "--json"))
    assert rows_of(at / "broken") != rows_of(at / "whole")


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
