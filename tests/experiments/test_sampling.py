"""Text sampled from the teacher: full blocks, from real prompts, reproducible, past end-of-text tokens."""

import pytest
import torch

from hf_memmix.training.experiments.bundled.sampling import sample_blocks
from tiny_teachers import tiny_teacher

STREAM = torch.randint(3, 64, (200,), generator=torch.Generator().manual_seed(0))


def test_blocks_are_full_seeded_and_start_in_the_stream():
    teacher = tiny_teacher()
    state = torch.get_rng_state()
    blocks = sample_blocks(teacher, STREAM, 6, 24, prompt_tokens=4, batch_size=4)
    assert blocks.shape == (6, 24) and torch.equal(torch.get_rng_state(), state)
    windows = {tuple(window.tolist()) for window in STREAM.unfold(0, 4, 1)}
    assert all(tuple(block[:4].tolist()) in windows for block in blocks)
    assert torch.equal(blocks, sample_blocks(teacher, STREAM, 6, 24, prompt_tokens=4, batch_size=4))
    assert not torch.equal(blocks, sample_blocks(teacher, STREAM, 6, 24, prompt_tokens=4, batch_size=4, seed=1))


def test_end_of_text_does_not_end_a_block():
    teacher = tiny_teacher()
    teacher.generation_config.eos_token_id = list(range(64))
    assert sample_blocks(teacher, STREAM, 2, 16).shape == (2, 16)
    assert teacher.generation_config.eos_token_id == list(range(64))


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="prompt_tokens is 16; it must be 1 to 15"):
        sample_blocks(tiny_teacher(), STREAM, 1, 16, prompt_tokens=16)
    with pytest.raises(ValueError, match="fewer than one prompt"):
        sample_blocks(tiny_teacher(), STREAM[:3], 1, 16)


def test_text_is_drawn_at_the_teachers_own_temperature():
    """A teacher that likes two tokens 3 : 1 at every place gives them at 3 : 1: no temperature, no top-k, no top-p."""
    teacher = tiny_teacher(layers=1)
    with torch.no_grad():
        teacher.lm_head.weight.zero_()
    teacher.lm_head.bias = torch.nn.Parameter(torch.full((64,), -30.0))
    teacher.lm_head.bias.data[5], teacher.lm_head.bias.data[9] = torch.tensor(3.0).log(), 0.0
    teacher.generation_config.temperature, teacher.generation_config.top_k = 0.3, 1
    drawn = sample_blocks(teacher, STREAM, 500, 88, prompt_tokens=8)[:, 8:]
    assert set(drawn.unique().tolist()) == {5, 9}
    # 40,000 draws have a standard deviation of 0.0022; a temperature of 0.9 or 1.1 moves the mean by 0.02
    assert (drawn == 5).float().mean().item() == pytest.approx(0.75, abs=0.009)
