"""Trains the small Llama that the package bundles as its teacher: loss = -mean log p(x_t | x_<t).

    python -m hf_memmix.training.experiments.bundled.pretrain_teacher --texts .scratch/teacher --stage first \\
        --out .scratch/teacher/first --metrics first_training.json

`fetch_text.py` writes the texts. The first stage learns a byte-level BPE tokenizer on the training text, then the
model (Touvron et al. 2023, arXiv:2302.13971, with grouped key/value heads and tied embeddings). Two further stages
(`STAGES`) train it on with drills of recall, each from the weights of the one before (`--start`). There every window
of text may have a row of drills beside it, and the loss is that of the text plus that of the answers. After each epoch
the losses on the development text are measured, and the weights with the lowest sum are kept. The held-out text is
read once, at the end.

The bundled weights are those of the stage "on". The stage "low" was stopped after 4 of its 7 epochs by the time limit
of its job, so stop it there. The weights repeat only nearly: a GPU adds in another order each time, and the rates of
"on" followed the clock for as long as the compilation made it run ahead of the steps (about the first ten epochs).
"""

import contextlib
import copy
import functools
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import transformers
import typer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader, Dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_memmix.conversion import load_model
from hf_memmix.conversion.records import commit, hardware, write_json
from hf_memmix.training.drills import material_of
from hf_memmix.training.experiments.bundled.language_model import (
    decay_matrices,
    losses_of_drills,
    matrices_of_layers,
    mean_loss,
    next_token_loss,
    without_masks,
)
from hf_memmix.training.experiments.bundled.muon import Muon
from hf_memmix.training.experiments.bundled.recall import DevRecall, DrilledWindows
from hf_memmix.training.experiments.common.options import check_names
from hf_memmix.training.text_files import read_text, text_record

END, PAD = "<|endoftext|>", "<|pad|>"


@dataclass(frozen=True)
class Stage:
    """What differs between the stages.

    Args:
        epochs: readings of the training text.
        lr: rate of AdamW; `muon_lr`: of Muon for the matrices of the layers, None for AdamW.
        weight_decay: strong, because the text is read many times.
        patience: epochs without a lower loss on the development text before the training ends.
        drills: whether rows of drills stand beside the text: beside every window of the first `short_epochs`, whose
            windows are short, and of every `drill_every`-th one afterwards. Then the answers weigh `answer_weight`.
        seconds: time limit, at which the learning rate is zero.
        probe_every: epochs between probes of recall in development text.
    """

    epochs: int
    lr: float
    weight_decay: float
    muon_lr: float | None = None
    patience: int = 99
    drills: bool = False
    short_epochs: int = 0
    drill_every: int = 4
    answer_weight: float = 0.3
    seconds: float | None = None
    probe_every: int = 4
    workers: int = 0
    seed: int = 0


STAGES = {
    "first": Stage(28, 3e-3, 1.0, patience=8),
    "low": Stage(7, 7.5e-4, 0.3, muon_lr=5e-3, drills=True, short_epochs=2, workers=2),
    # another seed: with the same one it would see the same batches again
    "on": Stage(24, 4.5e-4, 0.3, muon_lr=3e-3, drills=True, seconds=166, probe_every=3, workers=3, seed=1),
}


@dataclass(frozen=True)
class Sizes:
    """The sizes of the model, of the tokenizer, and of a step: `rows` windows of `context` tokens."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 640
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    context: int = 1024
    short_context: int = 256
    rows: int = 16


WARM_UP, DROPOUT, LOG_EVERY, DEV_SAMPLES = 200, 0.1, 50, 2


class ShiftedWindows(Dataset):
    """Non-overlapping windows of `length` tokens over one stream `ids` [N]; each epoch starts at another offset."""

    def __init__(self, ids: torch.Tensor, length: int):
        if len(ids) < 2 * length:
            raise ValueError(
                f"the training text has {len(ids)} tokens, fewer than two windows of {length}: give more text"
            )
        self.ids, self.length, self.offset = ids, length, 0

    def __len__(self) -> int:
        return len(self.ids) // self.length - 1

    def __getitem__(self, index: int) -> torch.Tensor:
        start = self.offset + index * self.length
        return self.ids[start : start + self.length]


def read_documents(path: Path) -> str:
    """The text of a file. Raises ValueError when it is missing, binary, or holds nothing but separators."""
    text = read_text(path)
    if not text.replace(END, "").strip():
        raise ValueError(f"{str(path)!r} holds no text; name a file with at least one document")
    return text


def train_tokenizer(text: str, vocab_size: int, context: int) -> PreTrainedTokenizerFast:
    """Learn byte-level BPE with bos = eos = `END`; the white space around `END` belongs to it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    end = AddedToken(END, special=True, lstrip=True, rstrip=True, normalized=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[end, AddedToken(PAD, special=True, normalized=False)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.split(f"\n{END}\n"), trainer)
    # bos is not prepended by itself: text may then be encoded piecewise
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=end, eos_token=end, pad_token=PAD, model_max_length=context
    )


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> torch.Tensor:
    """Encode a whole file as one stream [N] of token ids, int64."""
    return torch.tensor(tokenizer(text, verbose=False)["input_ids"])


def build_model(sizes, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama with the sizes of `Sizes`, or of an object with the same fields."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        max_position_embeddings=sizes.context,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def add_dropout(model: LlamaForCausalLM, p: float) -> None:
    """Add dropout to the embeddings and to the outputs of each attention and MLP, during training.

    The Llama of transformers has only attention dropout. Hooks do not change its code or its saved config.
    """

    def hook(module, _, output):
        if isinstance(output, tuple):
            return (F.dropout(output[0], p, module.training), *output[1:])
        return F.dropout(output, p, module.training)

    model.model.embed_tokens.register_forward_hook(hook)
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(hook)
        layer.mlp.register_forward_hook(hook)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


def optimizers_of(model: LlamaForCausalLM, stage: Stage) -> list[torch.optim.Optimizer]:
    """AdamW for all parameters; with `stage.muon_lr`, Muon for the matrices of the layers.

    Muon decays weights by the same share per step as AdamW.
    """
    if stage.muon_lr is None:
        matrices, rest = [], model.parameters()
    else:
        matrices, rest = matrices_of_layers(model)
    fused = True if matrices and torch.cuda.is_available() else None
    adam = torch.optim.AdamW(decay_matrices(rest, stage.weight_decay), lr=stage.lr, betas=(0.9, 0.95), fused=fused)
    if not matrices:
        return [adam]
    return [adam, Muon(matrices, lr=stage.muon_lr, weight_decay=stage.weight_decay * stage.lr / stage.muon_lr)]


def windows_of(ids: torch.Tensor, length: int, stage: Stage, sizes: Sizes, material) -> DataLoader:
    """The loader of windows of `length` tokens; a batch has as many tokens of text at every length."""
    windows, rows = ShiftedWindows(ids, length), sizes.rows * sizes.context // length
    items, options = windows, {"num_workers": stage.workers, "pin_memory": torch.cuda.is_available()}
    if material is not None:
        items = DrilledWindows(windows, material, stage.seed, stage.drill_every if length == sizes.context else 1)
        options["collate_fn"] = as_it_is
    return DataLoader(items, batch_size=rows, shuffle=True, drop_last=len(windows) >= rows, **options)


def as_it_is(batch):
    """The batch, which its data set has already stacked."""
    return batch


def loss_of(model, batch, answers_too) -> torch.Tensor:
    """The losses [1], or of text and of answers [2], of a batch: (windows,), or (windows, drills, weights)."""
    if len(batch) == 1:
        return next_token_loss(model, batch[0])[None]
    text, drills, weights = batch
    ids, weights = torch.cat([text, drills]), torch.cat([weights.new_zeros(text.shape), weights])
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return torch.stack(answers_too(logits, ids, weights, len(text)))


class Clock:
    """The share of a time limit that has passed since the first question; always 0 without a limit."""

    def __init__(self, seconds: float | None):
        self.seconds, self.began = seconds, None

    def share(self) -> float:
        if self.seconds is None:
            return 0.0
        self.began = time.time() if self.began is None else self.began
        return (time.time() - self.began) / self.seconds


def rate_at(step: int, clock: Clock, warmup: int, total: int) -> float:
    """The learning rate as a share of its maximum: a linear warm-up, then a cosine to zero.

    The cosine ends after `total` steps or, if this is earlier, at the limit of the clock.
    """
    if step < warmup:
        return step / max(1, warmup)
    progress = max((step - warmup) / max(1, total - warmup), clock.share())
    return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def train(
    stage: Stage, texts: dict[str, str], out: Path, start: Path | None, metrics: Path, sizes: Sizes | None = None
) -> dict:
    """Train a stage, write the best model and its tokenizer to `out`, and return a record.

    The record of the epochs so far is written to `metrics` after each one.

    Args:
        texts: the contents of "train", "dev" and "heldout".
        start: the folder of the stage before, whose tokenizer and sizes stay.

    Raises:
        ValueError: a text is too short, or the loss is not finite.
    """
    device, sizes = torch.device("cuda" if torch.cuda.is_available() else "cpu"), sizes or Sizes()
    autocast = functools.partial(torch.autocast, device.type, torch.bfloat16, enabled=device.type == "cuda")
    torch.manual_seed(stage.seed)
    if start is None:
        tokenizer = train_tokenizer(texts["train"], sizes.vocab_size, sizes.context)
        model = build_model(sizes, tokenizer)
    else:
        tokenizer, model = AutoTokenizer.from_pretrained(start), load_model(start, torch.float32)
    add_dropout(model.to(device), DROPOUT)
    ids = {name: encode(tokenizer, text) for name, text in texts.items()}
    material, dev_recall, answers_too = None, None, losses_of_drills
    if stage.drills:
        material = material_of(tokenizer, ids["train"], texts["heldout"])
        dev_material = material_of(tokenizer, ids["dev"], texts["heldout"])
        dev_recall = DevRecall(tokenizer, texts["dev"], dev_material, sizes.context, DEV_SAMPLES)
    lengths = [sizes.short_context] * stage.short_epochs + [sizes.context] * (stage.epochs - stage.short_epochs)
    loaders = {n: windows_of(ids["train"], n, stage, sizes, material) for n in dict.fromkeys(lengths)}
    if stage.drills and device.type == "cuda":
        torch._dynamo.config.suppress_errors = True  # a part that cannot be compiled runs as it is
        for layer in model.model.layers:
            layer.compile(dynamic=False)
        answers_too = torch.compile(losses_of_drills, dynamic=False)
    optimizers, total = optimizers_of(model, stage), sum(len(loaders[n]) for n in lengths)
    clock = Clock(stage.seconds)
    rate = functools.partial(rate_at, clock=clock, warmup=min(WARM_UP, total // 10), total=total)
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, rate) for optimizer in optimizers]
    record = {
        "arguments": asdict(stage) | asdict(sizes),
        "parameters": model.num_parameters(),
        "tokens": {name: len(x) for name, x in ids.items()},
        "bytes_per_token": round(len(texts["train"].encode()) / len(ids["train"]), 3),
        "hardware": hardware(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "commit": commit(),
        "steps": [],
        "epochs": [],
    }
    best, best_epoch, step, seen, began = math.inf, 0, 0, 0, time.time()
    offsets = torch.Generator().manual_seed(stage.seed)
    for epoch, length in enumerate(lengths, 1):
        data = loaders[length].dataset
        windows = data.windows if stage.drills else data
        windows.offset, data.epoch = int(torch.randint(length, (1,), generator=offsets)), epoch
        model.train()
        losses, weights = [], torch.ones(1 + stage.drills, device=device)
        weights[1:] = stage.answer_weight if length == sizes.context else 1.0
        with without_masks(model) if stage.drills else contextlib.nullcontext():
            for batch in loaders[length]:
                batch = [part.to(device, non_blocking=True) for part in ([batch] if torch.is_tensor(batch) else batch)]
                with autocast():
                    loss = loss_of(model, batch, answers_too)
                (loss @ weights).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                for optimizer, schedule in zip(optimizers, schedules, strict=True):
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                losses.append(loss.detach())
                step, seen = step + 1, seen + sum(part.numel() for part in batch[:2])
                if step % LOG_EVERY == 0 or step == total:
                    seconds = {"seconds": round(time.time() - began, 2)}
                    record["steps"].append({"step": step} | train_losses(loss) | seconds)
                if clock.share() >= 1:
                    break
        ends = step == total or clock.share() >= 1
        row = {"epoch": epoch, "step": step} | train_losses(torch.stack(losses).mean(0))
        with torch.compiler.set_stance("force_eager"), autocast():  # other shapes are not compiled
            dev = mean_loss(model, ids["dev"], sizes.context)
            row["dev_loss"] = round(dev, 4)
            if dev_recall is not None:
                row |= dev_recall.measure(model, epoch % stage.probe_every == 0 or ends)
        dev += row.get("dev_answers", 0.0)
        if not math.isfinite(dev):
            raise ValueError(f"the dev loss became {dev} at step {step}: lower the rate of the stage, {stage.lr}")
        row["seconds"] = round(time.time() - began, 1)
        record["epochs"].append(row)
        print(json.dumps(row), flush=True)
        if dev < best:
            best, best_epoch = dev, epoch
            save(model, tokenizer, out)
        record |= {"best_epoch": best_epoch, "wall_seconds": row["seconds"], "tokens_seen": seen}
        write_json(metrics, record)
        if epoch - best_epoch >= stage.patience or ends:
            break
    return record


def train_losses(losses: torch.Tensor) -> dict[str, float]:
    """The rounded losses [1] of text, or [2] of text and of answers, for the record."""
    names = ("train_loss", "train_answers")
    return {name: round(value, 4) for name, value in zip(names, losses.tolist(), strict=False)}


def measure_export(folder: Path, heldout: Path, context: int, device="cpu") -> dict:
    """The loss of the saved teacher in `folder` on the held-out text, in windows of `context` tokens."""
    text = read_documents(heldout)
    model = load_model(folder, torch.float32).to(device)
    ids = encode(AutoTokenizer.from_pretrained(folder), text)
    loss = mean_loss(model, ids, context)
    predicted = len(ids) - math.ceil(len(ids) / context)
    return {
        "text": text_record(heldout),
        "loss": round(loss, 4),
        "perplexity": round(math.exp(loss), 3),
        "bits_per_byte": round(loss * predicted / math.log(2) / len(text.encode()), 4),
        "window": context,
        "arithmetic": "float32 on the saved bfloat16 weights",
    }


def main(
    texts: Annotated[Path, typer.Option(help="folder that fetch_text.py wrote")],
    stage: Annotated[str, typer.Option(help=", ".join(STAGES))],
    out: Annotated[Path, typer.Option(help="folder for the model and its tokenizer")],
    metrics: Annotated[Path, typer.Option(help="JSON file for the record of the run")],
    start: Annotated[Path | None, typer.Option(help="folder of the stage before")] = None,
) -> None:
    """Train one stage of the bundled teacher and write its folder."""
    check_names("--stage", [stage], STAGES)
    if (start is None) != (stage == "first"):
        raise typer.BadParameter(f"{stage!r} {'needs' if start is None else 'has no'} --start", param_hint="--start")
    found = {name: read_documents(texts / f"{name}.txt") for name in ("train", "dev", "heldout")}
    record = train(STAGES[stage], found, out, start, metrics)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    record["heldout"] = measure_export(out, texts / "heldout.txt", record["arguments"]["context"], device)
    write_json(metrics, record)


if __name__ == "__main__":
    typer.run(main)
