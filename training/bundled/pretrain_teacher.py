"""Train the small Llama that the package bundles as its teacher: loss = -mean log p(x_t | x_<t).

    python -m hf_memmix.training.bundled.fetch_text --out .scratch/teacher
    python -m hf_memmix.training.bundled.pretrain_teacher --train .scratch/teacher/train.txt \\
        --dev .scratch/teacher/dev.txt --heldout .scratch/teacher/heldout.txt \\
        --out .scratch/teacher/model --metrics .scratch/teacher/metrics.json

Learns a byte-level BPE tokenizer on the training text, then the model (Touvron et al. 2023, arXiv:2302.13971, with
grouped key/value heads and tied embeddings). After each epoch the loss on the dev text is measured and the best
weights are kept. The run ends after `--patience` epochs without an improvement. The held-out text is read once, at the
end. Text files hold documents separated by a line `<|endoftext|>`, which is the tokenizer's bos and eos.
"""

import copy
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
from accelerate.utils import set_seed
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader, Dataset
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    get_cosine_schedule_with_warmup,
)

from hf_memmix.conversion import load_model
from hf_memmix.conversion.records import hardware, write_json
from hf_memmix.training.bundled.language_model import decay_matrices, mean_loss, next_token_loss
from hf_memmix.training.text_files import read_text, text_record

END, PAD = "<|endoftext|>", "<|pad|>"


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


def train(args: SimpleNamespace) -> dict:
    """Train with the settings `args`, write the best model and its tokenizer to `args.out`, and return a record."""
    texts = {name: read_documents(getattr(args, name)) for name in ("train", "dev", "heldout")}
    accelerator = Accelerator(mixed_precision="bf16" if torch.cuda.is_available() else "no")
    set_seed(args.seed)
    tokenizer = train_tokenizer(texts["train"], args.vocab_size, args.context)
    ids = {name: encode(tokenizer, text) for name, text in texts.items()}
    model = build_model(args, tokenizer)
    add_dropout(model, args.dropout)

    windows = ShiftedWindows(ids["train"], args.context)
    loader = DataLoader(windows, batch_size=args.batch_size, shuffle=True, drop_last=len(windows) >= args.batch_size)
    optimizer = torch.optim.AdamW(decay_matrices(model, args.weight_decay), lr=args.lr, betas=(0.9, 0.95))
    plain_model = model
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    total_steps = args.max_steps or args.epochs * len(loader)
    schedule = get_cosine_schedule_with_warmup(optimizer, min(args.warmup, total_steps // 10), total_steps)

    record = {
        "arguments": {k: v.name if isinstance(v, Path) else v for k, v in vars(args).items()},
        "parameters": plain_model.num_parameters(),
        "tokens": {name: len(x) for name, x in ids.items()},
        "bytes_per_token": round(len(texts["train"].encode()) / len(ids["train"]), 3),
        "hardware": hardware(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "steps": [],
        "epochs": [],
    }
    best, best_epoch, step, epoch, began = math.inf, 0, 0, 0, time.time()
    offsets = torch.Generator().manual_seed(args.seed)
    while step < total_steps and epoch - best_epoch < args.patience:
        epoch += 1
        windows.offset = int(torch.randint(args.context, (1,), generator=offsets))
        model.train()
        losses = []
        for batch in loader:
            loss = next_token_loss(model, batch)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            step += 1
            if step % args.log_every == 0 or step == total_steps:
                record["steps"].append({"step": step, "train_loss": round(loss.item(), 4)})
            if step == total_steps:
                break
        dev = mean_loss(model, ids["dev"], args.context)
        if not math.isfinite(dev):
            raise ValueError(f"the dev loss became {dev} at step {step}: lower --lr (now {args.lr})")
        row = {"epoch": epoch, "step": step, "train_loss": torch.stack(losses).mean().item(), "dev_loss": dev}
        record["epochs"].append({k: round(v, 4) for k, v in row.items()})
        accelerator.print(f"epoch {epoch} step {step} train {row['train_loss']:.4f} dev {dev:.4f}", flush=True)
        if dev < best:
            best, best_epoch = dev, epoch
            if accelerator.is_main_process:
                save(plain_model, tokenizer, args.out)

    accelerator.wait_for_everyone()
    record["best_epoch"], record["wall_seconds"] = best_epoch, round(time.time() - began, 1)
    record["tokens_seen"] = step * args.batch_size * args.context * accelerator.num_processes
    record["heldout"] = measure_export(args.out, args.heldout, args.context, accelerator.device)
    return record


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
    vocab_size: int = 4096,
    context: Annotated[int, typer.Option(help="window length, in tokens")] = 1024,
    hidden_size: int = 256,
    intermediate_size: int = 640,
    layers: int = 6,
    heads: int = 4,
    kv_heads: int = 2,
    epochs: int = 28,
    max_steps: Annotated[int | None, typer.Option(help="optimizer steps, instead of --epochs")] = None,
    patience: Annotated[int, typer.Option(help="epochs without a lower dev loss before stopping")] = 8,
    batch_size: Annotated[int, typer.Option(help="windows per step and process")] = 16,
    lr: float = 3e-3,
    warmup: Annotated[int, typer.Option(help="steps of linear warm-up (at most a tenth of the run)")] = 200,
    weight_decay: Annotated[float, typer.Option(help="strong, because the text is read many times")] = 1.0,
    dropout: float = 0.1,
    log_every: Annotated[int, typer.Option(help="steps between rows of the record")] = 50,
    seed: int = 0,
) -> None:
    """Train the bundled teacher and write its folder."""
    values = dict(locals())
    args = SimpleNamespace(train=values.pop("train_text"), **values)
    record = train(args)
    print(json.dumps({k: record[k] for k in ("parameters", "tokens", "best_epoch", "wall_seconds", "heldout")}))
    if metrics:
        write_json(metrics, record)


if __name__ == "__main__":
    typer.run(main)
