"""Write every figure of the documents from the committed measurements, and the plot of README.md.

    python -m hf_memmix.training.readme_tables            # after new measurements
    python -m hf_memmix.training.readme_tables --check    # exit code 1 if a document says anything else

A table stands between `<!-- begin NAME -->` and `<!-- end NAME -->`. NAME is a key of `tables.TABLES` and the words
after it: `op lattice` are the measurements of an op, `results recall` is the report of training/results/recall.json.
"""

import json
import re
import sys
from pathlib import Path

from hf_memmix.training.tables import DEMO, TABLES

PLOT = "training/results/demo.png"
DOCUMENTS = (
    "README.md",
    "training/README.md",
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
    """`text` of a document with every table written anew.

    Raises:
        ValueError: a begin lacks its end, or there is no such table.
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


def main(root: Path, check: bool) -> int:
    stale = []
    for path in documents(root):
        text = path.read_text(encoding="utf-8")
        rendered = render(text, root)
        if text != rendered:
            stale.append(path.relative_to(root))
            if not check:
                path.write_text(rendered, encoding="utf-8")
    print(f"{'out of date' if check else 'written'}: {', '.join(map(str, stale)) or 'nothing'}")
    if check:
        return int(bool(stale))
    from hf_memmix.training.plot import plot_context_cost

    plot_context_cost(json.loads((root / DEMO).read_text()), root / PLOT)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parents[1], "--check" in sys.argv[1:]))
