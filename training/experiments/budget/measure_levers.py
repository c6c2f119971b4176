"""Measures what makes the stages `align` and `distill` of a small model slow on one GPU, lever by lever.

    python training/experiments/budget/measure_levers.py --out training/experiments/budget/results/levers_h100.json

Rows: the fused loss against float64; steps of a 135M shape (16 x 1024 tokens) with the loss as it was (checkpointed,
in eager float32), with the fused loss, with a CUDA graph of the step, with compiled layers, and with all of them; with
kept layers, also with one kernel of attention after the other (math: plain matrix products); a 1.2B shape (4 x 2048
tokens); and runs of `align` and `distill` through the Trainer, for several mixers. A profile names the kernels that
take the time. A row that fails or takes too long is recorded with its error; the rest then runs in a new process.
"""

import argparse
import contextlib
import faulthandler
import functools
import gc
import itertools
import json
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, LlamaConfig, TrainerCallback

from hf_memmix.conversion import convert_model
from hf_memmix.conversion.records import environment, write_json
from hf_memmix.training import compiled_layers, student_teacher
from hf_memmix.training.data import TokenBlocks
from hf_memmix.training.experiments.budget.measure_training import SIZES, materialise, prepared
from hf_memmix.training.losses import forward_kl
from hf_memmix.training.planning.memory import Settings
from hf_memmix.training.train import train
from hf_memmix_kernels.rowwise import forward_kl_, naive_forward_kl

ROW_SECONDS = 60
ATTENTION = {
    "math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
}  # fmt: skip
MIXERS = {"gka": {}, "window": {"mixer": "window", "sinks": 1}, "gated_delta": {"mixer": "gated_delta"}}
EIGHT = [3, 7, 11, 15, 19, 23, 27, 29]
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


def models(size: str, keep, options: dict):
    fields = SIZES[size]
    keep = [layer for layer in keep if layer < fields["num_hidden_layers"]]
    with torch.device("meta"):
        teacher = AutoModelForCausalLM.from_config(LlamaConfig(**fields), dtype=torch.bfloat16)
    student = convert_model(teacher.eval(), **({"mixer": "gka"} | options), keep=keep or None)
    materialise(teacher, student, DEVICE)
    return teacher, student


def sync() -> float:
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def loss_as_it_was(student_hidden, teacher_hidden, student_head, teacher_head, mask=None, chunk_tokens=2048):
    """The checkpointed loss in eager float32, which computes logits twice."""
    ours, theirs = student_hidden.flatten(0, -2), teacher_hidden.detach().flatten(0, -2)

    def total(ours, theirs):
        with torch.no_grad():
            logits = teacher_head(theirs)
        return forward_kl(student_head(ours), logits).sum()

    loss = 0.0
    for at in range(0, len(ours), chunk_tokens):
        rows = slice(at, at + chunk_tokens)
        loss = loss + checkpoint(total, ours[rows], theirs[rows], use_reentrant=False)
    return loss / len(ours)


@contextlib.contextmanager
def old_loss(on: bool):
    own = student_teacher.chunked_forward_kl
    if on:
        student_teacher.chunked_forward_kl = loss_as_it_was
    try:
        yield
    finally:
        student_teacher.chunked_forward_kl = own


def join_layers(pair, mode: str) -> None:
    """joined: all products of a mixer's input by one matrix, so that it is cast, and its gradient summed, once.
    padded: only those whose outputs are no multiple of 8, which slow kernels compute, with rows of zeros up to one.
    """

    def joined(mixer, x):
        layers = {name: mixer._modules[name] for name in mixer.input_layers if name in mixer._modules}
        alone = {name for name, layer in layers.items() if "padded" in mode and layer.out_features % 8 == 0}
        together = {name: layer for name, layer in layers.items() if name not in alone}
        found = {name: layers[name](x) for name in alone}
        if not together:
            return found
        dtype = torch.bfloat16 if torch.is_autocast_enabled(x.device.type) else x.dtype
        weight = torch.cat([layer.weight.to(dtype) for layer in together.values()])
        sizes = [layer.out_features for layer in together.values()]
        zeros = -sum(sizes) % 8
        weight = nn.functional.pad(weight, (0, 0, 0, zeros))
        parts = nn.functional.linear(x, weight).split([*sizes, zeros], -1)
        for (name, layer), part in zip(together.items(), parts, strict=False):
            found[name] = part if layer.bias is None else part + layer.bias.to(dtype)
        return found

    on = "joined" in mode or "padded" in mode
    for mixer in pair.plain_student.modules():
        if hasattr(mixer, "joined_layers"):
            mixer.joined_layers = functools.partial(joined, mixer) if on else None


class Step:
    """A step of training of a pair, and its times."""

    def __init__(
        self, stage: str, size: str, keep=(), rows: int = 16, length: int = 1024, options=None, chunk: int = 2048
    ):
        self.settings = Settings(stage, rows=rows, length=length, chunk_tokens=chunk)
        teacher, student = models(size, keep, options or {})
        self.pair, self.optimizer = prepared(teacher, student, self.settings, CUDA)
        self.trained = [parameter for parameter in self.pair.parameters() if parameter.requires_grad]
        vocabulary = SIZES[size]["vocab_size"]
        self.tokens = torch.randint(3, vocabulary, (8, rows, length), device=DEVICE)
        self.count = 0

    def passes(self):
        self.count += 1
        loss = self.pair(self.tokens[self.count % 8])["loss"]
        loss.backward()
        return loss

    def update(self):
        nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def __call__(self):
        loss = self.passes()
        self.update()
        return loss

    def times(self, untimed: int, timed: int) -> dict:
        start = sync()
        for _ in range(untimed):
            loss = self()
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
        begin = sync()
        for _ in range(timed):
            loss = self()
        launched = time.perf_counter()
        end = sync()
        seconds = (end - begin) / timed
        found = {"ms": round(seconds * 1e3, 1), "tokens_s": round(self.settings.tokens / seconds)}
        found |= {"host_ms": round((launched - begin) / timed * 1e3, 1), "untimed_s": round(begin - start, 1)}
        found["loss"] = loss.item()
        if CUDA:
            found["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)  # without what a graph keeps
            found["reserved_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 2)
            self.passes()
            begin = sync()
            self.update()
            found["update_ms"] = round((sync() - begin) * 1e3, 1)
        return found

    def profile(self, rows: int = 45) -> dict:
        """Kernels of one step by their time, and how many there are."""
        if not CUDA:
            return {}
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            self()
            torch.cuda.synchronize()
        kernels = [event for event in profiler.key_averages() if event.self_device_time_total > 0]
        kernels.sort(key=lambda event: -event.self_device_time_total)
        shown = [
            [event.key[:110], event.count, round(event.self_device_time_total / 1e3, 2)] for event in kernels[:rows]
        ]
        return {
            "kernel_ms": round(sum(event.self_device_time_total for event in kernels) / 1e3, 1),
            "kernels": sum(event.count for event in kernels),
            "top": shown,
        }

    def gradients(self) -> list[torch.Tensor]:
        loss = self.pair(self.tokens[0])["loss"]
        return [loss.detach().clone(), *torch.autograd.grad(loss, self.trained, allow_unused=True)]


def difference(ours: list, theirs: list) -> float:
    """The largest relative difference of a gradient, by its norm."""
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if b is not None]
    return max(((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item() for a, b in pairs)


def check_loss() -> dict:
    """The fused loss against float64: values relative by their norms, gradients by those of the probabilities.

    Where both models are certain of one word, the gradient is the difference of two ones.
    """
    found = {}
    cases = [(64, 49152, 3.0, torch.bfloat16), (5, 50257, 30.0, torch.bfloat16), (3, 128256, 300.0, torch.float32)]
    cases += [(7, 1, 1.0, torch.float32), (33, 4099, 1.0, torch.bfloat16), (2048, 49152, 3.0, torch.bfloat16)]
    cases = cases if CUDA else cases[3:5]
    for rows, size, scale, dtype in cases:
        student = (scale * torch.randn(rows, size, device=DEVICE)).to(dtype)
        teacher = (student.float() + 0.1 * scale * torch.randn(rows, size, device=DEVICE)).to(dtype)
        weight = (torch.rand(rows, device=DEVICE) > 0.3).float()
        p_s, p_t = student.double().softmax(-1), teacher.double().softmax(-1)
        want = naive_forward_kl(student.double(), teacher.double()), (p_s - p_t) * weight[:, None]
        got = forward_kl_(student, teacher, weight), student
        sizes = want[0].norm(), (p_t * weight[:, None]).norm()
        name = f"{rows} x {size}, {scale}, {dtype}"
        found[name] = [
            ((a.double() - b).norm() / size.clamp_min(1e-30)).item()
            for a, b, size in zip(got, want, sizes, strict=True)
        ]
    if CUDA:
        student, teacher = torch.randn(2, 2048, 49152, device=DEVICE, dtype=torch.bfloat16)
        forward_kl_(student, teacher)
        begin = sync()
        for _ in range(20):
            forward_kl_(student, teacher)
        found["ms of 2048 x 49152"] = (sync() - begin) / 20 * 1e3
    # the whole loss with its heads, against a dense one in float64
    hidden = torch.randn(2, 300, 64, device=DEVICE, requires_grad=True)
    ours, theirs = (nn.Linear(64, 4099, bias=False, device=DEVICE) for _ in range(2))
    mask = torch.rand(2, 300, device=DEVICE) > 0.3
    loss = student_teacher.chunked_forward_kl(hidden, hidden.detach() + 0.1, ours, theirs, mask, 128)
    got = [loss.detach(), *torch.autograd.grad(loss, [hidden, ours.weight])]
    deep, weight = hidden.detach().double().requires_grad_(), ours.weight.detach().double().requires_grad_()
    dense = forward_kl(deep @ weight.T, (hidden.detach().double() + 0.1) @ theirs.weight.double().T)[mask].mean()
    want = [dense.detach(), *torch.autograd.grad(dense, [deep, weight])]
    found["loss, d hidden, d weight in fp32"] = [
        ((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, want, strict=True)
    ]
    return found


def levers(stage: str, size: str, modes: list[str], profiled: list[str], timed: int = 8, **kwargs):
    """Names and functions of the rows of one pair; a mode names its levers: old, graph, compile."""
    made: dict = {}  # the pair, made by the first row

    def row(mode: str) -> dict:
        if "step" not in made:
            gc.collect()
            made["step"] = Step(stage, size, **kwargs)
        step = made["step"]
        join_layers(step.pair, mode)
        step.pair.forget_steps()
        graph = CUDA and "graph" in mode
        if graph:
            step.pair.record_steps()
        with contextlib.ExitStack() as levers:
            levers.enter_context(old_loss("old" in mode))
            if "compile" in mode:
                levers.enter_context(compiled_layers.compiled(step.pair.modules_to_compile()))
            for name in ATTENTION.keys() & mode.split():
                levers.enter_context(sdpa_kernel(ATTENTION[name]))
            found = step.times(5 if CUDA else 1, timed if CUDA else 1)
            if graph:
                found["recorded"] = step.pair._graph.recorded
            if mode in profiled:
                found["profile"] = step.profile()
            if graph and size != "1.2B":
                recorded, step.pair._graph = step.pair._graph, None
                plain, again = step.gradients(), step.gradients()
                step.pair._graph = recorded
                found["graph_against_eager"] = difference(step.gradients(), plain)
                found["eager_against_eager"] = difference(again, plain)
        if mode == modes[-1]:
            made.clear()
        return found

    kept = len(kwargs.get("keep", ()))
    for mode in modes:
        yield f"{size} {stage}, {kept} kept {kwargs.get('options') or ''}: {mode}", functools.partial(row, mode)


class Clock(TrainerCallback):
    def __init__(self):
        self.at = {}

    def on_train_begin(self, args, state, control, **kwargs):
        self.begin = sync()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % 5 == 0:
            self.at[state.global_step] = sync()


def through_trainer(
    stage: str, size: str, graph, compile: bool, mixer: str, keep=(), rows: int = 16, length: int = 1024
):
    """Tokens per second of a run, and the seconds that its first steps take more than later ones: what is compiled is
    compiled anew.
    """
    steps = 30 if CUDA else 12
    teacher, student = models(size, keep, MIXERS[mixer])
    vocabulary, clock = SIZES[size]["vocab_size"], Clock()
    data = TokenBlocks(torch.randint(3, vocabulary, (rows * length * steps,)), length)
    torch._dynamo.reset()
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder, torch._inductor.config.patch(force_disable_caches=True):
        result = train(
            student, teacher, data, folder, recipe=stage, stage=stage, steps=steps, warmup_steps=5, batch_size=rows,
            block_size=length, cuda_graph=graph, compile=compile, save_every=0, callbacks=[clock],
        )  # fmt: skip
    first, last = min(clock.at), max(clock.at)
    seconds = (clock.at[last] - clock.at[first]) / max(1, last - first)
    found = {
        "ms": round(seconds * 1e3, 1),
        "tokens_s": round(rows * length / seconds),
        "start_s": round(clock.at[first] - clock.begin - first * seconds, 1),
        "seconds": result["seconds"],
        "losses": [result["first_loss"], result["last_loss"]],
    }
    return found | ({"reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2)} if CUDA else {})


def product(size: str, mixers, keep=(), **shape):
    """Names and functions of the runs of a shape through the Trainer."""
    keep = [layer for layer in keep if layer < SIZES[size]["num_hidden_layers"]]
    for mixer, stage, compile in itertools.product(mixers, ("distill", "align"), (False, True)):
        name = f"{size} {stage}, {len(keep)} kept, {mixer}: Trainer, graph{', compile' if compile else ''}"
        yield name, functools.partial(through_trainer, stage, size, "auto", compile, mixer, keep, **shape)


def plan(size: str):
    """(name, function) of every row, made as they are needed; what matters most comes first."""
    small = {"rows": 2, "length": 64} if size == "tiny" else {}
    graph = ["fused graph"]
    yield "fused loss against float64", check_loss
    for stage in ("distill", "align"):
        yield from levers(stage, size, ["fused graph", "joined graph"], ["fused graph", "joined graph"], **small)
    compiled = ["compile graph", "padded compile graph"]
    yield from levers("distill", size, compiled, compiled, **small)
    yield from levers("align", size, compiled, compiled, **small)
    yield from levers("distill", size, ["fused", "old"], [], timed=4, **small)
    yield from levers("align", size, ["old"], [], timed=4, **small)
    yield from levers(
        "distill", size, [*graph, "math graph", "flash graph", "cudnn graph"], graph, keep=EIGHT, **small
    )
    yield from levers("align", size, graph, [], keep=EIGHT, **small)
    for options in ({"mixer": "window"}, {"local_window": 64}):
        yield from levers("distill", size, graph, [], options=options, **small)
    if size == "135M":
        yield from levers("distill", "1.2B", ["fused graph", "old"], graph, 4, rows=4, length=2048)
        yield from levers("align", "1.2B", ["fused graph", "old"], graph, 4, rows=4, length=2048)
    yield from product(size, ["gka"], **small)
    yield from product(size, ["gka"], EIGHT, **small)
    if size == "135M":
        yield from product("1.2B", ["gka"], rows=4, length=2048)
    others = [mixer for mixer in MIXERS if mixer != "gka"]
    yield from product(size, others, **small)
    plain = functools.partial(through_trainer, "distill", size, False, False, "gka", **small)
    yield f"{size} distill, 0 kept, gka: Trainer, plain", plain
    if size == "135M":
        yield from product("1.2B", others, rows=4, length=2048)
        yield from product("1.2B", ["gka"], EIGHT, rows=4, length=2048)
    yield from product(size, others, EIGHT, **small)


def too_long(*args):
    raise TimeoutError(f"the row took more than {ROW_SECONDS} seconds")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the script")
    parser.add_argument("--seconds", type=float, default=190.0, help="begin no further row after so many seconds")
    parser.add_argument("--only", default="", help="only the rows with this text in their name")
    parser.add_argument("--begun", type=float, help=argparse.SUPPRESS)  # when, and after how many rows; of a process
    parser.add_argument("--after", type=int, default=0, help=argparse.SUPPRESS)  # that goes on
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("hf_memmix").setLevel(logging.INFO)
    begin = args.begun or time.time()
    if not CUDA:
        compiled_layers.BACKEND = "aot_eager"
    faulthandler.dump_traceback_later(max(10.0, begin + args.seconds + 20 - time.time()), exit=True)
    signal.signal(signal.SIGALRM, too_long)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    rows = json.loads(args.out.read_text())["rows"] if args.after else []
    for count, (name, row) in enumerate(plan("tiny" if args.tiny else "135M")):
        if count < args.after or args.only not in name:
            continue
        at = time.time() - begin
        if at > args.seconds:
            print(f"no time left for {name}", flush=True)
            break
        signal.alarm(ROW_SECONDS)
        try:
            found = row()
        except Exception as error:
            found = {
                "error": f"{type(error).__name__}: {str(error)[:300]}",
                "traceback": traceback.format_exc()[-3000:],
            }
        signal.alarm(0)
        rows.append({"row": name, "at_s": round(at, 1), "took_s": round(time.time() - begin - at, 1)} | found)
        print(json.dumps({key: value for key, value in rows[-1].items() if key != "profile"}), flush=True)
        if "profile" in found and found["profile"]:
            profile = found["profile"]
            print(f"  {profile['kernels']} kernels, {profile['kernel_ms']} ms", flush=True)
            for key, kernels, ms in profile["top"]:
                print(f"  {ms:8.2f} ms {kernels:6d} x {key}", flush=True)
        write_json(args.out, {"experiment": "levers", "environment": environment(DEVICE), "rows": rows})
        if "error" in found:  # nothing of it may reach the next row
            sys.stdout.flush()
            again = ["--out", str(args.out), "--seconds", str(args.seconds), *(["--tiny"] if args.tiny else [])]
            again += ["--only", args.only, "--begun", str(begin), "--after", str(count + 1)]
            os.execv(sys.executable, [sys.executable, __file__, *again])
        row = None  # its models are not needed any more
        gc.collect()
        if CUDA:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
