"""How much of the teacher's recall does a pure student keep after a longer training that asks for recall?

    python training/experiments/recall_teacher/raised.py --teacher .scratch/teacher --data .scratch/recall \\
        --seconds 150 --record training/experiments/recall_teacher/results/raised.json

One student without kept layers is aligned and distilled on the same GPU for a fixed time, or on a fixed number of
tokens. It differs from the students of `grid.py` in this: many times more tokens, in drills that never come again;
half-lives of 16 to 4096 tokens at the start; the loss is the KL to the teacher over tokens of text plus the KL over
the answers of the drills; the gates, which decide what a memory forgets, have their own rate. Recall on development
text is measured on the way, so the record shows recall by tokens read.
"""

import json
import math
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import torch
import typer
from torch import Tensor

from hf_memmix.conversion import convert_model
from hf_memmix.conversion.families import attention_module
from hf_memmix.conversion.records import environment, write_json
from hf_memmix.serving.footprint import Footprint
from hf_memmix.training.drills import DrillMaterial
from hf_memmix.training.experiments.bundled.drill_batches import DRILL_TEXT, batches_of
from hf_memmix.training.experiments.common.harness import device
from hf_memmix.training.experiments.common.options import check_names
from hf_memmix.training.experiments.recall_teacher.probing import drawn, quick_gate
from hf_memmix.training.experiments.recall_teacher.students import (
    RAISED_LAYOUTS,
    START_DECAY,
    measured,
    teacher_of,
)
from hf_memmix.training.experiments.recall_teacher.texts import material_of, probe_materials, tokens_of
from hf_memmix.training.student_teacher import AlignStudentTeacher

# parameters of decay, beta and alpha; of Lattice's steps
GATES = re.compile(r"\b(a_proj|b_proj|alpha_proj|A_log|dt_bias|gamma_proj)\b")
WARM_UP = 40  # steps of each stage
CHECKS = 6  # measurements of recall on the way, in `distill`


def divergences(ours: Tensor, theirs: Tensor, heads: tuple[Tensor, Tensor], weights: Tensor, text: int):
    """The forward KL of text and of answers, in nats per token.

    ours, theirs: last hidden states [B, T, D]; heads: [V, D] of student and teacher; weights of answers [B, T]; the
    first `text` rows are real text. Tokens of drills that are no answers have the weight `DRILL_TEXT`, as in the
    teacher's training.
    """
    logq, logp = (
        (hidden[:, :-1] @ head.to(hidden.dtype).T).float().log_softmax(-1)
        for hidden, head in zip((ours, theirs), heads, strict=True)
    )
    kl = (logp.exp() * (logp - logq)).sum(-1)
    answers = weights[:, 1:]
    plain = (answers == 0).float()
    plain = torch.cat([plain[:text], DRILL_TEXT * plain[text:]])
    return (kl * plain).sum() / plain.sum(), (kl * answers).sum() / answers.sum().clamp_min(1)


def rate(step: int, progress: float) -> float:
    """The learning rate at a share `progress` of a stage's time, as a share of its maximum: a cosine after warm-up."""
    return min(1.0, (step + 1) / WARM_UP) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def optimizer_of(named: list, lr: float, gate_lr: float, rest_lr: float) -> torch.optim.Optimizer:
    """AdamW with the rates of mixers, of their gates and of all other parameters, for (name, parameter, is mixer)."""
    rates: dict[float, list] = {}
    for name, parameter, is_mixer in named:
        own = (gate_lr if GATES.search(name) else lr) if is_mixer else rest_lr
        rates.setdefault(own, []).append(parameter)
    groups = [{"params": found, "lr": own, "highest": own} for own, found in rates.items()]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0, fused=device().type == "cuda")


def compile_parts(model) -> None:
    """Compile what is not the mixer: the MLPs and the norms of the layers.

    They are compiled for the rows of training only. Probes have many shapes and run `without_compiled_parts`:
    otherwise each new number of rows and length would compile every part again, up to torch's limit of eight.
    """
    torch._dynamo.config.suppress_errors = True  # a part that cannot be compiled runs as it is
    for layer in model.model.layers:
        for part in (layer.mlp, layer.input_layernorm, layer.post_attention_layernorm):
            part.compile(dynamic=False)


def without_compiled_parts():
    """A context in which compiled parts run as they were before they were compiled."""
    return torch.compiler.set_stance("force_eager")


def stage(name: str, part: float, loss_of, optimizer, batches, args, check=None) -> dict:
    """Train for a part of `args.tokens`, or of `args.seconds` if it ends first; `check` does not count as time.

    loss_of(ids, weights) returns the loss and the figures to log; check(step, tokens) measures the student on the way.
    """
    began, away, step, seen, curve, checked, last = time.time(), 0.0, 0, 0, [], 0, None
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def progress_now() -> float:
        return max((time.time() - began - away) / args.seconds, seen / (args.tokens or math.inf)) / part

    while (progress := progress_now()) < 1:
        ids, weights = (x.to(device(), non_blocking=True) for x in next(batches))
        factor = rate(step, progress)
        for group in optimizer.param_groups:
            group["lr"] = factor * group["highest"]
        with torch.autocast(device().type, torch.bfloat16, enabled=device().type == "cuda"):
            loss, last = loss_of(ids.long(), weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step, seen = step + 1, seen + ids.numel()
        if step % args.log_every == 0 or step == 1:
            curve.append({"step": step, "tokens": seen} | {k: round(v.item(), 4) for k, v in last.items()})
            if not all(math.isfinite(value) for value in curve[-1].values()):
                raise ValueError(f"{name} diverged: {curve[-1]}; lower the rates")
            print(name, curve[-1], f"{time.time() - began:.0f} s", flush=True)
        if check is not None and int(progress * CHECKS) > checked:
            checked, paused = int(progress * CHECKS), time.time()
            check(step, seen)
            away += time.time() - paused
    return {"steps": step, "tokens": seen, "seconds": round(time.time() - began - away, 1), "curve": curve}


def train(args: SimpleNamespace) -> tuple:
    """The trained student, its teacher and the record of both stages."""
    torch.set_float32_matmul_precision("high")
    teacher_data = material_of(args.data, "heldout")
    few = drawn(probe_materials(args.data, filler="dev"), [args.gate_length], args.few, seed=1)
    teacher_tokens = tokens_of(args.data, "train")
    tokenizer = teacher_data.tokenizer
    material = DrillMaterial(tokenizer, teacher_tokens, teacher_data)
    batches = batches_of(material, args.block_size, args)  # before CUDA starts
    teacher = teacher_of(args.teacher)
    name, options, half_lives = RAISED_LAYOUTS[args.layout]
    student = convert_model(teacher, name, seed=args.seed, mixers={name: options}).float().to(device())
    layers = student.config.memory_layers
    if half_lives is not None:
        for layer in layers:
            START_DECAY[name](attention_module(student, layer), half_lives)
    record = {"state_bytes": Footprint.of(student.config, torch.float32).state_bytes(), "checks": []}
    if args.compile:
        compile_parts(student)
        compile_parts(teacher)

    pair = AlignStudentTeacher(student, teacher, bf16=device().type == "cuda").to(device())
    named = [(name, p, True) for name, p in pair.mixers.named_parameters()]

    def align_loss(ids: Tensor, weights: Tensor):
        error = pair.loss(ids, None)
        return error, {"error": error.detach()}

    optimizer = optimizer_of(named, args.align_lr, args.align_lr, args.align_lr)
    record["align"] = stage("align", args.align_share, align_loss, optimizer, batches, args)

    student.requires_grad_(True)
    inside = {id(p) for layer in layers for p in attention_module(student, layer).parameters()}

    kl_of = torch.compile(divergences, dynamic=False) if args.compile else divergences
    heads = student.lm_head.weight, teacher.lm_head.weight

    def distill_loss(ids: Tensor, weights: Tensor):
        with torch.no_grad():
            theirs = teacher.model(input_ids=ids, use_cache=False).last_hidden_state
        ours = student.model(input_ids=ids, use_cache=False).last_hidden_state
        text, answers = kl_of(ours, theirs, heads, weights, len(ids) // 2)
        return text + args.answer_weight * answers, {"text": text.detach(), "answers": answers.detach()}

    def check(step: int, tokens: int):
        with without_compiled_parts():
            gate = quick_gate(student, few, args.gate_length)
        record["checks"].append({"step": step, "tokens": tokens} | gate)
        print(record["checks"][-1], flush=True)

    named = [(name, p, id(p) in inside) for name, p in student.named_parameters()]
    optimizer = optimizer_of(named, args.lr, args.gate_lr, args.rest_lr)
    record["distill"] = stage("distill", 1 - args.align_share, distill_loss, optimizer, batches, args, check)
    return student.eval(), teacher, record


def main(
    teacher: Annotated[Path, typer.Option(help="folder of the recall teacher")],
    data: Annotated[Path, typer.Option(help="folder that corpus.py wrote")],
    record: Annotated[Path, typer.Option(help="JSON file for the figures")],
    layout: Annotated[str, typer.Option(help="a layout of grid.py, or of students.py")] = "gka, long",
    seconds: Annotated[float, typer.Option(help="time limit of align and distill together")] = 150,
    tokens: Annotated[
        float | None, typer.Option(help="tokens of align and distill together; default: the time decides")
    ] = None,
    align_share: Annotated[float, typer.Option(help="share of align")] = 0.25,
    batch_tokens: Annotated[int, typer.Option(help="tokens per optimizer step")] = 32768,
    block_size: int = 2048,
    align_lr: float = 5e-3,
    lr: Annotated[float, typer.Option(help="learning rate of the mixers in distill")] = 2e-3,
    gate_lr: Annotated[float, typer.Option(help="learning rate of the gates in distill")] = 6e-3,
    rest_lr: Annotated[float, typer.Option(help="learning rate of all other parameters in distill")] = 5e-4,
    answer_weight: float = 1.0,
    workers: Annotated[int, typer.Option(help="processes that make the rows")] = 6,
    compile: Annotated[bool, typer.Option(help="compile MLPs, norms and the loss")] = True,
    log_every: int = 25,
    gate_length: int = 1024,
    lengths: Annotated[list[int], typer.Option(help="lengths of the probes at the end; repeatable")] = (
        256,
        512,
        1024,
        2048,
    ),
    samples: Annotated[int, typer.Option(help="probes per length and depth")] = 12,
    few: Annotated[int, typer.Option(help="probes per depth on the way, in development text")] = 4,
    measured_tokens: int = 65_536,
    seed: int = 0,
) -> None:
    """Train the student, then measure it beside its teacher."""
    values = dict(locals())
    check_names("--layout", [layout], RAISED_LAYOUTS)
    args = SimpleNamespace(**values)
    settings = {key: str(value.name) if isinstance(value, Path) else value for key, value in values.items()}
    results = {"experiment": "recall_raised", "environment": environment(device()), "settings": settings}
    student, theirs, trained = train(args)
    results |= trained
    write_json(record, results)
    with without_compiled_parts():
        results |= measured(student, theirs, args)
    write_json(record, results)
    print(json.dumps({key: results[key] for key in ("heldout_ppl_ratio", "heldout_kl")}))


if __name__ == "__main__":
    typer.run(main)
