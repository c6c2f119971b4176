"""Tasks with examples: what is read from dictionaries and sources, balanced labels, files that lm-eval reads."""

import gzip
import json
import random
from collections import Counter

import pytest
import torch
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from typer.testing import CliRunner

from hf_memmix.assets import asset_path
from hf_memmix.training.experiments.smollm2 import few_shot

ENTRIES = """Preface
Abjure \\Ab*jure"\\, v. t. [imp. & p. p. {Abjured}; L. abjurare
   to deny upon oath.]
   1. To renounce upon oath; to forswear.
      [1913 Webster]

Abjurement \\Ab*jure"ment\\ (-ment), n.
   Renunciation. [R.]

Ably \\A"bly\\, adv.
   In an able manner. [1913 Webster]

Abjuratory \\Ab*ju"ra*to*ry\\, a.
   Containing an
   abjuration of faith.
"""


def test_parts_of_speech_of_a_dictionary(tmp_path):
    file = tmp_path / "usr" / "share" / "dictd" / "gcide.dict.dz"
    file.parent.mkdir(parents=True)
    file.write_bytes(gzip.compress(ENTRIES.encode()))
    assert few_shot.speech(tmp_path) == {
        "noun": [],  # its entry has marks behind the word, and one word as its meaning
        "verb": ["Word: abjure\nMeaning: To renounce upon oath\nPart of speech:"],
        "adverb": ["Word: ably\nMeaning: In an able manner\nPart of speech:"],
        "adjective": ["Word: abjuratory\nMeaning: Containing an abjuration of faith\nPart of speech:"],
    }


def test_lines_from_the_middle_of_a_source(tmp_path):
    for name, count in (("long.py", 30), ("short.py", 9)):
        file = tmp_path / "usr" / "lib" / "python3.11" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"x{i} = {i}\n\n" for i in range(count)))
    found = few_shot.languages(tmp_path)
    assert found["Python"] == ["\n".join(["Code:", *(f"x{i} = {i}" for i in range(15, 23)), "Language:"])]
    assert not any(found[name] for name in found if name != "Python")


def test_labels_are_balanced():
    found = {"b": [f"b{i}" for i in range(9)], "a": ["a0", "a1", "a1", "a2"]}
    rows = list(few_shot.balanced(found, 100, random.Random(0)))
    assert Counter(row["answer"] for row in rows) == {0: 3, 1: 3} and len({row["prompt"] for row in rows}) == 6
    assert all(row["prompt"].startswith(row["choices"][row["answer"]]) for row in rows)


def test_sums_and_their_files(tmp_path):
    app = typer.Typer()
    app.command()(few_shot.main)
    arguments = ["--out", str(tmp_path), "--only", "arithmetic", "--count", "30", "--shots", "2"]
    run = CliRunner().invoke(app, arguments)
    assert run.exit_code == 0, run.output
    rows = [json.loads(line) for line in (tmp_path / "arithmetic.test.jsonl").read_text().splitlines()]
    assert len(rows) == 30
    for row in rows:
        right = eval(row["prompt"].removesuffix(" ="))
        assert row["choices"][row["answer"]] == str(right) and len(set(row["choices"])) == 4
    assert len((tmp_path / "arithmetic.train.jsonl").read_text().splitlines()) == few_shot.EXAMPLES
    group = json.loads((tmp_path / f"{few_shot.GROUP}.yaml").read_text())
    assert group["task"] == ["arithmetic_choice", "arithmetic_generated"]


def test_exact_answers_are_those_that_a_model_generates(tmp_path, monkeypatch):
    monkeypatch.setattr(few_shot, "END", "")  # so that an answer is one word
    few_shot.main(tmp_path, None, 20, 2, 0, ["arithmetic"])
    tokenizer = AutoTokenizer.from_pretrained(asset_path("tiny_teacher"))
    model = AutoModelForCausalLM.from_pretrained(asset_path("tiny_teacher"))
    test = tmp_path / "arithmetic.test.jsonl"
    rows = [json.loads(line) for line in test.read_text().splitlines()]
    for row, sample in zip(rows[::2], few_shot.questions(tmp_path, "arithmetic", tokenizer)[::2], strict=True):
        ids = torch.tensor([sample.ids[: sample.answers[0].start]])
        said = tokenizer.decode(model.generate(ids, max_new_tokens=1, do_sample=False)[0, -1:])
        assert said.startswith(" ")  # a word, which is written as one token again
        row["choices"][row["answer"]] = said.removeprefix(" ")
    for row in rows[1::2]:
        row["choices"][row["answer"]] = "umbrellas"
    test.write_text("\n".join(map(json.dumps, rows)))
    found = few_shot.answered(model, tokenizer, tmp_path, 1024)
    assert found["arithmetic"] == 0.5
    assert found["arithmetic" + few_shot.NLL] > 0


def bytes_and_blank_lines():
    """A tokenizer of bytes that, like SmolLM2's, has a token for a blank line at the end of a text, and two for one
    within it.
    """
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: number for number, piece in enumerate([*pieces, "ĊĊ"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ċ", "Ċ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("kind", ["tiny_teacher", "bytes"])
def test_a_question_stands_behind_its_examples(kind, tmp_path):
    few_shot.main(tmp_path, None, 3, 2, 0, ["arithmetic"])
    tokenizer = bytes_and_blank_lines() if kind == "bytes" else AutoTokenizer.from_pretrained(asset_path(kind))
    rows = [json.loads(line) for line in (tmp_path / "arithmetic.test.jsonl").read_text().splitlines()]
    for row, sample in zip(rows, few_shot.questions(tmp_path, "arithmetic", tokenizer), strict=True):
        (answer,) = sample.answers
        question, said = sample.ids[: answer.start], sample.ids[answer.start : answer.stop]
        assert tokenizer.decode(question).endswith("\n\n" + row["prompt"])
        assert tokenizer.decode(question).count(" = ") == few_shot.SHOTS
        right = f" {row['choices'][row['answer']]}"
        assert tokenizer.decode(said).rstrip("\n") == right and tokenizer.decode(said) != right
        # the model has seen such tokens in the examples
        example = tokenizer.decode(question) + right + few_shot.BLANK + row["prompt"]
        assert tokenizer(example)["input_ids"][: answer.stop] == question + said


@pytest.mark.slow  # imports another library
def test_lm_eval_reads_the_tasks(tmp_path):
    evaluator = pytest.importorskip("lm_eval.evaluator")
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

    few_shot.main(tmp_path, None, 10, 2, 0, ["arithmetic"])

    class Calculator(LM):
        """Knows every sum, after two examples."""

        def right(self, text: str) -> str:
            *examples, question = text.split("\n\n")
            assert len(examples) == 2 and all(str(eval(e.split(" =")[0])) == e.split("= ")[1] for e in examples)
            return f" {eval(question.removesuffix(' ='))}"

        def loglikelihood(self, requests):
            return [(0.0 if said == self.right(text) else -1.0, True) for text, said in (r.args for r in requests)]

        def generate_until(self, requests):
            return [self.right(request.args[0]) for request in requests]

        def loglikelihood_rolling(self, requests):
            raise NotImplementedError

    tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)
    results = evaluator.simple_evaluate(Calculator(), tasks=[few_shot.GROUP], task_manager=tasks)["results"]
    assert results["arithmetic_choice"]["acc,none"] == results["arithmetic_generated"]["exact_match,none"] == 1.0
