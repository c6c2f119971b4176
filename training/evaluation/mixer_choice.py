"""Chooses one mixer per layer with the lowest sum of scores under budgets, exactly.

    minimise  sum_l score[l, m_l]   subject to   sum_l cost[l, m_l, d] <= limit[d]  for every cost d

This is a multiple-choice knapsack. Partial choices (labels) of the first layers are extended layer by layer. A label
is dropped if it cannot meet a limit any more, if another label is at least as good in score and in every cost, or if
its Lagrangian bound is above the score of a known solution. None of the three drops every best solution.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

Costs = Sequence[Sequence[Sequence[int]]]  # [layer][candidate][kind of cost]
STEPS = 200  # of the search for multipliers, which only makes the bound tighter


def best_choice(scores: Sequence[Sequence[float]], costs: Costs, limits: Sequence[int]) -> list[int] | None:
    """The candidate of every layer; None if no choice meets the limits.

    Args:
        scores: [layer][candidate], finite; lower is better. Layers may have different numbers of candidates.
        costs: [layer][candidate][d], integers of at least 0.
        limits: [d], integers.
    """
    layers, kinds = len(scores), len(limits)
    score = [np.asarray(row, dtype=np.float64) for row in scores]
    cost = [np.asarray(row, dtype=np.int64).reshape(len(row), kinds) for row in costs]
    limit = np.asarray(limits, dtype=np.int64)
    least = _suffix_sums([rows.min(0) for rows in cost], kinds)
    if (least[0] > limit).any():
        return None
    multipliers, known = _multipliers(score, cost, limit)
    bound = _suffix_sums([np.array([(s + c @ multipliers).min()]) for s, c in zip(score, cost, strict=True)], 1)[:, 0]
    free = float(limit @ multipliers)

    total, spent = np.zeros(1), np.zeros((1, kinds), dtype=np.int64)
    picked = np.zeros((1, layers), dtype=np.int32)
    for layer in range(layers):
        many = len(score[layer])
        total = (total[:, None] + score[layer]).ravel()
        spent = (spent[:, None] + cost[layer]).reshape(len(total), kinds)
        picked = np.repeat(picked, many, axis=0)
        picked[:, layer] = np.tile(np.arange(many), len(picked) // many)
        hopeful = (spent + least[layer + 1] <= limit).all(1)
        slack = 1e-9 * (1 + abs(known)) if np.isfinite(known) else 0.0
        hopeful &= total + spent @ multipliers + bound[layer + 1] - free <= known + slack
        keep = np.flatnonzero(hopeful)
        keep = keep[_not_dominated(total[keep], spent[keep])]
        total, spent, picked = total[keep], spent[keep], picked[keep]
        if not len(total):
            return None
    return picked[int(total.argmin())].tolist()


def _suffix_sums(rows: list[np.ndarray], width: int) -> np.ndarray:
    """[layers + 1, width]: the sums of the rows from each layer to the end."""
    sums = accumulate(reversed(rows), initial=np.zeros(width, dtype=rows[0].dtype if rows else np.int64))
    return np.stack(list(sums)[::-1])


def _multipliers(score, cost, limit) -> tuple[np.ndarray, float]:
    """Lagrange multipliers of the costs with a high dual bound, and the score of the best solution met on the way.

    Subgradient ascent. Each cost is measured in units of its limit.
    """
    unit = np.maximum(limit, 1).astype(np.float64)
    size = max(1e-12, float(sum(np.ptp(row) for row in score)))
    multipliers, best, best_bound, known = np.zeros(len(limit)), np.zeros(len(limit)), -np.inf, np.inf
    for step in range(STEPS if len(limit) else 0):
        rows = [s + c @ (multipliers / unit) for s, c in zip(score, cost, strict=True)]
        picks = [int(row.argmin()) for row in rows]
        spent = sum(c[i] for c, i in zip(cost, picks, strict=True))
        if (spent <= limit).all():
            known = min(known, float(sum(s[i] for s, i in zip(score, picks, strict=True))))
        dual = sum(float(row.min()) for row in rows) - float(multipliers @ (limit / unit))
        if dual > best_bound:
            best, best_bound = multipliers, dual
        excess = (spent - limit) / unit
        norm = float(np.linalg.norm(excess))
        if norm < 1e-12:
            break
        multipliers = np.maximum(0.0, multipliers + size / (1 + step) * excess / norm)
    return best / unit, known


def _not_dominated(total: np.ndarray, spent: np.ndarray) -> list[int]:
    """Indices of labels such that no other one has a score and costs that are all as low or lower."""
    order = np.lexsort((*spent.T[::-1], total))
    if spent.shape[1] <= 1:  # in this order only the lowest cost so far counts
        lowest, kept = np.inf, []
        for index in order:
            value = spent[index, 0] if spent.shape[1] else 0
            if value < lowest:
                lowest, kept = value, [*kept, int(index)]
        return kept
    kept, front = [], np.empty_like(spent)
    for index in order:
        if not (front[: len(kept)] <= spent[index]).all(1).any():
            front[len(kept)] = spent[index]
            kept.append(int(index))
    return kept
