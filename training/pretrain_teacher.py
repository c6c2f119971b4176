"""Train the small Llama that the package bundles as its teacher: loss = -mean log p(x_t | x_<t).

    python training/fetch_text.py --out .scratch/teacher
    python training/pretrain_teacher.py --train .scratch/teacher/train.txt --dev .scratch/teacher/dev.txt \\
        --heldout .scratch/teacher/heldout.txt --out .scratch/teacher/model --metrics .scratch/teacher/metrics.json

Learns a byte-level BPE tokenizer on the training text, then the model (Touvron et al. 2023, arXiv:2302.13971, with
grouped key/value heads and tied embeddings). After each epoch the loss on the dev text is taken; the best weights are
kept, and the run ends once `--patience` epochs brought no better ones. The held-out text is read once, at the end.
Text files hold documents separated by a line `<|endoftext|>`, which is the tokenizer's bos and eos.
"""

import argparse
import copy
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
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
from hf_memmix.training.data import text_record

END, PAD = "<|endoftext|>", "<|pad|>"


class Windows(Dataset):
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


def read_text(path: Path) -> str:
    """Return the text of a file, or raise ValueError when it is missing, binary or empty."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"no text file at {path}: make it with training/fetch_text.py or name another") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}): convert it or name another file") from None
    if "\0" in text:
        raise ValueError(f"{path} holds NUL bytes, so it is not text: name a plain text file")
    if not text.replace(END, "").strip():
        raise ValueError(f"{path} holds no text: name a file with at least one document")
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


def build_model(args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
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
    """Drop out the embeddings and what each attention and MLP adds to the residual stream, while training.

    The Llama of transformers has attention dropout alone; hooks leave its code and its saved config as they are.
    """

    def hook(module, _, output):
        if isinstance(output, tuple):
            return (F.dropout(output[0], p, module.training), *output[1:])
        return F.dropout(output, p, module.training)

    model.model.embed_tokens.register_forward_hook(hook)
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(hook)
        layer.mlp.register_forward_hook(hook)


def next_token_loss(model, ids: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """Cross-entropy of ids [B, T] against the prediction from their prefixes; B * (T - 1) terms, fp32."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction=reduction)


@torch.no_grad()
def mean_loss(model, ids: torch.Tensor, length: int, batch_size: int = 16) -> float:
    """Mean loss per predicted token of a stream `ids` [N] cut into windows of `length`, the last one shorter."""
    model.eval()
    device = next(model.parameters()).device
    windows = [w for w in ids.split(length) if len(w) > 1]
    full = [w for w in windows if len(w) == length]
    batches = [torch.stack(full[i : i + batch_size]) for i in range(0, len(full), batch_size)]
    batches += [w[None] for w in windows if len(w) < length]
    total = sum(next_token_loss(model, batch.to(device), "sum").item() for batch in batches)
    return total / sum(len(w) - 1 for w in windows)


def optimizer_groups(model, weight_decay: float) -> list[dict]:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


def train(args: argparse.Namespace) -> dict:
    """Train as `args` says, leave the best model and its tokenizer in `args.out`, return the record of the run."""
    texts = {name: read_text(getattr(args, name)) for name in ("train", "dev", "heldout")}
    accelerator = Accelerator(mixed_precision="bf16" if torch.cuda.is_available() else "no")
    set_seed(args.seed)
    tokenizer = train_tokenizer(texts["train"], args.vocab_size, args.context)
    ids = {name: encode(tokenizer, text) for name, text in texts.items()}
    model = build_model(args, tokenizer)
    add_dropout(model, args.dropout)

    windows = Windows(ids["train"], args.context)
    loader = DataLoader(windows, batch_size=args.batch_size, shuffle=True, drop_last=len(windows) >= args.batch_size)
    optimizer = torch.optim.AdamW(optimizer_groups(model, args.weight_decay), lr=args.lr, betas=(0.9, 0.95))
    plain_model = model
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    total_steps = args.max_steps or args.epochs * len(loader)
    schedule = get_cosine_schedule_with_warmup(optimizer, min(args.warmup, total_steps // 10), total_steps)

    record = {
        "arguments": {k: v.name if isinstance(v, Path) else v for k, v in vars(args).items()},
        "parameters": plain_model.num_parameters(),
        "tokens": {name: len(x) for name, x in ids.items()},
        "bytes_per_token": round(len(texts["train"].encode()) / len(ids["train"]), 3),
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
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
    """What is reported of a teacher: loss of its folder on the held-out text, in windows of `context` tokens."""
    text = read_text(heldout)
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


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    for name in ("train", "dev", "heldout"):
        parser.add_argument(f"--{name}", type=Path, required=True, help=f"{name} text, UTF-8")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model and its tokenizer")
    parser.add_argument("--metrics", type=Path, help="JSON file for the record of the run")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--context", type=int, default=1024, help="window length, in tokens")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--intermediate-size", type=int, default=640)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=28)
    parser.add_argument("--max-steps", type=int, help="optimizer steps, instead of --epochs")
    parser.add_argument("--patience", type=int, default=8, help="epochs without a lower dev loss before stopping")
    parser.add_argument("--batch-size", type=int, default=16, help="windows per step and process")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=200, help="steps of linear warm-up (at most a tenth of the run)")
    parser.add_argument("--weight-decay", type=float, default=1.0, help="strong, as the text is read many times")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--log-every", type=int, default=50, help="steps between rows of the record")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    record = train(args)
    print(json.dumps({k: record[k] for k in ("parameters", "tokens", "best_epoch", "wall_seconds", "heldout")}))
    if args.metrics:
        args.metrics.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
