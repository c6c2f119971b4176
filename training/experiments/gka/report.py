"""The table of associative recall."""

import statistics

from hf_memmix.conversion.records import markdown_table
from hf_memmix.training.experiments.common.harness import matches
from hf_memmix.training.experiments.common.rates import chosen_rows, trained_and_failed
from hf_memmix.training.experiments.common.report import caption, memory_text, rate_text


def measured_rows(results: dict) -> list[dict]:
    """The rows with an accuracy, in the order of the models of the settings.

    Rows that learnt nothing are among them: a mean over seeds without such a seed would be too high.
    """
    names = results["settings"]["models"]
    return sorted((row for row in results["rows"] if "accuracy" in row), key=lambda row: names.index(row["model"]))


def cells_in(rows: list[dict]) -> list[tuple[int, int]]:
    """The (length, pairs) of the rows, in ascending order."""
    return sorted({(row["length"], row["pairs"]) for row in rows})


def seeds_text(rows: list[dict]) -> str:
    """The mean of the accuracies in percent, then that of each of several seeds; "" without rows."""
    if not rows:
        return ""
    each = [100 * row["accuracy"] for row in rows]
    beside = f" ({', '.join(f'{one:.1f}' for one in each)})" if len(each) > 1 else ""
    return f"{statistics.fmean(each):.1f}{beside}"


def recall_table(results: dict) -> str:
    """Accuracy in percent of each model in each cell, with the learning rate and the size of its memory."""
    rows = measured_rows(results)
    cells = cells_in(rows)
    table = []
    for name in dict.fromkeys(row["model"] for row in rows):
        line = [name, memory_text(results["settings"], name)[0]]
        for length, pairs in cells:
            cell = {"model": name, "length": length, "pairs": pairs}
            chosen = chosen_rows(rows, **cell)
            tried = [row for row in results["rows"] if matches(row, cell)]
            line += [rate_text(tried, chosen[0]["lr"]) if chosen else "", seeds_text(chosen)]
        table.append(line)
    head = [name for length, pairs in cells for name in ("rate", f"{length} tokens, {pairs} pairs")]
    return markdown_table(["model", "memory, floats per layer", *head], table)


def missing_cells(results: dict) -> str:
    """A sentence that names the planned cells without any row; "" if there are none."""
    measured = {(row["length"], row["pairs"]) for row in results["rows"]}
    missing = [f"{length} tokens, {pairs} pairs" for length, pairs in results["settings"]["cells"]
               if (length, pairs) not in measured]  # fmt: skip
    return f" Planned and not run: {'; '.join(missing)}." if missing else ""


def recall(results: dict) -> str:
    """The table with its caption."""
    _, failed = trained_and_failed(results)
    below = caption(results, failed, "In brackets: each of several seeds.")
    return f"{recall_table(results)}\n\n{below}{missing_cells(results)}"
