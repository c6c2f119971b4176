"""Functions for the reports of all experiments: means over seeds, differences in percent, captions, and the table of
language models.
"""

import statistics

from hf_memmix.conversion.records import markdown_table
from hf_memmix.training.experiments.common.harness import measured_at
from hf_memmix.training.experiments.common.rates import chosen_rows, trained_and_failed


def mean_and_range(rows: list[dict], key: str, digits: int, scale: float = 1.0) -> str:
    """The mean of one model's rows and the largest distance of a seed from it, as text; "" without rows."""
    values = [scale * row[key] for row in rows]
    if not values:
        return ""
    mean = statistics.fmean(values)
    spread = f" ± {max(abs(v - mean) for v in values):.{digits}f}" if len(values) > 1 else " (1 seed)"
    return f"{mean:.{digits}f}{spread}"


def percent_above(of: dict[str, float], name: str, to: str) -> str:
    """By how many percent the figure of model `name` is above that of model `to`; "" if one is missing."""
    return f"{100 * (of[name] / of[to] - 1):+.1f} %" if name in of and to in of else ""


def language_table(results: dict, rows: list[dict], reference: str, in_paper: dict) -> str:
    """A table of perplexities by context, and the order of the models at each context.

    Each perplexity has its distance in percent from the reference model, and the paper's distance if the paper has
    one.
    """
    names, lines, orders = dict.fromkeys(row["model"] for row in rows), {}, []
    for context in results["settings"]["contexts"]:
        chosen = {name: chosen_rows(rows, model=name, context=context) for name in names}
        chosen = {name: found for name, found in chosen.items() if found}
        ours = {name: statistics.fmean(row["perplexity"] for row in found) for name, found in chosen.items()}
        paper = {name: in_paper[name][context] for name in ours if context in in_paper.get(name, {})}
        for name, found in chosen.items():
            above = (percent_above(ours, name, reference), percent_above(paper, name, reference))
            cells = (mean_and_range(found, "perplexity", 2), *above)
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
    return f"{markdown_table(head, table)}\n\n" + "\n".join(orders)


def caption(results: dict, failed: list[dict]) -> str:
    """The text below a table: size of the models, hardware, commits, and the rows that learnt nothing."""
    settings = results["settings"]
    text = f"{settings['layers']} layers of {settings['hidden_size']}, {settings['tokens'] / 1e6:.0f}M tokens;"
    text += f" {measured_at(results)}."
    names = [f"{row.get('model') or row['rung']} at {row['lr']:g}" for row in failed]
    return text + (f" Learnt nothing: {', '.join(dict.fromkeys(names))}." if names else "")


def language_section(results: dict, reference: str, in_paper: dict) -> str:
    """The table of language models with its caption."""
    rows, failed = trained_and_failed(results)
    return f"{language_table(results, rows, reference, in_paper)}\n\n{caption(results, failed)}"
