"""What does each mixer keep of a teacher that recalls? Converts the recall teacher by mixer and number of kept layers.

    python training/experiments/recall_teacher/distillation_rows.py --data .scratch/recall \\
        --out .scratch/recall/rows.npy
    python training/experiments/recall_teacher/grid.py --teacher .scratch/teacher --data .scratch/recall --workers 8 \\
        --out training/experiments/recall_teacher/results/grid.json

Every layout is aligned in all layers once per seed. Its students take these mixers, keep 0, 1, 3 or 6 of 12 layers
as attention (spread uniformly, or the layers that `memmix select` ranks highest), and are distilled on the same
tokens. Students with attention over a window of 64 or 256 tokens in the place of the mixer are the control. Mixtures
take their mixers from the same alignments: the choice of `memmix select` at the state bytes of one mixer, and Echo's
layout. The rows come in the order of what they tell: pure students and three kept layers of every mixer first. The
same command continues an interrupted run and stops itself at its time limit.
"""

import json
import time
from pathlib import Path
from typing import Annotated

import numpy
import torch
import typer

from hf_memmix.conversion import convert_model, mixer_types_of
from hf_memmix.conversion.families import attention_module
from hf_memmix.conversion.layer_cost import LayerCost
from hf_memmix.conversion.mixer_files import load_aligned, mixer_file, write_mixers
from hf_memmix.conversion.records import write_json
from hf_memmix.mixers import ATTENTION
from hf_memmix.serving.footprint import Footprint, state_bytes
from hf_memmix.swap import memory_mixers
from hf_memmix.training.evaluation.layer_selection import choose, rank_layers
from hf_memmix.training.evaluation.mixer_search import Budget, choose_mixers, scores_of
from hf_memmix.training.experiments.bundled.language_model import without_masks
from hf_memmix.training.experiments.common.fit import autocast, fit
from hf_memmix.training.experiments.common.harness import Experiment, attempt, device, matches
from hf_memmix.training.experiments.common.options import Options
from hf_memmix.training.experiments.recall_teacher.probing import drawn, recall_of
from hf_memmix.training.experiments.recall_teacher.students import (
    LAYOUTS,
    START_DECAY,
    measured,
    sequences,
    teacher_of,
)
from hf_memmix.training.experiments.recall_teacher.texts import probe_materials, tokens_of
from hf_memmix.training.losses import forward_kl
from hf_memmix.training.student_teacher import AlignStudentTeacher

MAIN = tuple(LAYOUTS)[:8]
FIRST, FIRST_CELLS = (*MAIN, "gka, long"), ((0, "uniform"), (3, "uniform"))  # what a seed measures first
MIXED = ("gka", "lattice", "mamba2", "coffee", "ska")  # the mixers of the library, which `select` chooses among
# layouts of several mixers: the mixer whose state bytes `select` may use, or None for Echo's layout
MIXTURES = {"select, bytes of gka": "gka", "select, bytes of lattice": "lattice", "echo": None}
RATES = {"align": {"learning_rate": 5e-3}, "distill": {"learning_rate": 2e-3, "rest_learning_rate": 2e-4}}
RANKING = "ranking.json"
RANKING_LENGTH = 512  # tokens of the probes that rank the layers


def rows_in_order(args) -> list[dict]:
    """All rows, the most informative first."""
    rows = []

    def add(names, seeds, cells, aligns=True):
        for seed in seeds if aligns else ():
            rows.extend({"stage": "align", "layout": name, "seed": seed} for name in names)
        for keep, how in cells:
            cell = {"keep": keep, "how": how}
            rows.extend({"stage": "distill", "layout": name, "seed": seed} | cell for seed in seeds for name in names)

    for seed in args.seed_list:
        add(FIRST, [seed], [(0, "uniform")])
        rows.append({"stage": "teacher"})
        add(FIRST, [seed], [(3, "uniform")])
        add(MAIN, [seed], [(1, "uniform"), (6, "uniform"), (3, "select")])
        add(MIXTURES, [seed], [(0, "mixture")], aligns=False)
        add(LAYOUTS, [seed], [(0, "uniform")])
    add(MAIN, args.seed_list, [(1, "select"), (6, "select")])
    unique = {tuple(row.items()): row for row in rows}
    return [row for row in unique.values() if row.get("layout", args.layouts[0]) in args.layouts]


def rows_to_run(done: list[dict], args) -> list[dict]:
    """The rows whose mixers are aligned and lie in the folder of aligned mixers.

    A seed begins when pure students and those with three kept layers of the seed before it have ended.
    """
    aligned = {(row["layout"], row["seed"]): row for row in done if row["stage"] == "align"}

    def is_ready(row: dict) -> bool:
        if row["stage"] != "distill":
            return True
        names = MIXED if row["how"] == "mixture" else [row["layout"]]
        found = [aligned.get((name, row["seed"])) for name in names]
        return all(one and one.get("finite") and (one.get("ranking") or row["how"] == "uniform") for one in found)

    def is_first(row: dict) -> bool:
        return row.get("layout") in FIRST and (row["stage"] == "align" or (row["keep"], row["how"]) in FIRST_CELLS)

    rows = [row for row in rows_in_order(args) if is_ready(row)]
    running = [row["seed"] for row in rows if is_first(row) and not any(matches(known, row) for known in done)]
    places = {seed: place for place, seed in enumerate(args.seed_list)}
    last = min((places[seed] for seed in running), default=len(places))
    return [row for row in rows if places.get(row.get("seed"), 0) <= last]


def kept_layers(keep: int, how: str, ranking: dict, layers: int) -> list[int]:
    """The layers that stay attention: in the middle of equal parts of the model, or with the highest scores."""
    if how == "select" and keep:
        return choose(ranking, keep, layers)
    return [int((i + 0.5) * layers / keep) for i in range(keep)]


def run(row: dict, args):
    if row["stage"] == "teacher":
        return measured_teacher(args)
    return align(row, args) if row["stage"] == "align" else distill(row, args)


def align(row: dict, args) -> dict:
    """Align a layout in all layers, keep its mixers for the other rows, and rank its layers on development text."""
    teacher = teacher_of(args.teacher)
    name, options, half_lives = LAYOUTS[row["layout"]]
    student = convert_model(teacher, name, seed=row["seed"], mixers={name: options})
    if half_lives is not None:
        for layer in student.config.memory_layers:
            START_DECAY[name](attention_module(student, layer), half_lives)
    began = time.time()
    result = trained(student, teacher, "align", row["seed"], args)
    if not result["finite"]:
        return result
    result["training_seconds"] = round(time.time() - began, 1)
    dev = torch.from_numpy(tokens_of(args.data, "dev").astype(numpy.int64))[: args.ranking_tokens]
    blocks = dev[: len(dev) // RANKING_LENGTH * RANKING_LENGTH].view(-1, RANKING_LENGTH)
    found = drawn(probe_materials(args.data, "dev"), [RANKING_LENGTH], args.ranking_samples, ("niah", "mqar_32"))
    samples = {task: by_length[RANKING_LENGTH] for task, by_length in found.items()}
    errors = {}
    with autocast():
        ranking = attempt(
            errors, "ranking", rank_layers, teacher, student.to(device()), blocks, samples, batch_size=32
        )
    folder = mixers_folder(row, args)
    folder.mkdir(parents=True, exist_ok=True)
    write_mixers(student, mixer_file(folder, name), {})
    size = {"layer_bytes": state_bytes(memory_mixers(student)[0], torch.float32)}
    write_json(folder / RANKING, (ranking or {}) | size)  # the last file: with it, the folder is complete
    return result | {"ranking": ranking} | ({"ranking_error": errors["ranking"]} if errors else {})


def distill(row: dict, args) -> dict:
    """Distil one student and measure it."""
    teacher = teacher_of(args.teacher)
    layers = teacher.config.num_hidden_layers
    if row["how"] == "mixture":
        types, options = mixture(row, layers, args), {}
        sources = {name: aligned_folder(row | {"layout": name}, args) for name in MIXED}
    else:
        name, options, _ = LAYOUTS[row["layout"]]
        kept = kept_layers(row["keep"], row["how"], ranking_of(row, args), layers)
        types = [ATTENTION if layer in kept else name for layer in range(layers)]
        sources, options = {name: aligned_folder(row, args)}, {name: options}
    student = convert_model(teacher, layers=types, seed=row["seed"], mixers=options)
    for mixer in memory_mixers(student).values():
        load_aligned(mixer, sources[mixer.name])
    size = Footprint.of(student.config, torch.float32)
    result = {"types": types, "state_bytes": size.state_bytes(), "parameters": student.num_parameters()}
    began = time.time()
    result |= trained(student, teacher, "distill", row["seed"], args)
    if not result["finite"]:
        return result
    result["training_seconds"] = round(time.time() - began, 1)
    return result | measured(student, teacher, args)


def mixture(row: dict, layers: int, args) -> list[str]:
    """The mixer of every layer of a mixture."""
    rankings = {name: ranking_of(row | {"layout": name}, args) for name in MIXED}
    if (limit := MIXTURES[row["layout"]]) is None:
        return mixer_types_of(row["layout"], layers)
    scores = [{k: v for k, v in layer.items() if k != ATTENTION} for layer in scores_of(rankings)]
    costs = [{name: LayerCost(found["layer_bytes"], None, None) for name, found in rankings.items()}] * layers
    return choose_mixers(scores, costs, Budget(state_bytes=layers * rankings[limit]["layer_bytes"]))


def trained(student, teacher, stage: str, seed: int, args) -> dict:
    """Train one stage in place and return the result of `fit`.

    `align` trains the mixers, on the inputs of the teacher's layers; `distill` trains all parameters on the forward
    KL of the next-token distributions. These are the losses of `memmix align` and `memmix distill`.
    """
    torch.set_float32_matmul_precision("high")
    student.float().to(device())
    rows = torch.from_numpy(numpy.load(args.data / "rows.npy", allow_pickle=False).astype(numpy.int64))
    rows = rows.flatten()[: rows.numel() // args.block_size * args.block_size].view(-1, args.block_size).to(device())
    steps, batch = getattr(args, f"{stage}_steps"), args.batch_size
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).to(device())
    if stage == "align":
        pair = AlignStudentTeacher(student, teacher)
        loss_of, rates = lambda ids: pair.loss(ids, None), [RATES[stage]["learning_rate"]]
        parameters = [list(pair.mixers.parameters())]
    else:
        student.requires_grad_(True)
        mixers = {id(p) for mixer in memory_mixers(student).values() for p in mixer.parameters()}
        parameters = [[p for p in student.parameters() if (id(p) in mixers) == inside] for inside in (True, False)]
        rates = [RATES[stage]["learning_rate"], RATES[stage]["rest_learning_rate"]]

        def loss_of(ids):
            with torch.no_grad():
                theirs = teacher(input_ids=ids, use_cache=False).logits
            return forward_kl(student(input_ids=ids, use_cache=False).logits, theirs).mean()

    def batch_of(step: int):
        at = torch.arange(step * batch, (step + 1) * batch, device=device()) % len(rows)
        return (rows[order[at]],)

    groups = [{"params": p, "lr": lr, "weight_decay": 0.0} for p, lr in zip(parameters, rates, strict=True) if p]
    schedule = {"warmup_steps": steps // 10 + 1, "groups": groups}
    graphed = not {mixer.name for mixer in memory_mixers(student).values()} & set(args.eager)
    with without_masks(student, teacher):
        result = fit(student, loss_of, steps, rates[0], args, batch_of, graphed=graphed, **schedule)
    student.requires_grad_(True).eval()
    return result


def measured_teacher(args) -> dict:
    teacher = teacher_of(args.teacher)
    return {"recall": recall_of(teacher, sequences(args.data, tuple(args.lengths), args.samples))}


def ranking_of(row: dict, args) -> dict | None:
    """The ranking of the layers by the aligned mixers of this layout and seed."""
    return json.loads((aligned_folder(row, args) / RANKING).read_text())


def aligned_folder(row: dict, args) -> Path:
    """The folder of the aligned mixers of this layout and seed; aligns them again if it is lost."""
    folder = mixers_folder(row, args)
    if not (folder / RANKING).exists():
        align(row, args)
    return folder


def mixers_folder(row: dict, args) -> Path:
    return args.out.with_suffix(".mixers") / f"{row['layout'].replace(', ', '-')}-{row['seed']}"


class GridOptions(Options):
    teacher: Annotated[Path, typer.Option(help="folder of the recall teacher")]
    data: Annotated[Path, typer.Option(help="folder that corpus.py wrote, with rows.npy of distillation_rows.py")]
    layouts: Annotated[list[str], typer.Option(help="repeatable")] = (*LAYOUTS, *MIXTURES)
    seed_list: Annotated[list[int], typer.Option(help="seeds, in the order of their rows; repeatable")] = (0, 1)
    align_steps: int = 100
    distill_steps: int = 180
    batch_size: int = 8
    block_size: int = 2048
    measured_tokens: Annotated[int, typer.Option(help="tokens of each text that are measured")] = 65_536
    lengths: Annotated[list[int], typer.Option(help="lengths of the probes; repeatable")] = (256, 512, 1024, 2048)
    samples: Annotated[int, typer.Option(help="probes per length and depth")] = 8
    ranking_tokens: Annotated[int, typer.Option(help="development text that ranks the layers")] = 16_384
    ranking_samples: Annotated[int, typer.Option(help="probes per depth that rank the layers")] = 4
    eager: Annotated[
        list[str], typer.Option(help="mixers whose training steps are not captured as CUDA graphs; repeatable")
    ] = ()


main = Experiment("recall_grid", __file__, GridOptions, rows_to_run).command()


if __name__ == "__main__":
    typer.run(main)
