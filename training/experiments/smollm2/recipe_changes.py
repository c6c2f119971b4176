"""What an arm of `arms.py` may change in conversion and recipe, each behind its `@`.

mixers=.1    the rate of mixers is .1 times that of the recipe, besides the factor `rate` of all rates
window_rate=.1   distill: of windows alone, see `Recipe`; 1 if it is not given, whatever the recipe says
rope=0       kept layers do not rotate queries and keys
unshare=1    every query head of the memory has keys and values of its own
frozen=1     distill leaves the weights of the MLPs as they are
slope=.9     distill: an MLP has .9 times the rate of the MLP above it
average=.98  distill ends with a mean of its weights, in which a step weighs .98 times as much as the next one
then=8192    80 further steps of distill, of equally many tokens, on rows of 8,192
own=.25      a quarter of the rows are answers of the teacher to prompts, see `own_prompts.py`
"""

import torch
from transformers import TrainerCallback

from hf_memmix.training.data import TokenBlocks
from hf_memmix.training.recipe import Recipe

CHANGES = {"rope": int, "unshare": int, "frozen": int, "slope": float, "average": float, "then": int, "own": float}
CHANGES |= {"mixers": float, "window_rate": float}
THEN_STEPS = 80


def conversion(row: dict, memory: str, mixers: dict[str, dict]) -> dict:
    """Arguments of `convert_model`."""
    if row.get("unshare"):
        mixers = mixers | {memory: mixers[memory] | {"unshare_kv_heads": True}}
    return {"mixers": mixers, "keep_without_rope": "all" if row.get("rope") == 0 else None}


def rates(recipe: Recipe, row: dict) -> dict[str, float]:
    """The rates of mixers, of all other weights and of windows."""
    rest, mixers, windows = (1.0 if row[name] is None else row[name] for name in ("rate", "mixers", "window_rate"))
    return {
        "learning_rate": recipe.learning_rate * rest * mixers,
        "rest_learning_rate": recipe.rest_learning_rate * rest,
        "window_rate": windows if recipe.stage == "distill" else 1.0,
    }


def groups(row: dict, layers: int, rate: float) -> list[dict]:
    """Groups of the recipe of distill, see `Recipe`. `rate`: that of the last MLP."""
    if row["frozen"]:
        return [{"match": r"\.mlp\.", "learning_rate": 0.0}]
    slope = row["slope"]
    if slope is None:
        return []
    rates = {layer: rate * slope ** (layers - 1 - layer) for layer in range(layers)}
    return [{"match": rf"\.layers\.{layer}\.mlp\.", "learning_rate": rate} for layer, rate in rates.items()]


def with_own(data: TokenBlocks, own: TokenBlocks, share: float) -> TokenBlocks:
    """Rows of text and drills, of which a share, none of them a drill, are rows of `own`, which may repeat."""
    rows, weights = data.blocks.clone(), data.loss_mask.clone()
    text = (weights == 1).all(-1).nonzero()[:, 0]
    places = text[torch.linspace(0, len(text) - 1, round(share * len(data))).long()]
    taken = torch.arange(len(places)) % len(own)
    rows[places], weights[places] = own.blocks[taken], own.loss_mask[taken].to(weights.dtype)
    return TokenBlocks(rows.flatten(), data.block_size, None, data.tokenizer, weights, drills=data.drills)


class Average(TrainerCallback):
    """Trained parameters end as their mean over the steps, in which a step weighs `decay` times the next one."""

    def __init__(self, decay: float):
        self.decay, self.means = decay, None

    def on_step_end(self, arguments, state, control, model, **kwargs):
        weights = self._weights(model)
        if self.means is None:
            self.means = [weight.clone() for weight in weights]
        else:
            torch._foreach_lerp_(self.means, weights, 1 - self.decay)

    def on_train_end(self, arguments, state, control, model, **kwargs):
        torch._foreach_copy_(self._weights(model), self.means)

    @staticmethod
    def _weights(model) -> list[torch.Tensor]:
        return [parameter.data for parameter in model.parameters() if parameter.requires_grad]
