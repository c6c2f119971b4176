"""Training a small language model from scratch: its losses, which parameters decay, and attention without masks."""

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from hf_memmix._transformers import attention_implementation

WHOLE_ROWS = "causal_whole_rows"
DRILL_TEXT = 0.25  # weight of those tokens of a drill that are no answers


def next_token_loss(model, ids: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy of ids [B, T] against the prediction from their prefixes; B * (T - 1) terms, fp32."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction=reduction)


def losses_of_drills(logits: Tensor, ids: Tensor, weights: Tensor, text: int) -> tuple[Tensor, Tensor]:
    """The mean losses of text and of answers, in nats.

    logits [B, T - 1, V] of the tokens after the first one, ids [B, T], weights of answers [B, T]. The first `text`
    rows are real text; tokens of the other rows that are no answers have the weight `DRILL_TEXT` in the first loss.
    """
    loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)
    answers = weights[:, 1:]
    plain = (answers == 0).float()
    plain = torch.cat([plain[:text], DRILL_TEXT * plain[text:]])
    return (loss * plain).sum() / plain.sum(), (loss * answers).sum() / answers.sum().clamp_min(1)


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


def matrices_of_layers(model) -> tuple[list, list]:
    """The matrices of the layers, which Muon trains, and the other parameters: embeddings and vectors."""
    named = [
        (parameter.ndim == 2 and "embed_tokens" not in name, parameter) for name, parameter in model.named_parameters()
    ]
    return [p for inner, p in named if inner], [p for inner, p in named if not inner]


@contextlib.contextmanager
def without_masks(*models):
    """Causal attention of whole rows, for models that see no padding.

    Otherwise transformers looks for packed rows, and the host waits for the device; in a CUDA graph it makes a mask.
    """
    AttentionInterface.register(WHOLE_ROWS, AttentionInterface()["sdpa"])  # a name without a function that makes masks
    before = [attention_implementation(model.config) for model in models]
    try:
        for model in models:
            model.set_attn_implementation(WHOLE_ROWS)
        yield
    finally:
        for model, name in zip(models, before, strict=True):
            model.set_attn_implementation(name)
