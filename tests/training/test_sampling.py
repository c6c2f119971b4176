"""Text sampled from the teacher: full blocks, from real prompts, reproducible, past end-of-text tokens."""

import pytest
import torch

from hf_memmix.training.sampling import sample_blocks
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
