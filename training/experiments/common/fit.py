"""Small Llama models of equal size with different mixers, and the loop that trains all of them in the same way.

The loop uses AdamW with betas (0.9, 0.95), weight decay 0.1 on matrices, gradients clipped to norm 1, a linear warm-up
and a cosine decay of the learning rate to a tenth. On a GPU it runs under bf16 autocast.
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
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_memmix import memmix_config
from hf_memmix.mixers import ATTENTION
from hf_memmix.swap import memory_mixers
from hf_memmix.training.experiments.bundled.language_model import decay_matrices, mean_loss, next_token_loss
from hf_memmix.training.experiments.common import baselines  # noqa: F401, registers "linear"
from hf_memmix.training.experiments.common.graphs import GraphedFunction
from hf_memmix.training.experiments.common.harness import check_time, device
from hf_memmix.training.experiments.common.text import VOCAB, Windows, measured_tokens, train_tokens

# the name of a model: the mixer of all its layers, or those that take turns, and the mixer's options
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
    "gdn": ("gdn", {}),
    "dec-vconv": ("lattice", {"variant": "dec", "use_v_conv": True}),
    "gdn-vconv": ("gdn", {"use_v_conv": True}),
    "delta-vconv": ("lattice", {"variant": "delta", "use_v_conv": True}),
    "gka-no-vconv": ("gka", {"use_v_conv": False}),
    "gla": ("gla", {}),
    "gla-no-vconv": ("gla", {"use_v_conv": False}),
    "linear-decay-vconv": ("linear", {"decay": True, "use_v_conv": True}),
    "mamba2-no-vconv": ("mamba2-no-vconv", {}),
    "gka-attention": (["gka", ATTENTION], {}),
    "gka-plain": ("gka", {"use_decay": False, "use_alpha": False}),
    "gka-no-alpha": ("gka", {"use_alpha": False}),
    "gka-sketch-16": ("gka", {"sketch_dim": 16}),
    "gka-sketch-8": ("gka", {"sketch_dim": 8}),
}
# Models whose memory is as large as that of Lattice, hidden_size * head size numbers per layer, and the option that
# makes it so. GKA keeps two matrices [head size, head size] per head, so it gets twice as many heads of half the size.
EQUAL_MEMORY = {
    "gka-equal": None,
    "mamba2-equal": "state_size",
    "coffee-equal": "states",
    "mamba2-no-vconv-equal": "state_size",
}
NAMES = (*MODELS, *EQUAL_MEMORY)
POINTS = 20  # how many times in a training its loss is read; reading waits for the device


def model_of(name: str, args: SimpleNamespace) -> tuple[SimpleNamespace, str, dict]:
    """The arguments, the mixer and the mixer's options of a model of `NAMES`."""
    if name not in EQUAL_MEMORY:
        return args, *MODELS[name]
    mixer, options = MODELS[name.removesuffix("-equal")]
    half, option = args.hidden_size // args.heads // 2, EQUAL_MEMORY[name]
    if option is None:
        return SimpleNamespace(**vars(args) | {"heads": 2 * args.heads}), mixer, options
    return args, mixer, options | {option: half}


def parameter_count(config) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())


def configured(
    args: SimpleNamespace, mixer: str | list[str], options: dict, *, vocab: int, context: int, intermediate: int
):
    """The configuration of a Llama. `mixer`: the mixer of all layers, or a list of mixers that take turns."""
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
    types = ([mixer] if isinstance(mixer, str) else mixer) * args.layers
    types = types[: args.layers]
    mixers = {name: options for name in types if name != ATTENTION}
    return memmix_config(backbone, mixer_types=types, mixers=mixers or None)


def build(args: SimpleNamespace, mixer: str | list[str], options: dict, *, vocab: int, context: int, seed: int):
    """The model of `configured`. The width of its MLP gives it as many parameters as the transformer has."""
    width, sizes = args.hidden_size * 5 // 2, {"vocab": vocab, "context": context}
    same_width = [
        parameter_count(configured(args, *model, **sizes, intermediate=width))
        for model in ((mixer, options), (ATTENTION, {}))
    ]
    narrower = round((same_width[0] - same_width[1]) / (3 * args.hidden_size * args.layers))
    torch.manual_seed(seed)
    config = configured(args, mixer, options, **sizes, intermediate=width - narrower)
    return AutoModelForCausalLM.from_config(config).to(device())


def memory_of(args: SimpleNamespace, mixer: str | list[str], options: dict) -> tuple[int, str]:
    """How many numbers the memory of one layer holds for one sequence, and which of q, k and v are convolved.

    The last inputs of the short convolutions are not counted. The memory of attention grows: a model with attention
    has 0.
    """
    if ATTENTION in mixer:  # the name itself, or one of several
        return 0, ""
    config = configured(args, mixer, options, vocab=VOCAB, context=1, intermediate=args.hidden_size)
    with torch.device("meta"):
        layer = next(iter(memory_mixers(AutoModelForCausalLM.from_config(config)).values()))
    shapes = layer.state_shapes(1)
    floats = sum(math.prod(shape) for name, (shape, _) in shapes.items() if not name.startswith("conv"))
    return floats, getattr(layer, "convolves", None) or convolved_inputs(shapes)


def convolved_inputs(shapes: dict) -> str:
    """Which inputs of a memory are convolved, from the names of a mixer's states: for example "q, k" or "u".

    Mamba-2 has one convolution of x, B and C, which are the v, k and q of the other mixers.
    """
    names = [name.removeprefix("conv_") for name in shapes if name.startswith("conv_")]
    return ", ".join(names) if names else "q, k, v" if "conv" in shapes else ""


def autocast():
    return torch.autocast("cuda", torch.bfloat16) if device().type == "cuda" else contextlib.nullcontext()


def fit(
    model,
    loss_of: Callable[..., Tensor],
    steps: int,
    lr: float,
    args: SimpleNamespace,
    batch_of: Callable[[int], tuple[Tensor, ...]],
    stop_below_loss: float = 0.0,
    constant_rate_share: float = 0.0,
    warmup_steps: int | None = None,
    groups: list[dict] | None = None,
    graphed: bool = True,
) -> dict:
    """Train a model on the loss `loss_of(*batch_of(step))`.

    On a GPU a training step is one CUDA graph, because for such small models launching the kernels takes longer than
    running them.

    Args:
        batch_of: returns the tensors of a step; their shapes are the same at every step.
        stop_below_loss: training ends early when the loss is below this value at a point of the curve.
        constant_rate_share: the share of the steps that run at the full learning rate before the cosine decay begins.
        warmup_steps: steps in which the rate grows linearly; default: a twentieth of all steps.
        groups: parameter groups of AdamW; a group without its own "lr" has `lr`. Default: weight decay on matrices.
        graphed: on a GPU, capture a step as a CUDA graph.

    Returns:
        "curve", a list of [step, loss]; "gradient_norms", the largest norm of the gradients, before they are clipped,
        since the previous point of the curve; "steps", the number of steps that ran; "finite", whether the losses
        are finite; "ms_per_step"; "graphed", whether steps were replayed from a CUDA graph.

    Raises:
        OutOfTime: the command's deadline passed before the training ended.
    """
    model.train()
    groups = decay_matrices(model.parameters(), 0.1) if groups is None else groups
    on_gpu = device().type == "cuda"

    def rate_of(highest: float):  # a CUDA graph reads the rate from device memory
        return torch.tensor(highest, device=device()) if on_gpu else highest

    groups = [group | {"lr": rate_of(group.get("lr", lr))} for group in groups]
    optimizer = torch.optim.AdamW(groups, lr=rate_of(lr), betas=(0.9, 0.95), fused=on_gpu, capturable=on_gpu)
    warmup = max(1, steps // 20) if warmup_steps is None else warmup_steps

    def share_of_rate(step: int) -> float:
        decayed = max(0.0, step / steps - constant_rate_share) / (1 - constant_rate_share)
        return min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * decayed))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_rate)

    def update(*batch) -> Tensor:
        optimizer.zero_grad()
        with autocast():
            loss = loss_of(*batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return torch.stack([loss.detach().float(), norm.float()])

    update = GraphedFunction(update) if on_gpu and graphed else update
    every, began = max(1, steps // POINTS), time.time()
    curve, norms, largest = [], [], torch.zeros((), device=device())
    for step in range(steps):
        loss, norm = update(*batch_of(step))
        torch.maximum(largest, norm, out=largest)
        schedule.step()
        if (step + 1) % every == 0 or step + 1 == steps:
            curve.append([step + 1, round(loss.item(), 4)])
            norms.append(round(largest.item(), 4))
            largest.zero_()
            if not stop_below_loss <= curve[-1][1] < math.inf:  # small enough, or not finite
                break
            check_time(args)
    took, done = time.time() - began, curve[-1][0]
    optimizer.zero_grad()
    return {
        "curve": curve,
        "gradient_norms": norms,
        "steps": done,
        "finite": math.isfinite(curve[-1][1]),
        "ms_per_step": round(1000 * took / done, 2),
        "graphed": getattr(update, "graph", None) is not None,
    }


def train_language_model(
    row: dict,
    args: SimpleNamespace,
    mixer: str | list[str],
    options: dict,
    prepare: Callable | None = None,
    warmup_steps: int | None = None,
    groups_of: Callable | None = None,
) -> dict:
    """Train a language model with a context of `row["context"]` tokens on the training text and measure it.

    Args:
        prepare: called with the new model before its training.
        warmup_steps: as in `fit`.
        groups_of: called with the model; returns `groups` of `fit`.

    Returns the result of `fit`, the number of parameters and of trained tokens, the losses on the development and the
    held-out text, the held-out perplexity, and `gate_quantiles`.
    """
    context, seed = row["context"], row["seed"]
    model = build(args, mixer, options, vocab=VOCAB, context=context, seed=seed)
    if prepare is not None:
        prepare(model)
    batch = max(1, args.batch_tokens // context)
    windows = Windows(train_tokens(args.text).to(device()), context, batch, seed)
    steps = max(1, args.tokens // (batch * context))
    loss_of = functools.partial(next_token_loss, model)
    options = {"warmup_steps": warmup_steps, "groups": None if groups_of is None else groups_of(model)}
    result = fit(model, loss_of, steps, row["lr"], args, lambda step: (windows(step),), **options)
    result |= {"parameters": model.num_parameters(), "trained_tokens": steps * batch * context}
    if not result["finite"]:
        return result
    with autocast():
        for name in ("dev", "heldout"):
            result[f"{name}_loss"] = mean_loss(model, measured_tokens(name), context, batch)
        result |= gate_quantiles(model, windows(0)[:1])
    return result | {"perplexity": math.exp(result["heldout_loss"])}


@torch.no_grad()
def gate_quantiles(model, ids: Tensor) -> dict[str, list]:
    """The 5 %, 50 % and 95 % quantiles of each gate ("gamma", "log_decay") on one window of text, per layer."""
    found, mixers = {}, memory_mixers(model).values()

    def record_gates(project):
        def wrapped(x, rotary):
            tokens = project(x, rotary)
            for name in tokens.keys() & {"gamma", "log_decay"}:
                points = torch.tensor([0.05, 0.5, 0.95], device=x.device)
                spread = tokens[name].float().flatten().quantile(points)
                found.setdefault(name, []).append([round(value, 4) for value in spread.tolist()])
            return tokens

        return wrapped

    for mixer in mixers:
        mixer.project = record_gates(mixer.project)
    try:
        model(input_ids=ids, use_cache=False)
    finally:
        for mixer in mixers:
            del mixer.project
    return found


def query_logits(model, ids: Tensor, positions: Tensor) -> Tensor:
    """Logits [B, n, V] at the positions [B, n] of the queries only."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    index = positions[..., None].expand(-1, -1, hidden.shape[-1])
    return model.lm_head(hidden.gather(1, index)).float()


def recall_loss(model, ids: Tensor, positions: Tensor, values: Tensor) -> Tensor:
    """Cross-entropy of the values [B, n] that the model should answer at the queries."""
    return F.cross_entropy(query_logits(model, ids, positions).flatten(0, 1), values.flatten())
