"""Which start of an SKA layer is closest to the attention it replaces? Measured on the bundled teacher, all layers.

    python training/ablate_ska_init.py --out conversion/results/ska_init.json

Truncated SVD of the scores against random directions of the heads, powers K, sizes eta of the readout. Every variant
is converted and measured on the development text, aligned for a few steps (all with the same data and learning rate),
and measured again. A ridge solution is not bounded by the values as attention is: at the paper's eta of 1.5 its error
is ten times the attention's size. At K = 2 eta = 0.1 has the lowest error after alignment, which is what a conversion
starts with; K = 0 is better still.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from transformers import AutoTokenizer

from hf_memmix.assets import asset_path
from hf_memmix.conversion import convert_model, load_model
from hf_memmix.conversion.families import attention_module
from hf_memmix.training.ablate_init import measure
from hf_memmix.training.data import TokenBlocks, text_record, tokenize_files
from hf_memmix.training.train import align

# name: (options over the defaults of conversion, whether queries and keys are random, eta)
VARIANTS = {
    f"{'random' if random else 'svd'}, K = {power}, eta = {eta}": ({"power": power}, random, eta)
    for power, random, eta in (
        (2, False, 1.5), (2, True, 1.5), (0, False, 1.5), (2, False, 0.3), (2, False, 0.1), (2, True, 0.1),
        (0, False, 0.3), (0, False, 0.1), (0, True, 0.1),
    )
}  # fmt: skip
CHUNK_SIZE = 16  # the blocks of the measurement are short


@torch.no_grad()
def build(teacher, options: dict, random: bool, eta: float):
    """A converted model; `random` projects each head's queries and keys to the rank by one random orthogonal map."""
    student = convert_model(teacher, "ska", "none", chunk_size=CHUNK_SIZE, **options)
    generator = torch.Generator().manual_seed(0)
    for layer in range(student.config.num_hidden_layers if random else 0):
        mixer, attention = attention_module(student, layer), attention_module(teacher, layer)
        rank, size = mixer.options.rank, mixer.head_dim
        directions = torch.randn(mixer.kv_heads, size, rank, generator=generator)
        maps = torch.linalg.qr(directions)[0].mT.to(mixer.q_proj.weight.device)
        for name, heads in (("q_proj", mixer.heads), ("k_proj", mixer.kv_heads)):
            rows = getattr(attention, name).weight.unflatten(0, (heads, size))
            reduced = maps.repeat_interleave(heads // mixer.kv_heads, 0) @ rows
            getattr(mixer, name).weight.copy_(reduced.flatten(0, 1))
    for layer in range(student.config.num_hidden_layers):
        attention_module(student, layer).eta.fill_(eta)
    return student


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--text", type=Path, default=asset_path("dev.txt"), help="text of the measurement")
    parser.add_argument("--text-tokens", type=int, default=2048)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(asset_path("tiny_teacher"))
    teacher = load_model(asset_path("tiny_teacher"), dtype=torch.float32).to(device)
    data = TokenBlocks.from_files(asset_path("train.txt"), tokenizer, args.block_size)
    tokens = tokenize_files(args.text, tokenizer)[: args.text_tokens]
    rows = []
    for name, variant in VARIANTS.items():
        student = build(teacher, *variant)
        row = {"variant": name, "untrained": measure(student, teacher, tokens, args)}
        with tempfile.TemporaryDirectory() as scratch:
            options = {"steps": args.steps, "batch_size": args.batch_size, "block_size": args.block_size}
            options |= {"learning_rate": args.learning_rate, "warmup_steps": 5, "save_every": 0}
            align(student, teacher, data, scratch, trainer={"disable_tqdm": True}, **options)
        row["aligned"] = measure(student, teacher, tokens, args)
        rows.append(row)
        print(
            name,
            *(f"{row[k]['mean_error']:.3f} {row[k]['ppl_ratio']:.2f}" for k in ("untrained", "aligned")),
            flush=True,
        )
        settings = {k: v for k, v in vars(args).items() if k not in ("out", "text")}
        settings |= {"chunk_size": CHUNK_SIZE, "text": text_record(args.text), "device": device}
        settings |= {"torch": torch.__version__}
        args.out.write_text(json.dumps({"settings": settings, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
