"""`make real`: converts SmolLM2-135M-Instruct by the published recipe, in a small budget, and says how far it came.

    python training/experiments/smollm2/real.py .scratch/smollm2_teacher --out runs/real

It keeps the attention of the published layers of the teacher that `teacher.py` writes, replaces the others by the
published mixer, trains the student on the text of this checkout, then measures and saves it as `make demo` does. The
published student read more text, and other text, of which `corpus.py` makes its files. Half of the rows are drills.
"""

from pathlib import Path
from typing import Annotated

import transformers
import typer
from rich.console import Console
from rich.progress import Progress

from hf_memmix.conversion.layer_choice import layer_text
from hf_memmix.training import demo
from hf_memmix.training.experiments.common.harness import device
from hf_memmix.training.experiments.results import read
from hf_memmix.training.experiments.smollm2.arms_report import SHOWN, shown

KEPT, DRILLS = 4, 0.5  # of the published student of SHOWN
MIXER, OPTIONS = "window", {"window": 384, "sinks": 1}
CONTEXTS = (1024, 8192)  # the transformer reads 8,192 tokens
SIZES = {
    "cuda": demo.Sizes(
        align_steps=40,
        distill_steps=80,
        batch_size=8,
        block_size=2048,
        text_tokens=65_536,
        probe_lengths=(512, 1024, 2048, 4096),
        probe_samples=8,
        contexts=CONTEXTS,
    ),
    "cpu": demo.Sizes(
        align_steps=16,
        distill_steps=16,
        batch_size=1,
        block_size=512,
        text_tokens=4096,
        probe_lengths=(512, 1024),
        probe_samples=1,
        contexts=CONTEXTS,
    ),
}
LEARNING_RATES = {
    "cuda": {"align": {}, "distill": {}},  # those of the recipes
    # for a few short steps, to which the recipes' rates would do harm
    "cpu": {
        "align": {"learning_rate": 3e-4},
        "distill": {"learning_rate": 3e-4, "rest_learning_rate": 3e-6},  # of windows: 3e-5
    },
}


def main(
    teacher: Annotated[Path, typer.Argument(help="folder of the teacher")],
    out: Annotated[Path, typer.Option(help="folder of the results and the student")],
) -> None:
    """Convert, train, measure and save; print the published figures beside."""
    published = shown([read("rates")], *next(one for one in SHOWN if one[0] == KEPT))[0]
    console, place = Console(), device().type
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    training = {"learning_rates": LEARNING_RATES[place], "drills": False, "fact_drills": DRILLS}
    recipe = demo.Recipe(MIXER, OPTIONS, published["keep"], **training, probes={"fact": "fact"})
    given = ", ".join(f"{name}={value}" for name, value in OPTIONS.items())
    console.print(f"on {place}: {MIXER} ({given}) in all layers but {layer_text(recipe.keep)}", highlight=False)
    with Progress(*demo.COLUMNS, console=console) as progress:
        found = demo.run_demo(out, progress, SIZES[place], recipe, teacher_folder=teacher, device=place)
    demo.show(found, out, console)
    tokens = sum(stage["tokens"] for stage in found["stages"])
    quality, size = found["quality"], SIZES[place].block_size
    console.print(
        f"KL {quality['kl']:.3f}, ratio of perplexities {quality['ppl_ratio']:.3f} on {found['text']['file']} in"
        f" blocks of {size} tokens, of which a window holds {OPTIONS['window']}, after {tokens:,} tokens. The"
        f" published student: KL {published['heldout_kl']:.3f}, ratio {published['heldout_ppl_ratio']:.3f} on its"
        f" held-out text after {published['tokens']:,} tokens.",
        highlight=False,
    )


if __name__ == "__main__":
    typer.run(main)
