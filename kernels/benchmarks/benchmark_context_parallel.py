"""Measures training steps of one sequence that is split over several GPUs: a Llama of 1.04 billion parameters, and the
same Llama with a mixer in every layer, or in three of four.

    NCCL_NVLS_ENABLE=0 python -m torch.distributed.run --standalone --nproc-per-node 2 \\
        kernels/benchmarks/benchmark_context_parallel.py --out kernels/benchmarks/results/context_parallel_h200.json

Weights and tokens are random. "train" is forward, backward, the sum of the gradients over the GPUs and one fused
AdamW step, with gradient checkpointing and the library's own loss, in torch's `context_parallel`. Its time is the
median of `--repeats` steps between CUDA events, its memory the largest peak of the GPUs. With one process the same
step runs on one GPU. `weights` is the dtype of weights, gradients and optimizer; with float32, as our training recipes
have it, matrices are multiplied in bf16 (autocast). "compile" launches the kernels of "train" once, in a model of one
layer, and makes no row.

"check" compares a small model on all GPUs, with gradient checkpointing, with the same on one GPU. `difference` is
|a - b| / |b| of the loss and of all gradients as one vector, `worst` the largest of the parameters' gradients, and
`steps` that of the change of all weights in three steps of SGD with momentum. Weights are fp32; `autocast` is the type
in which matrices are multiplied, and with bfloat16, `rounding` is the `worst` that it makes on one GPU, beside fp32.
`balanced` means that a GPU holds a part from the front and one from the end of the sequence. Rows of --out that
describe the same measurement are replaced; all other rows are kept.
"""

import argparse
import copy
import itertools
import json
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import triton
from benchmark import commit, write_merged
from benchmark_long import median_seconds
from benchmark_model import MIXERS
from llama import SHAPE, mixer_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from transformers import AutoModelForCausalLM, LlamaConfig

import hf_memmix
from hf_memmix import launch
from hf_memmix.context_parallel import keep_order

TOKENS = 262144
CHECKED_TOKENS = 4096
# as many heads for keys as for queries: torch's attention in fp32 cannot share them
SMALL = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
         "intermediate_size": 512, "vocab_size": 512}  # fmt: skip
SHARED_KEYS = {**SMALL, "num_key_value_heads": 2}
LAYOUTS = ("all", "hybrid")  # hybrid: every fourth layer keeps its attention
PHASES = ("compile", "check", "train")
CHECKED_STEPS = 3  # of SGD
COMPILED = {"num_hidden_layers": 1, "vocab_size": 512}
MEASURED = ("seconds", "tokens_s", "peak_mib", "difference", "worst", "steps", "rounding", "note")


def build(mixer: str, layout: str, dtype: torch.dtype, **fields):
    """A Llama in training mode with `mixer` in the layers of a layout."""
    config = LlamaConfig(**{**SHAPE, **fields}, dtype=dtype, bos_token_id=0, eos_token_id=None, pad_token_id=0)
    if mixer != "attention":
        kept = [layout == "hybrid" and i % 4 == 3 for i in range(config.num_hidden_layers)]
        kind, options = mixer_of(mixer)
        config = hf_memmix.memmix_config(config, ["attention" if keep else kind for keep in kept], options)
    torch.manual_seed(0)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).train()


def batch(length: int, vocabulary: int) -> list[torch.Tensor]:
    """Ids, positions, shifted labels and a full mask [1, T], the same in all processes."""
    torch.manual_seed(1)
    ids = torch.randint(3, vocabulary, (1, length), device="cuda")
    labels = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:].contiguous()
    return [ids, torch.arange(length, device="cuda")[None], labels, torch.ones_like(ids)]


def split(tensors: list[torch.Tensor], mesh):
    """A context in which the tensors hold this GPU's part; with one GPU, one in which they are whole."""
    if mesh is None:
        return nullcontext()
    return context_parallel(mesh, buffers=tensors, buffer_seq_dims=[1] * len(tensors), no_restore_buffers=set(tensors))


def add_up(gradients: list[torch.Tensor]):
    """Sum each gradient over all GPUs, in place, in one message per dtype."""
    for dtype in {gradient.dtype: None for gradient in gradients}:
        same = [gradient for gradient in gradients if gradient.dtype == dtype]
        flat = torch.cat([gradient.flatten() for gradient in same])
        dist.all_reduce(flat)
        for gradient, total in zip(same, flat.split([gradient.numel() for gradient in same]), strict=True):
            gradient.copy_(total.view_as(gradient))


def backward(model, length: int, mesh, autocast: bool = False) -> torch.Tensor:
    """The mean loss over all tokens of the sequence; the gradients are those of the whole sequence."""
    tensors = batch(length, model.config.vocab_size)
    with split(tensors, mesh):
        ids, positions, labels, mask = tensors
        given = {
            "labels": labels,
            "shift_labels": labels,
            "num_items_in_batch": torch.tensor(length - 1, device="cuda"),
        }
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = model(ids, position_ids=positions, attention_mask=mask, use_cache=False, **given).loss
        loss.backward()
    loss = loss.detach()
    if mesh is not None:
        dist.all_reduce(loss)
        add_up([parameter.grad for parameter in model.parameters()])
    return loss


def relative(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """|a - b| / |b| of pairs (a, b), which count as one vector, with two digits."""
    ours, theirs = (torch.cat([tensor.flatten() for tensor in of_one]) for of_one in zip(*pairs, strict=True))
    return float(f"{((ours - theirs).norm() / theirs.norm()).item():.2g}")


def check(mixer: str, layout: str, mesh, autocast: bool) -> dict:
    """The relative differences of loss, gradients and trained weights between all GPUs and one."""
    model = build(mixer, layout, torch.float32, **(SHARED_KEYS if autocast else SMALL))
    alone, start = copy.deepcopy(model), [parameter.detach().clone() for parameter in model.parameters()]
    model.gradient_checkpointing_enable()
    exact = copy.deepcopy(model) if autocast else None
    runs = [(m, torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), on) for m, on in ((model, mesh), (alone, None))]
    found = {}
    for _ in range(CHECKED_STEPS):
        losses = [backward(each, CHECKED_TOKENS, on, autocast) for each, _, on in runs]
        if not found:
            pairs = [(p.grad, q.grad) for p, q in zip(model.parameters(), alone.parameters(), strict=True)]
            found["difference"] = max(relative([tuple(losses)]), relative(pairs))
            found["worst"] = max(relative([pair]) for pair in pairs)
            if exact is not None:
                backward(exact, CHECKED_TOKENS, None)
                rounded = [(q.grad, r.grad) for q, r in zip(alone.parameters(), exact.parameters(), strict=True)]
                found["rounding"] = max(relative([pair]) for pair in rounded)
        for _, optimizer, _ in runs:
            optimizer.step()
            optimizer.zero_grad()
    changes = [(p - s, q - s) for p, q, s in zip(model.parameters(), alone.parameters(), start, strict=True)]
    return {**found, "steps": relative(changes)}


def compile_kernels(mixer: str, layout: str, mesh, length: int, weights: torch.dtype):
    """Launch the kernels of `train` once."""
    model = build(mixer, layout, weights, **COMPILED)
    model.gradient_checkpointing_enable()
    backward(model, length, mesh, weights == torch.float32)


def train(mixer: str, layout: str, mesh, length: int, weights: torch.dtype, repeats: int) -> dict:
    """The measured columns of training steps of one sequence of `length` tokens."""
    model = build(mixer, layout, weights)
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step():
        backward(model, length, mesh, weights == torch.float32)
        optimizer.step()
        optimizer.zero_grad()

    torch.cuda.reset_peak_memory_stats()
    seconds = median_seconds(step, repeats)
    peak = torch.tensor(torch.cuda.max_memory_allocated(), device="cuda")
    if mesh is not None:
        dist.all_reduce(peak, dist.ReduceOp.MAX)
    return {
        "seconds": round(seconds, 3),
        "tokens_s": round(length / seconds),
        "peak_mib": round(peak.item() / 2**20),
    }


def measured(args, phase: str, mixer: str, layout: str, balanced: bool, mesh) -> dict:
    """One row without the machine."""
    keep_order(not balanced)
    gpus = 1 if mesh is None else mesh.size()
    row = {"phase": phase, "mixer": mixer, "layout": layout, "gpus": gpus, "balanced": balanced}
    if phase == "check":
        name = "bfloat16" if args.autocast else "none"
        return {**row, "T": CHECKED_TOKENS, "autocast": name, **check(mixer, layout, mesh, args.autocast)}
    try:
        found = train(mixer, layout, mesh, args.tokens, getattr(torch, args.weights), args.repeats)
    except torch.OutOfMemoryError:
        if mesh is not None:  # the other processes would wait for this one
            raise
        found = {"note": "out of memory"}
    return {**row, "T": args.tokens, "checkpointing": True, "weights": args.weights, **found}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mixers", nargs="+", choices=MIXERS, default=list(MIXERS))
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=["all"])
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=["check", "train"])
    parser.add_argument(
        "--balanced", nargs="+", type=int, choices=(0, 1), default=[0], help="1: front and end per GPU"
    )
    parser.add_argument("--autocast", action="store_true", help="check in bf16, with keys that several heads share")
    parser.add_argument("--weights", choices=("float32", "bfloat16"), default="float32", help="of training steps")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--repeats", type=int, default=2, help="timed steps, after one that is not timed")
    parser.add_argument("--commit", default=commit(), help="for machines that hold no git checkout")
    args = parser.parse_args()
    mesh = None
    torch.cuda.set_device(launch.local_rank())
    if launch.processes() > 1:
        dist.init_process_group("nccl")
        mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    for mixer, layout, phase, balanced in itertools.product(args.mixers, args.layouts, args.phases, args.balanced):
        if phase == "compile":
            compile_kernels(mixer, layout, mesh, args.tokens, getattr(torch, args.weights))
        else:
            found = {**measured(args, phase, mixer, layout, bool(balanced), mesh), **machine, "commit": args.commit}
            if mesh is None or mesh.get_rank() == 0:
                print(json.dumps({k: v for k, v in found.items() if k not in machine}), flush=True)
                write_merged(args.out, [found], MEASURED)
        torch.cuda.empty_cache()
    if mesh is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
