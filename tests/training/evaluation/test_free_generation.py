"""Scores of generation: where texts diverge, and answers that a model generates itself."""

import pytest
import torch

from hf_memmix.conversion import convert_model
from hf_memmix.training.evaluation.free_generation import divergence_of, generated_answers, greedy_tokens
from hf_memmix.training.evaluation.probes.material import Answer, Sample
from tiny_teachers import tiny_teacher


def test_texts_agree_until_their_first_different_token():
    theirs = torch.arange(12).view(3, 4)
    ours = theirs.clone()
    ours[1, 2:], ours[2, 0] = 0, 99  # what follows a different token does not count
    assert divergence_of(ours, theirs) == {
        "prompts": 3,
        "new_tokens": 4,
        "same": pytest.approx(1 / 3),
        "first_divergence": pytest.approx((4 + 2 + 0) / 3),
        "median": 2.0,
    }


@pytest.mark.parametrize("kept", [[0], [0, 1]])
def test_a_model_generates_its_likeliest_tokens_whatever_its_settings_say(kept):
    """In batches, with the state of a student's memory; an end of text does not end it."""
    teacher = tiny_teacher(layers=2)
    model = teacher if len(kept) == 2 else convert_model(teacher, "gka", keep=kept)
    prompts = torch.randint(3, 60, (3, 9), generator=torch.Generator().manual_seed(0))
    ids = prompts
    for _ in range(5):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    model.generation_config.update(do_sample=True, temperature=7.0, eos_token_id=ids[0, 10].item())
    assert torch.equal(greedy_tokens(model, prompts, 5, batch_size=2), ids[:, 9:])
    samples = [Sample(row.tolist(), [], [Answer(9, 14)]) for row in ids]
    samples.append(Sample([*ids[0, :8].tolist(), (ids[0, 8].item() + 1) % 60], [], [Answer(8, 9)]))
    right = greedy_tokens(model, ids[:1, :8], 1)[0, 0] == (ids[0, 8] + 1) % 60
    assert generated_answers(model, samples) == (3 + right) / 4
