"""Write the figures of the product's pages from figures.json, which the experiments write.

python model_cards/figures.py            # after an edit of figures.json or of a page
python model_cards/figures.py --check    # exit code 1 if a page says anything else

A page holds figures in two forms. A table stands between `<!-- begin NAME -->` and `<!-- end NAME -->`; its blocks,
which are sentences and tables with a head and rows, are under "tables" in the file. A number follows `<!--= NAME -->`;
its text is under "numbers". `python -m hf_memmix.training.experiments.figures` computes the file from the results.
"""

import json
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from hf_memmix.conversion.records import markdown_table

ROOT = Path(__file__).parents[1]
FILE = ROOT / "model_cards" / "figures.json"
PAGES = (
    "README.md",
    "conversion/README.md",
    "hf_memmix/generate.md",
    "hf_memmix/serving/README.md",
    "training/*.md",
    "kernels/README.md",
    "kernels/torch-ext/hf_memmix_kernels/*/README.md",
    "model_cards/*/README.md",
)
TABLE = re.compile(r"(<!-- begin ([^>]+?) -->\n)(.*?)(<!-- end \2 -->)", re.DOTALL)
NUMBER = re.compile(r"(<!--= ([^>]+?) -->)([-+−]?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+))?")


def pages() -> list[Path]:
    """The pages of the product that may hold figures."""
    return [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]


def names(text: str) -> tuple[list[str], list[str]]:
    """The names of the tables and of the numbers of a page.

    Raises:
        ValueError: a begin mark has no end mark, or an end mark no begin mark.
    """
    tables = [match[2] for match in TABLE.finditer(text)]
    marks = re.findall(r"<!-- (?:begin|end) ([^>]+?) -->", text)
    if sorted(marks) != sorted(2 * tables):
        raise ValueError(f"each table needs its begin mark and its end mark once, and the marks are {marks}")
    return tables, [match[2] for match in NUMBER.finditer(text)]


def block(content: str | dict) -> str:
    """A sentence as it is, a table in Markdown."""
    return content if isinstance(content, str) else markdown_table(content["head"], content["rows"], content["right"])


def render(text: str, figures: dict) -> str:
    """`text` of a page with every table and number as in `figures`.

    Raises:
        ValueError: the marks of a table do not fit, or the file has no figure of a name.
    """
    for kind, used in zip(("tables", "numbers"), names(text), strict=True):
        if missing := set(used) - figures[kind].keys():
            raise ValueError(
                f'"{kind}" of figures.json have no {", ".join(sorted(missing))}; add it to '
                "training/experiments/figures.py and run that"
            )
    text = TABLE.sub(lambda m: m[1] + "\n\n".join(map(block, figures["tables"][m[2]])) + "\n" + m[4], text)
    return NUMBER.sub(lambda m: m[1] + figures["numbers"][m[2]]["text"], text)


def main(check: Annotated[bool, typer.Option(help="change nothing; exit code 1 if a page is out of date")] = False):
    """Write the figures of all pages."""
    figures = json.loads(FILE.read_text(encoding="utf-8"))
    stale = []
    for path in pages():
        text = path.read_text(encoding="utf-8")
        if text != (rendered := render(text, figures)):
            stale.append(str(path.relative_to(ROOT)))
            if not check:
                path.write_text(rendered, encoding="utf-8")
    if check and stale:
        sys.exit(f"out of date: {', '.join(stale)}; run python model_cards/figures.py")


if __name__ == "__main__":
    typer.run(main)
