"""The results of probes by task and length: choice, exact and generated answers with intervals, and what counts.

A cell in which the teacher itself is below `LEAST_OF_TEACHER` says more about the question than about the student, so
it does not count.
"""

import math

LEAST_OF_TEACHER = 0.8
Z = 1.96  # of an interval of 95 %
MEASURES = ("choice", "exact", "generated")
FIELDS = ("task", "length", "depth", "answers", "chance")


def wilson(share: float, count: int) -> tuple[float, float]:
    """The interval of 95 % around a share of `count` independent answers (Wilson, 1927)."""
    middle, spread = share + Z**2 / (2 * count), Z * math.sqrt(share * (1 - share) / count + (Z / (2 * count)) ** 2)
    return max(0.0, (middle - spread) / (1 + Z**2 / count)), min(1.0, (middle + spread) / (1 + Z**2 / count))


def counted_rows(results: dict, teacher: str = "teacher") -> list[dict]:
    """The shares of every model by task and length, over all depths.

    results: of `run_probes`.

    Returns rows `{"task", "length", "answers", "chance", "counts"}` and, by the model's name, a share and an interval
    ("exact", "exact_interval") for each of `MEASURES`, or None if the length is over the model's limit. "choice" is
    None without candidates, "generated" if nothing was generated. `counts` says for each measure whether the teacher
    has at least `LEAST_OF_TEACHER`; None without a teacher. The intervals treat the answers of one sequence as
    independent, so they are too narrow for tasks with many answers in a sequence.
    """
    found: dict[tuple[str, int], list[dict]] = {}
    for cell in results["cells"]:
        found.setdefault((cell["task"], cell["length"]), []).append(cell)
    rows = []
    for (task, length), cells in found.items():
        answers = sum(cell["answers"] for cell in cells)
        row = {"task": task, "length": length, "answers": answers, "chance": cells[0]["chance"]}
        for name in (name for name in cells[0] if name not in FIELDS):
            row[name] = _shares(cells, name, answers)
        row["counts"] = {measure: _counts(row.get(teacher), measure) for measure in MEASURES}
        rows.append(row)
    return rows


def _shares(cells: list[dict], name: str, answers: int) -> dict | None:
    if any(cell[name] is None for cell in cells):
        return None
    shares = {}
    for measure in MEASURES:
        known = all(cell[name].get(measure) is not None for cell in cells)
        share = sum(cell["answers"] * cell[name][measure] for cell in cells) / answers if known else None
        shares |= {measure: share, f"{measure}_interval": None if share is None else list(wilson(share, answers))}
    return shares


def _counts(teacher: dict | None, measure: str) -> bool | None:
    if teacher is None or teacher[measure] is None:
        return None
    return teacher[measure] >= LEAST_OF_TEACHER


def shares_text(row: dict, name: str, intervals: bool = False) -> str:
    """The measures of a model in percent, "98 / 74" or "98 (92-100) / 74 (62-83)"; a star behind what does not count;
    "-" without figures. What was generated is left out if nothing was.
    """
    if row[name] is None:
        return "-"
    texts = []
    for measure in MEASURES:
        if (share := row[name].get(measure)) is None:
            texts.append("-")
            continue
        star = "*" if row["counts"][measure] is False else ""
        low, high = (100 * bound for bound in row[name][f"{measure}_interval"])
        texts.append(f"{100 * share:.0f}{star}" + (f" ({low:.0f}-{high:.0f})" if intervals else ""))
    return " / ".join(texts).removesuffix(" / -")
