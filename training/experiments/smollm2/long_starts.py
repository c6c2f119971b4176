"""The table of the errors at the start of each mixer, by how long its memory lasts.

The error of a layer is |mixer - attention|^2 / |attention|^2 on the inputs that the layer has in the transformer. A
row is one mixer with half-lives in tokens, or with its own ones, or a window with some first tokens (`sinks`).
"former" undoes what a start does about the size of a memory's output.
"""

from hf_memmix.conversion.records import markdown_table
from hf_memmix.training.experiments.common.harness import measured_at

HALF_LIVES = {"its own": None, "64": [64, 64], "2048": [2048, 2048]}  # those of the table


def table(results: dict) -> str:
    """A table of mixers by half-lives, and one of windows by size and first tokens; former errors in brackets."""
    of_mixers, largest, of_windows = {}, {}, []
    for row in results["rows"]:
        errors, former = row["errors_at_start"], row.get("former_errors")
        mean = f"{sum(errors) / len(errors):.3f}"
        if "window" in row:
            of_windows.append([row["window"], row["sinks"], mean, f"{max(errors):.2f}"])
            continue
        before = "" if former is None else f" ({sum(former) / len(former):.2f})"
        of_mixers.setdefault(row["mixer"], {})[str(row["half_lives"])] = mean + before
        largest[row["mixer"]] = max(largest.get(row["mixer"], 0), *errors)
    lines = [
        [mixer, *(cells.get(str(lives), "") for lives in HALF_LIVES.values()), f"{largest[mixer]:.2f}"]
        for mixer, cells in of_mixers.items()
    ]
    every, tokens, length = (results["settings"][name] for name in ("every", "measured_tokens", "length"))
    which = "All" if every == 1 else f"Every {every}th of the"
    note = f"{which} layers, {tokens} tokens in rows of {length}; largest: of a layer; {measured_at(results)}."
    head = ["mean error; half-lives:", *HALF_LIVES, "largest"]
    windows = markdown_table(["tokens of a window", "first tokens", "mean error", "largest"], of_windows, figures=True)
    return f"{markdown_table(head, lines, figures=True)}\n\n{windows}\n\n{note}"
