"""Scores of generation: where texts diverge, and answers that a model generates itself."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer, GenerationConfig

from hf_memmix.assets import asset_path
from hf_memmix.conversion import convert_model
from hf_memmix.training.evaluation import free_generation
from hf_memmix.training.evaluation.free_generation import (
    compare_texts,
    divergence_of,
    generated_answers,
    greedy_tokens,
    text_of,
)
from hf_memmix.training.evaluation.probes import Material, run_probes
from hf_memmix.training.evaluation.probes.counted import wilson
from hf_memmix.training.evaluation.probes.material import Answer, Sample
from tiny_teachers import CHAT, tiny_teacher, tiny_text, tiny_tokenizer


def test_texts_agree_until_their_first_different_token():
    theirs = torch.arange(12).view(3, 4)
    ours = theirs.clone()
    ours[1, 2:], ours[2, 0] = 0, 99  # what follows a different token does not count
    found = divergence_of(ours, theirs)
    assert found == {
        "prompts": 3,
        "new_tokens": 4,
        "same": pytest.approx(1 / 3),
        "same_interval": pytest.approx(wilson(1 / 3, 3)),
        "first_divergence": pytest.approx((4 + 2 + 0) / 3),
        "error": pytest.approx((4 / 3) ** 0.5),
        "median": 2.0,
    }
    assert "± 2 of 4" in text_of(found)
    assert divergence_of(ours[:1], theirs[:1])["error"] is None
    # what follows the end of the teacher's text does not count, but the end itself does
    ended = divergence_of(ours[1:], theirs[1:], ends={5, 8})
    assert ended["same"] == 0.5 and ended["first_divergence"] == (4 + 0) / 2


@pytest.mark.parametrize("kept", [[0], [0, 1]])
def test_a_model_generates_its_likeliest_tokens_whatever_its_settings_say(kept):
    """In batches, with the state of a student's memory; an end of text does not end it."""
    teacher = tiny_teacher(layers=2)
    model = teacher if len(kept) == 2 else convert_model(teacher, "gka", keep=kept)
    prompts = torch.randint(3, 60, (3, 9), generator=torch.Generator().manual_seed(0))
    ids = prompts
    for _ in range(5):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    first, last = ids[0, 9].item(), ids[0, -1].item()
    settings = [
        {"do_sample": True, "temperature": 7.0, "eos_token_id": ids[0, 10].item()},
        {"repetition_penalty": 9.0, "no_repeat_ngram_size": 1, "min_length": 20, "eos_token_id": last},
        {"suppress_tokens": [first], "bad_words_ids": [[last]], "forced_eos_token_id": 4, "max_length": 10},
        {"begin_suppress_tokens": [first], "forced_bos_token_id": 4, "exponential_decay_length_penalty": (0, 9.0)},
        {"sequence_bias": [[[first], -99.0]], "num_beams": 3, "length_penalty": 5.0, "eos_token_id": last},
    ]
    for given in settings:
        model.generation_config = GenerationConfig(**given)
        assert torch.equal(greedy_tokens(model, prompts, 5, batch_size=2), ids[:, 9:]), given
        assert all(getattr(model.generation_config, name) == value for name, value in given.items())
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["lm_head"], task_type="CAUSAL_LM"))
    assert torch.equal(greedy_tokens(adapted, prompts, 5), ids[:, 9:])
    model = adapted.unload()
    assert all(getattr(model.generation_config, name) == value for name, value in given.items())
    samples = [Sample(row.tolist(), [], [Answer(9, 14, asked=9)]) for row in ids]
    wrong = [*ids[0, :8].tolist(), (ids[0, 8].item() + 1) % 60]
    samples += [Sample(wrong, [], [Answer(8, 9, asked=8)]), Sample(wrong, [], [Answer(8, 9)])]
    right = greedy_tokens(model, ids[:1, :8], 1)[0, 0] == wrong[-1]
    assert generated_answers(model, samples) == [True, True, True, bool(right), None]


def test_the_time_of_all_texts_is_that_of_prompts_and_of_tokens(monkeypatch):
    """Not that of one more prompt for every few tokens."""
    now, told = [0.0], []

    def generated(model, prompts, new_tokens, batch_size):
        now[0] += prompts.shape[1] + 2 * new_tokens
        return torch.zeros(len(prompts), new_tokens, dtype=torch.long)

    monkeypatch.setattr(free_generation, "greedy_tokens", generated)
    monkeypatch.setattr(free_generation.time, "perf_counter", lambda: now[0])
    material, models = Material(tiny_tokenizer(), tiny_text()), {"teacher": tiny_teacher(layers=1)}
    for new_tokens in (1, 4, 64):
        began = len(told)
        sizes = {"prompts": 6, "prompt_tokens": 40, "new_tokens": new_tokens, "batch_size": 2}
        compare_texts(models, material, **sizes, estimate=lambda seconds: told.append((seconds, now[0])))
        assert told[began][0] == pytest.approx(now[0] - told[began][1])


def test_a_generated_answer_to_a_question_holds_the_expected_word():
    """Whatever the words around it are."""
    tokenizer, model = tiny_tokenizer(), tiny_teacher(layers=1)
    prompt = [5, 6, 7]
    said = greedy_tokens(model, torch.tensor([prompt]), 19)[0].tolist()  # two tokens before the answer, and the rest
    first, end = list(dict.fromkeys(token for token in said if 3 < token < len(tokenizer)))[:2]  # those that are words
    other = next(token for token in range(4, len(tokenizer)) if token not in said)
    asked = [Sample([*prompt, 8, 9, token], [], [Answer(5, 6, asked=3)]) for token in (first, end, other)]
    assert generated_answers(model, asked, tokenizer) == [True, True, False]
    model.generation_config.eos_token_id = end  # what follows the end of an answer does not count
    assert generated_answers(model, asked, tokenizer) == [True, False, False]


def test_a_generated_answer_ends_where_the_model_has_no_more_positions():
    model, tokenizer, prompt = tiny_teacher("gpt2", layers=1, n_positions=8), tiny_tokenizer(), [10, 11, 12]
    said = greedy_tokens(model, torch.tensor([prompt]), 5)[0].tolist()
    word = next(token for token in said if 3 < token < len(tokenizer))
    sample = Sample([*prompt, *said[:4], word], [], [Answer(7, 8, asked=3)])
    assert generated_answers(model, [sample], tokenizer) == [True]


def test_texts_and_answers_of_a_student_beside_its_teacher():
    teacher = tiny_teacher(layers=2, vocab_size=4096)
    student = convert_model(teacher, "gka", keep=[0])
    tokenizer, text = AutoTokenizer.from_pretrained(asset_path("tiny_teacher")), asset_path("heldout.txt").read_text()
    tokenizer.chat_template = CHAT
    models, seconds, seen = {"teacher": teacher, "student": lambda: student, "same": teacher}, [], []
    material = Material(tokenizer, text, chat=True)
    sizes = {"prompts": 3, "prompt_tokens": 64, "new_tokens": 6, "batch_size": 2}
    found = compare_texts(models, material, **sizes, estimate=seconds.append, progress=lambda *at: seen.append(at))
    assert list(found) == ["student", "same", "settings"] and found["same"]["same"] == 1
    assert found["student"]["first_divergence"] < 6 == found["same"]["first_divergence"]
    assert len(seconds) == 1 and seconds[0] > 0 and seen[-1] == (9, 9)
    with pytest.raises(ValueError, match="longer prompt"):
        compare_texts(models, material, prompt_tokens=4)
    arguments = {"lengths": (160,), "depths": (0.5,), "samples": 2, "generate": True}
    results = run_probes(models, material, tasks=("question",), **arguments)
    assert results["settings"]["chat"] and 0 <= results["cells"][0]["student"]["generated"] <= 1
    plain = run_probes(models, Material(tokenizer, text), tasks=("fact", "mqar"), **arguments)
    for row in plain["summary"]:  # here an exact answer is one that the model generates
        assert row["teacher"]["generated"] == (row["teacher"]["exact"] if row["task"] == "fact" else None)
