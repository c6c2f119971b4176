"""The tables of the Lattice experiments, beside the paper's figures.

Figures are means over seeds, with the largest distance from the mean where there are several. Rows that learnt nothing
are left out and named.
"""

import statistics

from hf_memmix.conversion.records import markdown_table
from hf_memmix.training.experiments.common.rates import chosen_rows, learnt_and_lost
from hf_memmix.training.experiments.common.report import caption, figure, gap, language_section
from hf_memmix.training.experiments.lattice.language import PAPER
from hf_memmix.training.experiments.lattice.rungs import LADDER, OPEN


def language(results: dict) -> str:
    """The language models, beside the paper's."""
    return language_section(results, "dec", PAPER)


def ablation_table(rows: list[dict]) -> str:
    """Perplexity of each rung, and of what the paper leaves open, against DEC with projection."""
    found = {name: chosen_rows(rows, rung=name) for name in dict.fromkeys(row["rung"] for row in rows)}
    found = {name: chosen for name, chosen in found.items() if chosen}
    ours = {name: statistics.fmean(row["perplexity"] for row in chosen) for name, chosen in found.items()}
    paper = {name: perplexity for name, (_, perplexity) in LADDER.items() if perplexity is not None}
    full = "+ projection"
    table = [
        [name, f"{chosen[0]['lr']:g}", figure(chosen, "perplexity", 2), gap(ours, name, full), gap(paper, name, full)]
        for name, chosen in found.items()
    ]
    return markdown_table(["model", "rate", "perplexity", f'above "{full}"', "paper"], table)


def ablation(results: dict) -> str:
    """The rungs with their caption."""
    rows, lost = learnt_and_lost(results, [*LADDER, *OPEN])
    return f"{ablation_table(rows)}\n\n{caption(results, lost)}"
