"""The two training losses: relative error per layer for `align`, forward KL divergence of the logits for `distill`.

    relative error = ||s - t||^2 / ||t||^2          forward_kl = sum_v p_t(v) (log p_t(v) - log p_s(v)), T = 1

The two stages are those of RADLADS (arXiv:2505.03005). The division by ||t||^2 gives all layers the same weight,
whatever the size of their outputs. If only the teacher's k largest probabilities are stored, the distributions are
compared over k + 1 classes: these tokens, and all others together.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_memmix.errors import UserError
from hf_memmix.training.chunk_sums import sum_over_chunks
from hf_memmix_kernels.rowwise import forward_kl_


class Squares(nn.Module):
    """Numerator and denominator of the relative error of tensors [B, T, d], in fp32; a module, so it can be compiled.

    `mask` [B, T] is 1 at the tokens that are used, or a weight. No gradient flows to the target.
    """

    def forward(self, student: Tensor, target: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        error = (student.float() - target.detach().float()).square().sum(-1)
        size = target.detach().float().square().sum(-1)
        if mask is not None:
            error, size = error * mask, size * mask
        return error.sum(), size.sum()


def mean_over_processes(tensor: Tensor) -> Tensor:
    """The mean over the processes of a distributed run, without gradient; in other runs the tensor itself."""
    if not (dist.is_available() and dist.is_initialized()):
        return tensor
    total = tensor.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


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

    `mask` [B, T] is 1 at the tokens that count. All processes divide by the same mean of their numbers, so the mean of
    their losses is that over all of these tokens.
    Only the logits of `chunk_tokens` tokens are in memory at a time, see `chunk_sums.sum_over_chunks`: those of both
    models, and what the divergence needs (nothing on a GPU: `hf_memmix_kernels.rowwise.forward_kl_`). The gradients
    are those of the loss without chunks.
    """
    student_hidden = student_hidden.flatten(0, -2)
    teacher_hidden = teacher_hidden.detach().flatten(0, -2)
    weight = None if mask is None else mask.flatten().to(torch.float32)

    def divergence(logits: Tensor, teacher_chunk: Tensor, weight_chunk: Tensor | None) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            teacher_logits = teacher_head(teacher_chunk)
        kl = forward_kl_(logits, teacher_logits, weight_chunk)
        return (kl if weight_chunk is None else kl * weight_chunk).sum(), logits

    loss = sum_over_chunks(divergence, student_head, chunk_tokens, student_hidden, teacher_hidden, weight)
    return loss / _count(student_hidden, weight)


def top_k_of(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities [..., k] of the k likeliest tokens, their ids [..., k], and the log-probability [...] of all
    other tokens together.

    Probabilities are fp32. For k = V the last one is minus infinity. Raises ValueError if k is not in 1 to V.
    """
    if not 1 <= k <= logits.shape[-1]:
        raise UserError(f"k is {k}; it must be 1 to the vocabulary's {logits.shape[-1]}")
    log_p = logits.float().log_softmax(-1)
    top, ids = log_p.topk(k, dim=-1)
    return top, ids, _log_rest(log_p, ids)


def top_k_kl(student_logits: Tensor, log_probs: Tensor, ids: Tensor, log_rest: Tensor) -> Tensor:
    """KL(teacher || student) of every token over the teacher's top k [..., k] and the rest [...], fp32: [...].

    It is at most `forward_kl`, because the other tokens are one class, and equal to it for k = V.
    """
    log_s = student_logits.to(torch.promote_types(student_logits.dtype, torch.float32)).log_softmax(-1)
    ids, log_probs, log_rest = ids.long(), log_probs.to(log_s.dtype), log_rest.to(log_s.dtype)
    kl = (log_probs.exp() * (log_probs - log_s.gather(-1, ids))).sum(-1)
    if ids.shape[-1] == student_logits.shape[-1]:
        return kl
    rest = log_rest.exp()
    # 0 log 0 = 0, also in the gradient
    log_ratio = torch.where(rest > 0, log_rest, 0.0) - _log_rest(log_s, ids)
    return kl + rest * log_ratio


def chunked_top_k_kl(
    student_hidden: Tensor,
    student_head: Callable[[Tensor], Tensor],
    teacher_log_probs: Tensor,
    teacher_ids: Tensor,
    teacher_log_rest: Tensor,
    mask: Tensor | None = None,
    chunk_tokens: int = 2048,
) -> Tensor:
    """Mean `top_k_kl` per token of hidden states [B, T, d], without full logits, see `chunked_forward_kl`.

    `teacher_log_probs` and `teacher_ids` [B, T, k] and `teacher_log_rest` [B, T] are what `top_k_of` gives.
    """

    weight = None if mask is None else mask.flatten().to(torch.float32)

    def divergence(logits: Tensor, weight_chunk: Tensor | None, *targets: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            kl = top_k_kl(logits.requires_grad_(), *targets)
            total = (kl if weight_chunk is None else kl * weight_chunk).sum()
        return total.detach(), torch.autograd.grad(total, logits)[0]

    hidden, log_probs, ids = (x.flatten(0, -2) for x in (student_hidden, teacher_log_probs, teacher_ids))
    targets = log_probs, ids, teacher_log_rest.flatten()
    loss = sum_over_chunks(divergence, student_head, chunk_tokens, hidden, weight, *targets)
    return loss / _count(hidden, weight)


def _count(hidden: Tensor, weight: Tensor | None) -> Tensor | int:
    """The number of tokens that count, of hidden states [N, d]; a mean over the processes if some do not count."""
    return hidden.shape[0] if weight is None else mean_over_processes(weight.sum()).clamp_min(1e-12)


def _log_rest(log_p: Tensor, ids: Tensor) -> Tensor:
    """The log of the probability of all tokens but `ids` [..., k], from log-probabilities [..., V]."""
    return log_p.scatter(-1, ids, float("-inf")).logsumexp(-1)
