"""The choice of a learning rate: which rates are tried, which one is chosen, and which rows have the chosen rate."""

import math
from collections.abc import Iterable
from types import SimpleNamespace

from hf_memmix.training.experiments.common.harness import matches

MAX_EXTENSIONS = 4  # rates that `rates_to_try` adds to the given ones, at most


def lowest_dev_loss(done: list[dict], **wanted) -> dict | None:
    """The finished row with the wanted values that has the lowest development loss; None without such rows.

    A row whose training succeeded and whose measuring failed has no development loss and is never chosen.
    """
    rows = [row for row in done if row.get("finite") and "dev_loss" in row and matches(row, wanted)]
    return min(rows, key=lambda row: row["dev_loss"], default=None)


def rates_to_try(
    done: list[dict], lrs: list[float], extensions: int = MAX_EXTENSIONS, key: str = "lr", **wanted
) -> tuple[list[float], float | None]:
    """The learning rates to try for the rows with the wanted values, and the rate that is chosen for them.

    The chosen rate has the lowest development loss; it is None until all rates have been tried. While the best rate
    is the largest one tried, twice that rate is tried as well; while it is the smallest, half that rate, up to
    `extensions` times. The rule is the same for all models, so no model is behind only because the given rates
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
        if given == 1 or beyond is None or len(lrs) >= given + extensions:
            return lrs, best[key]
        lrs.append(beyond)
    return lrs, None


def rates_until_solved(
    done: list[dict], lrs: list[float], solved: float, extensions: int = MAX_EXTENSIONS, **kind
) -> tuple[list[float], float | None]:
    """The rates to try with seed 0 for the rows of this kind, and the chosen one; None until it is known.

    The rates run in the given order. After a rate whose development loss is below `solved` no further one is tried:
    the loss cannot choose between rates that both solve the task. If none does, `rates_to_try` decides.
    """
    first = lowest_dev_loss(done, **kind, seed=0)
    if first is not None and first["dev_loss"] < solved:
        return [first["lr"]], first["lr"]
    tried = {row["lr"] for row in done if matches(row, {**kind, "seed": 0})}
    for position, lr in enumerate(lrs):
        if lr not in tried:
            return lrs[: position + 1], None
    return rates_to_try(done, lrs, extensions, **kind, seed=0)


def rows_until_solved(done: list[dict], kinds: Iterable[dict], solved: float, args: SimpleNamespace) -> list[dict]:
    """The first rate of every kind of rows, then in turns further rates and, where the rate is known, other seeds.

    kinds: the values that name a kind, the most important kind first. `rates_until_solved` decides about the rates,
    with `args.lrs` and `args.further_rates`. `args.seeds`: the number of seeds; the first one tries the rates.
    """
    rows = []
    for kind in kinds:
        lrs, chosen = rates_until_solved(done, args.lrs, solved, args.further_rates, **kind)
        rows += [(2 * lrs.index(lr), {**kind, "lr": lr, "seed": 0}) for lr in lrs]
        rows += [(seed, {**kind, "lr": chosen, "seed": seed}) for seed in range(1, args.seeds) if chosen is not None]
    return [row for _, row in sorted(rows, key=lambda pair: pair[0])]


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
