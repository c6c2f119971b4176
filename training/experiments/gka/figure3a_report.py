"""The table and the plot of `figure3a.py`: recall of every model at every hidden size."""

from pathlib import Path

from hf_memmix.conversion.records import bytes_text, markdown_table
from hf_memmix.training.experiments.common.averages import SPREAD_NOTE, spread_text
from hf_memmix.training.experiments.common.harness import matches, measured_at
from hf_memmix.training.experiments.common.plots import bars, figure_of, save, styles_of
from hf_memmix.training.experiments.common.rates import chosen_rows

SAME_IN_RECALL = ("gdn", "gla", "delta")


def cells_of(results: dict) -> dict[tuple[int, int], list[dict]]:
    """The rows with an accuracy, by the length and the number of pairs of their sequences."""
    cells: dict[tuple[int, int], list[dict]] = {}
    for row in results["rows"]:
        if "accuracy" in row:
            cells.setdefault((row["length"], row["pairs"]), []).append(row)
    return cells


def sizes_of(rows: list[dict]) -> list[int]:
    return sorted({row["hidden_size"] for row in rows})


def with_rows_of_size_64(results: dict, grid: dict, recall: dict) -> dict:
    """The results with the rows at hidden size 64 that `recall.py` and `variants.py` trained in the same way.

    Args:
        grid: the results of `variants.py` with 64 pairs; its "as in Figure 3a" is GKA here.
        recall: the results of `recall.py`. Its "gka" has decay and alpha and its "mamba2" a larger memory, so only
            `SAME_IN_RECALL` are taken.
    """
    rows, cells = list(results["rows"]), [tuple(cell) for cell in results["settings"]["cells"]]
    own = [row["state_bytes"] for row in rows if row["hidden_size"] == 64 and row["model"] in SAME_IN_RECALL]
    memory = {"state_bytes": own[0]} if own else {}  # theirs are equally large
    peers = [memory | row for row in recall["rows"] if row["model"] in SAME_IN_RECALL]
    plain = [row | {"model": "gka"} for row in grid["rows"] if row["variant"] == "as in Figure 3a"]
    commits = (recall["environment"]["commit"], grid["environment"]["commit"])
    for commit, found in zip(commits, (peers, plain), strict=True):
        for row in found:
            key = {name: row[name] for name in ("model", "length", "pairs", "lr", "seed")} | {"hidden_size": 64}
            if (row["length"], row["pairs"]) in cells and not any(matches(known, key) for known in rows):
                rows.append({"commit": commit, **row, "hidden_size": 64})
    return results | {"rows": rows}


def cell_text(tried: list[dict], chosen: list[dict]) -> str:
    """The mean at the chosen rate with its seeds, and the first seed at each other rate; "" without rows."""
    if not chosen:
        return ""
    lr, rates = chosen[0]["lr"], sorted({row["lr"] for row in tried if row["seed"] == 0})
    place = "only rate" if len(rates) == 1 else {rates[0]: "smallest", rates[-1]: "largest"}.get(lr, "inside")
    seeds = f"{len(chosen)} seed" + "s" * (len(chosen) > 1)
    mean = spread_text([100 * row["accuracy"] for row in chosen], 1)
    of_rate = {row["lr"]: row["accuracy"] for row in tried if row["seed"] == 0}
    others = [f"{100 * of_rate[rate]:.1f} at {rate:g}" for rate in rates if rate != lr]
    return "; ".join([f"**{mean}** at {lr:g} ({place}, {seeds})", *others])


def joined(files: list[dict]) -> dict:
    """The results of one file, or those of `with_rows_of_size_64` from three."""
    return files[0] if len(files) == 1 else with_rows_of_size_64(*files)


def section(files: list[dict]) -> str:
    """One table per length and number of pairs: the accuracy of each model at each size, its rates and its memory.

    Args:
        files: as in `joined`.
    """
    results, tables = joined(files), []
    for (length, pairs), rows in cells_of(results).items():
        sizes, lines = sizes_of(rows), []
        for model in results["settings"]["models"]:
            cells = []
            for size in sizes:
                of = {"model": model, "hidden_size": size}
                chosen = chosen_rows(rows, **of)
                tried = [row for row in rows if matches(row, of)]
                memory = next((bytes_text(row["state_bytes"]) for row in tried if "state_bytes" in row), "")
                cells += [memory, cell_text(tried, chosen)]
            lines.append([model, *cells])
        head = [name for size in sizes for name in ("state per layer", f"size {size}")]
        tables.append(f"{length} tokens, {pairs} pairs:\n\n" + markdown_table(["model", *head], lines))
    own = results["settings"]
    caption = (
        f"Accuracy in percent after at most {own['tokens'] / 1e6:.0f}M tokens, {own['layers']} layers with"
        f" {own['heads']} heads. Bold: at the learning rate with the lowest development loss, which is the smallest or"
        " the largest of those that were tried, or inside; then the other rates, with the first seed."
        f" {SPREAD_NOTE} {measured_at(results)}."
    )
    return "\n\n".join([*tables, caption])


def plot(files: list[dict], path: str | Path) -> None:
    """Accuracy against hidden size, one panel per length and number of pairs. files: as in `joined`."""
    results = joined(files)
    cells = cells_of(results)
    figure, panels = figure_of(len(cells), measured_at(results))
    for panel, ((length, pairs), rows) in zip(panels, cells.items(), strict=True):
        for model, style in styles_of([{"model": name} for name in results["settings"]["models"]]).items():
            found = {size: chosen_rows(rows, model=model, hidden_size=size) for size in sizes_of(rows)}
            points = [(size, [100 * row["accuracy"] for row in chosen]) for size, chosen in found.items() if chosen]
            bars(panel, points, model, style)
        panel.set_title(f"accuracy, %: {length} tokens, {pairs} pairs", fontsize=11)
        panel.set(xscale="log", xlabel="hidden size")
        panel.set_xticks(sizes_of(rows), [str(size) for size in sizes_of(rows)])
        panel.minorticks_off()
        panel.legend(frameon=False, fontsize=8)
    save(figure, path)
