"""Make the bundled GKA student: convert the bundled teacher, align, distil, export, measure on held-out text.

    python make_tiny_gka.py --keep auto --text train.txt --out out/tiny_gka --minutes 7
    python make_tiny_gka.py --keep none --text train.txt --out out/tiny_gka_pure --minutes 7

It is meant for one GPU. The number of steps is computed from `--minutes` and the time of a few steps, so the run ends
in time on any machine. `--keep auto` aligns all layers, and then keeps
the layer whose replacement changes the teacher's predictions most. The model in bf16 and `metrics.json` are written to
`--out`. The held-out text is read once, at the end; all other figures are measured on the development text.

For a teacher that recalls, `--drill-blocks` adds rows of drills, which help to choose
the kept layer, and the recall of both models is measured. Before the end, the held-out text then only says which words
are not used in the drills.
"""

import shutil
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import torch
import transformers
import typer
from transformers import AutoTokenizer

from hf_memmix.assets import asset_path
from hf_memmix.conversion import convert_model, layers_to_keep, load_model, report, save_student
from hf_memmix.conversion.hashes import file_hash
from hf_memmix.conversion.records import bytes_text, commit, write_json
from hf_memmix.conversion.saving import check_target
from hf_memmix.conversion.taken_mixers import take_mixers
from hf_memmix.training.data import TokenBlocks, tokenize_files
from hf_memmix.training.drills import drill_rows, material_of
from hf_memmix.training.experiments.bundled.recall import measure_recall
from hf_memmix.training.text_files import read_text, text_record
from hf_memmix.training.train import Recipe, train

OFFSETS = 4  # real text is cut into blocks at this many offsets
DEV_TOKENS = 20_000
TEACHER = asset_path("tiny_teacher")
TRAINING_TEXT, DEV_TEXT, HELDOUT_TEXT = (asset_path(f"{name}.txt") for name in ("train", "dev", "heldout"))
NOT_RECORDED = ("out", "text", "keep_layers")
ALIGN_SHARE = 0.15  # of the training time
RATES, REST_RATE = {"align": 3e-3, "distill": 1.5e-3}, 4e-4  # of the mixers; of all other parameters


def main(
    out: Annotated[Path, typer.Option(help="folder for the model and metrics.json")],
    keep_layers: Annotated[
        str, typer.Option("--keep", help='layers that stay attention: "2", "none" or "auto"')
    ] = "none",
    text: Annotated[list[Path], typer.Option(help="training text; repeatable")] = (TRAINING_TEXT,),
    minutes: Annotated[float, typer.Option(help="for align and distill together")] = 7.0,
    block_size: int = 512,
    batch_size: int = 64,
    drill_blocks: Annotated[int, typer.Option(help="blocks of drills of recall")] = 0,
    seed: int = 0,
) -> None:
    """Make the student and measure it."""
    args = SimpleNamespace(**locals())
    started = time.monotonic()

    def say(message: str) -> None:
        print(f"[{time.monotonic() - started:6.1f} s] {message}", flush=True)

    check_target(out, overwrite=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(TEACHER)
    teacher = load_model(TEACHER, dtype=torch.float32).to(device)
    layers = teacher.config.num_hidden_layers
    keep = "none" if keep_layers in ("none", "auto") else layers_to_keep(keep_layers, layers)
    student = convert_model(teacher, "gka", keep, seed=args.seed)
    stream = tokenize_files(args.text, tokenizer)
    dev = tokenize_files(DEV_TEXT, tokenizer)[:DEV_TOKENS]
    before = measure(student, teacher, tokenizer, DEV_TEXT, args.block_size, DEV_TOKENS)
    say(f"converted {student.conversion_report.converted}: perplexity ratio {before['ppl_ratio']:.2f} untrained")

    data = make_data(stream, tokenizer, args)
    say(f"{len(data)} blocks of {args.block_size}, {args.drill_blocks} of them drills")

    runs, scores = [], None
    with tempfile.TemporaryDirectory() as scratch:
        step_seconds = {stage: measure_step(stage, teacher, data, args, keep) for stage in ("align", "distill")}
        say("seconds per step: " + ", ".join(f"{stage} {value:.4f}" for stage, value in step_seconds.items()))
        left = 60 * args.minutes - (time.monotonic() - started)
        shares = {"align": ALIGN_SHARE, "distill": 1 - ALIGN_SHARE}
        for stage, share in shares.items():
            steps = max(2, int(share * left / step_seconds[stage]))
            recipe = stage_recipe(stage, steps, args)
            runs.append(train(student, teacher, data, Path(scratch) / stage, recipe=recipe, resume=False))
            middle = report(student, teacher, dev, block_size=args.block_size)
            say(f"{stage}: {steps} steps, perplexity ratio {middle['ppl_ratio']:.4f}")
            if stage == "align" and keep_layers == "auto":
                keep, scores = most_needed_layer(student, teacher, scored_tokens(stream, data, args), args.block_size)
                say(f"KL when only this layer is replaced: {scores}; keeping {keep}")
                student = with_kept(student, teacher, keep)

    save_student(student.cpu(), out, tokenizer, overwrite=True, dtype=torch.bfloat16)
    final = measure_export(out, TEACHER, HELDOUT_TEXT, args.block_size, device)
    metrics = {
        "keep": keep,
        "layer_kl": scores,
        "mixer_options": student.config.mixers,
        "teacher": {"sha256": file_hash(TEACHER / "model.safetensors")},
        "untrained": before,
        "heldout": final,
        "stages": [{k: v for k, v in run.items() if k != "log"} for run in runs],
        "curves": {run["stage"]: [[e["step"], e["loss"]] for e in run["log"]] for run in runs},
        "arguments": {"keep": keep_layers} | {k: str(v) for k, v in vars(args).items() if k not in NOT_RECORDED},
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit(),
        "seconds": round(time.monotonic() - started, 1),
    }
    write_json(out / "metrics.json", metrics)
    if args.drill_blocks:
        models = {"teacher": teacher, "student": load_model(out, dtype=torch.float32).to(device)}
        context = teacher.config.max_position_embeddings
        metrics["recall"] = measure_recall(models, tokenizer, read_text(HELDOUT_TEXT), context)
        write_json(out / "metrics.json", metrics)
    size = bytes_text(sum(p.stat().st_size for p in out.iterdir()))
    say(
        f"perplexity {final['student_ppl']:.3f} against {final['teacher_ppl']:.3f}, ratio {final['ppl_ratio']:.4f}, "
        f"top-1 agreement {final['top1_agreement']:.3f}; {size} in {out}"
    )


def measure(student, teacher, tokenizer, text: Path, block_size: int, max_tokens: int | None = None) -> dict:
    """The comparison on the first `max_tokens` tokens of a file, and the record of this file."""
    tokens = tokenize_files(text, tokenizer)
    return {"text": text_record(text)} | report(student, teacher, tokens[:max_tokens], block_size=block_size)


def measure_export(folder: Path, teacher: Path, heldout: Path, block_size: int, device: str = "cpu") -> dict:
    """The comparison of the student in `folder` with the teacher, on the held-out text, both in float32."""
    student, target = (load_model(path, dtype=torch.float32).to(device) for path in (folder, teacher))
    result = measure(student, target, AutoTokenizer.from_pretrained(folder), heldout, block_size)
    return result | {"arithmetic": "float32 on the saved bfloat16 weights", "device": device}


def with_kept(aligned, teacher, keep: list[int]):
    """A student with `keep` as attention and the mixers of `aligned` elsewhere."""
    student = convert_model(teacher, "gka", keep).float()
    take_mixers(student, aligned)
    return student


def most_needed_layer(aligned, teacher, tokens: torch.Tensor, block_size: int) -> tuple[list[int], list[float]]:
    """The layer whose replacement changes the teacher's predictions most, and the KL divergence for every layer."""
    layers = range(teacher.config.num_hidden_layers)
    scores = []
    for layer in layers:
        single = with_kept(aligned, teacher, [i for i in layers if i != layer])
        scores.append(round(report(single, teacher, tokens, block_size=block_size)["kl"], 5))
    return [max(layers, key=scores.__getitem__)], scores


def scored_tokens(stream: torch.Tensor, data: TokenBlocks, args) -> torch.Tensor:
    """The tokens that choose a kept layer: real text and, if the student learns drills, as many blocks of them."""
    blocks = TokenBlocks(stream[:20_000], args.block_size).blocks
    drills = data.blocks[-min(args.drill_blocks, len(blocks)) :] if args.drill_blocks else blocks[:0]
    return torch.cat([blocks, drills]).flatten()


def make_data(stream: torch.Tensor, tokenizer, args) -> TokenBlocks:
    """Blocks of real text, cut at several offsets, and drills."""
    size = args.block_size
    offsets = [i * size // OFFSETS for i in range(OFFSETS) if len(stream) > i * size // OFFSETS + size]
    parts = [TokenBlocks(stream[offset:], size).blocks for offset in offsets]
    if args.drill_blocks:
        material = material_of(tokenizer, stream, read_text(HELDOUT_TEXT))
        parts.append(drill_rows(material, args.drill_blocks, size, args.seed))
    return TokenBlocks(torch.cat(parts).flatten(), size)


def stage_recipe(stage: str, steps: int, args) -> Recipe:
    return Recipe(
        stage=stage,
        steps=steps,
        batch_size=args.batch_size,
        block_size=args.block_size,
        learning_rate=RATES[stage],
        rest_learning_rate=REST_RATE,
        warmup_steps=min(100, steps // 10 + 1),
        seed=args.seed,
        trainer={"disable_tqdm": True, "logging_steps": max(1, steps // 40)},
    )


def measure_step(stage: str, teacher, data: TokenBlocks, args, keep) -> float:
    """Seconds of one step of a copy of the student, measured after a shorter run that compiles the kernels."""
    student = convert_model(teacher, "gka", keep)
    with tempfile.TemporaryDirectory() as scratch:
        for steps in (3, 23) if torch.cuda.is_available() else (1, 2):
            result = train(student, teacher, data, scratch, recipe=stage_recipe(stage, steps, args), resume=False)
        shutil.rmtree(scratch, ignore_errors=True)
    return result["seconds"] / steps


if __name__ == "__main__":
    typer.run(main)
