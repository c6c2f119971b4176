"""The tables of the Lattice experiments, with the paper's figures.

Figures are means and standard deviations over seeds. Rows that learnt nothing are not in the tables; the caption lists
them.
"""

import math
import statistics

from hf_memmix.conversion.records import markdown_table
from hf_memmix.training.experiments.common.averages import SPREAD_NOTE, spread_text
from hf_memmix.training.experiments.common.harness import matches, measured_at
from hf_memmix.training.experiments.common.rates import chosen_rows, trained_and_failed
from hf_memmix.training.experiments.common.report import (
    above,
    caption,
    joined,
    language_section,
    mean_of_rows,
    paper_above,
    rate_text,
    spread_note,
)
from hf_memmix.training.experiments.lattice.language import PAPER
from hf_memmix.training.experiments.lattice.variants import IN_PAPER, NOT_IN_PAPER

LARGE = 100.0  # a norm of the gradients, before they are clipped to 1, that the sentence below the table names


def language(files: list[dict]) -> str:
    """The table of language models, with the paper's figures and with the models of the other files (`joined`)."""
    return language_section(joined(files[0], files[1:]), "dec", PAPER)


def ablation_table(rows: list[dict]) -> str:
    """A table of the perplexity of each variant and its distance from DEC with projection, here and in the paper."""
    found = {name: chosen_rows(rows, rung=name) for name in dict.fromkeys(row["rung"] for row in rows)}
    found = {name: chosen for name, chosen in found.items() if chosen}
    paper = {name: perplexity for name, (_, perplexity) in IN_PAPER.items() if perplexity is not None}
    full = "+ projection"
    table = [
        [
            name,
            rate_text([row for row in rows if matches(row, {"rung": name})], chosen[0]["lr"]),
            mean_of_rows(chosen, "perplexity", 2),
            above(chosen, found.get(full, [])),
            paper_above(paper, name, full),
        ]
        for name, chosen in found.items()
    ]
    return markdown_table(["model", "rate", "perplexity", f'above "{full}"', "paper"], table)


def ablation(results: dict) -> str:
    """The table of the ablation with its caption."""
    rows, failed = trained_and_failed(results, [*IN_PAPER, *NOT_IN_PAPER])
    chosen = [chosen_rows(rows, rung=name) for name in dict.fromkeys(row["rung"] for row in rows)]
    return f"{ablation_table(rows)}\n\n{caption(results, failed, spread_note(chosen))}"


def as_written(results: dict) -> str:
    """A table of the losses and the gradients of ENC with and without its limits at every rate, and what they show.

    The gradients are clipped to norm 1; the norms are those before.
    """
    own, norms, losses, table = results["settings"], {}, {}, []
    for lr in sorted({row["lr"] for row in results["rows"]}):
        for name in ("enc", "enc-as-written"):
            rows = [row for row in results["rows"] if matches(row, {"model": name, "lr": lr})]
            losses[name, lr] = [row["curve"][-1][1] for row in rows]
            norms[name, lr] = [max(row["gradient_norms"]) for row in rows]
            seeds = ", ".join(f"{norm:.1e}" for norm in norms[name, lr])
            table.append([name, f"{lr:g}", spread_text(losses[name, lr], 2), seeds])
    head = ["model", "rate", "last training loss", "largest gradient norm of each seed"]
    size = (
        f"{own['layers']} layers of {own['hidden_size']}, {own['steps']} steps of {own['batch_size']} sequences of"
        f" {own['context']} tokens. Norms: before clipping to 1. {SPREAD_NOTE} {measured_at(results)}."
    )
    return f"{markdown_table(head, table)}\n\n{size}\n\n{_said_of(norms, losses)}"


def _said_of(norms: dict[tuple[str, float], list[float]], losses: dict[tuple[str, float], list[float]]) -> str:
    """Whether all losses are finite, at which rates a gradient norm is large, and the losses there.

    norms, losses: of each seed, by model and rate.
    """
    last = [loss for found in losses.values() for loss in found]
    finite = sum(map(math.isfinite, last))
    ends = f"{'All ' if finite == len(last) else f'{finite} of '}{len(last)} trainings end with a finite loss."
    large = {name: [lr for other, lr in norms if other == name and max(norms[name, lr]) > LARGE] for name, _ in norms}
    if not (rates := large["enc-as-written"]):
        return f"{ends} As written, no gradient norm passes {LARGE:g} at these rates."
    where = {
        name: f"at {' and '.join(f'{lr:g}' for lr in lrs)}" if lrs else "at no rate" for name, lrs in large.items()
    }
    more = [statistics.fmean(losses["enc-as-written", lr]) - statistics.fmean(losses["enc", lr]) for lr in rates]
    return (
        f"{ends} As written, a gradient norm passes {LARGE:g} {where['enc-as-written']}, with the two limits"
        f" {where['enc']}. There the last loss as written minus that with the limits is"
        f" {' and '.join(f'{by:+.2f}' for by in more)}."
    )
