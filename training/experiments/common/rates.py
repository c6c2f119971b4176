"""Which learning rates are tried, which one is chosen, and the rows at the chosen one."""

import math

from hf_memmix.training.experiments.common.harness import matches


def best(done: list[dict], **wanted) -> dict | None:
    """The finished row with these values that has the lowest dev loss."""
    rows = [row for row in done if row.get("finite") and matches(row, wanted)]
    return min(rows, key=lambda row: row["dev_loss"], default=None)


def rates_to_try(done: list[dict], lrs: list[float], **wanted) -> tuple[list[float], float | None]:
    """The learning rates to try for what is `wanted`, and the one with the lowest dev loss, None before all are tried.

    If the best of `lrs` is the largest or the smallest, twice or half that rate is tried as well.
    The rule is the same for all models, so that no model loses only because the rates did not suit it.
    """
    rows = [row for row in done if matches(row, wanted)]
    first = best([row for row in rows if row["lr"] in lrs])
    tried, lrs = {row["lr"] for row in rows}, list(lrs)
    if first is not None and len(lrs) > 1 and tried >= set(lrs):
        beyond = {max(lrs): 2 * max(lrs), min(lrs): min(lrs) / 2}.get(first["lr"])
        lrs += [] if beyond is None else [beyond]
    chosen = best([row for row in rows if row["lr"] in lrs]) if tried >= set(lrs) else None
    return lrs, None if chosen is None else chosen["lr"]


def chosen_rows(rows: list[dict], **wanted) -> list[dict]:
    """For each seed the row with these values at the chosen rate, which is that of seed 0."""
    first = best(rows, **wanted, seed=0)
    if first is None:
        return []
    others = (best(rows, **wanted, seed=seed, lr=first["lr"]) for seed in sorted({row["seed"] for row in rows} - {0}))
    return [first, *(row for row in others if row is not None)]


def learnt_and_lost(results: dict, names: list[str] | None = None) -> tuple[list[dict], list[dict]]:
    """The trained rows that learnt something, and those that did not: not finite, or no better than chance.

    They are in the order of `names`, the models or rungs as the experiment lists them; default: its models.
    """
    names = results["settings"]["models"] if names is None else names
    rows = [row for row in results["rows"] if "finite" in row]
    rows.sort(key=lambda row: names.index(row.get("model") or row["rung"]))
    limit = results.get("chance_loss", math.inf)
    kept = [row for row in rows if row["finite"] and row["dev_loss"] < limit]
    return kept, [row for row in rows if row not in kept]
