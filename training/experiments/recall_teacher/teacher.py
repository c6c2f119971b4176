"""Trains a small Llama that uses its context: half of its training rows are text and code, the other half is recall.

    python training/experiments/recall_teacher/corpus.py --out .scratch/recall --record sources.json
    python training/experiments/recall_teacher/teacher.py --data .scratch/recall --out .scratch/teacher \\
        --record training/experiments/recall_teacher/results/teacher.json --seconds 260

The loss is the mean cross-entropy of text, plus the mean over the answers of the drills. Matrices are trained by Muon,
embeddings and norms by AdamW. Rows have 512 tokens in the first half of the time and 2048 in the second. All
schedules follow the time, not a number of steps: the run ends at its limit on any machine, but two runs do not have
equal weights. `--start` trains on from the weights of an earlier run.

At the end the teacher is measured: held-out loss, the cost of a shorter context, recall on held-out words, and the
gate.
"""

import copy
import json
import math
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import numpy
import torch
import torch.nn.functional as F
import typer
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM

from hf_memmix.conversion import load_model
from hf_memmix.conversion.records import environment, write_json
from hf_memmix.training.drills import DrillMaterial
from hf_memmix.training.experiments.bundled.drill_batches import batches_of, losses_of_drills
from hf_memmix.training.experiments.bundled.language_model import matrices_of_layers, mean_loss, without_masks
from hf_memmix.training.experiments.bundled.muon import Muon
from hf_memmix.training.experiments.bundled.pretrain_teacher import build_model
from hf_memmix.training.experiments.common.harness import device
from hf_memmix.training.experiments.recall_teacher.probing import drawn, gate_of, quick_gate, recall_of
from hf_memmix.training.experiments.recall_teacher.texts import (
    WORDS,
    material_of,
    probe_materials,
    tokens_of,
    write_words,
)

CONTEXT = 2048
WARM_UP = 100  # steps
FLAT = 0.4  # share of the time with the full learning rate; it falls linearly afterwards
CONTEXTS = (64, 256, 1024)  # tokens before a token whose loss is measured with the context cut


def build(args: SimpleNamespace, tokenizer) -> LlamaForCausalLM:
    torch.manual_seed(args.seed)
    return build_model(SimpleNamespace(**vars(args), context=CONTEXT), tokenizer)


def losses(hidden: Tensor, head: Tensor, ids: Tensor, weights: Tensor, text: int) -> tuple[Tensor, Tensor]:
    """The losses of text and of answers.

    hidden [B, T, D], head [V, D], ids [B, T], weights of answers [B, T]; the first `text` rows are real text.
    """
    return losses_of_drills(hidden[:, :-1] @ head.to(hidden.dtype).T, ids, weights, text)


def optimizers_of(model, args: SimpleNamespace) -> list[torch.optim.Optimizer]:
    inner, rest = matrices_of_layers(model)
    adam = torch.optim.AdamW(rest, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=model.device.type == "cuda")
    return [Muon(inner, lr=args.muon_lr, weight_decay=0.1), adam]


def rate(step: int, progress: float) -> float:
    """The learning rate at a share `progress` of the time, as a share of its maximum."""
    return min(1.0, (step + 1) / WARM_UP) * min(1.0, max(0.02, (1 - progress) / (1 - FLAT)))


def save(plain, tokenizer, out: Path) -> None:
    copy.deepcopy(plain).to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


def compiled(model, args: SimpleNamespace):
    """The loss function; with `--compile`, it and the decoder layers are compiled, each kind once."""
    if not args.compile:
        return losses
    torch._dynamo.config.suppress_errors = True  # a part that cannot be compiled runs as it is
    for layer in model.model.layers:
        layer.compile(dynamic=False)
    return torch.compile(losses, dynamic=False)


def train(args: SimpleNamespace) -> dict:
    """Train until `args.seconds` have passed and return the record of the training."""
    began = time.time()
    torch.set_float32_matmul_precision("high")
    tokenizer = AutoTokenizer.from_pretrained(args.data)
    probes = material_of(args.data, "heldout")
    material = DrillMaterial(tokenizer, tokens_of(args.data, "train"), probes)
    if not (args.data / WORDS).exists():
        write_words(args.data, material.keys, material.values)
    lengths = list(args.lengths)
    batches = {length: batches_of(material, length, args) for length in sorted(set(lengths))}
    model = build(args, tokenizer) if args.start is None else load_model(args.start, dtype=torch.float32)
    model = model.to(device()).train()
    plain = copy.deepcopy(model)  # is saved and probed: other shapes would compile the layers again
    optimizers, loss_of = optimizers_of(model, args), compiled(model, args)
    on_gpu = model.device.type == "cuda"
    parameters = list(model.parameters())
    few = drawn(probe_materials(args.data, filler="dev"), [args.gate_length], args.few, seed=1)
    record = {"parameters": model.num_parameters(), "curve": [], "gates": []}
    step, seen, saved, checked = 0, 0, began, 0
    sums, summed = torch.zeros(2, device=model.device), 0
    training_began = time.time()
    limit = max(1.0, args.seconds - (training_began - began))
    while (progress := (time.time() - training_began) / limit) < 1:
        length = lengths[min(len(lengths) - 1, int(progress * len(lengths)))]
        ids, weights = (x.to(model.device, non_blocking=True) for x in next(batches[length]))
        ids = ids.long()
        with torch.autocast(model.device.type, torch.bfloat16, enabled=on_gpu), without_masks(model):
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
            text, answers = loss_of(hidden, model.lm_head.weight, ids, weights, len(ids) // 2)
        (text + args.answer_weight * answers).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        factor = rate(step, progress)
        for optimizer, highest in zip(optimizers, (args.muon_lr, args.lr), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = factor * highest
            optimizer.step()
            optimizer.zero_grad()
        sums += torch.stack([text.detach(), answers.detach()])
        step, summed, seen = step + 1, summed + 1, seen + ids.numel()
        if step % args.log_every == 0 or step == 1:
            text, answers = (sums / summed).tolist()
            sums, summed = sums.zero_(), 0
            now = time.time()
            row = {"step": step, "tokens": seen, "seconds": now - training_began, "text": text, "answers": answers}
            record["curve"].append({key: round(value, 4) for key, value in row.items()})
            if not math.isfinite(text + answers):
                raise ValueError(f"at step {step} the loss is {text} of text, {answers} of answers; lower the rates")
            print(f"step {step} tokens {seen / 1e6:.1f}M length {length} text {text:.3f} answers {answers:.3f}"
                  f" rate {factor:.2f} time {now - began:.0f} s", flush=True)  # fmt: skip
            if now - saved > args.save_every:
                plain.load_state_dict(model.state_dict())
                save(plain, tokenizer, args.out)
                saved = now
            if int(progress * args.checks) > checked:
                checked = int(progress * args.checks)
                plain.load_state_dict(model.state_dict())
                record["gates"].append({"step": step, "tokens": seen} | quick_gate(plain, few, args.gate_length))
                print(record["gates"][-1], f"{time.time() - now:.1f} s", flush=True)
    record |= {"steps": step, "tokens": seen}
    record["training_seconds"] = round(time.time() - training_began, 1)
    plain.load_state_dict(model.state_dict())
    save(plain, tokenizer, args.out)
    record["dev_gate"] = quick_gate(plain, few, args.gate_length)  # decides between runs
    return record


@torch.no_grad()
def context_use(model, tokens: Tensor, count: int) -> list[dict]:
    """The loss of `count` tokens after a context of each of `CONTEXTS`, in nats per token."""
    positions = torch.linspace(max(CONTEXTS), len(tokens) - 1, count).long()
    rows = []
    for context in CONTEXTS:
        total = 0.0
        for at in positions.split(max(1, 32768 // context)):
            windows = tokens[at[:, None] - context + torch.arange(context)].to(model.device)
            logits = model(input_ids=windows, use_cache=False, logits_to_keep=1).logits[:, -1].float()
            total += F.cross_entropy(logits, tokens[at].to(model.device), reduction="sum").item()
        rows.append({"context": context, "loss": total / count})
    return rows


def probes_of(data: Path, lengths: list[int], samples: int) -> dict:
    return drawn(probe_materials(data), lengths, samples)


def measure(folder: Path, data: Path, args: SimpleNamespace, probes: dict) -> dict:
    """The figures of a saved teacher, in float32 on its bfloat16 weights."""
    model = load_model(folder, dtype=torch.float32).to(device()).eval()
    streams = {name: torch.from_numpy(tokens_of(data, name).astype(numpy.int64)) for name in ("heldout", "domain")}
    result = {"loss": {}, "context_use": {}}
    for name, stream in streams.items():
        result["loss"][name] = mean_loss(model, stream[: args.measured_tokens], 1024)
        result["context_use"][name] = context_use(model, stream[: args.measured_tokens], args.positions)
    result["recall"] = recall_of(model, probes)
    result["gate"] = gate_of(result["recall"])
    return result


def main(
    data: Annotated[Path, typer.Option(help="folder that corpus.py wrote")],
    out: Annotated[Path, typer.Option(help="folder for the teacher and its tokenizer")],
    record: Annotated[Path, typer.Option(help="JSON file for the figures")],
    seconds: Annotated[float, typer.Option(help="time limit of the training; measuring comes after it")] = 240,
    start: Annotated[Path | None, typer.Option(help="teacher to train on from")] = None,
    hidden_size: int = 384,
    intermediate_size: int = 1024,
    layers: int = 12,
    heads: int = 6,
    kv_heads: int = 3,
    batch_tokens: Annotated[int, typer.Option(help="tokens per optimizer step")] = 65536,
    lengths: Annotated[list[int], typer.Option(help="tokens of a row, in equal parts of the time")] = (512, 2048),
    muon_lr: float = 0.02,
    lr: Annotated[float, typer.Option(help="learning rate of AdamW")] = 3e-3,
    answer_weight: float = 1.0,
    workers: Annotated[int, typer.Option(help="processes that make the rows of each length")] = 7,
    compile: Annotated[bool, typer.Option(help="use torch.compile")] = True,
    log_every: int = 50,
    checks: Annotated[int, typer.Option(help="parts of the training, after each of which recall is measured")] = 8,
    save_every: Annotated[float, typer.Option(help="seconds between checkpoints")] = 60,
    gate_length: Annotated[int, typer.Option(help="length of the probes during training")] = 1024,
    probe_lengths: Annotated[list[int], typer.Option(help="lengths of the probes at the end")] = (
        128,
        256,
        512,
        1024,
        2048,
    ),
    samples: Annotated[int, typer.Option(help="probes per length and depth")] = 20,
    few: Annotated[int, typer.Option(help="probes per depth during training, in development text")] = 6,
    measured_tokens: int = 200_000,
    positions: Annotated[int, typer.Option(help="tokens whose loss is measured with the context cut")] = 1000,
    seed: int = 0,
) -> None:
    """Train the teacher, then measure it."""
    values = dict(locals())
    args = SimpleNamespace(**values)
    settings = {key: str(value.name) if isinstance(value, Path) else value for key, value in values.items()}
    results = {"experiment": "recall_teacher", "environment": environment(device()), "settings": settings}
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:  # draws the probes while it trains
        probes = pool.submit(probes_of, data, probe_lengths, samples)
        results |= train(args)
        write_json(record, results)
        results |= measure(out, data, args, probes.result())
        write_json(record, results)
    print(json.dumps({"gate": results["gate"], "loss": results["loss"]}))


if __name__ == "__main__":
    typer.run(main)
