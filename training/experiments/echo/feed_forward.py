"""Is the Koopman MLP of Echo as good as SwiGLU at equal parameters? No other script trains this part of Echo.

    python training/experiments/echo/feed_forward.py --text text.npy --workers 4 --out echo_feed_forward.json

Language models of Mamba-2 layers differ in their feed-forward layers: SwiGLU; the Koopman MLP, whose two matrices are
1.5 times as wide; the gated one, with three matrices; and the Koopman MLP of SwiGLU's width, as in the paper, with a
third fewer parameters in these layers. Sizes, text and the choice of rates are those of `baselines/language.py`; the
eigenvalues of the Koopman MLP have no weight decay, as in the package.
"""

import typer

from hf_memmix import no_weight_decay_names
from hf_memmix.mixers import KoopmanMLP
from hf_memmix.training.experiments.bundled.language_model import decay_matrices
from hf_memmix.training.experiments.common.fit import MODELS, train_language_model
from hf_memmix.training.experiments.common.harness import Experiment, device
from hf_memmix.training.experiments.common.options import LanguageModelOptions
from hf_memmix.training.experiments.common.rates import plan
from hf_memmix.training.experiments.common.text import describe_training_text

CONTEXT, WARMUP_STEPS, SEEDS = 512, 150, (0, 1, 2)
# the width of a layer for each one of SwiGLU's, and whether it is gated; None: SwiGLU
FEED_FORWARDS = {
    "SwiGLU": None,
    "Koopman": (1.5, False),
    "Koopman, gated": (1.0, True),
    "Koopman, a third fewer": (1.0, False),
}


def replace_feed_forwards(model, name: str) -> None:
    """Put new feed-forward layers of `FEED_FORWARDS` in the place of SwiGLU, in place."""
    if FEED_FORWARDS[name] is None:
        return
    wider, gated = FEED_FORWARDS[name]
    for layer in model.model.layers:
        inner, hidden = layer.mlp.gate_proj.weight.shape
        layer.mlp = KoopmanMLP(hidden, 2 * round(wider * inner / 2), gated).to(device())
        layer.mlp.init_weights()


def groups_of(model) -> list[dict]:
    """The optimizer groups of `fit`, with parameters that the package spares from weight decay in the last one."""
    names = no_weight_decay_names(model)
    spared = [parameter for name, parameter in model.named_parameters() if name in names]
    decayed = [parameter for name, parameter in model.named_parameters() if name not in names]
    return [*decay_matrices(decayed, 0.1), {"params": spared, "weight_decay": 0.0}]


def rows_to_run(done: list[dict], args) -> list[dict]:
    return plan(done, [{"feed_forward": name, "context": CONTEXT} for name in FEED_FORWARDS], args.lrs, SEEDS)


def run(row: dict, args) -> dict:
    def prepare(model):
        replace_feed_forwards(model, row["feed_forward"])

    options = {"prepare": prepare, "warmup_steps": WARMUP_STEPS, "groups_of": groups_of}
    return train_language_model(row, args, *MODELS["mamba2"], **options)


class FeedForwardOptions(LanguageModelOptions):
    lrs = (8e-3, 16e-3)


main = Experiment(
    "echo_feed_forward",
    __file__,
    FeedForwardOptions,
    rows_to_run,
    about=lambda args: describe_training_text(args.text),
).command()


if __name__ == "__main__":
    typer.run(main)
