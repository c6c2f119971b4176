"""The tables of the two image experiments, and the plot of the throughput."""

import statistics

from hf_memmix.conversion.records import markdown_table
from hf_memmix.training.evaluation.probes.counted import wilson
from hf_memmix.training.experiments.common.averages import SPREAD_NOTE, spread_text
from hf_memmix.training.experiments.common.harness import measured_at
from hf_memmix.training.experiments.common.mnist import TEST
from hf_memmix.training.experiments.common.plots import Panel, draw
from hf_memmix.training.experiments.common.rates import chosen_rows
from hf_memmix.training.experiments.common.report import rate_text
from hf_memmix.training.experiments.gka_vision.models import MODELS

KINDS = ("inference", "training")
INTERVAL_NOTE = f"In brackets: the interval of 95 % for {TEST:,} test images, the same for all seeds (Wilson)."


def accuracy_text(rows: list[dict], digits: int, key: str = "accuracy") -> str:
    """Mean and deviation over seeds in percent, and in brackets the interval of the mean for `TEST` images."""
    shares = [row[key] for row in rows if key in row]
    if not shares:
        return ""
    low, high = (100 * bound for bound in wilson(statistics.fmean(shares), TEST))
    return f"{spread_text([100 * share for share in shares], digits)} ({low:.1f} to {high:.1f})"


def digits(results: dict) -> str:
    """Accuracy on test images at the learning rate that the development images chose: mean ± deviation of seeds.

    A seed whose loss is above that of guessing counts too: it was trained and measured as the others.
    """
    rows, table = [row for row in results["rows"] if "accuracy" in row], []
    running = any("accuracy_running" in row for row in rows)
    for model in MODELS:
        chosen = chosen_rows(rows, model=model)
        if not chosen:
            continue
        rate = rate_text([row for row in rows if row["model"] == model], chosen[0]["lr"])
        cells = [accuracy_text(chosen, 2, key) for key in ("accuracy", "accuracy_running")[: 1 + running]]
        table.append([model, f"{chosen[0]['parameters'] / 1e6:.2f} M", rate, len(chosen), *cells])
    head = ["model", "parameters", "learning rate", "seeds", "accuracy on test images, %"]
    head += ["with the running statistics of the training"] * running
    return f"{markdown_table(head, table)}\n\n{SPREAD_NOTE} {INTERVAL_NOTE} {measured_at(results)}."


def throughput(results: dict) -> str:
    """Images per second of every measured model, and in brackets how many times as fast as the ViT it is."""
    found = {(row["model"], row["resolution"]): row for row in results["rows"]}
    resolutions, tables = sorted({resolution for _, resolution in found}), []
    for kind in KINDS:
        table = []
        for model in (model for model in MODELS if any(name == model for name, _ in found)):
            cells = []
            for resolution in resolutions:
                own, vit = (
                    found.get((name, resolution), {}).get(f"{kind}_images_per_second") for name in (model, "vit")
                )
                cells.append("" if own is None else f"{own:,.0f}" + (f" ({own / vit:.2f})" if vit else ""))
            table.append([model, *cells])
        tables.append(markdown_table([kind, *(f"{resolution} px" for resolution in resolutions)], table))
    batch = results["settings"]["batch_at_224"]
    caption = f"bf16, {batch} images of 224 pixels per batch. {measured_at(results)}."
    return "\n\n".join([*tables, caption])


def plot_throughput(files: list[dict], path) -> None:
    """Images per second by resolution, one panel for inference and one for forward and backward."""
    (results,), panels = files, []
    resolutions = sorted({row["resolution"] for row in results["rows"]})
    for kind in KINDS:
        lines = {}
        for model in MODELS:
            rows = [row for row in results["rows"] if row["model"] == model and f"{kind}_images_per_second" in row]
            lines[model] = sorted((row["resolution"], row[f"{kind}_images_per_second"]) for row in rows)
        axes = {"title": f"{kind}: images per second", "xlabel": "pixels per side", "xscale": "log", "yscale": "log"}
        axes |= {"xticks": resolutions, "xticklabels": list(map(str, resolutions))}
        panels.append(Panel(lines, axes))
    draw(panels, path, f"{results['environment']['hardware']}, bf16, equal parameters")
