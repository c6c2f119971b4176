"""Functions for the reports of all experiments: figures of a model, differences in percent, captions, and the table of
language models.
"""

from collections import Counter
from collections.abc import Iterable
from types import SimpleNamespace

from hf_memmix.conversion.records import markdown_table
from hf_memmix.training.experiments.common.averages import SPREAD_NOTE, percent_above, spread_text
from hf_memmix.training.experiments.common.fit import NAMES, memory_of, model_of
from hf_memmix.training.experiments.common.harness import matches, measured_at
from hf_memmix.training.experiments.common.rates import at_best_rate, at_edge, chosen_rows, trained_and_failed


def mean_of_rows(rows: list[dict], key: str, digits: int, scale: float = 1.0) -> str:
    """The mean and deviation of one model's rows, as text; "" without rows."""
    return spread_text([scale * row[key] for row in rows], digits, alone=" (1 seed)")


def above(rows: list[dict], others: list[dict]) -> str:
    """By how many percent the perplexity of `rows` is above that of `others`, at the seeds that both have, else ""."""
    by = percent_above(*({row["seed"]: row["perplexity"] for row in found} for found in (rows, others)))
    return "" if by is None else f"{by:+.1f} %"


def paper_above(of: dict[str, float], name: str, to: str) -> str:
    """By how many percent the paper's figure of model `name` is above that of model `to`; "" if one is missing."""
    return f"{100 * (of[name] / of[to] - 1):+.1f} %" if name in of and to in of else ""


def rate_text(rows: list[dict], lr: float) -> str:
    """The learning rate; "(edge)" if no larger or no smaller one was tried in `rows`, so a better one may exist."""
    alone = len({row["lr"] for row in rows}) == 1
    return f"{lr:g}" + (" (only one)" if alone else " (edge)" if at_edge(rows, lr) else "")


def memory_text(settings: dict, model: str) -> tuple[str, str]:
    """The numbers of a layer's memory that do not grow, and which of q, k and v are convolved, as two cells."""
    if model not in NAMES:
        return "", ""
    floats, convolved = memory_of(*model_of(model, SimpleNamespace(**settings)))
    return (f"{floats:,}" if floats else "grows"), convolved.replace(", ", "")


def language_table(results: dict, rows: list[dict], reference: str, in_paper: dict) -> str:
    """A table of perplexities by context.

    Each perplexity has its distance in percent from the reference model, at the seeds that both have, and the paper's
    distance if the paper has one.
    """
    contexts = results["settings"]["contexts"]
    names, lines = dict.fromkeys(row["model"] for row in rows), {}
    for context in contexts:
        chosen = {name: chosen_rows(rows, model=name, context=context) for name in names}
        chosen = {name: found for name, found in chosen.items() if found}
        paper = {name: in_paper[name][context] for name in chosen if context in in_paper.get(name, {})}
        for name, found in chosen.items():
            distances = (above(found, chosen.get(reference, [])), paper_above(paper, name, reference))
            distances = tuple(text.removesuffix(" %") for text in distances)
            tried = [row for row in results["rows"] if matches(row, {"model": name, "context": contexts[0]})]
            cells = (mean_of_rows(found, "perplexity", 2), *distances)
            lines.setdefault(name, {})[context] = (*cells, rate_text(tried, found[0]["lr"]))
    head = ["model", "memory, floats per layer", "convolved", "rate"]
    for context in contexts:
        head += [str(context), f"above {reference}, %", *(["paper"] if in_paper else [])]
    table = []
    for name, cells in lines.items():
        row = [name, *memory_text(results["settings"], name), next(iter(cells.values()))[3]]
        for context in contexts:
            row += cells.get(context, ("", "", ""))[: 3 if in_paper else 2]
        table.append(row)
    return markdown_table(head, table)


def rows_table(results: dict, by: str, *figures: str) -> str:
    """A line for each arm: its rate, and the mean and deviation over seeds of its figures at this rate.

    The rate has the lowest mean development loss (`at_best_rate`); "(edge)": no larger or no smaller one was tried.

    Args:
        by: the values of a row that name an arm, separated by commas: "model,context".
        figures: "name:digits" or "name:digits:factor" of what is shown, for example "accuracy:1:100".
    """
    names, shown = by.split(","), [(*figure.split(":"), "1")[:3] for figure in figures]
    arms: dict[tuple, list[dict]] = {}
    for row in results["rows"]:
        if row.get("finite", True) and all(name in row for name in names):
            arms.setdefault(tuple(row[name] for name in names), []).append(row)
    has_rates, has_seeds = (any(key in row for rows in arms.values() for row in rows) for key in ("lr", "seed"))
    lines, seeds = [], set()
    for arm, tried in arms.items():
        rows = [row for row in (at_best_rate(tried) if has_rates else tried) if shown[0][0] in row]
        if not rows:
            continue
        cells = [spread_text([float(factor) * row[key] for row in rows], int(digits)) for key, digits, factor in shown]
        rate = [rate_text(tried, rows[0]["lr"])] if has_rates else []
        lines.append([*arm, *rate, *cells])
        seeds.add(len(rows))
    head = [*names, *(["rate"] if has_rates else [])]
    head += [key + (", %" if factor == "100" else "") for key, _, factor in shown]
    spread = (
        SPREAD_NOTE.replace("over", f"over {' or '.join(map(str, sorted(seeds)))}") if seeds != {1} else "One seed."
    )
    return f"{markdown_table(head, lines)}\n\n{f'{spread} ' * has_seeds}{measured_at(results)}."


def caption(results: dict, failed: list[dict], spread: str = SPREAD_NOTE) -> str:
    """The text below a table: size of the models, hardware, commits, what ± is (`spread`), and how many rows of a
    model it leaves out: those that learnt nothing, and those that were trained and not measured.
    """
    settings = results["settings"]
    text = f"{settings['layers']} layers of {settings['hidden_size']}, {settings['tokens'] / 1e6:.0f}M tokens;"
    text += f" {measured_at(results)}. {spread}"
    left_out = {"Learnt nothing": Counter(), "Trained and not measured": Counter()}
    for row in failed:
        measured = "dev_loss" in row or not row["finite"]
        left_out["Learnt nothing" if measured else "Trained and not measured"][row.get("model") or row["rung"]] += 1
    named = {why: [f"{name} ({count})" for name, count in rows.items()] for why, rows in left_out.items()}
    return text + "".join(f" {why}, rows: {', '.join(names)}." for why, names in named.items() if names)


def spread_note(figures: Iterable[list[dict]]) -> str:
    """What ± is, with the number of seeds. figures: the rows of each figure."""
    several = sorted({len(rows) for rows in figures if len(rows) > 1})
    return SPREAD_NOTE.replace("over", f"over {' or '.join(map(str, several))}") if several else SPREAD_NOTE


def language_section(results: dict, reference: str, in_paper: dict) -> str:
    """The table of language models with its caption."""
    rows, failed = trained_and_failed(results)
    table = language_table(results, rows, reference, in_paper)
    missing = [name for name in results["settings"]["models"] if not any(r["model"] == name for r in results["rows"])]
    planned = f" Planned and not run: {', '.join(missing)}." if missing else ""
    pairs = dict.fromkeys((row["model"], row["context"]) for row in rows)
    spread = spread_note(chosen_rows(rows, model=model, context=context) for model, context in pairs)
    return (
        f"{table}\n\n{caption(results, failed, spread)} Distances in percent are at the seeds that both models have."
        f"{planned}"
    )
