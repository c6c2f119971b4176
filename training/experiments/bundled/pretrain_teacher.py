"""Train the small Llama that the package bundles as its teacher: loss = -mean log p(x_t | x_<t).

    python fetch_text.py --out .scratch/teacher
    python pretrain_teacher.py --train .scratch/teacher/train.txt \\
        --dev .scratch/teacher/dev.txt --heldout .scratch/teacher/heldout.txt \\
        --out .scratch/teacher/model --metrics .scratch/teacher/metrics.json

Learns a byte-level BPE tokenizer on the training text, then the model (Touvron et al. 2023, arXiv:2302.13971, with
grouped key/value heads and tied embeddings). After each epoch the loss on the dev text is measured and the best
weights are kept. The run ends after `--patience` epochs without an improvement. The held-out text is read once, at the
end. Text files hold documents separated by a line `<|endoftext|>`, which is the tokenizer's bos and eos.

With `--drills`, every window of text has a row of drills of recall beside it (drills.py), and the loss is that of the
text plus that of the answers. After the short epochs the answers may weigh less, and only every `--drill-every`-th
window has drills. The epoch with the lowest sum of both losses on the development text is kept. `--start` trains on
from the weights and the tokenizer of an earlier run, not from its optimizer and its place in the text; with the same
`--seed` it sees the same batches again, so give another one.

The bundled weights come from three stages. The command above, 28 epochs of text without drills, made the first bundled
transformer. The run `low` of README.md trained it on:

    python pretrain_teacher.py --train ... --start .scratch/teacher/model --drills \\
        --out .scratch/teacher/low --muon-lr 0.005 --lr 0.00075 --weight-decay 0.3 --epochs 7 --short-context 256 \\
        --short-epochs 2 --drill-every 4 --answer-weight 0.3 --dev-samples 2 --probe-every 4 --samples 0 \\
        --patience 99 --workers 2 --compile

It was stopped by the time limit of its job: the weights are those after 4 of its 7 epochs, so stop it there. The run
`on` went on from them, with `--seed 1`, and its 24 epochs ended before its time limit:

    python pretrain_teacher.py --train ... --start .scratch/teacher/low --drills \\
        --out .scratch/teacher/on --seed 1 --muon-lr 0.003 --lr 0.00045 --weight-decay 0.3 --short-epochs 0 \\
        --epochs 24 --seconds 166 --drill-every 4 --answer-weight 0.3 --dev-samples 2 --probe-every 3 --samples 0 \\
        --patience 99 --workers 3 --compile

The weights repeat only nearly: a GPU adds in another order each time, and the rates of `on` followed the clock for as
long as the compilation made it run ahead of the steps (about the first ten epochs).
"""

import contextlib
import copy
import functools
import inspect
import json
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import torch
import torch.nn.functional as F
import transformers
import typer
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader, Dataset
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from hf_memmix.conversion import load_model
from hf_memmix.conversion.records import commit, hardware, write_json
from hf_memmix.training.drills import material_of
from hf_memmix.training.experiments.bundled.drill_batches import losses_of_drills
from hf_memmix.training.experiments.bundled.language_model import (
    decay_matrices,
    matrices_of_layers,
    mean_loss,
    next_token_loss,
    without_masks,
)
from hf_memmix.training.experiments.bundled.muon import Muon
from hf_memmix.training.experiments.bundled.recall import DevRecall, DrilledWindows, measure_recall
from hf_memmix.training.text_files import read_text, text_record

END, PAD = "<|endoftext|>", "<|pad|>"
# sizes of a new teacher, and the names that they have in the configuration of a Llama
SIZES = {
    "vocab_size": (4096, "vocab_size"),
    "hidden_size": (256, "hidden_size"),
    "intermediate_size": (640, "intermediate_size"),
    "layers": (6, "num_hidden_layers"),
    "heads": (4, "num_attention_heads"),
    "kv_heads": (2, "num_key_value_heads"),
}
OF_DRILLS = ("drill_every", "answer_weight", "dev_samples", "probe_every", "samples")  # options that need --drills
AT_LEAST = dict.fromkeys(
    (
        *SIZES,
        "epochs",
        "max_steps",
        "patience",
        "batch_size",
        "log_every",
        "drill_every",
        "dev_samples",
        "probe_every",
    ),
    1,
) | dict.fromkeys(
    ("lr", "warmup", "weight_decay", "dropout", "short_epochs", "answer_weight", "workers", "samples"), 0
)
AT_LEAST |= {"context": 2, "short_context": 2}
ABOVE_0 = ("seconds", "muon_lr")


def check_options(args: SimpleNamespace) -> None:
    """Raise a usage error if a value is outside its limits, or has no effect because `--drills` is missing."""

    def refuse(name: str, message: str):
        raise typer.BadParameter(message, param_hint=option_of(name))

    values = {name: value for name, value in vars(args).items() if value is not None}
    for name, least in AT_LEAST.items():
        if not values.get(name, least) >= least:
            refuse(name, f"{values[name]} is too small; give at least {least}")
    for name in ABOVE_0:
        if not values.get(name, 1) > 0:
            refuse(name, f"{values[name]} is too small; give more than 0, or leave it out")
    if not args.dropout < 1:
        refuse("dropout", f"{args.dropout} is too large; give less than 1")
    if args.short_epochs and args.short_context > args.context:
        refuse("short_context", f"{args.short_context} is above --context {args.context}; give at most that")
    standard = inspect.signature(main).parameters
    for name in () if args.drills else OF_DRILLS:
        if values[name] != standard[name].default:
            refuse(name, f"{values[name]} has no effect without --drills; add --drills, or leave it out")


def option_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def sizes_of(args: SimpleNamespace) -> dict[str, int]:
    """The sizes of the teacher by their names in `SIZES`: those of `args.start`, or the given and standard ones.

    Raises a usage error if `args.start` is no folder of a Llama, or has another size than a given one.
    """
    given = {name: getattr(args, name) for name in SIZES}
    if args.start is None:
        return {name: SIZES[name][0] if value is None else value for name, value in given.items()}
    for file in ("config.json", "tokenizer.json"):
        if not (args.start / file).is_file():
            message = f"{str(args.start)!r} holds no {file}; give the folder of a teacher that this command wrote"
            raise typer.BadParameter(message, param_hint="--start")
    config = json.loads((args.start / "config.json").read_text(encoding="utf-8"))
    if config.get("model_type") != LlamaConfig.model_type:
        message = f"{str(args.start)!r} is a {config.get('model_type')}; give the folder of a Llama"
        raise typer.BadParameter(message, param_hint="--start")
    found = {name: config.get(field) for name, (_, field) in SIZES.items()}
    for name, value in given.items():
        if value is not None and value != found[name]:
            message = f"{value} is not the {found[name]} of --start {args.start}; leave it out, or leave out --start"
            raise typer.BadParameter(message, param_hint=option_of(name))
    return found


class ShiftedWindows(Dataset):
    """Non-overlapping windows of `length` tokens over one stream `ids` [N]; each epoch starts at another offset."""

    def __init__(self, ids: torch.Tensor, length: int):
        if len(ids) < 2 * length:
            raise ValueError(
                f"the training text has {len(ids)} tokens, fewer than two windows of {length}: "
                f"give more text or lower --context to at most {len(ids) // 2}"
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


def build_model(args: SimpleNamespace, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        max_position_embeddings=args.context,
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


def optimizers_of(model: LlamaForCausalLM, args: SimpleNamespace) -> list[torch.optim.Optimizer]:
    """AdamW for all parameters; with `args.muon_lr`, Muon for the matrices of the layers.

    Muon decays weights by the same share per step as AdamW.
    """
    if args.muon_lr is None:
        matrices, rest = [], model.parameters()
    else:
        matrices, rest = matrices_of_layers(model)
    fused = True if matrices and torch.cuda.is_available() else None
    adam = torch.optim.AdamW(decay_matrices(rest, args.weight_decay), lr=args.lr, betas=(0.9, 0.95), fused=fused)
    if not matrices:
        return [adam]
    return [adam, Muon(matrices, lr=args.muon_lr, weight_decay=args.weight_decay * args.lr / args.muon_lr)]


def windows_of(ids: torch.Tensor, length: int, args: SimpleNamespace, material) -> tuple[ShiftedWindows, DataLoader]:
    """The windows of `length` tokens and their loader; a batch has as many tokens of text at every length."""
    windows, rows = ShiftedWindows(ids, length), args.batch_size * args.context // length
    items, options = windows, {"num_workers": args.workers, "pin_memory": torch.cuda.is_available()}
    if material is not None:
        items = DrilledWindows(windows, material, args.seed, args.drill_every if length == args.context else 1)
        options["collate_fn"] = as_it_is
    loader = DataLoader(items, batch_size=rows, shuffle=True, drop_last=len(windows) >= rows, **options)
    return windows, loader


def as_it_is(batch):
    """The batch, which its data set has already stacked."""
    return batch


def loss_of(model, batch, answers_too) -> torch.Tensor:
    """The losses [1], or of text and of answers [2], of a batch of windows, or of windows and drills."""
    if torch.is_tensor(batch):
        return next_token_loss(model, batch)[None]
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


def tokens_of(batch) -> int:
    """The tokens of a batch: those of its windows and of its drills."""
    return batch.numel() if torch.is_tensor(batch) else batch[0].numel() + batch[1].numel()


def train(args: SimpleNamespace) -> dict:
    """Train with the settings `args`, write the best model and its tokenizer to `args.out`, and return a record.

    The record of the epochs so far is written to `args.metrics` after each one.

    Raises:
        ValueError: a text is missing or too short, there is a time limit and more than one process, or the loss is not
            finite.
    """
    texts = {name: read_documents(getattr(args, name)) for name in ("train", "dev", "heldout")}
    accelerator = Accelerator(
        mixed_precision="bf16" if torch.cuda.is_available() else "no",
        dataloader_config=DataLoaderConfiguration(non_blocking=True),
    )
    if args.seconds is not None and accelerator.num_processes > 1:  # each has its own clock, and one would wait
        raise ValueError(
            f"--seconds is {args.seconds} with {accelerator.num_processes} processes, which need the same number of "
            "steps; give --max-steps or --epochs, or start one process"
        )
    set_seed(args.seed)
    if args.start is None:
        tokenizer = train_tokenizer(texts["train"], args.vocab_size, args.context)
    else:
        tokenizer = AutoTokenizer.from_pretrained(args.start)
    ids = {name: encode(tokenizer, text) for name, text in texts.items()}
    if args.start is None:
        model = build_model(args, tokenizer)
    else:
        model = load_model(args.start, torch.float32)
        model.config.max_position_embeddings = args.context
    add_dropout(model, args.dropout)

    material, dev_recall = None, None
    if args.drills:
        material = material_of(tokenizer, ids["train"], texts["heldout"])
        dev_material = material_of(tokenizer, ids["dev"], texts["heldout"])
        dev_recall = DevRecall(tokenizer, texts["dev"], dev_material, args.context, args.dev_samples)
    lengths = [args.short_context] * args.short_epochs + [args.context]  # of the epochs; the last one stays
    made = {length: windows_of(ids["train"], length, args, material) for length in dict.fromkeys(lengths)}
    plain_model, answers_too = model, losses_of_drills
    if args.compile:
        torch._dynamo.config.suppress_errors = True  # a part that cannot be compiled runs as it is
        for layer in model.model.layers:
            layer.compile(dynamic=False)
        answers_too = torch.compile(losses_of_drills, dynamic=False)
    model, *optimizers = accelerator.prepare(model, *optimizers_of(model, args))
    loaders = {length: accelerator.prepare(loader) for length, (_, loader) in made.items()}
    steps_of = [len(loaders[lengths[min(epoch, len(lengths) - 1)]]) for epoch in range(args.epochs)]
    total_steps = args.max_steps or sum(steps_of)
    warmup = min(args.warmup, total_steps // 10)
    clock = Clock(args.seconds)
    rate = functools.partial(rate_at, clock=clock, warmup=warmup, total=total_steps)
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, rate) for optimizer in optimizers]

    record = {
        "arguments": {k: v.name if isinstance(v, Path) else v for k, v in vars(args).items()},
        "parameters": plain_model.num_parameters(),
        "tokens": {name: len(x) for name, x in ids.items()},
        "bytes_per_token": round(len(texts["train"].encode()) / len(ids["train"]), 3),
        "hardware": hardware(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "commit": commit(),
        "steps": [],
        "epochs": [],
    }
    best, best_epoch, step, epoch, seen, began = math.inf, 0, 0, 0, 0, time.time()
    offsets = torch.Generator().manual_seed(args.seed)
    while step < total_steps and epoch - best_epoch < args.patience and clock.share() < 1:
        length = lengths[min(epoch, len(lengths) - 1)]
        epoch += 1
        windows = made[length][0]
        windows.offset = int(torch.randint(length, (1,), generator=offsets))
        if material is not None:
            made[length][1].dataset.epoch = epoch
        model.train()
        losses, weights = [], torch.ones(1 + args.drills, device=accelerator.device)
        weights[1:] = args.answer_weight if length == args.context else 1.0
        with without_masks(plain_model) if args.drills else contextlib.nullcontext():
            for batch in loaders[length]:
                loss = loss_of(model, batch, answers_too)
                accelerator.backward(loss @ weights)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                for optimizer, schedule in zip(optimizers, schedules, strict=True):
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                losses.append(loss.detach())
                step, seen = step + 1, seen + tokens_of(batch)
                if step % args.log_every == 0 or step == total_steps:
                    seconds = {"seconds": round(time.time() - began, 2)}
                    record["steps"].append({"step": step} | train_losses(loss) | seconds)
                if step == total_steps or clock.share() >= 1:
                    break
        ends = step == total_steps or clock.share() >= 1
        row = {"epoch": epoch, "step": step} | train_losses(torch.stack(losses).mean(0))
        with torch.compiler.set_stance("force_eager"):  # other shapes are not compiled
            dev = mean_loss(model, ids["dev"], args.context)
            row["dev_loss"] = round(dev, 4)
            if dev_recall is not None:
                with accelerator.autocast():
                    row |= dev_recall.measure(plain_model, epoch % args.probe_every == 0 or ends)
        dev += row.get("dev_answers", 0.0)
        if not math.isfinite(dev):
            raise ValueError(f"the dev loss became {dev} at step {step}: lower --lr (now {args.lr})")
        row["seconds"] = round(time.time() - began, 1)
        record["epochs"].append(row)
        accelerator.print(json.dumps(row), flush=True)
        if dev < best:
            best, best_epoch = dev, epoch
            if accelerator.is_main_process:
                save(plain_model, tokenizer, args.out)
        record |= {"best_epoch": best_epoch, "wall_seconds": row["seconds"]}
        record["tokens_seen"] = seen * accelerator.num_processes
        if accelerator.is_main_process and args.metrics:
            write_json(args.metrics, record)

    accelerator.wait_for_everyone()
    record["heldout"] = measure_export(args.out, args.heldout, args.context, accelerator.device)
    if args.drills and args.samples:
        model = load_model(args.out, torch.float32).to(accelerator.device)
        record["recall"] = measure_recall({"teacher": model}, tokenizer, texts["heldout"], args.context, args.samples)
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
    train_text: Annotated[Path, typer.Option("--train", help="training text, UTF-8")],
    dev: Annotated[Path, typer.Option(help="text that chooses the best epoch, UTF-8")],
    heldout: Annotated[Path, typer.Option(help="text that is only reported, UTF-8")],
    out: Annotated[Path, typer.Option(help="folder for the model and its tokenizer")],
    metrics: Annotated[Path | None, typer.Option(help="JSON file for the record of the run")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="default: 4096, or that of --start")] = None,
    context: Annotated[int, typer.Option(help="window length, in tokens")] = 1024,
    hidden_size: Annotated[int | None, typer.Option(help="default: 256, or that of --start")] = None,
    intermediate_size: Annotated[int | None, typer.Option(help="default: 640, or that of --start")] = None,
    layers: Annotated[int | None, typer.Option(help="default: 6, or that of --start")] = None,
    heads: Annotated[int | None, typer.Option(help="default: 4, or that of --start")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="default: 2, or that of --start")] = None,
    epochs: int = 28,
    start: Annotated[Path | None, typer.Option(help="folder of a teacher to train on from; its sizes stay")] = None,
    max_steps: Annotated[int | None, typer.Option(help="optimizer steps, instead of --epochs")] = None,
    seconds: Annotated[float | None, typer.Option(help="time limit, at which the learning rate is zero")] = None,
    patience: Annotated[int, typer.Option(help="epochs without a lower dev loss before stopping")] = 8,
    batch_size: Annotated[int, typer.Option(help="windows per step and process")] = 16,
    lr: float = 3e-3,
    warmup: Annotated[int, typer.Option(help="steps of linear warm-up (at most a tenth of the run)")] = 200,
    weight_decay: Annotated[float, typer.Option(help="strong, because the text is read many times")] = 1.0,
    dropout: float = 0.1,
    log_every: Annotated[int, typer.Option(help="steps between rows of the record")] = 50,
    seed: int = 0,
    drills: Annotated[bool, typer.Option("--drills", help="rows of drills of recall beside the text")] = False,
    muon_lr: Annotated[
        float | None, typer.Option(help="rate of Muon for the matrices of the layers; AdamW without it")
    ] = None,
    short_context: Annotated[int, typer.Option(help="window length of the first --short-epochs epochs")] = 256,
    short_epochs: int = 0,
    drill_every: Annotated[int, typer.Option(help="windows for a row of drills, after the short epochs")] = 1,
    answer_weight: Annotated[float, typer.Option(help="of the loss of answers, after the short epochs")] = 1.0,
    workers: Annotated[int, typer.Option(help="processes that make the rows")] = 0,
    compile: Annotated[bool, typer.Option("--compile", help="use torch.compile")] = False,
    dev_samples: Annotated[int, typer.Option(help="probes per length and depth, for the development text")] = 4,
    probe_every: Annotated[int, typer.Option(help="epochs between these probes")] = 1,
    samples: Annotated[int, typer.Option(help="the same at the end, on the held-out text; 0: not measured")] = 16,
) -> None:
    """Train the bundled teacher and write its folder."""
    values = dict(locals())
    args = SimpleNamespace(train=values.pop("train_text"), **values)
    check_options(args)
    args = SimpleNamespace(**vars(args) | sizes_of(args))
    record = train(args)
    print(json.dumps({k: record[k] for k in ("parameters", "tokens", "best_epoch", "wall_seconds", "heldout")}))
    if metrics:
        write_json(metrics, record)


if __name__ == "__main__":
    typer.run(main)
