"""The table of associative recall."""

from hf_memmix.conversion.records import markdown_table
from hf_memmix.training.experiments.common.rates import chosen_rows, trained_and_failed
from hf_memmix.training.experiments.common.report import caption, mean_and_range


def recall_table(rows: list[dict]) -> str:
    """Accuracy in percent of each model in each cell."""
    cells = list(dict.fromkeys((row["length"], row["pairs"]) for row in rows))
    table = []
    for name in dict.fromkeys(row["model"] for row in rows):
        chosen = [chosen_rows(rows, model=name, length=length, pairs=pairs) for length, pairs in cells]
        table.append([name, *(mean_and_range(found, "accuracy", 2, scale=100) for found in chosen)])
    return markdown_table(["model", *(f"{length} tokens, {pairs} pairs" for length, pairs in cells)], table)


def recall(results: dict) -> str:
    """The table with its caption."""
    rows, failed = trained_and_failed(results)
    return f"{recall_table(rows)}\n\n{caption(results, failed)}"
