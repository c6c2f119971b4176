"""`memmix convert | align | distill | generate | report | eval ...`: the Python API from a shell.

Results go to stdout (with `--json` as one JSON object), progress and messages to stderr. A user's mistake is one line
and exit code 1, a wrong option is exit code 2. A command imports what it needs when it runs.
"""

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from hf_memmix import cli_convert, cli_measure, cli_publish
from hf_memmix.shell import Device, Json, Overwrite, err, friendly, out
from hf_memmix.shell import bar as _bar
from hf_memmix.shell import load as _load
from hf_memmix.shell import print_json as _print_json
from hf_memmix.shell import shared_tokenizer as _shared_tokenizer
from hf_memmix.shell import tokenizer_of as _tokenizer

app = typer.Typer(
    help="Give a pretrained transformer a memory of fixed size.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Teacher = Annotated[Path, typer.Option(help="Folder of the transformer that was converted.")]
Student = Annotated[Path, typer.Option(help="Folder of a converted model.")]
Texts = Annotated[
    list[Path], typer.Option(help="Text, .jsonl or .parquet file, or hub:NAME with a streaming recipe; repeatable.")
]
Recipe = Annotated[str | None, typer.Option(help="Name of a bundled recipe or a YAML file.")]
Resume = Annotated[bool, typer.Option("--resume/--no-resume", help="Continue an interrupted run of this output.")]


app.command()(cli_convert.convert)
app.command("import-hmf")(cli_convert.import_hmf)


@app.command()
@friendly
def align(
    student: Student,
    teacher: Teacher,
    text: Texts,
    out_dir: Annotated[Path, typer.Option("--out", help="Folder for the trained model.")],
    recipe: Recipe = "align",
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Blocks per step.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens per block.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Peak learning rate of the mixers.")] = None,
    save_every: Annotated[int | None, typer.Option(help="Steps between checkpoints; 0: none.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the order of the data.")] = None,
    layers: Annotated[str | None, typer.Option(help='Train these layers only, e.g. "0-3,8"; see merge.')] = None,
    resume: Resume = True,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Train the mixers alone: each learns the output of the attention it replaced, on the teacher's inputs."""
    numbers = {"steps": steps, "batch_size": batch_size, "block_size": block_size, "learning_rate": learning_rate}
    numbers |= {"save_every": save_every, "seed": seed, "layers": layers}
    _train("align", student, teacher, text, out_dir, recipe, numbers, resume, overwrite, as_json)


@app.command()
@friendly
def distill(
    student: Student,
    teacher: Teacher,
    text: Texts,
    out_dir: Annotated[Path, typer.Option("--out", help="Folder for the trained model.")],
    recipe: Recipe = "distill",
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Blocks per step.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens per block.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Peak learning rate of the mixers.")] = None,
    rest_learning_rate: Annotated[float | None, typer.Option(help="Peak learning rate of everything else.")] = None,
    save_every: Annotated[int | None, typer.Option(help="Steps between checkpoints; 0: none.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the order of the data.")] = None,
    resume: Resume = True,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Train the whole student to predict what the teacher predicts (forward KL of the logits)."""
    numbers = {"steps": steps, "batch_size": batch_size, "block_size": block_size, "learning_rate": learning_rate}
    numbers |= {"rest_learning_rate": rest_learning_rate, "save_every": save_every, "seed": seed}
    _train("distill", student, teacher, text, out_dir, recipe, numbers, resume, overwrite, as_json)


@app.command()
@friendly
def merge(
    parts: Annotated[list[Path], typer.Argument(help="Outputs of align, each for other layers of one student.")],
    student: Annotated[Path, typer.Option(help="Folder of the student that all of them began from.")],
    out_dir: Annotated[Path, typer.Option("--out", help="Folder for the merged student.")],
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Join the layers that several align runs (--layers) trained, on one machine or many."""
    from hf_memmix.conversion import save_student
    from hf_memmix.conversion.saving import check_target
    from hf_memmix.training.merge import merge_students

    check_target(out_dir, overwrite)
    with err.status("merging"):
        model, origin = merge_students(student, parts)
        save_student(model, out_dir, _tokenizer(student, required=False), overwrite=overwrite)
    if as_json:
        _print_json({"out": str(out_dir), "layers": origin})
    else:
        out.print(f"{len(origin)} trained layers of {len(parts)} runs; written to {out_dir}")


@app.command("cache-teacher")
@friendly
def cache_teacher(
    teacher: Teacher,
    text: Texts,
    out_dir: Annotated[Path, typer.Option("--out", help="Folder for the cache.")],
    top_k: Annotated[int, typer.Option(min=1, help="Probabilities kept per token; 6 bytes each.")] = 32,
    recipe: Recipe = "distill",
    block_size: Annotated[int | None, typer.Option(help="Tokens per block, as in the run that reads it.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Blocks at a time.")] = 8,
    device: Device = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Write the teacher's most likely tokens to disk, for distill with `teacher: cache:DIR` in the recipe."""
    from hf_memmix.conversion.saving import check_target
    from hf_memmix.training.data import TokenBlocks
    from hf_memmix.training.recipe import load_recipe
    from hf_memmix.training.teacher_cache import teacher_hash, write_cache

    check_target(out_dir, overwrite)
    plan = load_recipe(recipe, block_size=block_size)
    data = TokenBlocks.from_files(text, _tokenizer(teacher), plan.block_size, plan.pack)
    options = {"teacher_id": teacher_hash(teacher), "batch_size": batch_size, "overwrite": overwrite}
    with _bar("reading the teacher") as advance:
        meta = write_cache(_load(teacher, device), data, out_dir, top_k, progress=advance, **options)
    if as_json:
        _print_json(meta | {"out": str(out_dir)})
    else:
        tokens = meta["rows"] * meta["block_size"]
        out.print(f"{tokens} tokens, {top_k} probabilities each; written to {out_dir}: teacher: cache:{out_dir}")


@app.command()
@friendly
def generate(
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    model: Annotated[Path | None, typer.Option(help="Model folder; default: the bundled GKA model.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length of the continuation.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 means greedy.")] = 0.8,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Nucleus of the sampled tokens.")] = 0.95,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Continue a prompt, printing the text as it is made."""
    import time

    import torch
    from transformers import TextStreamer

    from hf_memmix.assets import asset_path
    from hf_memmix.conversion.limits import check_length

    folder = model or asset_path("tiny_gka")
    network, tokenizer = _load(folder, device), _tokenizer(folder)
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=True).to(network.device)
    if inputs["input_ids"].shape[1] == 0:
        raise ValueError("the prompt is empty; give at least one word")
    total = inputs["input_ids"].shape[1] + max_new_tokens
    check_length(network, "model", total, "prompt with --max-new-tokens", "ask for fewer")
    torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p} if temperature else {"do_sample": False}
    streamer = None if as_json else TextStreamer(tokenizer, skip_special_tokens=True)
    start = time.perf_counter()
    tokens = network.generate(**inputs, **sampling, max_new_tokens=max_new_tokens, streamer=streamer)[0]
    seconds = time.perf_counter() - start
    new = len(tokens) - inputs["input_ids"].shape[1]
    if as_json:
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        _print_json({"model": str(folder), "text": text, "new_tokens": new, "tokens_per_second": new / seconds})
    else:
        err.print(f"{new} tokens, {new / seconds:.1f} tokens/s", style="dim")


@app.command()
@friendly
def report(
    student: Student,
    teacher: Teacher,
    text: Texts,
    block_size: Annotated[int, typer.Option(min=2, help="Tokens per block.")] = 512,
    batch_size: Annotated[int, typer.Option(min=1, help="Blocks at a time.")] = 8,
    max_tokens: Annotated[int | None, typer.Option(min=2, help="Read no more than this.")] = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Compare a student with its teacher on a text: perplexities, agreement, error of every mixer."""
    from hf_memmix.conversion.verify import report as compare
    from hf_memmix.training.data import tokenize_files

    tokens = tokenize_files(text, _shared_tokenizer(teacher, student))
    models = _load(student, device), _load(teacher, device)
    with _bar("comparing") as advance:
        result = compare(
            *models, tokens, block_size=block_size, batch_size=batch_size, max_tokens=max_tokens, progress=advance
        )
    if as_json:
        _print_json(result | cli_measure.report_record(student, text, block_size, models[0]))
        return
    table = Table("measure", "value")
    for name in ("tokens", "teacher_ppl", "student_ppl", "ppl_ratio", "top1_agreement", "kl"):
        table.add_row(name, f"{result[name]:.4f}" if isinstance(result[name], float) else str(result[name]))
    for layer, value in result["layer_error"].items():
        table.add_row(f"relative error, layer {layer}", f"{value:.4f}")
    out.print(table)


def _train(stage, student, teacher, text, out_dir, recipe, numbers, resume, overwrite, as_json) -> None:
    import torch

    from hf_memmix.conversion import save_student
    from hf_memmix.training.data import StreamedBlocks, TokenBlocks
    from hf_memmix.training.run_lock import run_folder
    from hf_memmix.training.train import load_recipe, train

    plan = load_recipe(recipe, **numbers, stage=stage)
    with run_folder(out_dir, resume, overwrite) as run_dir:
        tokenizer = _shared_tokenizer(teacher, student)
        read = StreamedBlocks if plan.stream else TokenBlocks.from_files
        data = read(text, tokenizer, plan.block_size, plan.pack)
        model = _load(student, "cpu", "auto")
        guide = teacher if plan.cache_dir else _load(teacher, "cpu", "auto" if torch.cuda.is_available() else None)
        dtype = model.dtype
        with _bar(stage) as advance:
            result = train(
                model, guide, data, run_dir, recipe=plan, resume=resume, callbacks=[_progress_callback(advance)]
            )
        if not int(os.environ.get("RANK", "0")):
            save_student(model.cpu(), out_dir, tokenizer, overwrite=overwrite, dtype=dtype)
    if as_json:
        _print_json(result | {"out": str(out_dir)})
    else:
        out.print(
            f"{stage}: {result['steps']} steps, {result['tokens']} tokens, {result['seconds']:.0f} s, "
            f"loss {result['first_loss']:.4f} -> {result['last_loss']:.4f}; written to {out_dir}"
        )


def _progress_callback(advance):
    from transformers import TrainerCallback

    class Report(TrainerCallback):
        loss = None

        def on_log(self, args, state, control, logs=None, **kwargs):
            self.loss = (logs or {}).get("loss", self.loss)

        def on_step_end(self, args, state, control, **kwargs):
            advance(state.global_step, state.max_steps, "" if self.loss is None else f"loss {float(self.loss):.4f}")

    return Report()


app.command("eval")(cli_measure.evaluate)
app.command()(cli_measure.select)
app.command()(cli_publish.card)
app.command()(cli_publish.push)


def main() -> None:
    """Console script."""
    app()


if __name__ == "__main__":
    main()
