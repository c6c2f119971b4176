"""Write the figures of all pages from the committed results.

    python -m hf_memmix.training.experiments.figures            # after new results, or after an edit of a page
    python -m hf_memmix.training.experiments.figures --check    # exit code 1 if a file would change

Pages of the product take their figures from `model_cards/figures.json`. This command writes it: it has the tables and
numbers that the pages name, see `model_cards/figures.py`. Tables of the experiments' own pages are written from the
results. A table's name is a key of `tables.ALL`, followed by its arguments: `results recall` is the report of the file
recall.json. A number's name is a key of `NUMBERS`.
"""

import json
import runpy
from pathlib import Path
from typing import Annotated

import typer

from hf_memmix.conversion.records import CHECKOUT
from hf_memmix.training.experiments.tables import ALL

PRODUCT = runpy.run_path(str(CHECKOUT / "model_cards" / "figures.py"))
STUDENT = "model_cards/tiny_gka/metrics_pure.json"
TEACHER = "model_cards/tiny_teacher/metrics.json"
LEVERS = "training/experiments/budget/results/levers_h100.json"
PRODUCT_LEVERS = "training/experiments/budget/results/levers_product_h100.json"
RECALL_TEACHER = "training/experiments/recall_teacher/results/teacher_kept.json"
# by name: a JSON file of the checkout, the keys of a value in it, what it is divided by, and the format of the number
NUMBERS: dict[str, tuple[str, str, float, str]] = {
    "recall teacher millions": (RECALL_TEACHER, "parameters", 1e6, ".0f"),
    "thousand tokens recorded": (PRODUCT_LEVERS, "rows 0 tokens_s", 1e3, ".0f"),
    "thousand tokens compiled": (PRODUCT_LEVERS, "rows 1 tokens_s", 1e3, ".0f"),
    "thousand tokens recorded 1.2B": (PRODUCT_LEVERS, "rows 8 tokens_s", 1e3, ".0f"),
    "thousand tokens compiled 1.2B": (PRODUCT_LEVERS, "rows 9 tokens_s", 1e3, ".0f"),
    "seconds to compile": (PRODUCT_LEVERS, "rows 1 start_s", 1, ".0f"),
    "thousand tokens plain": (LEVERS, "rows -1 tokens_s", 1e3, ".0f"),
    "untrained ratio": (STUDENT, "untrained ppl_ratio", 1, ".1f"),
    "teacher parameters": (TEACHER, "parameters", 1, ",d"),
    "teacher megabytes": (TEACHER, "assets tiny_teacher/model.safetensors bytes", 1e6, ".1f"),
    "teacher bytes per token": (TEACHER, "bytes_per_token", 1, ".3f"),
    "teacher train tokens": (TEACHER, "tokens train", 1, ",d"),
    "teacher heldout tokens": (TEACHER, "tokens heldout", 1, ",d"),
    "teacher heldout bytes": (TEACHER, "heldout text bytes", 1, ",d"),
    "teacher heldout loss": (TEACHER, "heldout loss", 1, ".4f"),
    "teacher heldout perplexity": (TEACHER, "heldout perplexity", 1, ".3f"),
    "teacher heldout bits": (TEACHER, "heldout bits_per_byte", 1, ".4f"),
    "teacher passes 0": (TEACHER, "selection stages 0 passes", 1, "d"),
    "teacher passes 1": (TEACHER, "selection stages 1 passes", 1, "d"),
    "teacher passes 2": (TEACHER, "selection stages 2 passes", 1, "d"),
    "teacher kept pass": (TEACHER, "selection stages 0 kept_pass", 1, "d"),
}


def lab_pages() -> list[Path]:
    """The experiments' own pages with tables."""
    found = sorted((CHECKOUT / "training" / "experiments").glob("*/*.md"))
    return [path for path in found if "<!-- begin " in path.read_text(encoding="utf-8")]


def table(name: str) -> str:
    """The Markdown of a table.

    Raises:
        ValueError: there is no such table.
    """
    kind, *words = name.split()
    if kind not in ALL:
        raise ValueError(f"there is no table {kind!r}; choose from {', '.join(ALL)}")
    return ALL[kind](*words)


def blocks(markdown: str) -> list[str | dict]:
    """The paragraphs of a text in Markdown; those that are tables with head and rows."""
    found = []
    for part in markdown.split("\n\n"):
        lines = part.split("\n")
        if not part.startswith("|"):
            found.append(part)
            continue
        head, line, *rows = ([cell.strip() for cell in row[1:-1].split(" | ")] for row in lines)
        found.append({"head": head, "right": line[-1] == "---:", "rows": rows})
    return found


def number(name: str) -> dict:
    """The text of a number, its file, and the commit of the measurement if the file has one."""
    file, keys, unit, form = NUMBERS[name]
    value = results = json.loads((CHECKOUT / file).read_text(encoding="utf-8"))
    for key in keys.split():
        value = value[int(key) if isinstance(value, list) else key]
    value = value if unit == 1 else value / unit
    commit = results.get("commit") if isinstance(results, dict) else None
    return {"text": format(value, form), "source": file, "commit": commit}


def figures() -> dict:
    """The content of figures.json: what the pages of the product name."""
    tables, numbers = set(), set()
    for page in PRODUCT["pages"]():
        found = PRODUCT["names"](page.read_text(encoding="utf-8"))
        tables.update(found[0])
        numbers.update(found[1])
    if unknown := sorted(numbers - NUMBERS.keys()):
        raise ValueError(f"there is no number {', '.join(unknown)}; choose from {', '.join(NUMBERS)}")
    return {
        "tables": {name: blocks(table(name)) for name in sorted(tables)},
        "numbers": {name: number(name) for name in sorted(numbers)},
    }


def written() -> dict[Path, str]:
    """The content of every file that this command writes."""
    found = figures()
    files = {PRODUCT["FILE"]: json.dumps(found, indent=1, ensure_ascii=False) + "\n"}
    for page in PRODUCT["pages"]():
        files[page] = PRODUCT["render"](page.read_text(encoding="utf-8"), found)
    for page in lab_pages():
        text = page.read_text(encoding="utf-8")
        names, _ = PRODUCT["names"](text)
        own = {"tables": {name: [table(name)] for name in names}, "numbers": {}}
        files[page] = PRODUCT["render"](text, own)
    return files


def main(check: Annotated[bool, typer.Option(help="change nothing; exit code 1 if a file would change")] = False):
    """Write figures.json and the figures of all pages."""
    stale = []
    for path, content in written().items():
        if not path.exists() or path.read_text(encoding="utf-8") != content:
            stale.append(str(path.relative_to(CHECKOUT)))
            if not check:
                path.write_text(content, encoding="utf-8")
    print(f"{'out of date' if check else 'written'}: {', '.join(stale) or 'nothing'}")
    if check:
        raise typer.Exit(int(bool(stale)))


if __name__ == "__main__":
    typer.run(main)
