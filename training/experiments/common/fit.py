"""Models of equal size over one small Llama, and the loop that trains all of them alike.

AdamW(0.9, 0.95), weight decay 0.1 on matrices, clip 1, linear warm-up, cosine to a tenth; bf16 autocast on a GPU.
"""

import contextlib
import functools
import math
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, TrainerCallback

from hf_memmix import memmix_config
from hf_memmix.mixers import ATTENTION
from hf_memmix.swap import memory_mixers
from hf_memmix.training.bundled.language_model import decay_matrices, mean_loss, next_token_loss
from hf_memmix.training.experiments.common import baselines  # noqa: F401, registers "linear"
from hf_memmix.training.experiments.common.graphs import Graphed
from hf_memmix.training.experiments.common.harness import check_time, device
from hf_memmix.training.experiments.common.text import VOCAB, Windows, measured_tokens, train_tokens

# name: mixer of all layers and its options
MODELS = {
    "transformer": (ATTENTION, {}),
    "linear": ("linear", {}),
    "linear-decay": ("linear", {"decay": True}),
    "delta": ("lattice", {"variant": "delta"}),
    "ttt": ("lattice", {"variant": "ttt"}),
    "gka": ("gka", {}),
    "dec": ("lattice", {"variant": "dec"}),
    "enc": ("lattice", {"variant": "enc"}),
    "sim": ("lattice", {"variant": "sim"}),
    "dec-small": ("lattice", {"variant": "dec", "gamma_max": 0.25}),
    "enc-small": ("lattice", {"variant": "enc", "gamma_max": 0.25}),
    "sim-small": ("lattice", {"variant": "sim", "gamma_max": 0.25}),
    "coffee": ("coffee", {}),
    "coffee-filter": ("coffee", {"use_output_filter": True}),
    "mamba2": ("mamba2", {}),
}


def parameters(config) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())


def build(args: SimpleNamespace, mixer: str, options: dict, *, vocab: int, context: int, seed: int):
    """A model with `mixer` in all layers. Its MLP is sized so that it has as many parameters as the transformer."""

    def config(kind, options, intermediate):
        backbone = LlamaConfig(
            vocab_size=vocab,
            hidden_size=args.hidden_size,
            intermediate_size=intermediate,
            num_hidden_layers=args.layers,
            num_attention_heads=args.heads,
            num_key_value_heads=args.heads,
            max_position_embeddings=context,
            tie_word_embeddings=True,
        )
        mixers = None if kind == ATTENTION else {kind: options}
        return memmix_config(backbone, mixer_types=[kind] * args.layers, mixers=mixers)

    width = args.hidden_size * 5 // 2
    surplus = parameters(config(mixer, options, width)) - parameters(config(ATTENTION, {}, width))
    narrower = round(surplus / (3 * args.hidden_size * args.layers))
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config(mixer, options, width - narrower)).to(device())


class Deadline(TrainerCallback):
    """Ends the training of a row at the command's deadline."""

    def __init__(self, args):
        self.args = args

    def on_step_end(self, *args, **kwargs):
        check_time(self.args)


def autocast():
    return torch.autocast("cuda", torch.bfloat16) if device().type == "cuda" else contextlib.nullcontext()


def fit(
    model,
    loss_of: Callable[..., Tensor],
    steps: int,
    lr: float,
    args: SimpleNamespace,
    batch_of: Callable[[int], tuple[Tensor, ...]],
    enough: float = 0.0,
    hold: float = 0.0,
) -> dict:
    """Train on `loss_of(*batch_of(step))`; the losses on the way, and whether they stayed finite.

    On a GPU a step is one CUDA graph: models so small would wait for their kernels' launches.

    Args:
        batch_of: gives tensors of the same shapes at every step.
        enough: a loss, looked at 20 times, below which training ends before `steps`.
        hold: the share of the steps at the full rate, before the cosine.

    Raises:
        OutOfTime: the command's deadline came first.
    """
    model.train()
    groups = decay_matrices(model, 0.1)
    on_gpu = device().type == "cuda"
    rate = torch.tensor(lr, device=device()) if on_gpu else lr  # a graph reads it from memory
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=on_gpu, capturable=on_gpu)
    warmup = max(1, steps // 20)

    def share_of_rate(step: int) -> float:
        falling = max(0.0, step / steps - hold) / (1 - hold)
        return min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * falling))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_rate)

    def update(*batch) -> Tensor:
        optimizer.zero_grad()
        with autocast():
            loss = loss_of(*batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    update = Graphed(update) if on_gpu else update
    every, curve, began, finite = max(1, steps // 20), [], time.time(), True
    for step in range(steps):
        loss = update(*batch_of(step))
        schedule.step()
        if (step + 1) % every == 0 or step + 1 == steps:
            check_time(args)
            curve.append([step + 1, round(loss.item(), 4)])
            finite = math.isfinite(curve[-1][1])
            if not finite or curve[-1][1] < enough:
                break
    took = time.time() - began
    optimizer.zero_grad()
    return {"curve": curve, "steps": step + 1, "finite": finite, "ms_per_step": round(1000 * took / (step + 1), 2)}


def learn_text(row: dict, args: SimpleNamespace, mixer: str, options: dict) -> dict:
    """A language model of `row["context"]` on the training text: losses on dev and held-out text, perplexity."""
    context, seed = row["context"], row["seed"]
    model = build(args, mixer, options, vocab=VOCAB, context=context, seed=seed)
    batch = max(1, args.batch_tokens // context)
    windows = Windows(train_tokens(args.text).to(device()), context, batch, seed)
    steps = max(1, args.tokens // (batch * context))
    loss_of = functools.partial(next_token_loss, model)
    result = fit(model, loss_of, steps, row["lr"], args, lambda step: (windows(step),))
    result |= {"parameters": model.num_parameters(), "trained_tokens": steps * batch * context}
    if not result["finite"]:
        return result
    with autocast():
        for name in ("dev", "heldout"):
            result[f"{name}_loss"] = mean_loss(model, measured_tokens(name), context, batch)
        result |= gates(model, windows(0)[:1])
    return result | {"perplexity": math.exp(result["heldout_loss"])}


@torch.no_grad()
def gates(model, ids: Tensor) -> dict[str, list]:
    """The 5, 50 and 95 % quantiles of each gate of a trained model on one window, for every layer."""
    found, mixers = {}, memory_mixers(model).values()

    def noting(project):
        def wrapped(x, rotary):
            tokens = project(x, rotary)
            for name in tokens.keys() & {"gamma", "log_decay"}:
                points = torch.tensor([0.05, 0.5, 0.95], device=x.device)
                spread = tokens[name].float().flatten().quantile(points)
                found.setdefault(name, []).append([round(value, 4) for value in spread.tolist()])
            return tokens

        return wrapped

    for mixer in mixers:
        mixer.project = noting(mixer.project)
    try:
        model(input_ids=ids, use_cache=False)
    finally:
        for mixer in mixers:
            del mixer.project
    return found


def answer(model, ids: Tensor, positions: Tensor) -> Tensor:
    """Logits [B, n, V] at the queries alone."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    index = positions[..., None].expand(-1, -1, hidden.shape[-1])
    return model.lm_head(hidden.gather(1, index)).float()


def recall_loss(model, ids: Tensor, positions: Tensor, values: Tensor) -> Tensor:
    return F.cross_entropy(answer(model, ids, positions).flatten(0, 1), values.flatten())
