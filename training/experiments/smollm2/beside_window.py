"""Should a memory beside a window share its projections, and should it read only what has left the window?

    python training/experiments/smollm2/beside_window.py --teacher .scratch/smollm2_teacher --data .scratch/smollm2 \\
        --out beside_window.json

Single layers start from the attention and are trained on the inputs that the layer has in the teacher, as `align`
trains them. A row is one layer with a window of 64 or 192 tokens and the first one, and beside it a memory in one of
`VARIANTS`, or none. The error is |layer - attention|^2 / |attention|^2 on held-out rows, of all tokens and of those
`beyond` the first `window` of them. All variants get the same steps, and the rate that the development text chooses at
the first layer with the first window, see `RATE_OF`.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from torch import Tensor

from hf_memmix.conversion import convert_model, load_model
from hf_memmix.conversion.families import attention_module, decoder_layers
from hf_memmix.conversion.records import markdown_table
from hf_memmix.training.data import tokenize_files
from hf_memmix.training.experiments.bundled.language_model import decay_matrices
from hf_memmix.training.experiments.common.averages import spread_text
from hf_memmix.training.experiments.common.fit import fit
from hf_memmix.training.experiments.common.harness import Experiment, device, measured_at
from hf_memmix.training.experiments.common.options import Options, Rates
from hf_memmix.training.experiments.common.rates import chosen_rows, plan, rates_to_try
from hf_memmix.training.experiments.smollm2 import measuring
from hf_memmix.training.text_files import text_record

MEMORIES = ("gka", "gated_delta")
VARIANTS = ("separate", "shared", "delayed", "shared, delayed")  # the first one is the product's
RATE_OF = {"separate": "delayed", "shared, delayed": "shared"}  # the second ones have the rates of the first ones
ARMS = [{"mixer": "window", "variant": ""}, *({"mixer": m, "variant": v} for v in VARIANTS for m in MEMORIES)]
SPLITS = ("train", "dev", "heldout")


def rows_to_run(done: list[dict], args) -> list[dict]:
    places = [{"layer": layer, "window": window} for window in args.windows for layer in args.layers]
    windows = plan(done, ARMS[:1], [args.window_lr * factor for factor in (1, 0.5, 2)], args.seeds, places)
    tries, chosen = [], []
    for memory in MEMORIES:
        for first, second in RATE_OF.items():
            cell = {"mixer": memory, "variant": first, **places[0], "seed": args.seeds[0]}
            rates, best = rates_to_try(done, args.lrs, **cell)
            tries += [(rates.index(lr), cell | {"lr": lr}) for lr in rates]
            chosen += [] if best is None else [{"mixer": memory, "variant": v, "lr": best} for v in (first, second)]
    rows = windows + [row for _, row in sorted(tries, key=lambda pair: pair[0])]
    return rows + [arm | place | {"seed": seed} for seed in args.seeds for place in places for arm in chosen]


def run(row: dict, args) -> dict:
    student, layer = layer_of(row, args)
    data, rotary = recorded(args.teacher, args.data, tuple(args.layers), tuple(args.rows), tuple(args.lengths))
    inputs = data[row["layer"]]
    found = {}
    if row["mixer"] == "window":
        found["start"] = errors_of(layer, inputs["heldout"], rotary, row["window"])
        found["outside"] = mass_outside(layer, inputs["heldout"][0], rotary)
    x, wanted = inputs["train"]
    order = torch.randperm(args.steps, generator=torch.Generator().manual_seed(row["seed"])) % len(x)

    def loss_of(x: Tensor, wanted: Tensor) -> Tensor:
        return relative_error(output_of(layer, x, rotary), wanted)

    def batch_of(step: int) -> tuple[Tensor, Tensor]:
        return tuple(t[order[step], None].float() for t in (x, wanted))

    layer.requires_grad_(True)
    found |= fit(layer, loss_of, args.steps, row["lr"], args, batch_of, groups=groups_of(layer, row["lr"], args))
    layer.eval()
    found["dev_loss"] = errors_of(layer, inputs["dev"], rotary, row["window"])["all"]
    found["trained"] = errors_of(layer, inputs["heldout"], rotary, row["window"])
    found["parameters"] = sum(p.numel() for p in layer.parameters())
    if row["mixer"] != "window":
        found["m"] = layer.m.abs().mean().item()
    if row["variant"] == VARIANTS[0]:
        found |= equal_window(row, student, inputs["heldout"], rotary, args)
    return found


def groups_of(layer, lr: float, args) -> list[dict]:
    """A window alone learns at the rate of its row. Beside a memory it learns at `window_lr`, the best rate
    of a window alone, and the memory at that of the row: a window starts near the attention, and a memory far from it.
    """
    window = dict(layer.window.named_parameters()) if hasattr(layer, "window") else {}
    near = {id(p) for p in window.values()}
    rest = [p for p in layer.parameters() if id(p) not in near]
    pairs = ((rest, lr), (list(window.values()), args.window_lr))
    return [g | {"lr": rate} for params, rate in pairs for g in decay_matrices(params, 0.1) if g["params"]]


def layer_of(row: dict, args):
    """A student with one converted layer, and this layer."""
    name, window = row["mixer"], row["window"]
    mixers = {"window": {"sinks": 1} | ({"window": window} if name == "window" else {})}
    if name != "window":
        mixers = {name: {"local_window": window}} | mixers
    teacher = measuring.teacher_of(args.teacher)
    others = [i for i in range(teacher.config.num_hidden_layers) if i != row["layer"]]
    student = convert_model(teacher, name, others, mixers=mixers)
    layer = attention_module(student, row["layer"])
    if "shared" in row["variant"]:
        for projection in ("q_proj", "k_proj", "v_proj"):
            setattr(layer.memory, projection, getattr(layer.window, projection))
    if "delayed" in row["variant"]:
        delay(layer.memory, window)
    return student, layer


def delay(memory, tokens: int) -> None:
    """From now on the memory of a token holds only what lies at least so many tokens back."""
    heads, scan = memory.heads_scan, memory.scan

    def delayed_heads(*given):
        q, k, v, states = heads(*given)
        return q[:, tokens:], *(t[:, : q.shape[1] - tokens] for t in (k, v)), states

    def delayed_scan(given, states, **where):
        length = given["q"].shape[1] - tokens
        moved = {name: given[name][:, :length] for name in ("log_decay", "beta")}
        if "alpha" in given:  # it belongs to the query
            moved["alpha"] = given["alpha"][:, tokens:]
        y, new = scan(given | moved, states, **where)
        return F.pad(y, (0, 0, 0, 0, tokens, 0)), new

    memory.heads_scan, memory.scan = delayed_heads, delayed_scan


@functools.cache
def recorded(folder: Path, data: Path, layers: tuple[int, ...], rows: tuple[int, ...], lengths: tuple[int, ...]):
    """By layer and split, inputs and outputs [rows, length, hidden] of the attention; cos and sin of the last row."""
    teacher = load_model(folder, dtype=torch.bfloat16).to(device())
    stack = decoder_layers(teacher)
    del stack[max(layers) + 1 :]  # what comes after is not recorded
    found, rotary, now = {layer: {split: [] for split in SPLITS} for layer in layers}, [], []

    def record(module, args, kwargs, output, layer):
        found[layer][now[-1]].append((kwargs["hidden_states"], output[0]))
        rotary[:] = (t[:1].float() for t in kwargs["position_embeddings"])

    for layer in layers:
        hook = functools.partial(record, layer=layer)
        attention_module(teacher, layer).register_forward_hook(hook, with_kwargs=True)
    for split, count, length in zip(SPLITS, rows, lengths, strict=True):
        now.append(split)
        for row in split_tokens(folder, data, split)[: count * length].view(count, 1, length):
            with torch.no_grad():
                teacher.base_model(row.to(device()), use_cache=False)
    joined = {
        layer: {split: tuple(map(torch.cat, zip(*pairs, strict=True))) for split, pairs in splits.items()}
        for layer, splits in found.items()
    }
    return joined, tuple(rotary)


def split_tokens(folder: Path, data: Path, split: str) -> Tensor:
    if split != "dev":
        return measuring.tokens_of(data, split)
    return torch.as_tensor(tokenize_files(data / "dev.txt", measuring.tokenizer_of(folder))).long()


def output_of(layer, x: Tensor, rotary) -> Tensor:
    return layer(x, position_embeddings=tuple(t[:, : x.shape[1]] for t in rotary))[0]


def relative_error(found: Tensor, wanted: Tensor) -> Tensor:
    return (found - wanted).square().sum() / wanted.square().sum()


@torch.no_grad()
def errors_of(layer, pair: tuple[Tensor, Tensor], rotary, window: int) -> dict[str, float]:
    """The relative errors of all tokens, and of those from the place `window` on."""
    found = torch.cat([output_of(layer, x[None].float(), rotary) for x in pair[0]])
    wanted = pair[1].float()
    parts = {"all": 0, "beyond": window}
    return {name: relative_error(found[:, at:], wanted[:, at:]).item() for name, at in parts.items()}


def equal_window(row: dict, student, pair, rotary, args) -> dict:
    """The bytes of the layer's state, and the errors of a window of as many bytes that is not trained."""
    size = measuring.layer_bytes(student)
    shape = attention_module(student, row["layer"]).window
    tokens = size // (4 * shape.kv_heads * shape.head_dim)  # keys and values in bf16
    _, layer = layer_of(row | {"mixer": "window", "variant": "", "window": tokens}, args)
    return {"state_bytes": size, "equal_window": tokens, "equal": errors_of(layer, pair, rotary, row["window"])}


@torch.no_grad()
def mass_outside(window, inputs: Tensor, rotary) -> float:
    """The mean weight that attention gives to tokens outside a window, without the first one; at all tokens that have
    such.
    """
    size, found = window.options.window, []
    for x in inputs:
        q, k = (window.project(x[None].float(), rotary)[name][0].transpose(0, 1) for name in "qk")
        scores = q @ k.repeat_interleave(len(q) // len(k), 0).mT * window.head_dim**-0.5
        ages = torch.arange(len(x))[:, None] - torch.arange(len(x))
        weights = scores.masked_fill(ages.to(scores.device) < 0, -torch.inf).softmax(-1)
        outside = (ages >= size).to(scores.device)
        outside[:, 0] = False
        found.append((weights * outside).sum(-1)[:, size + 1 :].mean())
    return torch.stack(found).mean().item()


def table(results: dict) -> str:
    """For each window a line per memory and variant: the errors of each layer beyond the window."""
    settings, rows, lines = results["settings"], results["rows"], []
    layers = settings["layers"]
    for window in settings["windows"]:

        def add(name: str, arm: dict, value: Callable[[list[dict]], str], window=window) -> None:
            """A line with one cell per layer, from the rows of all seeds."""
            found = [chosen_rows(rows, **arm, layer=layer, window=window) for layer in layers]
            if any(found):
                lines.append([window, name, *(value(seeds) if seeds else "" for seeds in found)])

        alone = ARMS[0]
        add("none: weight of attention outside", alone, lambda seeds: f"{100 * seeds[0]['outside']:.0f} %")
        add("none, untrained", alone, lambda seeds: f"{seeds[0]['start']['beyond']:.4f}")
        add("none", alone, trained_error)
        for memory in MEMORIES:
            for variant in VARIANTS:
                add(f"{memory}, {variant}", {"mixer": memory, "variant": variant}, trained_error)
            first = {"mixer": memory, "variant": VARIANTS[0]}
            size = next((row["equal_window"] for row in chosen_rows(rows, **first, window=window)), 0)
            name = f"none: {size} tokens, the bytes of {memory} and window, untrained"
            add(name, first, lambda seeds: f"{seeds[0]['equal']['beyond']:.4f}")
    head = ["window", "memory", *(f"layer {layer}" for layer in layers)]
    (train, _, heldout), (trained, _, length) = settings["rows"], settings["lengths"]
    seeds = max((row["seed"] for row in rows), default=0) + 1
    note = (
        f"Relative errors of tokens beyond the window, on {heldout} held-out rows of {length} tokens, after"
        f" {settings['steps']} steps of one of {train} rows of {trained} tokens; {seeds} seed{'s' * (seeds > 1)}."
        f" {measured_at(results)}."
    )
    return f"{markdown_table(head, lines, figures=True)}\n\n{note}"


def trained_error(seeds: list[dict]) -> str:
    return spread_text([row["trained"]["beyond"] for row in seeds], 4)


class Settings(Options):
    teacher: Annotated[Path, typer.Option(help="folder of the teacher")]
    data: Annotated[Path, typer.Option(help="folder of the token files of corpus.py")]
    layers: Annotated[list[int], typer.Option(help="layers; the first one chooses the rates; repeatable")] = (7, 2)
    windows: Annotated[list[int], typer.Option(help="tokens of the window; repeatable")] = (64, 192)
    lrs: Rates = (6e-3, 2e-3, 2e-2)
    window_lr: Annotated[float, typer.Option(help="rate of a window beside a memory")] = 2e-3
    seeds: Annotated[list[int], typer.Option(help="seeds of the order of the rows; repeatable")] = (0,)
    steps: Annotated[int, typer.Option(help="steps of one row")] = 100
    rows: Annotated[list[int], typer.Option(help="rows of training, development and held-out text")] = (64, 4, 6)
    lengths: Annotated[list[int], typer.Option(help="tokens of these rows; the last is the longest")] = (
        512,
        1024,
        1024,
    )


def about(args) -> dict:
    """What was measured on what, without the places on this machine."""
    texts = {split: text_record(args.data / f"{split}.npy") for split in SPLITS if split != "dev"}
    texts["dev"] = text_record(args.data / "dev.txt")
    return {"model": measuring.model_record(args.teacher), "texts": texts}


main = Experiment("beside_window", __file__, Settings, rows_to_run, about=about).command()

if __name__ == "__main__":
    typer.run(main)
