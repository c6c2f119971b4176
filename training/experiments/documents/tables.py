"""The tables of README.md and of other documents, from committed measurements; `figures.py` puts them in place."""

import json
from functools import partial
from pathlib import Path

from hf_memmix.conversion.records import bytes_text, markdown_table
from hf_memmix.conversion.teachers_table import refusals, teachers_table
from hf_memmix.training.demo import PROBES, recall_rows
from hf_memmix.training.experiments.bundled.versions import as_sentence
from hf_memmix.training.experiments.documents import choice_tables as choice
from hf_memmix.training.experiments.documents import conversion_costs as costs
from hf_memmix.training.experiments.documents import front_tables as front
from hf_memmix.training.experiments.documents import goal_tables as goals
from hf_memmix.training.experiments.documents import kernel_tables as kernels
from hf_memmix.training.experiments.documents import one_gpu_tables as one_gpu
from hf_memmix.training.experiments.documents import serving_tables as serving
from hf_memmix.training.experiments.documents.budget_tables import one_gpu_distil_table, plan_checked_table
from hf_memmix.training.experiments.documents.bundled_tables import (
    bundled_candidates_table,
    bundled_predictions_table,
    bundled_recall_table,
    bundled_runs_table,
)
from hf_memmix.training.experiments.documents.gpu_tables import gpu_table
from hf_memmix.training.experiments.documents.long_tables import (
    context_checks_table,
    context_parallel_table,
    long_prompts_table,
    long_training_table,
)
from hf_memmix.training.experiments.documents.quantized_tables import quantized_table, small_states_table
from hf_memmix.training.experiments.measurements import CARDS, MEASUREMENTS, RECALL_RUNS, read

aligned_table = partial(markdown_table, figures=True)


def demo_table(root: Path) -> str:
    """Both models of `make demo`, side by side."""
    results = read("demo", root)
    quality = results["quality"]
    pairs = list(zip(results["context_cost"]["teacher"], results["context_cost"]["student"], strict=True))
    layers = f"{results['student']['converted_layers']} of {results['student']['layers']} layers"
    rows = [
        ["held-out perplexity", f"{quality['teacher_ppl']:.2f}", f"{quality['student_ppl']:.2f}"],
        ["same most likely token", "", f"{100 * quality['top1_agreement']:.1f} %"],
    ]
    if "recall" in results:  # not in a run before the demo measured it
        rows += recall_rows(results["recall"])
    for theirs, ours in pairs:
        if theirs["context"] >= 4096:
            name = f"cache at {theirs['context'] // 1024}k tokens of context"
            rows.append([name, bytes_text(theirs["cache_bytes"]), bytes_text(ours["cache_bytes"])])
    for theirs, ours in pairs:
        name = f"decode after {theirs['context'] // 1024}k tokens, tokens/s"
        rows.append([name, *(f"{1e3 / row['ms_per_token']:.0f}" for row in (theirs, ours))])
    minutes = results["seconds"]["total"] / 60
    rows_of = ", half of the rows drills of recall" if results.get("drills") else ""
    answers = _answers_of(results["recall"]["rows"]) if "recall" in results else ""
    return (
        aligned_table(["", "transformer", f"GKA, {layers}"], rows)
        + f"\n\n{results['hardware']}; torch {results['torch']}, transformers {results['transformers']}; "
        f"{minutes:.1f} minutes in all, of which {results['seconds']['align'] + results['seconds']['distill']:.0f} s "
        f"are training{rows_of}. Perplexity over {quality['tokens']:,} tokens of the held-out text; the demo's "
        f"learning rates and steps were chosen on another text.{answers}" + as_sentence(results)
    )


def _answers_of(rows: list[dict]) -> str:
    """How many answers a share of recall is of, and how large its standard error can be, as a sentence."""
    told = []
    for task, name in PROBES.items() if rows else ():
        counts = sorted({row["answers"] for row in rows if row["task"] == task})
        most = " to ".join(dict.fromkeys(str(count) for count in (counts[0], counts[-1])))
        told.append(f"{name} {most} (up to {50 / counts[0] ** 0.5:.0f} points)")
    return f" Answers behind each share of recall, and its standard error: {', '.join(told)}." if told else ""


def student_table(root: Path) -> str:
    """One row for every student that has measurements in `model_cards`."""
    lines, devices, tokens, teachers = [], set(), set(), set()
    for path in sorted((root / CARDS).glob("*/metrics*.json")):
        metrics = json.loads(path.read_text())
        heldout = metrics["heldout"]
        if "student_ppl" not in heldout:
            continue
        kept = metrics["keep"] if isinstance(metrics["keep"], list) else []
        name = f"`assets/{path.parent.name}`"
        if path.stem != "metrics":
            name = f"{path.parent.name}, {path.stem.removeprefix('metrics_')} (not bundled)"
        line = [name, ", ".join(metrics["mixer_options"]), str(len(kept)), str(len(heldout["layer_error"]))]
        line += [f"{heldout[key]:.2f}" for key in ("teacher_ppl", "student_ppl")]
        lines.append([*line, f"{heldout['ppl_ratio']:.3f}", f"{100 * heldout['top1_agreement']:.1f} %"])
        tokens.add(f"{heldout['tokens']:,}")
        teachers.add(as_sentence(metrics))
        devices.add(f"{metrics['device']} in {metrics['seconds'] / 60:.0f} minutes")
    head = [
        "student",
        "mixer",
        "attention layers",
        "mixer layers",
        "teacher ppl",
        "student ppl",
        "ratio",
        "same token",
    ]
    return aligned_table(head, lines) + (
        f"\n\n{', '.join(sorted(tokens))} tokens of the held-out text, which was never used for selection; "
        f"distilled on one {', '.join(sorted(devices))} each.{''.join(sorted(teachers))}"
    )


def experiment_tables(root: Path, *names: str) -> str:
    """The reports of the experiments for the measurements of these names."""
    return _report([read(name, root) for name in names])


def echo_mask_table(root: Path) -> str:
    """SKA with and without the true action mask, beside the models that get none."""
    # not at the top: `memmix card` imports this package from a wheel, which has no experiments
    from hf_memmix.training.experiments.echo.report import mask_table

    return mask_table(read("echo_transfer", root), read("echo_ablation", root))


def recall_runs_table(root: Path) -> str:
    """The runs of the recall teacher."""
    from hf_memmix.training.experiments.recall_teacher.report import runs_table  # no experiments in a wheel

    earlier = {run: read(f"recall_teacher_{run}", root) for run in RECALL_RUNS[:-1]}
    return runs_table(earlier | {RECALL_RUNS[-1]: read("recall_teacher", root)})


def recall_predictions_table(root: Path, of: str = "") -> str:
    """What became of the predictions about the students of the recall teacher. `of`: as in `recall_raised_runs`."""
    from hf_memmix.training.experiments.recall_teacher.predictions import table  # no experiments in a wheel

    runs = recall_raised_runs(root, of) | {"even": read("recall_teacher_even", root)}
    return table(read(f"recall_{of}grid", root), runs, of.removesuffix("_") or RECALL_RUNS[-1])


def recall_raised_runs(root: Path, of: str = "") -> dict[str, dict]:
    """The records of `raised.py`, as "raised_long". `of`: "even_" for the students of the earlier teacher "even"."""
    start = f"recall_{of}"
    return {name.removeprefix(start): read(name, root) for name in MEASUREMENTS if name.startswith(f"{start}raised")}


def recall_raised_table(root: Path, of: str = "") -> str:
    """The students of `raised.py` beside each other and their teacher. `of`: as in `recall_raised_runs`."""
    from hf_memmix.training.experiments.recall_teacher.raised_report import raised_table  # no experiments in a wheel

    return raised_table(recall_raised_runs(root, of), read(f"recall_{of}grid", root))


def coffee_fixed_table(root: Path) -> str:
    """COFFEE's tables with the embedding of the last noise symbol fixed, and with that of symbol 8."""
    from hf_memmix.training.experiments.coffee.report import equal_epochs  # no experiments in a wheel

    tables = [read(f"coffee_table{number}", root) for number in (3, 4, 5)]
    fixed = [read("coffee_fixed8", root)]
    return equal_epochs(("last noise symbol fixed", "symbol 8 fixed"), tables, fixed)


def coffee_seeds_table(root: Path) -> str:
    """COFFEE's Table 2 with the first 32 seeds and with 32 further ones."""
    from hf_memmix.training.experiments.coffee.report import equal_epochs  # no experiments in a wheel

    titles = ("first seeds", "further seeds")
    return equal_epochs(titles, [read("coffee_table2", root)], [read("coffee_table2_seeds", root)])


def baselines_predictions_table(root: Path) -> str:
    """What became of the predictions about the language models of the baselines."""
    from hf_memmix.training.experiments.baselines.predictions import table  # no experiments in a wheel

    return table(read("baselines_language", root), read("coffee_language", root))


def associative_recall_predictions_table(root: Path) -> str:
    """What became of the predictions about associative recall (`gka/recall.py`)."""
    from hf_memmix.training.experiments.gka.recall_predictions import table  # no experiments in a wheel

    return table(read("recall", root))


def baselines_recall_table(root: Path) -> str:
    """What became of the predictions about associative recall of the baselines."""
    from hf_memmix.training.experiments.gka.recall_predictions import baselines_table  # no experiments in a wheel

    return baselines_table(read("recall", root), read("recall_gdn", root))


def gka_predictions_table(root: Path) -> str:
    """What became of the predictions about the variants of GKA."""
    from hf_memmix.training.experiments.gka.predictions import table  # no experiments in a wheel

    sketches, text = (read(f"gka_variants_{name}", root) for name in ("sketches", "text"))
    ridge = read("gka_variants_ridge", root) if "gka_variants_ridge" in MEASUREMENTS else None
    return table(sketches, text, _gka_grid(root), ridge, _gka_sizes(root))


def gka_sketch_table(root: Path) -> str:
    """GKA by the size of its sketch: recall, perplexity, bytes and times."""
    from hf_memmix.training.experiments.gka.variants_report import means_of_sketches  # no experiments in a wheel

    trained = means_of_sketches([read(f"gka_variants_{name}", root) for name in ("sketches", "text")])
    return kernels.sketch_table(root, list(trained.values()))


def gka_grid_table(root: Path) -> str:
    """What changes GKA's recall with 64 pairs."""
    from hf_memmix.training.experiments.gka.variants_report import section  # no experiments in a wheel

    return section([_gka_grid(root)])


def _gka_grid(root: Path) -> dict:
    from hf_memmix.training.experiments.gka.variants_report import with_recall_rows  # no experiments in a wheel

    return with_recall_rows(read("gka_variants_recall", root), read("recall", root))


def _gka_sizes(root: Path) -> dict | None:
    from hf_memmix.training.experiments.gka.figure3a_report import joined  # no experiments in a wheel

    if "gka_figure3a" not in MEASUREMENTS:
        return None
    return joined([read(name, root) for name in ("gka_figure3a", "gka_variants_recall", "recall")])


def recall_mixtures_table(root: Path) -> str:
    """The mixtures among the students of the recall teacher, beside single mixers."""
    from hf_memmix.training.experiments.recall_teacher.report import mixtures_table  # no experiments in a wheel

    return mixtures_table(read("recall_grid", root))


def recall_summary_table(root: Path) -> str:
    """Recall of a few students of the recall teacher, for the project's README."""
    from hf_memmix.training.experiments.recall_teacher.summary import summary_table  # no experiments in a wheel

    return summary_table(read("recall_grid", root), recall_raised_runs(root))


def gpus_table(root: Path, name: str = "multi_gpu") -> str:
    """Speed, memory and loss of every launch of `several_gpus/compare_launches.py` in one of its files."""
    results = read(name, root)
    model_names = {"bundled": "bundled, 5M", "1b": "Llama shape, 1.3B"}
    launches = {
        "single": "1 GPU",
        "single_accumulated": "1 GPU, halves",
        "ddp": "2 GPUs, DDP",
        "fsdp2": "2 GPUs, FSDP2",
        "zero3": "2 GPUs, ZeRO-3",
    }
    lines = []
    for model, model_name in model_names.items():
        for launch, title in launches.items():
            found = results["launches"].get(f"{model}_{launch}")
            for stage, row in (found or {"stages": {}})["stages"].items():
                compared = results["summary"].get(f"{model}_{launch}_{stage}", {})
                share, off = compared.get("scaling_efficiency"), compared.get("loss_difference")
                figures = (f"{row['tokens_per_second']:,}", bytes_text(row["peak_memory_bytes"]))
                figures += (
                    "" if share is None else f"{100 * share:.0f} %",
                    "" if off is None else f"{100 * off:.4f} %",
                )
                lines.append([model_name, stage, title, f"{row['tokens_per_step']:,}", *figures])
    head = ["model", "stage", "launch", "tokens per step", "tokens/s", "peak memory per GPU"]
    head += ["efficiency", "loss off by"]
    return (
        aligned_table(head, lines)
        + f"\n\n{results['gpus']} x {results['hardware']}, torch {results['torch']}, commit "
        f"{results['commit']}. Loss off by: the largest relative difference from the loss on one GPU, over all steps. "
        "Halves: gradient accumulation in two parts; the last rows of an epoch, fewer than a batch, had more weight."
        + as_sentence(results)
    )


def plans_table(root: Path) -> str:
    """Students by which layers kept their attention: chosen by `memmix select`, uniform, the mean of all sets."""
    return _report([read("compare_plans", root)])


def teacher_table(root: Path) -> str:
    """The families that can be converted."""
    return teachers_table()


def refused_table(root: Path) -> str:
    """The families that are refused."""
    return refusals()


def streaming_table(root: Path) -> str:
    """Memory, bytes and time of conversions by streaming, measured, and estimated by `--dry-run`."""
    rows = []
    for row in read("streaming", root)["rows"]:
        measured, estimated = row["measured"], row["estimated"]
        pairs = [f"{bytes_text(measured[key])} ({bytes_text(estimated[key])})" for key in ("peak_memory", "writes")]
        seconds = f"{measured['seconds']:.0f} s ({estimated['seconds']:.0f} s)"
        shard = bytes_text(row["largest_shard"])
        where = row["environment"]
        versions = f"torch {where['torch']}, transformers {where['transformers']}"
        machine = f"{row['cores']} cores of {where['hardware']}; {versions}"
        model = f"{row['shape']}, `{row['mixer']}`"
        rows.append([model, machine, shard, *pairs, seconds, f"{measured['cpu_seconds']:.0f} s"])
    head = ["model", "machine", "largest file", "peak memory", "written", "time", "CPU time"]
    return markdown_table(head, rows) + "\n\nIn brackets: what the dry run estimated."


def _report(files: list[dict]) -> str:
    # not at the top: `memmix card` imports this package from a wheel, which has no experiments
    from hf_memmix.training.experiments.report import report

    return report(files)


# by the first word of a name; the words after it are arguments
TABLES = {
    "demo": demo_table,
    "students": student_table,
    "front": front.front_table,
    "from_scratch": front.from_scratch_table,
    "induction": front.induction_table,
    "images": front.vision_table,
    "mixers": choice.mixers_table,
    "model_goals": goals.model_goals_table,
    "op_goals": goals.op_goals_table,
    "cpu_goals": goals.cpu_goals_table,
    "gpu_generations": gpu_table,
    "gka_sketch": gka_sketch_table,
    "bundled_recall": bundled_recall_table,
    "bundled_candidates": bundled_candidates_table,
    "bundled_runs": bundled_runs_table,
    "bundled_predictions": bundled_predictions_table,
    "results": experiment_tables,
    "echo_mask": echo_mask_table,
    "recall_runs": recall_runs_table,
    "coffee_fixed": coffee_fixed_table,
    "coffee_seeds": coffee_seeds_table,
    "baselines_predictions": baselines_predictions_table,
    "recall_predictions": recall_predictions_table,
    "associative_recall_predictions": associative_recall_predictions_table,
    "baselines_recall": baselines_recall_table,
    "gka_predictions": gka_predictions_table,
    "gka_grid": gka_grid_table,
    "recall_summary": recall_summary_table,
    "recall_mixtures": recall_mixtures_table,
    "recall_raised_runs": recall_raised_table,
    "conversion_costs": costs.costs_table,
    "conversion_memory": costs.conversion_memory_table,
    "published_conversions": costs.published_table,
    "teachers": teacher_table,
    "refusals": refused_table,
    "gpus": gpus_table,
    "one_gpu_distil": one_gpu_distil_table,
    "plan_checked": plan_checked_table,
    "quantized": quantized_table,
    "small_states": small_states_table,
    "plans": plans_table,
    "streaming": streaming_table,
    "long_prompts": long_prompts_table,
    "long_training": long_training_table,
    "context_parallel": context_parallel_table,
    "context_checks": context_checks_table,
    "one_gpu": one_gpu.one_gpu_table,
    "serving_families": serving.families_table,
    "serving_costs": serving.costs_table,
    "serving_matrix": serving.matrix_table,
    "serving_matrix_gpu": serving.matrix_gpu_table,
    "serving_refusals": serving.refusals_table,
    "serving_summary": serving.summary_table,
    "serving_prefix": serving.prefix_table,
    "tensor_parallel": serving.tensor_parallel_table,
    "serving_speed": serving.speed_table,
    "serving_before": serving.before_table,
    "serving_fit": serving.fit_table,
}
