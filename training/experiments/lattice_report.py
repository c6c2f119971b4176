"""The Lattice experiments' JSON files as Markdown tables, beside what the paper has.

python -m hf_memmix.training.experiments.lattice_report RESULTS.json [RESULTS.json ...]

Figures are means over seeds, with the largest distance from the mean where there are several. Rows that learnt nothing
are left out and named.
"""

import functools
import json
import statistics
import sys
from pathlib import Path

from hf_memmix.training.experiments.coffee_report import markdown
from hf_memmix.training.experiments.harness import measured_at
from hf_memmix.training.experiments.lattice_ablation import LADDER
from hf_memmix.training.experiments.lattice_language import PAPER
from hf_memmix.training.experiments.plots import chosen_rows, diverged


def figure(rows: list[dict], key: str, digits: int, scale: float = 1.0) -> str:
    """Mean of rows of one model, how far its seeds are from it, and how many they are."""
    values = [scale * row[key] for row in rows]
    if not values:
        return ""
    mean = statistics.fmean(values)
    spread = f" ± {max(abs(v - mean) for v in values):.{digits}f}" if len(values) > 1 else " (1 seed)"
    return f"{mean:.{digits}f}{spread}"


def gap(of: dict[str, float], name: str, to: str) -> str:
    """By how many percent a model's figure is above another's."""
    return f"{100 * (of[name] / of[to] - 1):+.1f} %" if name in of and to in of else ""


def language(results: dict, rows: list[dict], reference: str = "dec", in_paper: dict = PAPER) -> str:
    """Perplexity by context, its distance from the reference's beside the paper's if it has any, and the orders."""
    names, lines, orders = dict.fromkeys(row["model"] for row in rows), {}, []
    for context in results["settings"]["contexts"]:
        chosen = {name: chosen_rows(rows, model=name, context=context) for name in names}
        chosen = {name: found for name, found in chosen.items() if found}
        ours = {name: statistics.fmean(row["perplexity"] for row in found) for name, found in chosen.items()}
        paper = {name: in_paper[name][context] for name in ours if context in in_paper.get(name, {})}
        for name, found in chosen.items():
            cells = (figure(found, "perplexity", 2), gap(ours, name, reference), gap(paper, name, reference))
            lines.setdefault(name, {})[context] = (*cells, f"{found[0]['lr']:g}")
        for whose, figures in (("here", ours), ("paper", paper)):
            if figures:
                orders.append(f"Order at {context}, {whose}: {' < '.join(sorted(figures, key=figures.get))}.")
    head = ["model", "rate"]
    for context in results["settings"]["contexts"]:
        head += [str(context), f"above {reference}", *(["paper"] if in_paper else [])]
    table = []
    for name, cells in lines.items():
        rate = next(iter(cells.values()))[3]
        row = [name, rate]
        for context in results["settings"]["contexts"]:
            row += cells.get(context, ("", "", ""))[: 3 if in_paper else 2]
        table.append(row)
    return f"{markdown(head, table)}\n\n" + "\n".join(orders)


def ablation(results: dict, rows: list[dict]) -> str:
    """Perplexity of each rung, and of what the paper leaves open, against DEC with projection."""
    found = {name: chosen_rows(rows, rung=name) for name in dict.fromkeys(row["rung"] for row in rows)}
    found = {name: chosen for name, chosen in found.items() if chosen}
    ours = {name: statistics.fmean(row["perplexity"] for row in chosen) for name, chosen in found.items()}
    paper = {name: figure for name, (_, figure) in LADDER.items() if figure is not None}
    full = "+ projection"
    table = [
        [name, f"{chosen[0]['lr']:g}", figure(chosen, "perplexity", 2), gap(ours, name, full), gap(paper, name, full)]
        for name, chosen in found.items()
    ]
    return markdown(["model", "rate", "perplexity", f'above "{full}"', "paper"], table)


def recall(results: dict, rows: list[dict]) -> str:
    """Accuracy in percent of each model in each cell."""
    cells = list(dict.fromkeys((row["length"], row["pairs"]) for row in rows))
    table = []
    for name in dict.fromkeys(row["model"] for row in rows):
        chosen = [chosen_rows(rows, model=name, length=length, pairs=pairs) for length, pairs in cells]
        table.append([name, *(figure(found, "accuracy", 2, scale=100) for found in chosen)])
    return markdown(["model", *(f"{length} tokens, {pairs} pairs" for length, pairs in cells)], table)


SECTIONS = {
    "lattice_language": language,
    "coffee_language": functools.partial(language, reference="coffee", in_paper={}),
    "lattice_ablation": ablation,
    "recall": recall,
}


def section(results: dict) -> str:
    """The table of one file and, below it, what it is from."""
    rows, lost = diverged(results)
    settings = results["settings"]
    text = SECTIONS[results["experiment"]](results, rows)
    text += f"\n\n{settings['layers']} layers of {settings['hidden_size']}, {settings['tokens'] / 1e6:.0f}M tokens;"
    text += f" {measured_at(results)}."
    names = [f"{row.get('model') or row['rung']} at {row['lr']:g}" for row in lost]
    return text + (f" Learnt nothing: {', '.join(dict.fromkeys(names))}." if names else "")


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    print("\n\n".join(section(json.loads(Path(path).read_text())) for path in sys.argv[1:]))


if __name__ == "__main__":
    main()
