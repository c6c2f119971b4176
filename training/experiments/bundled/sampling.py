"""Training text that is sampled from the teacher, and so from the distribution that `distill` has to match."""

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from hf_memmix.errors import UserError


@torch.no_grad()
def sample_blocks(
    teacher: nn.Module,
    stream: Tensor,
    count: int,
    block_size: int,
    *,
    prompt_tokens: int = 8,
    batch_size: int = 1024,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """`count` blocks [count, block_size] sampled at temperature 1, on the CPU.

    Each starts with `prompt_tokens` tokens from a random place of `stream` [N], so that blocks begin in the middle of
    a sentence, as blocks of real text do. A block continues after an end-of-text token.
    """
    if not 0 < prompt_tokens < block_size:
        raise UserError(f"prompt_tokens is {prompt_tokens}; it must be 1 to {block_size - 1}")
    if len(stream) < prompt_tokens:
        raise UserError(f"the stream has {len(stream)} tokens, fewer than one prompt of {prompt_tokens}")
    device = teacher.get_input_embeddings().weight.device
    starts = torch.randint(len(stream) - prompt_tokens + 1, (count,), generator=torch.Generator().manual_seed(seed))
    prompts = stream[starts[:, None] + torch.arange(prompt_tokens)]
    blocks = []
    end, teacher.generation_config.eos_token_id = teacher.generation_config.eos_token_id, None
    with (
        contextlib.ExitStack() as stack,
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
    ):
        stack.callback(setattr, teacher.generation_config, "eos_token_id", end)
        torch.manual_seed(seed)
        for prompt in prompts.split(batch_size):
            tokens = teacher.generate(
                prompt.to(device),
                attention_mask=torch.ones_like(prompt, device=device),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=block_size - prompt_tokens,
                pad_token_id=0,  # unused: no row ends early
            )
            blocks.append(tokens.cpu())
            if progress is not None:
                progress(sum(map(len, blocks)), count)
    return torch.cat(blocks)
