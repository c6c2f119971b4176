"""The tables of the Lattice experiments, with the paper's figures.

Figures are means and standard deviations over seeds. Rows that learnt nothing are not in the tables; the caption lists
them.
"""

from hf_memmix.conversion.records import markdown_table
from hf_memmix.training.experiments.common.harness import matches
from hf_memmix.training.experiments.common.rates import chosen_rows, trained_and_failed
from hf_memmix.training.experiments.common.report import (
    above,
    caption,
    mean_of_rows,
    paper_above,
    rate_text,
    spread_note,
)
from hf_memmix.training.experiments.lattice.variants import IN_PAPER, NOT_IN_PAPER


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
