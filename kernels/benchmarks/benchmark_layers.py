"""Measures one layer's attention or mixer, with its projections, on one GPU: microseconds per decoded token and per
token of a prompt.

    python kernels/benchmarks/benchmark_layers.py --out conversion/layer_times.json

`memmix select` reads the result to estimate what a mixture of mixers costs (`hf_memmix.conversion.layer_cost`).
A mixer has the options of a default conversion, a window so 512 tokens. Weights (bf16) and inputs are random. "decode"
is one step in a CUDA graph that runs several layers in turn, which together are larger than the L2 cache, divided by
their number. "prefill" is one call of one layer with B = 1, between CUDA events, divided by the number of tokens; for
short inputs it includes what Python needs to launch the kernels. `context` is the number of tokens before the step, or
those of the prompt: attention reads them all. `weight_bytes` are those of the layer's parameters, `memory_bytes` those
that a decode step reads per sequence: states, or keys and values. Each kind runs in a process of its own with a time
limit. Rows of kinds in --only are replaced; all other rows are kept, if they are of the same GPU, because `memmix
select` compares the kinds.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig

import hf_memmix
from hf_memmix.conversion import convert_model
from hf_memmix.conversion.from_attention import STARTS
from hf_memmix.conversion.records import write_json
from hf_memmix.mixers import ATTENTION
from hf_memmix.serving.footprint import layer_kv_bytes, state_bytes
from hf_memmix.swap import memory_mixers

KINDS = (ATTENTION, *STARTS)
# hidden size, heads, heads of k and v, head size
SIZES = ((1024, 16, 8, 64), (2048, 32, 8, 64), (4096, 32, 8, 128))
DECODE_BATCHES, DECODE_CONTEXTS, PREFILL = (1, 32), (1024, 16384), (4096, 16384)
STREAMED_BYTES = 150e6  # three times the L2 cache


def config_of(hidden: int, heads: int, kv_heads: int, head_dim: int, layers: int) -> LlamaConfig:
    """A Llama whose attention has these sizes; the rest is as small as possible."""
    return LlamaConfig(
        vocab_size=128, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=head_dim, intermediate_size=64, tie_word_embeddings=True,
        max_position_embeddings=2**20, dtype="bfloat16", bos_token_id=0, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip


class Attention:
    """The attention modules of a model: `step` reads a full cache, `scan` a prompt."""

    def __init__(self, modules, config, device):
        self.modules, self.config, self.device = modules, config, device

    def memory_bytes(self, context: int) -> int:
        return layer_kv_bytes(self.config, 0, context, torch.bfloat16)

    def steps(self, batch: int, context: int, rotary) -> Callable[[], None]:
        c, device = self.config, self.device
        x = torch.randn(batch, 1, c.hidden_size, device=device, dtype=torch.bfloat16)
        shape = (batch, c.num_key_value_heads, context, c.head_dim)
        caches = [[torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in "kv"] for _ in self.modules]
        last = torch.tensor([context - 1], device=device)
        cos, sin = rotary(x, last[None])

        def run():
            for module, (keys, values) in zip(self.modules, caches, strict=True):
                q, k, v = _heads(module, x, cos, sin, c.head_dim)
                keys.index_copy_(2, last, k)
                values.index_copy_(2, last, v)
                y = F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
                module.o_proj(y.transpose(1, 2).flatten(2))

        return run

    def prompt(self, tokens: int, rotary) -> Callable[[], None]:
        module, c = self.modules[0], self.config
        x = torch.randn(1, tokens, c.hidden_size, device=self.device, dtype=torch.bfloat16)
        cos, sin = rotary(x, torch.arange(tokens, device=self.device)[None])

        def run():
            q, k, v = _heads(module, x, cos, sin, c.head_dim)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            module.o_proj(y.transpose(1, 2).flatten(2))

        return run


class Mixers(Attention):
    """The mixers of a model in place of attention."""

    def memory_bytes(self, context: int) -> int:
        return state_bytes(self.modules[0], torch.bfloat16)

    def steps(self, batch: int, context: int, rotary) -> Callable[[], None]:
        size = self.config.hidden_size
        past = torch.randn(batch, context, size, device=self.device, dtype=torch.bfloat16)
        at = torch.arange(context, device=self.device)[None]
        before, now = rotary(past, at), rotary(past, at[:, -1:])
        x = past[:, -1:].clone()
        states = [module.scan(module.project_rows(past, before), None)[1] for module in self.modules]

        def run():
            for module, state in zip(self.modules, states, strict=True):
                module.readout(module.step(module.project_rows(x, now), state), x)

        return run

    def prompt(self, tokens: int, rotary) -> Callable[[], None]:
        module = self.modules[0]
        x = torch.randn(1, tokens, self.config.hidden_size, device=self.device, dtype=torch.bfloat16)
        at = rotary(x, torch.arange(tokens, device=self.device)[None])

        def run():
            y, _ = module.scan(module.project_rows(x, at), None)
            module.readout(y, x)

        return run


def _heads(module, x, cos, sin, head_dim: int):
    """Rotated q and k, and v: [B, heads, T, head_dim]."""
    q, k, v = (
        p(x).unflatten(-1, (-1, head_dim)).transpose(1, 2) for p in (module.q_proj, module.k_proj, module.v_proj)
    )

    def rotated(t):
        first, second = t.chunk(2, dim=-1)
        return t * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]

    return rotated(q), rotated(k), v


def student_config(kind: str, config: LlamaConfig) -> hf_memmix.MemMixConfig:
    """The configuration of a model with a mixer in all layers, as a conversion writes it."""
    one = LlamaConfig.from_dict(config.to_dict() | {"num_hidden_layers": 1})
    mixers = convert_model(AutoModelForCausalLM.from_config(one, dtype=torch.bfloat16), kind).config.mixers
    return hf_memmix.memmix_config(config, [kind] * config.num_hidden_layers, mixers)


def build(kind: str, size: tuple[int, ...], device: str):
    """The layers of one kind, enough of them to leave no weight in the L2 cache, and the rotary embeddings."""
    hidden, heads, kv_heads, head_dim = size
    layers = math.ceil(STREAMED_BYTES / (2 * hidden * head_dim * (2 * heads + 2 * kv_heads)))
    config = config_of(*size, layers if device == "cuda" else 2)
    torch.manual_seed(0)
    full = config if kind == ATTENTION else student_config(kind, config)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(full, dtype=torch.bfloat16).eval()
    if kind == ATTENTION:
        layers = Attention([layer.self_attn for layer in model.model.layers], full, device)
    else:
        layers = Mixers(list(memory_mixers(model).values()), full, device)
    return layers, model.model.rotary_emb


def decode_us(run: Callable[[], None], layers: int) -> float:
    """Microseconds of a layer's step: the median of 20 replays of a CUDA graph that runs all layers."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return 1e3 * _median_ms(graph.replay, 20) / layers


def _median_ms(run: Callable[[], None], repeats: int) -> float:
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


@torch.no_grad()
def measure(kind: str, device: str, sizes) -> list[dict]:
    """All rows of one kind. On a CPU the calls run once and no time is measured: a check of this script."""
    rows = []
    for size in sizes:
        layers, rotary = build(kind, size, device)
        shape = dict(zip(("hidden_size", "heads", "kv_heads", "head_dim"), size, strict=True))
        weights = sum(p.numel() * p.element_size() for p in layers.modules[0].parameters())
        common = {"kind": kind, **shape, "weight_bytes": weights}
        contexts = DECODE_CONTEXTS if kind == ATTENTION else DECODE_CONTEXTS[:1]
        for batch in DECODE_BATCHES:
            for context in contexts if device == "cuda" else (64,):
                run = layers.steps(batch, context, rotary)
                us = decode_us(run, len(layers.modules)) if device == "cuda" else run()
                row = {"phase": "decode", "B": batch, "context": context, "memory_bytes": layers.memory_bytes(context)}
                rows.append(common | row | {"us": us})
        for tokens in PREFILL if device == "cuda" else (64,):
            run = layers.prompt(tokens, rotary)
            us = 1e3 * _median_ms(run, 7) / tokens if device == "cuda" else run()
            row = {"phase": "prefill", "B": 1, "context": tokens, "memory_bytes": layers.memory_bytes(tokens)}
            rows.append(common | row | {"us": us})
        del layers
        if device == "cuda":
            torch.cuda.empty_cache()
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=KINDS, default=KINDS, help="measure only these kinds")
    parser.add_argument("--commit", default="unknown", help="commit to record")
    parser.add_argument("--device", default="cuda", help="cpu: run everything once without times, to check the script")
    parser.add_argument("--limit", type=int, default=90, help="seconds per kind")
    parser.add_argument("--rows-of", choices=KINDS, help=argparse.SUPPRESS)  # the process of one kind
    args = parser.parse_args()
    if args.rows_of:
        write_json(args.out, measure(args.rows_of, args.device, SIZES if args.device == "cuda" else SIZES[:1]))
        return
    machine = torch.cuda.get_device_name() if args.device == "cuda" else "none"
    record = {"device": machine, "dtype": "bfloat16", "measured": {}, "rows": []}
    if args.out.exists():
        kept = json.loads(args.out.read_text())
        if kept["device"] == machine:
            record = kept
        elif others := sorted({row["kind"] for row in kept["rows"]}.difference(args.only)):
            parser.error(
                f"{args.out} has times of {', '.join(others)} on {kept['device']}, and this machine is {machine};"
                " leave --only out, or write to another file"
            )
    for kind in args.only:
        rows = rows_of(kind, args.device, args.limit)
        if rows is not None:
            record["rows"] = [row for row in record["rows"] if row["kind"] != kind] + rows
            record["measured"][kind] = {"torch": torch.__version__, "commit": args.commit}
            write_json(args.out, record)


def rows_of(kind: str, device: str, limit: int) -> list[dict] | None:
    """`measure` in a process of its own; None if it fails or takes longer than `limit` seconds, which is printed."""
    with tempfile.TemporaryDirectory() as scratch:
        part = Path(scratch) / "rows.json"
        command = [sys.executable, __file__, "--out", str(part), "--rows-of", kind, "--device", device]
        try:
            subprocess.run(command, timeout=limit, check=True)
        except subprocess.SubprocessError as error:
            print(f"{kind}: {str(error).splitlines()[0][:200]}", flush=True)
            return None
        print(f"{kind}: done", flush=True)
        return json.loads(part.read_text())


if __name__ == "__main__":
    main()
