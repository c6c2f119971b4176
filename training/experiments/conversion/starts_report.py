"""The table of `starts.py`: the starts of each mixer in the order of their error on the development text."""

import statistics

from hf_memmix.conversion.records import markdown_table
from hf_memmix.training.experiments.common.harness import measured_at

HEAD = ("mixer", "start", "dev", "aligned, dev", "held-out", "held-out, by layer")


def mean(rows: list[dict], text: str) -> float:
    return statistics.fmean(statistics.fmean(row[text]) for row in rows)


def table(rows: list[dict]) -> str:
    """A table of errors: means over seeds and layers; the last column has one mean over seeds per layer."""
    rows = [row for row in rows if "error" not in row]
    lines = []
    for mixer in dict.fromkeys(row["mixer"] for row in rows):
        own: dict[str, list[dict]] = {}
        for row in rows:
            if row["mixer"] == mixer and row["steps"] == 0:
                own.setdefault(row["start"], []).append(row)
        for start in sorted(own, key=lambda name: mean(own[name], "dev")):
            found = own[start]
            layers = " ".join(
                f"{statistics.fmean(layer):.3f}" for layer in zip(*(row["heldout"] for row in found), strict=True)
            )
            aligned = [row for row in rows if (row["mixer"], row["start"]) == (mixer, start) and row["steps"]]
            name = f"**{start}**" if start == "default" else start
            after = f"{mean(aligned, 'dev'):.3f}" if aligned else ""
            figures = (f"{mean(found, 'dev'):.3f}", after, f"{mean(found, 'heldout'):.3f}", layers)
            lines.append((mixer, name, *figures))
    return markdown_table(HEAD, lines)


def section(results: dict) -> str:
    """The table, and below it the measured texts, the hardware and the commits."""
    settings = results["settings"]
    return (
        f"{table(results['rows'])}\n\n{settings['measured_tokens']} tokens of each text in blocks of "
        f"{settings['block_size']}; aligned: {settings['steps']} steps of 4 rows of {settings['block_size'] // 2}. "
        f"{measured_at(results)}, torch {results['environment']['torch']}."
    )
