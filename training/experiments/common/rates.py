"""The choice of a learning rate: which rates are tried, which one is chosen, and which rows have the chosen rate."""

import math

from hf_memmix.training.experiments.common.harness import matches


def lowest_dev_loss(done: list[dict], **wanted) -> dict | None:
    """The finished row with the wanted values that has the lowest development loss; None without such rows."""
    rows = [row for row in done if row.get("finite") and matches(row, wanted)]
    return min(rows, key=lambda row: row["dev_loss"], default=None)


def rates_to_try(done: list[dict], lrs: list[float], **wanted) -> tuple[list[float], float | None]:
    """The learning rates to try for the rows with the wanted values, and the rate that is chosen for them.

    The chosen rate has the lowest development loss; it is None until all rates have been tried. If the best of `lrs`
    is the largest, twice that rate is tried as well; if it is the smallest, half that rate. The rule is the same for
    all models, so no model is behind only because the given rates did not suit it.
    """
    rows = [row for row in done if matches(row, wanted)]
    first = lowest_dev_loss([row for row in rows if row["lr"] in lrs])
    tried, lrs = {row["lr"] for row in rows}, list(lrs)
    if first is not None and len(lrs) > 1 and tried >= set(lrs):
        beyond = {max(lrs): 2 * max(lrs), min(lrs): min(lrs) / 2}.get(first["lr"])
        lrs += [] if beyond is None else [beyond]
    chosen = lowest_dev_loss([row for row in rows if row["lr"] in lrs]) if tried >= set(lrs) else None
    return lrs, None if chosen is None else chosen["lr"]


def chosen_rows(rows: list[dict], **wanted) -> list[dict]:
    """One row per seed with the wanted values at the chosen rate. Rows with seed 0 choose the rate for all seeds."""
    first = lowest_dev_loss(rows, **wanted, seed=0)
    if first is None:
        return []
    others = (
        lowest_dev_loss(rows, **wanted, seed=seed, lr=first["lr"])
        for seed in sorted({row["seed"] for row in rows} - {0})
    )
    return [first, *(row for row in others if row is not None)]


def trained_and_failed(results: dict, names: list[str] | None = None) -> tuple[list[dict], list[dict]]:
    """The rows whose training succeeded, and the rows whose loss is not finite or no better than chance.

    Args:
        names: the models or variants in the order that the rows should have; default: the models of the settings.
    """
    names = results["settings"]["models"] if names is None else names
    rows = [row for row in results["rows"] if "finite" in row]
    rows.sort(key=lambda row: names.index(row.get("model") or row["rung"]))
    limit = results.get("chance_loss", math.inf)
    kept = [row for row in rows if row["finite"] and row["dev_loss"] < limit]
    return kept, [row for row in rows if row not in kept]
