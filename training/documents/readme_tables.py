"""Write the tables of all documents, and the plot of README.md, from the committed measurements.

    python -m hf_memmix.training.documents.readme_tables            # after new measurements
    python -m hf_memmix.training.documents.readme_tables --check    # exit code 1 if a table is out of date

A table is between `<!-- begin NAME -->` and `<!-- end NAME -->`. NAME is a key of `tables.TABLES`, followed by its
arguments: `op lattice` is the table of the measurements of an op, `results recall` the report of the measurement
`recall`. `measurements.MEASUREMENTS` lists the files of the measurements.
"""

import re
from pathlib import Path
from typing import Annotated

import typer

from hf_memmix.conversion.records import CHECKOUT
from hf_memmix.training.documents.measurements import path_of, read
from hf_memmix.training.documents.tables import TABLES
from hf_memmix.training.evaluation.context_cost_plot import plot_context_cost

DOCUMENTS = (
    "README.md",
    "conversion/README.md",
    "hf_memmix/serving/README.md",
    "training/README.md",
    "training/bundled/README.md",
    "training/convert_your_model.md",
    "training/experiments/*/*.md",
    "kernels/README.md",
    "kernels/torch-ext/hf_memmix_kernels/*/README.md",
    "model_cards/*/README.md",
)
MARK = re.compile(r"(<!-- begin ([^>]+?) -->\n)(.*?)(<!-- end \2 -->)", re.DOTALL)


def documents(root: Path) -> list[Path]:
    """The files that have tables."""
    found = [path for pattern in DOCUMENTS for path in sorted(root.glob(pattern))]
    return [path for path in found if "<!-- begin " in path.read_text(encoding="utf-8")]


def render(text: str, root: Path) -> str:
    """`text` of a document with every table written again.

    Raises:
        ValueError: a begin mark has no end mark, or there is no such table.
    """
    for name in re.findall(r"<!-- (?:begin|end) ([^>]+?) -->", text):
        if not MARK.search(text[text.find(f"<!-- begin {name} -->") :]) or f"<!-- end {name} -->" not in text:
            raise ValueError(f"a document must hold <!-- begin {name} --> and after it <!-- end {name} -->")
        if name.split()[0] not in TABLES:
            raise ValueError(f"there is no table {name.split()[0]!r}; choose from {', '.join(TABLES)}")

    def table(match: re.Match) -> str:
        kind, *words = match[2].split()
        return f"{match[1]}{TABLES[kind](root, *words)}\n{match[4]}"

    return MARK.sub(table, text)


def main(
    check: Annotated[bool, typer.Option(help="change nothing; exit code 1 if a document is out of date")] = False,
):
    """Write the tables of all documents again, and the plot of README.md."""
    stale = []
    for path in documents(CHECKOUT):
        text = path.read_text(encoding="utf-8")
        rendered = render(text, CHECKOUT)
        if text != rendered:
            stale.append(path.relative_to(CHECKOUT))
            if not check:
                path.write_text(rendered, encoding="utf-8")
    print(f"{'out of date' if check else 'written'}: {', '.join(map(str, stale)) or 'nothing'}")
    if check:
        raise typer.Exit(int(bool(stale)))
    plot_context_cost(read("demo"), path_of("demo").with_suffix(".png"))


if __name__ == "__main__":
    typer.run(main)
