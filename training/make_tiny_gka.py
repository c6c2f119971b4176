"""Make the bundled GKA student: convert the bundled teacher, align, distil, export, measure on held-out text.

    python training/make_tiny_gka.py --keep auto --text train.txt --out out/tiny_gka --minutes 7
    python training/make_tiny_gka.py --keep none --text train.txt --out out/tiny_gka_pure --minutes 7

Meant for one GPU. The number of steps follows from `--minutes` and a few measured steps, so the run ends in time on
any machine. Part of the data is text that the teacher writes itself. `--keep auto` aligns all layers, then keeps the
one whose replacement alone costs most. `--out` receives the model in bf16 and `metrics.json`. The held-out text is
read once, at the end; what is shown on the way is measured on the development text.
"""

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoTokenizer

from hf_memmix.assets import asset_path
from hf_memmix.conversion import convert_model, layers_to_keep, load_model, report, save_student
from hf_memmix.conversion.plan import take_mixers
from hf_memmix.conversion.saving import check_target
from hf_memmix.training.data import TokenBlocks, text_record, tokenize_files
from hf_memmix.training.sampling import sample_blocks
from hf_memmix.training.train import Recipe, train

OFFSETS = 4  # real text is cut into blocks at this many offsets
DEV_TOKENS = 20_000


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", default="none", help='layers that stay attention: "2", "none" or "auto"')
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--teacher", type=Path, default=asset_path("tiny_teacher"))
    parser.add_argument("--text", type=Path, nargs="+", default=[asset_path("train.txt")])
    parser.add_argument("--dev", type=Path, default=asset_path("dev.txt"))
    parser.add_argument("--heldout", type=Path, default=asset_path("heldout.txt"))
    parser.add_argument("--minutes", type=float, default=7.0, help="for sampling, align and distill together")
    parser.add_argument("--align-share", type=float, default=0.15, help="share of the training time")
    parser.add_argument("--block-size", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--sampled-blocks", type=int, default=8192)
    parser.add_argument("--align-lr", type=float, default=3e-3)
    parser.add_argument("--mixer-lr", type=float, default=1.5e-3)
    parser.add_argument("--rest-lr", type=float, default=4e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--option", nargs="*", default=[], help="mixer options as NAME=JSON")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    started = time.monotonic()

    def say(message: str) -> None:
        print(f"[{time.monotonic() - started:6.1f} s] {message}", flush=True)

    check_target(args.out, overwrite=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(args.teacher)
    teacher = load_model(args.teacher, dtype=torch.float32).to(device)
    keep = "none" if args.keep in ("none", "auto") else layers_to_keep(args.keep, teacher.config.num_hidden_layers)
    options = {name: json.loads(value) for name, value in (pair.split("=", 1) for pair in args.option)}
    student = convert_model(teacher, "gka", keep, seed=args.seed, **options)
    stream = tokenize_files(args.text, tokenizer)
    dev = tokenize_files(args.dev, tokenizer)[:DEV_TOKENS]
    before = measure(student, teacher, tokenizer, args.dev, args.block_size, DEV_TOKENS)
    say(f"converted {student.conversion_report.converted}: perplexity ratio {before['ppl_ratio']:.2f} untrained")

    data = make_data(teacher, stream, args, say)
    say(f"{len(data)} blocks of {args.block_size}: {len(stream)} real tokens, {args.sampled_blocks} sampled blocks")

    runs, scores = [], None
    with tempfile.TemporaryDirectory() as scratch:
        step_seconds = {
            stage: measure_step(stage, teacher, data, args, keep, options) for stage in ("align", "distill")
        }
        say("seconds a step: " + ", ".join(f"{stage} {value:.4f}" for stage, value in step_seconds.items()))
        left = 60 * args.minutes - (time.monotonic() - started)
        shares = {"align": args.align_share, "distill": 1 - args.align_share}
        for stage, share in shares.items():
            steps = max(2, int(share * left / step_seconds[stage]))
            recipe = stage_recipe(stage, steps, args)
            runs.append(train(student, teacher, data, Path(scratch) / stage, recipe=recipe, resume=False))
            middle = report(student, teacher, dev, block_size=args.block_size)
            say(f"{stage}: {steps} steps, perplexity ratio {middle['ppl_ratio']:.4f}")
            if stage == "align" and args.keep == "auto":
                keep, scores = most_needed_layer(student, teacher, stream[:20_000], args.block_size, options)
                say(f"KL when only this layer is replaced: {scores}; keeping {keep}")
                student = with_kept(student, teacher, keep, options)

    save_student(student.cpu(), args.out, tokenizer, overwrite=True, dtype=torch.bfloat16)
    final = measure_export(args.out, args.teacher, args.heldout, args.block_size, device)
    metrics = {
        "keep": keep,
        "layer_kl": scores,
        "mixer_options": student.config.mixers,
        "untrained": before,
        "heldout": final,
        "stages": [{k: v for k, v in run.items() if k != "log"} for run in runs],
        "curves": {run["stage"]: [[e["step"], e["loss"]] for e in run["log"]] for run in runs},
        "arguments": {
            k: str(v) for k, v in vars(args).items() if k not in ("out", "text", "teacher", "dev", "heldout")
        },
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "seconds": round(time.monotonic() - started, 1),
    }
    (args.out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
    size = sum(p.stat().st_size for p in args.out.iterdir()) / 2**20
    say(
        f"perplexity {final['student_ppl']:.3f} against {final['teacher_ppl']:.3f}, ratio {final['ppl_ratio']:.4f}, "
        f"top-1 agreement {final['top1_agreement']:.3f}; {size:.1f} MiB in {args.out}"
    )


def measure(student, teacher, tokenizer, text: Path, block_size: int, max_tokens: int | None = None) -> dict:
    """The report on the first `max_tokens` tokens of a file, and which file it was."""
    tokens = tokenize_files(text, tokenizer)
    return {"text": text_record(text)} | report(student, teacher, tokens[:max_tokens], block_size=block_size)


def measure_export(folder: Path, teacher: Path, heldout: Path, block_size: int, device: str = "cpu") -> dict:
    """What is reported of a student: its folder against the teacher's on the held-out text, both in float32."""
    student, target = (load_model(path, dtype=torch.float32).to(device) for path in (folder, teacher))
    result = measure(student, target, AutoTokenizer.from_pretrained(folder), heldout, block_size)
    return result | {"arithmetic": "float32 on the saved bfloat16 weights", "device": device}


def with_kept(aligned, teacher, keep: list[int], options: dict):
    """A student with `keep` as attention and the mixers of `aligned` elsewhere."""
    student = convert_model(teacher, "gka", keep, **options).float()
    take_mixers(student, aligned)
    return student


def most_needed_layer(
    aligned, teacher, tokens: torch.Tensor, block_size: int, options: dict
) -> tuple[list[int], list[float]]:
    """The layer whose replacement alone moves the teacher's predictions most, and that KL for every layer."""
    layers = range(teacher.config.num_hidden_layers)
    scores = []
    for layer in layers:
        single = with_kept(aligned, teacher, [i for i in layers if i != layer], options)
        scores.append(round(report(single, teacher, tokens, block_size=block_size)["kl"], 5))
    return [max(layers, key=scores.__getitem__)], scores


def make_data(teacher, stream: torch.Tensor, args, say) -> TokenBlocks:
    """Real text cut at several offsets, and as many blocks as asked for by the teacher itself."""
    size = args.block_size
    offsets = [i * size // OFFSETS for i in range(OFFSETS) if len(stream) > i * size // OFFSETS + size]
    parts = [TokenBlocks(stream[offset:], size).blocks for offset in offsets]
    if args.sampled_blocks:
        parts.append(
            sample_blocks(
                teacher,
                stream,
                args.sampled_blocks,
                size,
                seed=args.seed,
                progress=lambda done, total: say(f"sampled {done} of {total} blocks"),
            )
        )
    return TokenBlocks(torch.cat(parts).flatten(), size)


def stage_recipe(stage: str, steps: int, args) -> Recipe:
    return Recipe(
        stage=stage,
        steps=steps,
        batch_size=args.batch_size,
        block_size=args.block_size,
        learning_rate=args.align_lr if stage == "align" else args.mixer_lr,
        rest_learning_rate=args.rest_lr,
        warmup_steps=min(100, steps // 10 + 1),
        seed=args.seed,
        trainer={"disable_tqdm": True, "logging_steps": max(1, steps // 40)},
    )


def measure_step(stage: str, teacher, data: TokenBlocks, args, keep, options) -> float:
    """Seconds of one step, from a short run on a throw-away student after a shorter one that compiles kernels."""
    student = convert_model(teacher, "gka", keep, **options)
    with tempfile.TemporaryDirectory() as scratch:
        for steps in (3, 23) if torch.cuda.is_available() else (1, 2):
            result = train(student, teacher, data, scratch, recipe=stage_recipe(stage, steps, args), resume=False)
        shutil.rmtree(scratch, ignore_errors=True)
    return result["seconds"] / steps


if __name__ == "__main__":
    main()
