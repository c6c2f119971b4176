"""The two losses of the conversion: per-layer relative error for `align`, forward KL of the logits for `distill`.

    relative_mse = ||s - t||^2 / ||t||^2            forward_kl = sum_v p_t(v) (log p_t(v) - log p_s(v)), T = 1

RADLADS (arXiv:2505.03005) is the source of the two stages; the ratio makes layers of any magnitude weigh the same.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def relative_mse(student: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
    """Squared error of `student` over the squared size of `target`, both [B, T, d], as an fp32 scalar.

    `mask` [B, T] selects the tokens that count. The target is a constant; a target of zeros gives a finite value.
    """
    error = (student.float() - target.detach().float()).square().sum(-1)
    size = target.detach().float().square().sum(-1)
    if mask is not None:
        error, size = error * mask, size * mask
    return error.sum() / size.sum().clamp_min(1e-12)


def forward_kl(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """KL(teacher || student) of every token, [..., V] -> [...], in fp32 (fp64 for fp64 logits)."""
    dtype = torch.promote_types(student_logits.dtype, torch.float32)
    log_s = student_logits.to(dtype).log_softmax(-1)
    log_t = teacher_logits.detach().to(dtype).log_softmax(-1)
    return (log_t.exp() * (log_t - log_s)).sum(-1)


def chunked_forward_kl(
    student_hidden: Tensor,
    teacher_hidden: Tensor,
    student_head: Callable[[Tensor], Tensor],
    teacher_head: Callable[[Tensor], Tensor],
    mask: Tensor | None = None,
    chunk_tokens: int = 2048,
) -> Tensor:
    """Mean forward KL per token from the last hidden states [B, T, d] and the heads d -> V, as a scalar.

    Logits exist for `chunk_tokens` tokens at a time: forward frees them and backward computes them again, so memory is
    `chunk_tokens * V` instead of `B * T * V`, and the gradients are exactly those of the dense loss.
    """
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}; it must be at least 1")
    student_hidden = student_hidden.flatten(0, -2)
    teacher_hidden = teacher_hidden.detach().flatten(0, -2)
    weight = None if mask is None else mask.flatten().to(torch.float32)

    def total(student_chunk: Tensor, teacher_chunk: Tensor, weight_chunk: Tensor | None) -> Tensor:
        with torch.no_grad():
            teacher_logits = teacher_head(teacher_chunk)
        kl = forward_kl(student_head(student_chunk), teacher_logits)
        return kl.sum() if weight_chunk is None else (kl * weight_chunk).sum()

    loss = 0.0
    for start in range(0, student_hidden.shape[0], chunk_tokens):
        part = slice(start, start + chunk_tokens)
        weights = None if weight is None else weight[part]
        loss = loss + checkpoint(total, student_hidden[part], teacher_hidden[part], weights, use_reentrant=False)
    count = student_hidden.shape[0] if weight is None else weight.sum().clamp_min(1.0)
    return loss / count
