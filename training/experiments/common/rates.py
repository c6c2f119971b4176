"""The choice of a learning rate: which rates are tried, which one is chosen, and which rows have the chosen rate."""

import math
import statistics
from collections.abc import Iterable, Sequence

from hf_memmix.training.experiments.common.harness import matches

MAX_EXTENSIONS = 4  # rates that `rates_to_try` adds to the given ones, at most


def lowest_dev_loss(done: list[dict], **wanted) -> dict | None:
    """The finished row with the wanted values that has the lowest development loss; None without such rows.

    A row whose training succeeded and whose measuring failed has no development loss and is never chosen.
    """
    rows = [row for row in done if row.get("finite") and "dev_loss" in row and matches(row, wanted)]
    return min(rows, key=lambda row: row["dev_loss"], default=None)


def rates_to_try(done: list[dict], lrs: list[float], key: str = "lr", **wanted) -> tuple[list[float], float | None]:
    """The learning rates to try for the rows with the wanted values, and the rate that is chosen for them.

    The chosen rate has the lowest development loss; it is None until all rates have been tried. While the best rate
    is the largest one tried, twice that rate is tried as well; while it is the smallest, half that rate, up to
    `MAX_EXTENSIONS` times. The rule is the same for all models, so no model is behind only because the given rates
    did not suit it. Rates that were tried for another reason count as well, except where one rate is given: it is
    the choice. `key`: the name of the rate in a row.
    """
    rows, given = [row for row in done if matches(row, wanted)], len(lrs)
    lrs = list(dict.fromkeys([*lrs, *(row[key] for row in rows if given > 1)]))
    tried = {row[key] for row in rows}
    while tried >= set(lrs):
        best = lowest_dev_loss([row for row in rows if row[key] in lrs])
        if best is None:
            break
        beyond = {max(lrs): 2 * max(lrs), min(lrs): min(lrs) / 2}.get(best[key])
        if given == 1 or beyond is None or len(lrs) >= given + MAX_EXTENSIONS:
            return lrs, best[key]
        lrs.append(beyond)
    return lrs, None


def plan(
    done: list[dict],
    arms: Iterable[dict],
    lrs: list[float],
    seeds: Iterable[int],
    budgets: Sequence[dict] = ({},),
    key: str = "lr",
) -> list[dict]:
    """The rows of a comparison: every arm at every budget with every seed, at the rate that development data choose.

    First every arm is trained at the first budget with the first seed, with one rate before any arm has the next one,
    so a time limit leaves out the same rates of all arms. Then the chosen rate of each arm runs at all budgets, one
    seed after the other.

    Args:
        arms, budgets: the values of a row that name them, for example {"model": "gka"} and {"context": 512}.
        lrs: the rates to try, see `rates_to_try`.
        key: the name of the rate in a row.
    """
    seeds, tries, chosen = list(seeds), [], []
    for arm in arms:
        cell = {**arm, **budgets[0], "seed": seeds[0]}
        rates, best = rates_to_try(done, lrs, key=key, **cell)
        tries += [(rates.index(lr), {**cell, key: lr}) for lr in rates]
        chosen += [] if best is None else [{**arm, key: best}]
    rows = [row for _, row in sorted(tries, key=lambda pair: pair[0])]
    return rows + [{**arm, **budget, "seed": seed} for seed in seeds for budget in budgets for arm in chosen]


def at_best_rate(rows: list[dict], **wanted) -> list[dict]:
    """The trained rows with the wanted values, of all seeds, at the learning rate with the lowest mean development
    loss.

    The mean is over the seeds that every rate has finished. A rate is not chosen if one of its trainings diverged.
    """
    by_rate = {}
    for row in rows:
        if matches(row, wanted) and ("dev_loss" in row or row.get("finite") is False):
            by_rate.setdefault(row["lr"], {})[row["seed"]] = row
    if not by_rate:
        return []
    seeds = set.intersection(*map(set, by_rate.values())) or {min(min(found) for found in by_rate.values())}

    def loss(rate: float) -> float:
        losses = [row.get("dev_loss", math.inf) for seed, row in by_rate[rate].items() if seed in seeds]
        return statistics.fmean(losses) if losses else math.inf

    return list(by_rate[min(by_rate, key=loss)].values())


def at_edge(rows: list[dict], lr: float, key: str = "lr") -> bool:
    """Whether no larger or no smaller rate than the chosen one was tried, so that a better one may lie outside.

    A single rate is always at the edge.
    """
    tried = {row[key] for row in rows}
    return lr in (min(tried), max(tried))


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
    """The rows whose training succeeded, and the rows whose loss is not finite, not measured or no better than chance.

    Args:
        names: the models or variants in the order that the rows should have; default: the models of the settings.
    """
    names = results["settings"]["models"] if names is None else names
    rows = [row for row in results["rows"] if "finite" in row]
    rows.sort(key=lambda row: names.index(row.get("model") or row["rung"]))
    limit = results.get("chance_loss", math.inf)
    kept = [row for row in rows if row["finite"] and row.get("dev_loss", math.inf) < limit]
    return kept, [row for row in rows if row not in kept]
