"""Compares GKA in bf16 on a GPU with float64: error and time of solver schedules. The default schedule was chosen by
it.

    python kernels/benchmarks/gka_accuracy.py --out kernels/benchmarks/results/gka_accuracy_h200.json

A layer is initialised as in a model and gets noise of unit variance as its input. Its weights are rounded to bf16
once, so the bf16 layer and the float64 layer have equal weights. `layer` is the error of the layer's output; the
reference is the float64 layer. o, dq, dk, dv and dg are the errors of the op on this layer's q, k and v, rounded to
bf16. Names with `_fast` are the same with the log-decays scaled to a mean of -0.75, as in a fresh layer: few keys then
fill the state. All errors are rms(error) / rms(reference), and the largest over seeds, head sizes and lengths. Times
are medians of the op alone at B=4, T=8192, H=8, D=128. `--part errors` and `--part times` write to the same file one
after the other, so that the GPU may do other work while the errors are measured.
"""

import argparse
import contextlib
import copy
import json
import multiprocessing
import os
from pathlib import Path

import torch
from transformers import LlamaConfig

from hf_memmix import memmix_config
from hf_memmix.mixers.gka import GKAMixer
from hf_memmix_kernels import chunk_gka

SCHEDULES = [(30,), (20,), (8, 8), (10, 10), (12, 10), (12, 12), (7, 7, 7), (10, 10, 10)]
EXACT = (20, 20, 20)  # leaves a residual of 1e-7
CASES = [(seed, dim, length) for seed in (0, 1, 2) for dim in (64, 128) for length in (150, 4096)]
NAMES = ("o", "dq", "dk", "dv", "dg")
FAST = -0.75  # mean log-decay of a layer whose gates are fresh


@contextlib.contextmanager
def backend(name: str):
    """Make the ops use one path, "triton" or "torch", in this block."""
    os.environ["HF_MEMMIX_BACKEND"] = name
    try:
        yield
    finally:
        del os.environ["HF_MEMMIX_BACKEND"]


def rms_ratio(value: torch.Tensor, truth: torch.Tensor) -> float:
    """rms(value - truth) / rms(truth).

    Raises:
        ValueError: a value is not finite, which the ratio could hide.
    """
    if not torch.isfinite(value).all():
        raise ValueError("non-finite values in a result")
    return ((value.double() - truth).norm() / truth.norm()).item()


def random_layer(seed: int, dim: int, length: int, batch: int = 2, heads: int = 4):
    """A GKA layer with bf16 weights and its input [batch, length, hidden] in bf16."""
    torch.manual_seed(seed)
    hidden = heads * dim
    llama = LlamaConfig(
        hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=heads // 2, head_dim=dim,
        num_hidden_layers=1, vocab_size=32, intermediate_size=32,
    )  # fmt: skip
    mixer = GKAMixer(memmix_config(llama, mixer_types=["gka"]), 0)
    mixer.init_weights()
    for name, parameter in mixer.named_parameters():
        if name.endswith("proj.weight"):
            torch.nn.init.normal_(
                parameter, std=hidden**-0.5
            )  # activations of unit variance, so the gates differ from 1/2
        elif name.endswith("conv1d.weight"):
            torch.nn.init.normal_(parameter, std=0.5)
    keep = set(GKAMixer.fp32_parameters)
    for name, parameter in mixer.named_parameters():
        if name not in keep:
            parameter.data = parameter.data.bfloat16()
    x = torch.randn(batch, length, hidden).bfloat16()
    return mixer.cuda(), x.cuda()


def op_inputs(mixer, x):
    """The arguments of `chunk_gka` in this layer, with q, k and v rounded to bf16, and a random gradient of its
    output.
    """
    seen = {}

    def record(q, k, v, log_decay, alpha, beta, **kwargs):
        seen["args"] = (q, k, v, log_decay, alpha, beta)
        return chunk_gka(q, k, v, log_decay, alpha, beta, **kwargs)

    module = __import__(GKAMixer.__module__, fromlist=["chunk_gka"])
    original, module.chunk_gka = module.chunk_gka, record
    try:
        mixer(x)
    finally:
        module.chunk_gka = original
    q, k, v, *gates = (t.detach() for t in seen["args"])
    do = torch.randn(*q.shape[:3], v.shape[-1], device=q.device)
    return [t.bfloat16() for t in (q, k, v)] + [t.float() for t in gates], do.bfloat16()


def op_results(inputs, do, dtype, schedule):
    """o and the gradients of q, k, v and the log-decay."""
    gate_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    leaves = [t.to(dtype if i < 3 else gate_dtype).requires_grad_() for i, t in enumerate(inputs)]
    o, _ = chunk_gka(*leaves, refinement=schedule)
    return (o.detach(), *torch.autograd.grad(o, leaves[:4], do.to(dtype)))


def case_errors(case: tuple[int, int, int]) -> list[dict[str, float]]:
    """For each schedule, the error of each quantity in one case."""
    mixer, x = random_layer(*case)
    reference = copy.deepcopy(mixer).double()
    reference.options.solver_phases = list(EXACT)
    with backend("torch"):
        with torch.no_grad():
            layer_truth = reference(x.double())[0]
        inputs, do = op_inputs(reference, x.double())
        fast = [*inputs[:3], inputs[3] * (FAST / inputs[3].mean()), *inputs[4:]]
        regimes = [
            (args, suffix, op_results(args, do, torch.float64, EXACT))
            for args, suffix in ((inputs, ""), (fast, "_fast"))
        ]
    found = []
    for schedule in SCHEDULES:
        mixer.options.solver_phases = list(schedule)
        with backend("triton"):
            with torch.no_grad():
                got = {"layer": rms_ratio(mixer(x)[0], layer_truth)}
            for args, suffix, truths in regimes:
                results = op_results(args, do, torch.bfloat16, schedule)
                got |= {name + suffix: rms_ratio(r, t) for name, r, t in zip(NAMES, results, truths, strict=True)}
        found.append(got)
    return found


def errors() -> list[dict[str, float]]:
    """For each schedule, the largest error of each quantity over CASES."""
    with multiprocessing.get_context("spawn").Pool(len(CASES)) as pool:
        cases = pool.map(case_errors, CASES, chunksize=1)
    return [
        {name: round(max(case[i][name] for case in cases), 5) for name in cases[0][i]} for i in range(len(SCHEDULES))
    ]


def times(schedule) -> dict[str, float]:
    """Median milliseconds of the forward under no_grad and of forward and backward."""
    from triton.testing import do_bench

    torch.manual_seed(0)
    shape = (4, 8192, 8, 128)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    q, k = (torch.nn.functional.normalize(t.float(), dim=-1).bfloat16() for t in (q, k))
    g = -torch.rand(shape[:3], device="cuda") * 0.2
    alpha, beta = torch.rand(shape[:3], device="cuda"), torch.rand(shape[:3], device="cuda")
    leaves = [t.requires_grad_() for t in (q, k, v, g, alpha, beta)]
    do = torch.randn_like(v)

    def forward():
        with torch.no_grad():
            chunk_gka(*leaves, refinement=schedule)

    def both():
        torch.autograd.grad(chunk_gka(*leaves, refinement=schedule)[0], leaves, do)

    return {
        "fwd_ms": round(do_bench(forward, return_mode="median"), 3),
        "fwd_bwd_ms": round(do_bench(both, return_mode="median"), 3),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="unknown", help="commit to record")
    parser.add_argument("--part", choices=("errors", "times", "all"), default="all")
    args = parser.parse_args()
    rows = {str(list(schedule)): {"schedule": list(schedule)} for schedule in SCHEDULES}
    if args.part == "times" and args.out.exists():
        rows |= {str(row["schedule"]): row for row in json.loads(args.out.read_text())["rows"]}
    if args.part != "times":
        for row, found in zip(rows.values(), errors(), strict=True):
            row |= found
    if args.part != "errors":
        for row in rows.values():
            row |= times(tuple(row["schedule"]))
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": args.commit, "cases": CASES}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({**about, "rows": list(rows.values())}, indent=1) + "\n")
    for row in rows.values():
        print(row)


if __name__ == "__main__":
    main()
