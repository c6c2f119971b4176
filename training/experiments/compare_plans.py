"""Which layers stay attention: the plan of `memmix select` beside uniform plans and all others of the same size.

    python training/experiments/compare_plans.py --text train.txt --out training/results/compare_plans.json --plot

Aligns every layer of the bundled transformer once, ranks the layers on the development text, then distils one student
for every set of kept layers of the given sizes, from the same aligned mixers, with the same tokens in the same order.
With every set trained, a random plan is no draw but the mean over all of them. What is reported is of held-out text.
"""

import itertools
import statistics
import tempfile
from pathlib import Path

import torch
from transformers import AutoTokenizer

from hf_memmix.assets import asset_path
from hf_memmix.conversion import convert_model, load_model, report, save_student
from hf_memmix.conversion.convert import layers_to_keep
from hf_memmix.conversion.plan import take_mixers
from hf_memmix.training.data import TokenBlocks
from hf_memmix.training.experiments.fit import Deadline
from hf_memmix.training.experiments.harness import device, execute, measured_at, parser_of, write_json
from hf_memmix.training.experiments.text import measured_tokens, text_record, train_tokens
from hf_memmix.training.layer_selection import cost_of_swaps, rank_layers
from hf_memmix.training.probes import Material, draw
from hf_memmix.training.probes.grid import DEPTHS
from hf_memmix.training.probes.score import score
from hf_memmix.training.train import Recipe, train

TASKS, LENGTH = ("niah", "mentions"), 256
ALIGN = {"steps": 400, "learning_rate": 3e-3}
DISTILL = {"steps": 250, "learning_rate": 1e-3, "rest_learning_rate": 1e-4}
SCORES = {"select": ("kl", "nll"), "KL alone": ("kl",), "answers alone": ("nll",)}


def plan(done: list[dict], args) -> list[dict]:
    if not any(row["stage"] == "align" for row in done):
        return [{"stage": "align"}]
    layers = load_model(asset_path("tiny_teacher")).config.num_hidden_layers
    sets = [list(keep) for size in args.sizes for keep in itertools.combinations(range(layers), size)]
    return [{"stage": "distill", "keep": keep} for keep in sets]


def run(row: dict, args) -> dict:
    teacher = load_model(asset_path("tiny_teacher"), dtype=torch.float32).to(device())
    if row["stage"] == "align":
        return align(teacher, args)
    aligned = load_model(_folder(args), dtype=torch.float32).to(device())
    layers = range(teacher.config.num_hidden_layers)
    swapped = [layer for layer in layers if layer not in row["keep"]]
    base, (cost,) = cost_of_swaps(teacher, aligned, [swapped], *_read("heldout", args), batch_size=args.batch_size)
    student = convert_model(teacher, args.mixer, row["keep"])
    take_mixers(student, aligned)
    _train(student, teacher, args, "distill", DISTILL | {"steps": args.distill_steps})
    tokens = measured_tokens("heldout")[: args.measured_tokens]
    compared = report(student, teacher, tokens, batch_size=args.batch_size)
    trained = {name: compared[name] for name in ("student_ppl", "ppl_ratio", "kl", "top1_agreement")}
    samples = _read("heldout", args)[1]
    scores = {task: score(student, drawn, args.batch_size, control=False) for task, drawn in samples.items()}
    trained["answers"] = {task: sum(s.nll for s in found) / len(found) for task, found in scores.items()}
    return {"teacher": base | {"ppl": compared["teacher_ppl"]}, "untrained": cost, "trained": trained}


def align(teacher, args) -> dict:
    """Align all layers, keep them for the other rows, and rank them on the development text."""
    student = convert_model(teacher, args.mixer, "none")
    done = _train(student, teacher, args, "align", ALIGN | {"steps": args.align_steps})
    save_student(student, _folder(args), overwrite=True)
    ranking = rank_layers(teacher, student, *_read("dev", args), batch_size=args.batch_size)
    return {"ranking": ranking, "curve": [[entry["step"], entry["loss"]] for entry in done["log"]]}


def _folder(args) -> Path:
    return args.out.with_suffix(".aligned")


def _train(student, teacher, args, stage: str, numbers: dict) -> dict:
    data = TokenBlocks(train_tokens(args.text).long(), args.block_size)
    settings = {"disable_tqdm": True, "logging_steps": max(1, numbers["steps"] // 20)}
    recipe = Recipe(
        stage=stage,
        batch_size=args.batch_size,
        block_size=args.block_size,
        warmup_steps=numbers["steps"] // 10 + 1,
        trainer=settings,
        **numbers,
    )
    with tempfile.TemporaryDirectory() as scratch:
        return train(student, teacher, data, scratch, recipe=recipe, resume=False, callbacks=[Deadline(args)])


def _read(name: str, args) -> tuple[torch.Tensor, dict]:
    """Blocks and probes of the development or the held-out text."""
    tokens = measured_tokens(name)[: args.measured_tokens]
    blocks = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
    text = asset_path(f"{name}.txt").read_text(encoding="utf-8")
    material = Material(AutoTokenizer.from_pretrained(asset_path("tiny_teacher")), text)
    drawn = {
        task: [s for depth in DEPTHS for s in draw(task, material, LENGTH, depth, seed=0, count=args.samples)]
        for task in TASKS
    }
    return blocks, drawn


def summary(results: dict) -> list[dict]:
    """For every number of kept layers: the plans by name, and all plans as mean, deviation, best and worst.

    A named plan has its figures and `better`, the share of the other plans that it beats in KL after distillation.
    """
    (ranking,) = (row["ranking"] for row in results["rows"] if row["stage"] == "align")
    trained = {tuple(row["keep"]): row["trained"] for row in results["rows"] if row["stage"] == "distill"}
    layers, rows = len(ranking["layers"]), []
    for size in sorted({len(keep) for keep in trained}):
        plans = {keep: row for keep, row in trained.items() if len(keep) == size}
        named = {name: _chosen(ranking, parts, size) for name, parts in SCORES.items()}
        named["uniform"] = tuple(layers_to_keep(size / layers, layers))
        row = {"kept": size, "plans": len(plans), "named": {}}
        for name, keep in named.items():
            if keep in plans:
                beaten = [plans[keep]["kl"] < other["kl"] for others, other in plans.items() if others != keep]
                row["named"][name] = {"keep": list(keep), **plans[keep], "better": sum(beaten) / max(1, len(beaten))}
        for figure in ("kl", "ppl_ratio"):
            values = [found[figure] for found in plans.values()]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            row[figure] = {
                "mean": statistics.mean(values), "deviation": spread, "best": min(values), "worst": max(values)
            }  # fmt: skip
        rows.append(row)
    return rows


def _chosen(ranking: dict, parts: tuple[str, ...], size: int) -> tuple[int, ...]:
    ranked = sorted(ranking["layers"], key=lambda row: -sum(row[part] for part in parts))
    return tuple(sorted(row["layer"] for row in ranked[:size]))


def plot(results: dict, path: Path) -> None:
    """KL to the teacher on held-out text after distillation, every plan a dot, the named ones marked."""
    from hf_memmix.training.experiments.plots import figure_of, save

    rows, trained = summary(results), [row for row in results["rows"] if row["stage"] == "distill"]
    caption = f"{results['settings']['distill_steps']} steps of distillation; {measured_at(results)}"
    figure, (panel,) = figure_of(1, caption)
    panel.plot([len(r["keep"]) for r in trained], [r["trained"]["kl"] for r in trained], ".", color="#999999")
    # open and of several sizes: plans may coincide
    for marker, size, name in zip("*sDo", (16, 12, 8, 8), [*SCORES, "uniform"], strict=True):
        points = [(row["kept"], row["named"][name]["kl"]) for row in rows if name in row["named"]]
        style = {"markersize": size, "markerfacecolor": "none", "label": name}
        panel.plot(*zip(*points, strict=True), marker, **style) if points else None
    panel.plot([row["kept"] for row in rows], [row["kl"]["mean"] for row in rows], "_", markersize=18, label="mean")
    panel.set_xticks([row["kept"] for row in rows])
    panel.set_xlabel("layers that stay attention")
    panel.set_ylabel("KL to the teacher, held-out text")
    panel.margins(x=0.3)
    figure.legend(loc="outside right center", frameon=False, fontsize=8)
    save(figure, path)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--text", type=Path, default=asset_path("train.txt"), help="training text, .txt or .npy")
    parser.add_argument("--mixer", default="gka")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2], help="numbers of kept layers")
    parser.add_argument("--align-steps", type=int, default=ALIGN["steps"])
    parser.add_argument("--distill-steps", type=int, default=DISTILL["steps"])
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--block-size", type=int, default=512)
    parser.add_argument("--measured-tokens", type=int, default=60_000, help="of each text")
    parser.add_argument("--samples", type=int, default=32, help="sequences for each depth of a probe")
    args = parser.parse_args()
    results = execute(Path(__file__).stem, args, plan, text=text_record(args.text))
    if len(results["rows"]) > 1:
        results["summary"] = summary(results)
        write_json(args.out, results)
        for row in results["summary"]:
            named = {name: round(found["kl"], 4) for name, found in row["named"].items()}
            print(row["kept"], "kept:", named, {k: round(v, 4) for k, v in row["kl"].items()})
        if args.plot:
            plot(results, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
