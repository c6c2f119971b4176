"""The sum of a loss over the logits of all tokens, a chunk of tokens at a time: full logits are never in memory.

    loss = sum over chunks of f(head(hidden[chunk]))

The loss is a scalar, so its gradients are known up to a factor in the forward pass already: each chunk computes its
logits, f, df / dlogits, and from these the gradients of its hidden states and of the head's parameters, which are
summed in their own dtype. The backward pass multiplies them by the upstream gradient. Nothing is computed twice.

This needs the parameters of the head where the forward pass runs. They are unknown for a plain function, and ZeRO-3
holds them only while the head runs; then each chunk is checkpointed: its logits are computed again in the backward
pass.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from hf_memmix.conversion.logits import LogitsHead
from hf_memmix.errors import UserError

# value and gradient of a chunk's loss, from logits [n, V] without autograd, whose memory it may use, and other tensors
Loss = Callable[..., tuple[Tensor, Tensor]]


def sum_over_chunks(
    loss: Loss, head: Callable[[Tensor], Tensor], chunk_tokens: int, hidden: Tensor, *others: Tensor | None
) -> Tensor:
    """The sum of `loss(head(chunk), *chunks of others)[0]` over chunks of `chunk_tokens` rows, a scalar.

    Args:
        hidden: [N, d]. It and the head's parameters get gradients.
        others: tensors [N, ...] without gradients, or None.

    Raises:
        ValueError: `chunk_tokens` is below 1.
    """
    if chunk_tokens < 1:
        raise UserError(f"chunk_tokens is {chunk_tokens}; it must be at least 1")
    if (parameters := _trained_parameters(head)) is None:
        return _checkpointed(loss, head, chunk_tokens, hidden, others)
    if not torch.is_grad_enabled():
        hidden, parameters = hidden.detach(), []
    return _GradientsAtOnce.apply(loss, head, chunk_tokens, others, hidden, *parameters)


def _trained_parameters(head) -> list[Tensor] | None:
    """The parameters of a head that are trained; None if they are not all known and at hand."""
    if not isinstance(head, (LogitsHead, nn.Module)):
        return None
    parameters = list(head.parameters())
    if any(hasattr(p, "ds_id") or hasattr(p, "full_tensor") for p in parameters):
        return None
    return [p for p in parameters if p.requires_grad]


def _chunks(chunk_tokens: int, hidden: Tensor, others: tuple):
    """A slice, and these rows of the tensors, for each chunk."""
    for start in range(0, hidden.shape[0], chunk_tokens):
        rows = slice(start, start + chunk_tokens)
        yield rows, hidden[rows], [None if tensor is None else tensor[rows] for tensor in others]


class _GradientsAtOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss: Loss, head, chunk_tokens: int, others: tuple, hidden: Tensor, *parameters: Tensor):
        sums: list[Tensor | None] = [None] * len(parameters)
        d_hidden = torch.empty_like(hidden) if hidden.requires_grad else None
        total = []
        for rows, chunk, rest in _chunks(chunk_tokens, hidden.detach(), others):
            with torch.enable_grad():
                leaf = chunk.requires_grad_(hidden.requires_grad)
                logits = head(leaf)
            value, d_logits = loss(logits.detach(), *rest)
            total.append(value)
            if not (inputs := [*([leaf] if hidden.requires_grad else []), *parameters]):
                continue
            found = list(torch.autograd.grad(logits, inputs, d_logits))
            if hidden.requires_grad:
                d_hidden[rows] = found.pop(0)
            sums = [new if old is None else old.add_(new) for old, new in zip(sums, found, strict=True)]
            del logits, d_logits, found  # not beside the logits of the next chunk
        ctx.gradients = [d_hidden, *sums]
        return torch.stack(total).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor):
        if ctx.gradients is None:
            raise RuntimeError("the gradients of this loss were taken already; compute the loss again")
        gradients, ctx.gradients = ctx.gradients, None  # the factor goes into their memory
        return None, None, None, None, *(None if g is None else g.mul_(upstream) for g in gradients)


class _WithGradient(torch.autograd.Function):
    """A loss that gives its own gradient, for autograd."""

    @staticmethod
    def forward(ctx, logits: Tensor, loss: Loss, *others: Tensor | None):
        value, gradient = loss(logits.detach(), *others)
        ctx.save_for_backward(gradient)
        ctx.count = len(others)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor):
        return ctx.saved_tensors[0] * upstream, *([None] * (1 + ctx.count))


def _checkpointed(loss: Loss, head, chunk_tokens: int, hidden: Tensor, others: tuple) -> Tensor:
    def value(chunk: Tensor, *rest: Tensor | None) -> Tensor:
        return _WithGradient.apply(head(chunk), loss, *rest)

    parts = [
        checkpoint(value, chunk, *rest, use_reentrant=False)
        for _, chunk, rest in _chunks(chunk_tokens, hidden, others)
    ]
    return torch.stack(parts).sum()
