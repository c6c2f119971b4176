"""Which memory replaces the attention of SmolLM2 best, at equal bytes of state and equal steps of training?

    python training/experiments/smollm2/arms.py --teacher SMOLLM2 --data .scratch/smollm2 --out arms.json \\
        --arms "window 384" --arms "gka @ kept=4 seed=1"

`--data` is the folder of `corpus.py`. First the teacher is measured, and its kept layers are chosen greedily with
windows in place of mixers (`memmix select --stand-in window`), on development text. Then each arm is converted,
aligned, distilled and measured; it begins only if the rest of `--seconds` is probably enough for it. The same command
runs the remaining arms. Behind an `@` stands what an arm has in place of the common settings, see `CHANGES`. An arm
with fewer kept layers keeps those that were chosen first. "gka @ drills=.5" trains on rows half of which are drills of
recall, see `training/fact_drills.py`. Other changes of the recipe: `recipe_changes.py`.
"""

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import TrainerCallback

from hf_memmix.conversion import convert_model
from hf_memmix.training.data import TokenBlocks
from hf_memmix.training.experiments.common.harness import Experiment, check_time
from hf_memmix.training.experiments.common.options import Options, check_names
from hf_memmix.training.experiments.smollm2 import measuring, recipe_changes
from hf_memmix.training.text_files import text_record
from hf_memmix.training.train import align, distill, load_recipe

# by name the options of the mixer and, if there is one, of the window beside it. The state of GKA has the bytes of a
# window of 384 tokens, that of gated_delta those of 192
FIRST_TOKEN, NO_FIRST_TOKEN = {"window": {"sinks": 1}}, {"window": {"sinks": 0}}
ARMS = {
    "window 384": {"window": {"window": 384, "sinks": 0}},
    "window 64": {"window": {"window": 64, "sinks": 0}},
    "window 384, first token": {"window": {"window": 384, "sinks": 1}},
    "window 192, first token": {"window": {"window": 192, "sinks": 1}},
    "window 64, first token": {"window": {"window": 64, "sinks": 1}},
    "gka": {"gka": {}},
    "gka + window 64": {"gka": {"local_window": 64}} | NO_FIRST_TOKEN,
    "gka + window 64, first token": {"gka": {"local_window": 64}} | FIRST_TOKEN,
    "gka, long + window 64, first token": {"gka": {"local_window": 64, "half_lives": [16, 2048]}} | FIRST_TOKEN,
    "gated_delta": {"gated_delta": {}},
    "gated_delta + window 64": {"gated_delta": {"local_window": 64}} | NO_FIRST_TOKEN,
    "gated_delta + window 64, first token": {"gated_delta": {"local_window": 64}} | FIRST_TOKEN,
    "gated_delta + window 192": {"gated_delta": {"local_window": 192}} | NO_FIRST_TOKEN,
    "gated_delta + window 192, first token": {"gated_delta": {"local_window": 192}} | FIRST_TOKEN,
    "gka, long": {"gka": {"half_lives": [16, 2048]}},
    "gated_delta, long": {"gated_delta": {"half_lives": [16, 2048]}},
    "kda": {"kda": {}},
    "kda + window 192": {"kda": {"local_window": 192}} | NO_FIRST_TOKEN,
    "kda + window 192, first token": {"kda": {"local_window": 192}} | FIRST_TOKEN,
    "lattice": {"lattice": {}},
    "lattice + window 192, first token": {"lattice": {"local_window": 192}} | FIRST_TOKEN,
    "mamba2": {"mamba2": {}},
    "mamba2 + window 192, first token": {"mamba2": {"local_window": 192}} | FIRST_TOKEN,
}
# a memory beside a window that `align` also compares by what attention reads outside this window
FAR = ", far weight 1"
ARMS |= {name + FAR: mixers for name, mixers in ARMS.items() if any("local_window" in own for own in mixers.values())}
# layers that keep their attention, seed, a factor of the steps; share and weight of drills, see `with_drills`; a
# factor of the learning rates; 1 for the drills of `more_forms`; and changes of the recipe
SIZES = {"kept": int, "seed": int, "times": int}
NOTED = {"drills": float, "answers": float, "rate": float, "more": int} | recipe_changes.CHANGES  # in every row
CHANGES = SIZES | NOTED
FIRST = (
    "window 384",
    "gka + window 64",
    "gated_delta + window 192",
    "gka",
    "gated_delta",
    "window 64",
    "gated_delta + window 64",
    "window 384, first token",
)
STAGES = {"align": align, "distill": distill}
SKIPPED = 5  # steps of a run whose speed is not measured


class Clock(TrainerCallback):
    """The seconds of a step, after those that compile kernels and record a CUDA graph."""

    def __init__(self, args):
        self.args, self.steps, self.began, self.seconds_per_step = args, 0, time.time(), 0.0

    def on_step_end(self, arguments, state, control, **kwargs):
        self.steps += 1
        if self.steps == SKIPPED:
            self.began = _now()
        check_time(self.args)

    def on_train_end(self, arguments, state, control, **kwargs):
        counted = self.steps - SKIPPED if self.steps > SKIPPED else self.steps
        self.seconds_per_step = (_now() - self.began) / counted


def _now() -> float:
    """The time when the GPU has done all that it was told to do."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.time()


def changes_of(asked: str) -> tuple[str, dict[str, float]]:
    """The name of an arm, and the numbers behind its `@`.

    Raises:
        ValueError: a number has no name, or is none; there are answers, more sentences or own texts without drills; or
            own texts would take the place of drills.
    """
    name, _, changes = asked.partition(" @ ")
    pairs = (change.split("=") for change in changes.split())
    found = {change: CHANGES.get(change, float)(value) for change, value in pairs}
    if not 0 <= found.get("drills", 0) <= 1 or ({"answers", "more", "own"} & {*found} and not found.get("drills")):
        raise ValueError
    own = found.get("own", 0)  # in place of text, which drills without weights look like
    if own and (own + found["drills"] > 1 or found.get("answers") == 0):
        raise ValueError
    return name, found


def row_of(asked: str, trace: list[dict], args) -> dict:
    """The row of an arm. `trace`: of the choice, whose first row is before any layer is chosen."""
    arm, changes = changes_of(asked)
    counts = [changes.get("times", 1) * int(count) for count in args.given_steps.split(",")]
    keep = sorted(row["layer"] for row in trace[1 : changes.get("kept", args.kept) + 1])
    row = {"step": "arm", "arm": arm, "keep": keep, "seed": changes.get("seed", args.seed)}
    # None in results that are older than these changes
    row |= {name: changes.get(name) for name in NOTED}
    return row | dict(zip(STAGES, counts, strict=True))


def rows_to_run(done: list[dict], args) -> list[dict]:
    teacher = next((row for row in done if row["step"] == "teacher" and "choice" in row), None)
    if teacher is None:
        return [{"step": "teacher", "arm": "teacher"}]
    ended = [row for row in done if row["step"] == "arm" and "seconds" in row]
    per_step = statistics.median([row["seconds"] / (row["align"] + row["distill"]) for row in ended] or [0.0])
    left = getattr(args, "deadline", float("inf")) - time.time()
    rows = [row_of(asked, teacher["choice"]["trace"], args) for asked in args.arms]
    return [row for row in rows if per_step * (row["align"] + row["distill"]) < left]


def run(row: dict, args):
    return chosen_and_measured(args) if row["step"] == "teacher" else trained_and_measured(row, args)


def chosen_and_measured(args) -> dict:
    """The layers that keep their attention, and the figures of the teacher."""
    began = time.time()
    found = measuring.search_of(args, ",".join(measuring.CHOICE_PROBES)).run(args.kept)
    trace = [{key: row[key] for key in ("layer", "loss", "kl", "answers")} for row in found["trace"]]
    choice = {"keep": found["keep"], "trace": trace, "seconds": round(time.time() - began, 1)}
    figures = measuring.measured_of(args)
    return {"choice": choice, "measuring_seconds": figures.seconds} | figures.of_teacher()


def student_of(row: dict, args):
    mixers = ARMS[row["arm"]]  # the memory stands first
    memory = next(iter(mixers))
    given = recipe_changes.conversion(row, memory, mixers)
    return convert_model(measuring.teacher_of(args.teacher), memory, row["keep"], **given)


def data_of(row: dict, block_size: int, args) -> TokenBlocks:
    if not row["drills"]:
        return TokenBlocks(measuring.tokens_of(args.data, "train"), block_size)
    answers = 1.0 if row["answers"] is None else row["answers"]
    data = measuring.drilled_blocks(args.teacher, args.data, block_size, row["drills"], answers, bool(row["more"]))
    if row["own"]:
        own = measuring.own_blocks(args.teacher, args.data, block_size)
        data = recipe_changes.with_own(data, own, row["own"])
    return data


def train(student, stage: str, row: dict, seed: int, args, longer: bool = False) -> tuple[dict, Clock]:
    """One stage with the rates of `recipe_changes.rates`. `longer`: `THEN_STEPS` on rows of `then` tokens."""
    recipe, clock = load_recipe(stage), Clock(args)
    steps, size = (recipe_changes.THEN_STEPS, row["then"]) if longer else (row[stage], args.block_size)
    data = data_of(row, size, args)
    batch = args.batch_size * args.block_size // size
    sizes = {"steps": steps, "batch_size": batch, "block_size": size, "save_every": 0}
    sizes |= recipe_changes.rates(recipe, row)
    sizes |= {"drills": data.drills, "compile": args.compile}
    callbacks = [clock]
    if stage == "distill":
        sizes["groups"] = recipe_changes.groups(row, len(student.config.mixer_types), sizes["rest_learning_rate"])
        callbacks += [recipe_changes.Average(row["average"])] if row["average"] else []
    if args.compile:
        torch.compiler.reset()  # the layers of the arm before, in the same process
    if stage == "align" and row["arm"].endswith(FAR):
        sizes["far_weight"] = 1.0
    with tempfile.TemporaryDirectory() as folder:
        result = STAGES[stage](
            student,
            measuring.teacher_of(args.teacher),
            data,
            folder,
            **sizes,
            seed=seed,
            resume=False,
            callbacks=callbacks,
            trainer={"logging_steps": max(1, steps // 12)},
        )
    return result, clock


def trained_and_measured(row: dict, args):
    """An arm, in parts."""
    student = student_of(row, args)
    size = args.batch_size * args.block_size
    yield {
        "parameters": student.num_parameters(),
        "state_bytes": measuring.layer_bytes(student),
        "tokens": size * (sum(row[stage] for stage in STAGES) + (recipe_changes.THEN_STEPS if row["then"] else 0)),
    }
    parts = [(stage, stage, False) for stage in STAGES] + [("then", "distill", True)] * bool(row["then"])
    for seed, (part, stage, longer) in enumerate(parts):
        result, clock = train(student, stage, row, row["seed"] * len(STAGES) + seed, args, longer)
        kept = {name: result[name] for name in ("first_loss", "last_loss", "seconds", "log")}
        kept["compiled"] = args.compile
        yield {f"{part}_run": kept | {"tokens_per_second": round(size / clock.seconds_per_step)}}
    began = time.time()
    figures = measuring.measured_of(args).of(student)
    yield figures | {"finite": True, "measuring_seconds": round(time.time() - began, 1)}


class Settings(Options):
    teacher: Annotated[Path, typer.Option(help="folder of the teacher")]
    data: Annotated[Path, typer.Option(help="folder of the token files of corpus.py")]
    text: Annotated[Path | None, typer.Option(help="text of the choice; default: dev.txt of the data")] = None
    arms: Annotated[
        list[str], typer.Option(help="arms to compare, as NAME or NAME @ CHANGE=VALUE ...; repeatable")
    ] = FIRST
    kept: Annotated[int, typer.Option(help="layers that keep their attention, and that are chosen")] = 8
    window: Annotated[int, typer.Option(help="tokens of the windows of the choice")] = 64
    sinks: Annotated[int, typer.Option(help="first tokens that these windows read as well")] = 0
    seed: Annotated[int, typer.Option(help="seed of the order of the training text")] = 0
    given_steps: Annotated[str, typer.Option(help="steps of align and distill")] = "160,320"
    compile: Annotated[bool, typer.Option(help="compile the layers by torch.compile")] = False
    batch_size: Annotated[int, typer.Option(help="sequences of a step")] = 8
    block_size: Annotated[int, typer.Option(help="tokens of a sequence")] = 2048
    length: Annotated[int, typer.Option(help="tokens of a sequence of the choice")] = 1024
    choice_samples: Annotated[int, typer.Option(help="sequences per depth of a probe of the choice")] = 4
    choice_tokens: Annotated[int, typer.Option(help="tokens of the text of the choice")] = 16384
    probes: Annotated[list[str], typer.Option(help="probes of `memmix eval`; repeatable")] = measuring.PROBES
    few_shot: Annotated[Path | None, typer.Option(help="folder of few_shot.py, whose tasks are measured as well")] = (
        None
    )
    lengths: Annotated[list[int], typer.Option(help="lengths of the probes; repeatable")] = (
        256,
        512,
        1024,
        2048,
        4096,
        8192,
    )
    samples: Annotated[int, typer.Option(help="sequences per length and depth of a probe")] = 16
    measured_tokens: Annotated[int, typer.Option(help="tokens of each text that are read")] = 65536
    free_prompts: Annotated[int, typer.Option(help="texts that are generated")] = 64
    free_tokens: Annotated[int, typer.Option(help="tokens of a generated text")] = 128


def check(args) -> None:
    for asked in args.arms:
        try:
            arm, changes = changes_of(asked)
        except ValueError:
            told = (
                f"{asked!r} is no NAME @ CHANGE=NUMBER ..., with drills of 0 to 1, which answers, more and own need;"
                " own and drills are at most 1 together, and own needs answers above 0"
            )
            raise typer.BadParameter(told, param_hint="--arms") from None
        check_names("--arms", [arm], ARMS)
        check_names("--arms", list(changes), CHANGES)
    args.text = args.data / "dev.txt" if args.text is None else args.text


def about(args) -> dict:
    """What was measured on what, without the places on this machine."""
    texts = {name: text_record(args.data / f"{name}.npy") for name in ("train", *measuring.TEXTS)}
    found = {"model": measuring.model_record(args.teacher), "texts": texts | {"choice": text_record(args.text)}}
    if args.few_shot is not None:
        found["few_shot"] = json.loads((args.few_shot / "sources.json").read_text(encoding="utf-8"))
    return found


main = Experiment("arms", __file__, Settings, rows_to_run, check, about).command()

if __name__ == "__main__":
    typer.run(main)
