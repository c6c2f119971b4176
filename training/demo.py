"""`make demo`: converts, trains and measures the bundled transformer, offline, on a CPU.

It converts the bundled transformer to GKA, aligns and distils it briefly on the bundled text and on drills of recall,
and measures both models: perplexity and agreement on held-out text, recall by length, bytes of the cache and time per
token by context length, and generated text. It writes `results.json`, `plot.png` and the checkpoint `student/`, and
loads this checkpoint in a new Python process. To change learning rates or steps, compare with `--text
hf_memmix/assets/dev.txt`: the held-out text must not be used for choices.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, TrainerCallback

from hf_memmix.assets import asset_path
from hf_memmix.conversion import convert_model, report, save_student
from hf_memmix.conversion.hashes import file_hash
from hf_memmix.conversion.limits import limit_of
from hf_memmix.conversion.records import hardware, write_json
from hf_memmix.errors import UserError
from hf_memmix.training.data import TokenBlocks
from hf_memmix.training.drills import drill_rows, material_of
from hf_memmix.training.evaluation.context_cost import context_cost
from hf_memmix.training.evaluation.context_cost_plot import plot_context_cost
from hf_memmix.training.evaluation.probes import Material, by_length, run_probes
from hf_memmix.training.fact_drills import with_drills
from hf_memmix.training.text_files import read_text, text_record
from hf_memmix.training.train import align, distill

COLUMNS = (TextColumn("{task.description:34}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
CONTEXTS = (1024, 4096, 32768, 131072)
PROMPT_TOKENS = 24
# these short schedules need higher rates than the recipes
LEARNING_RATES = {
    "align": {"learning_rate": 5e-3},
    "distill": {"learning_rate": 5e-4, "rest_learning_rate": 5e-5},
}
WARMUP_STEPS = 5
NEW_TOKENS = 80
PROBES = {"niah": "needle", "mqar": "keys and values (MQAR)"}
PROBE_LENGTHS = (128, 256, 512, 1024)
STAGE_SECONDS = 95  # a slow or busy machine stops training here, so that the whole takes less than five minutes
# the code of the new process, which gets only the folder and the prompt
LOAD_AND_GENERATE = """
import sys, torch, hf_memmix
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, prompt, new_tokens, threads, device = sys.argv[1:]
torch.set_num_threads(int(threads))
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
ids = AutoTokenizer.from_pretrained(folder)(prompt, add_special_tokens=False, return_tensors="pt").input_ids.to(device)
torch.manual_seed(0)
out = model.generate(ids, max_new_tokens=int(new_tokens), do_sample=True, temperature=0.7, top_k=40)
print(out[0, ids.shape[1]:].tolist())
"""


class ProgressBar(TrainerCallback):
    """One rich bar for a run of the Trainer, with its current loss; ends the run after `STAGE_SECONDS`."""

    def __init__(self, progress: Progress, name: str):
        self.progress, self.name = progress, name

    def on_train_begin(self, args, state, control, **kwargs):
        self.end = time.perf_counter() + STAGE_SECONDS
        self.task = self.progress.add_task(self.name, total=state.max_steps, completed=state.global_step)

    def on_step_end(self, args, state, control, **kwargs):
        self.progress.update(self.task, completed=state.global_step)
        control.should_training_stop |= time.perf_counter() > self.end

    def on_train_end(self, args, state, control, **kwargs):
        self.progress.update(self.task, total=state.global_step)  # fewer than planned if the time was up

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            self.progress.update(self.task, description=f"{self.name}, loss {logs['loss']:.3f}")


@dataclass(frozen=True)
class Sizes:
    """How long the demo trains, and how much it measures."""

    align_steps: int = 100
    distill_steps: int = 100
    batch_size: int = 4
    block_size: int = 256
    text_tokens: int = 20_000  # of the text on which the models are compared
    probe_lengths: tuple[int, ...] = PROBE_LENGTHS  # those that the transformer can read
    probe_samples: int = 2  # needles at each of five depths, and so many sequences of MQAR, per length
    contexts: tuple[int, ...] = CONTEXTS
    new_tokens: int = NEW_TOKENS


@dataclass(frozen=True)
class Recipe:
    """What replaces the attention, and how the student is trained."""

    mixer: str = "gka"
    options: dict = field(default_factory=lambda: {"chunk_size": 32})  # the fastest chunk on a CPU
    keep: str | list[int] = "none"  # layers that stay attention
    learning_rates: dict[str, dict] = field(default_factory=lambda: LEARNING_RATES)
    drills: bool = True  # half of the training rows are drills of recall, without the words of every fourth probe
    fact_drills: float = 0.0  # share of the other rows that are drills of `with_drills`
    probes: dict[str, str] = field(default_factory=lambda: PROBES)  # tasks of recall, and what the table calls them


def run_demo(
    output: Path,
    progress: Progress,
    sizes: Sizes = Sizes(),
    recipe: Recipe = Recipe(),
    *,
    text: Path | None = None,
    teacher_folder: Path | None = None,
    device: str = "cpu",
) -> dict:
    """Run the demo, write its files into the folder `output`, and return the content of `results.json`.

    The models are compared on the file `text`, the bundled held-out text by default. `teacher_folder` takes the place
    of the bundled transformer.

    Raises:
        UserError: the teacher's weights are not one file of safetensors.
    """
    text = asset_path("heldout.txt") if text is None else text
    content = read_text(text)
    started = time.perf_counter()
    output.mkdir(parents=True, exist_ok=True)
    teacher_folder = asset_path("tiny_teacher") if teacher_folder is None else teacher_folder
    weights = teacher_folder / "model.safetensors"
    if not weights.is_file():
        raise UserError(f"{weights} is missing; the demo takes a transformer that is saved as one file of safetensors")
    teacher = AutoModelForCausalLM.from_pretrained(teacher_folder, dtype=torch.float32).to(device)
    tokenizer = AutoTokenizer.from_pretrained(teacher_folder)
    student = convert_model(teacher, mixer=recipe.mixer, keep=recipe.keep, **recipe.options)
    data = training_rows(tokenizer, sizes.block_size, content if recipe.drills else None)
    if recipe.fact_drills:
        data = with_drills(data, tokenizer, recipe.fact_drills)
    stages = {
        stage.__name__: trained(stage, (student, teacher), data, steps, sizes, recipe, output, progress)
        for stage, steps in ((align, sizes.align_steps), (distill, sizes.distill_steps))
    }
    # from here on the student is the saved one: weights that were rounded to bf16, computed in fp32
    folder = output / "student"
    save_student(student, folder, tokenizer, overwrite=True, dtype=torch.bfloat16)
    student = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    models = {"teacher": teacher, "student": student}
    measured = measure(models, tokenizer, content, sizes, recipe.probes, progress)
    moved = bar(progress, "load the folder in a new process")
    again = tokens_of_new_process(folder, measured["prompt"], sizes.new_tokens, device)
    moved(1, 1)
    mixers = [kind for kind in student.config.mixer_types if kind != "attention"]
    results = {
        "hardware": f"{hardware(device)}, fp32, one sequence",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtype": "float32",
        "teacher": describe("transformer", teacher) | {"sha256": file_hash(weights)},
        "student": describe(recipe.mixer, student) | {"converted_layers": len(mixers)},
        "text": text_record(text),
        "drills": recipe.drills,
        "stages": list(stages.values()),
        **measured,
        "new_process_agrees": again == measured["generated"]["student"]["tokens"],
        "seconds": {name: stage["seconds"] for name, stage in stages.items()}
        | {"total": round(time.perf_counter() - started, 1)},
    }
    write_json(output / "results.json", results)
    results = json.loads((output / "results.json").read_text(encoding="utf-8"))
    plot_context_cost(results, output / "plot.png")
    return results


def trained(stage, models, data, steps: int, sizes: Sizes, recipe: Recipe, output: Path, progress: Progress) -> dict:
    """Run one stage, `align` or `distill`, and return its result."""
    name = stage.__name__
    options = recipe.learning_rates[name] | {"steps": steps, "warmup_steps": min(WARMUP_STEPS, steps)}
    options |= {"batch_size": sizes.batch_size, "block_size": sizes.block_size, "save_every": 0}
    options["drills"] = data.drills
    return stage(*models, data, output / name, callbacks=[ProgressBar(progress, name)], **options)


def measure(models: dict, tokenizer, content: str, sizes: Sizes, probes: dict[str, str], progress: Progress) -> dict:
    """Quality on the text `content`, recall, memory and speed by context, and a text of both models."""
    quality = report(
        models["student"],
        models["teacher"],
        content,
        tokenizer,
        block_size=sizes.block_size,
        max_tokens=sizes.text_tokens,
        progress=bar(progress, "compare on the text"),
    )
    lengths = tuple(length for length in sizes.probe_lengths if length <= limit_of(models["teacher"]))
    told = bar(progress, "probe recall")
    material = Material(tokenizer, content)
    recall = recall_of(models, material, tuple(probes), lengths, sizes.probe_samples, progress=told)
    cost = {role: [] for role in models}
    task = progress.add_task("measure memory and speed", total=2 * len(sizes.contexts))
    for context in sizes.contexts:
        for role, model in models.items():
            cost[role].append(context_cost(model, context))
            progress.advance(task)
    prompt = tokenizer.decode(tokenizer(content[:2000], add_special_tokens=False).input_ids[:PROMPT_TOKENS])
    return {
        "quality": quality,
        "recall": {"samples": sizes.probe_samples, "tasks": probes, "rows": recall},
        "context_cost": cost,
        "prompt": prompt,
        "generated": {role: generate(model, tokenizer, prompt, sizes.new_tokens) for role, model in models.items()},
    }


def bar(progress: Progress, name: str):
    """A function that moves a new bar: done, total."""
    task = progress.add_task(name, total=None)
    return lambda done, total: progress.update(task, completed=done, total=total)


def training_rows(tokenizer, block_size: int, probes: str | None) -> TokenBlocks:
    """The bundled training text in rows of `block_size` tokens; with the text of the probes, as many drills."""
    data = TokenBlocks.from_files(asset_path("train.txt"), tokenizer, block_size)
    if probes is None:
        return data
    material = material_of(tokenizer, data.blocks.flatten(), probes)
    rows = [data.blocks, drill_rows(material, len(data), block_size, seed=0)]
    return TokenBlocks(torch.cat(rows).flatten(), block_size, tokenizer=data.tokenizer)


def recall_of(
    models: dict, material: Material, tasks: tuple, lengths: tuple, samples: int, progress=None
) -> list[dict]:
    """The share of exact answers of the models by task and length, see `by_length`."""
    options = {"tasks": tasks, "lengths": lengths, "samples": samples, "control": False}
    return by_length(run_probes(models, material, progress=progress, **options)) if lengths else []


def recall_rows(recall: dict) -> list[list[str]]:
    """One row per task for a table: its name with the lengths, and the percentages of both models."""
    table = []
    for task, name in recall["tasks"].items() if recall["rows"] else ():
        rows = [row for row in recall["rows"] if row["task"] == task]
        shares = [" / ".join(f"{100 * row[role]:.0f}" for row in rows) for role in ("teacher", "student")]
        table.append([f"{name} recalled, % at {' / '.join(str(row['length']) for row in rows)} tokens", *shares])
    return table


def recalls_nothing(recall: dict) -> bool:
    """Whether the transformer itself fails nearly everything, so that the probes say nothing about its student."""
    return max((row["teacher"] for row in recall["rows"]), default=0.0) < 0.1


def describe(name: str, model: PreTrainedModel) -> dict:
    """Name, size and shape of a model for the results."""
    return {
        "name": name,
        "parameters": model.num_parameters(),
        "layers": model.config.num_hidden_layers,
        "hidden_size": model.config.hidden_size,
    }


def generate(model: PreTrainedModel, tokenizer, prompt: str, new_tokens: int) -> dict:
    """Sample a continuation of `prompt`; the time includes the prefill."""
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids.to(model.device)
    torch.manual_seed(0)
    start = time.perf_counter()
    out = model.generate(ids, max_new_tokens=new_tokens, do_sample=True, temperature=0.7, top_k=40)
    elapsed = time.perf_counter() - start
    tokens = out[0, ids.shape[1] :].tolist()
    return {"text": tokenizer.decode(tokens), "tokens": tokens, "tokens_per_second": round(len(tokens) / elapsed, 1)}


def tokens_of_new_process(folder: Path, prompt: str, new_tokens: int, device: str) -> list[int]:
    """The same continuation by a new Python process that loads `folder` with AutoModelForCausalLM."""
    command = [sys.executable, "-c", LOAD_AND_GENERATE, str(folder), prompt, str(new_tokens)]
    done = subprocess.run(
        [*command, str(torch.get_num_threads()), device], capture_output=True, text=True, env=os.environ
    )
    if done.returncode != 0:
        raise RuntimeError(f"a new Python process could not load {folder}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def show(results: dict, output: Path, console: Console) -> None:
    """Print the table and the two texts."""
    quality, cost = results["quality"], results["context_cost"]
    student = results["student"]
    table = Table(title=f"{student['name']} in {student['converted_layers']} of {student['layers']} layers")
    for column, side in (("", "left"), ("transformer", "right"), ("student", "right")):
        table.add_column(column, justify=side)
    table.add_row(
        f"perplexity on {results['text']['file']}", f"{quality['teacher_ppl']:.2f}", f"{quality['student_ppl']:.2f}"
    )
    table.add_row("top-1 agreement with the transformer", "", f"{100 * quality['top1_agreement']:.1f} %")
    for row in recall_rows(results["recall"]):
        table.add_row(*row)
    for ours, theirs in zip(cost["student"], cost["teacher"], strict=True):
        if theirs["context"] >= 4096:
            sizes = (f"{row['cache_bytes']:,}" for row in (theirs, ours))
            table.add_row(f"cache bytes at {theirs['context'] // 1024}k tokens", *sizes)
    for ours, theirs in zip(cost["student"], cost["teacher"], strict=True):
        speeds = (f"{1e3 / row['ms_per_token']:.1f}" for row in (theirs, ours))
        table.add_row(f"decode tokens/s after {theirs['context'] // 1024}k tokens", *speeds)
    rates = (f"{results['generated'][role]['tokens_per_second']:.1f}" for role in ("teacher", "student"))
    table.add_row("generate() tokens/s, short prompt", *rates)
    console.print(table)
    if recalls_nothing(results["recall"]):
        console.print("The transformer itself recalls nearly nothing, so its student has no recall to keep.")
    console.print(f"[bold]prompt[/bold] {results['prompt']}", highlight=False)
    for role, name in (("teacher", "transformer"), ("student", "student")):
        console.print(f"[bold]{name}[/bold] {results['generated'][role]['text']}", highlight=False)
    agrees = "gives the same text" if results["new_process_agrees"] else "gives ANOTHER text"
    console.print(f"A new process loads {output / 'student'} with AutoModelForCausalLM and {agrees}.")
    console.print(f"Wrote {output / 'results.json'}, {output / 'plot.png'} in {results['seconds']['total']:.0f} s.")


def main(
    output: Annotated[Path, typer.Option(help="folder of the results, the plot and the checkpoint")] = Path(
        "runs/demo"
    ),
    keep: Annotated[str, typer.Option(help='layers that stay attention: "none" or e.g. "1,4"')] = "none",
    align_steps: Annotated[int, typer.Option(help="steps of layer-wise alignment")] = 100,
    distill_steps: Annotated[int, typer.Option(help="steps of distillation")] = 100,
    text: Annotated[Path | None, typer.Option(help="text of the comparison; the held-out text by default")] = None,
    teacher: Annotated[Path | None, typer.Option(help="folder of another transformer than the bundled one")] = None,
    drills: Annotated[bool, typer.Option(help="train on drills of recall, too")] = True,
) -> None:
    """Convert, align, distil and measure the bundled transformer."""
    console = Console()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with Progress(*COLUMNS, console=console) as progress:
        sizes = Sizes(align_steps=align_steps, distill_steps=distill_steps)
        recipe = Recipe(keep=keep, drills=drills)
        results = run_demo(output, progress, sizes, recipe, text=text, teacher_folder=teacher)
    show(results, output, console)


if __name__ == "__main__":
    typer.run(main)
