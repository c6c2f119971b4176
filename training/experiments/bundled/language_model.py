"""Training a small language model from scratch: its losses, and which parameters decay."""

import torch
import torch.nn.functional as F
from torch import Tensor


def next_token_loss(model, ids: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy of ids [B, T] against the prediction from their prefixes; B * (T - 1) terms, fp32."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction=reduction)


@torch.no_grad()
def mean_loss(model, ids: Tensor, length: int, batch_size: int = 16) -> float:
    """Mean loss per predicted token of a stream `ids` [N] cut into windows of `length`, the last one shorter."""
    model.eval()
    device = next(model.parameters()).device
    windows = [w for w in ids.split(length) if len(w) > 1]
    full = [w for w in windows if len(w) == length]
    batches = [torch.stack(full[i : i + batch_size]) for i in range(0, len(full), batch_size)]
    batches += [w[None] for w in windows if len(w) < length]
    total = sum(next_token_loss(model, batch.to(device), "sum").item() for batch in batches)
    return total / sum(len(w) - 1 for w in windows)


def decay_matrices(parameters, weight_decay: float) -> list[dict]:
    """Optimizer groups: weight decay on matrices, none on vectors (norms, biases)."""
    parameters = list(parameters)
    matrices = [p for p in parameters if p.ndim >= 2]
    vectors = [p for p in parameters if p.ndim < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
