"""The plan of a mixture: the choice under a budget, the measurements behind it, and its plot."""

from dataclasses import asdict
from pathlib import Path

from hf_memmix.conversion.layer_cost import measured_on
from hf_memmix.mixers import ATTENTION
from hf_memmix.training.evaluation.mixer_search import Budget, Measured, choose_mixers, totals
from hf_memmix.training.evaluation.picture import new_picture, write_picture


def mixture_plan(measured: Measured, budget: Budget, context: int) -> dict:
    """What `memmix select` writes for several mixers, as JSON values; `conversion.layer_plan` reads it.

    Raises:
        ValueError: no mixture meets the budget.
    """
    scores, costs = measured.scores(), measured.costs
    types = choose_mixers(scores, costs, budget)
    used = [kind for kind in dict.fromkeys(types) if kind != ATTENTION]
    layers = range(len(types))
    rows = []
    for layer in layers:
        cells = {ATTENTION: {"score": 0.0, "kl": 0.0, "nll": 0.0, **costs[layer][ATTENTION].record()}}
        for kind, ranking in measured.rankings.items():
            found = ranking["layers"][layer]
            parts = {name: found[name] for name in ("score", "kl", "nll", "answers")}
            cells[kind] = parts | costs[layer][kind].record()
        rows.append({"layer": layer, "mixers": cells})
    singles = {kind: [kind] * len(types) for kind in measured.rankings}
    return {
        "mixer_types": types,
        "mixers": {kind: measured.options[kind] for kind in used},
        "num_layers": len(types),
        "keep": [layer for layer in layers if types[layer] == ATTENTION],
        "candidates": list(measured.rankings),
        "budget": asdict(budget) | {"keep_layers": list(budget.keep_layers), "context": context},
        "totals": totals(types, scores, costs),
        "single": {kind: totals(alone, scores, costs) for kind, alone in singles.items()},
        "times_of": measured_on(),
        "scores": rows,
    }


def plot_mixture(plan: dict, path: str | Path) -> None:
    """Draw the scores of a plan as a PNG: one cell per layer and mixer, with a frame around the chosen one."""
    from matplotlib.patches import Rectangle

    kinds, rows = plan["candidates"], plan["scores"]
    values = [[row["mixers"][kind]["score"] for row in rows] for kind in kinds]
    figure, axes = new_picture(figsize=(max(4, 0.5 * len(rows) + 2), 0.45 * len(kinds) + 1.4))
    image = axes.imshow(values, cmap="YlOrRd", aspect="auto")
    for layer, kind in enumerate(plan["mixer_types"]):
        if kind in kinds:
            corner = (layer - 0.5, kinds.index(kind) - 0.5)
            axes.add_patch(Rectangle(corner, 1, 1, fill=False, lw=2, edgecolor="#2f6fa7"))
    axes.set_xticks(range(len(rows)), [row["layer"] for row in rows])
    axes.set_yticks(range(len(kinds)), kinds)
    axes.set_xlabel("layer; framed: chosen" + (f"; attention: {plan['keep']}" if plan["keep"] else ""))
    figure.colorbar(image, ax=axes, label="loss alone, nats")
    write_picture(figure, path)
