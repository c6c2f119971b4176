"""Tables that README.md and the model cards show instead of the long ones of the experiments."""

from pathlib import Path

from hf_memmix.conversion.estimate import estimate
from hf_memmix.conversion.records import bytes_text, markdown_table
from hf_memmix.training.experiments.common.averages import SPREAD_NOTE, median, spread_text
from hf_memmix.training.experiments.common.harness import measured_at
from hf_memmix.training.experiments.common.rates import chosen_rows, trained_and_failed
from hf_memmix.training.experiments.common.report import above, mean_of_rows, memory_text, paper_above
from hf_memmix.training.experiments.documents.conversion_costs import SHAPES, TIMED, Costs
from hf_memmix.training.experiments.gka_vision.models import MODELS
from hf_memmix.training.experiments.lattice.language import PAPER
from hf_memmix.training.experiments.measurements import read

CONTEXT, TOKENS = 131072, 1e8  # of a cache; of each training stage
SEQUENCES = (1, 32, 128)  # decoded at the same time
FROM_SCRATCH = (
    "transformer",
    "linear-decay",
    "delta",
    "gdn",
    "dec",
    "gla",
    "gka-equal",
    "gka",
    "mamba2-equal",
    "mamba2",
)
RESOLUTIONS = (224, 512, 1024)


def front_table(root: Path) -> str:
    """Three sizes of transformers with `gka`: the cache, the time of a decode step, and the hours of a conversion."""
    steps = {}
    for row in read("models", root):
        if row["phase"] == "decode" and row["mixer"] in ("attention", "gka"):
            steps[row["B"], row["mixer"]] = row
    costs, lines = Costs(root), []
    for place, shape in enumerate(SHAPES):
        none, quarter = (
            estimate(shape.model(), "gka", keep, contexts=(CONTEXT,))["state"][0] for keep in ("none", 0.25)
        )
        cache = [bytes_text(size) for size in (none["teacher"], quarter["student"], none["student"])]
        times = [" → ".join(f"{steps[b, m]['ms']:.1f}" for m in ("attention", "gka")) for b in SEQUENCES]
        hours = sum(costs.hours(shape, "gka", stage, TOKENS) for stage in ("align", "distill"))
        decode = times if place == 0 else [""] * len(times)
        lines.append([shape.name, " → ".join(cache[:2]), cache[2], *decode, f"{hours:.1f}"])
    head = ["transformer", f"cache at {CONTEXT // 1024}k tokens, a quarter of the layers kept", "no layer kept"]
    head += [f"ms per token, {b} sequence{'s' * (b > 1)}" for b in SEQUENCES] + ["GPU hours"]
    row = steps[1, "gka"]
    return (
        f"{markdown_table(head, lines, figures=True)}\n\nBefore → after, with `gka`. Cache of one sequence:"
        f" computed by `memmix convert --dry-run`. Decode: measured at {TIMED.name} on an {row['gpu']} after"
        f" {row['T'] // 1024}k tokens, no layer kept; empty: not measured. Hours: computed for {TOKENS / 1e6:.0f}M"
        " tokens of each training stage on this GPU, from runs of 1.0B and 1.2B models."
    )


def from_scratch_table(root: Path) -> str:
    """Small language models at one protocol, with the paper's distances of the Lattice paper."""
    results = read("baselines_language", root)
    rows, _ = trained_and_failed(results)
    paper = {name: by[512] for name, by in PAPER.items()}
    found = {name: chosen_rows(rows, model=name) for name in FROM_SCRATCH}
    lines = [
        [
            name,
            memory_text(results["settings"], name)[0],
            mean_of_rows(chosen, "perplexity", 2),
            above(chosen, found["dec"]),
            paper_above(paper, name, "dec"),
        ]
        for name, chosen in found.items()
    ]
    head = ["model", "memory, floats per layer", "perplexity at 512", "above dec", "the paper's distance"]
    return f"{markdown_table(head, lines, figures=True)}\n\n{SPREAD_NOTE} {measured_at(results)}."


def induction_table(root: Path) -> str:
    """COFFEE's tables beside the paper's: one line per setting."""
    lines = []
    for name in ("coffee_table1", "coffee_table2", "coffee_fixed8", "coffee_table6"):
        for setting, run in read(name, root)["runs"].items():
            number, words = setting.split(": ")
            if number == "1" and "coffee" in words and "fixed=8" not in words:
                continue
            seeds = run["best_accuracy_of_seeds"]
            solved = f"{run['seeds_at_0.99']} of {run['seeds']}"
            lines.append([number, words.rpartition(" rate=")[0], run["paper"], f"{median(seeds):.3f}", solved])
    for setting, run in read("coffee_mnist_5k", root)["runs"].items():
        lines.append(["7", setting, run["paper_on_mnist"], spread_text(run["last"]["accuracy"], 3), ""])
    return markdown_table(["table", "setting", "paper", "median of seeds (7: mean)", "seeds at 0.99"], lines)


def vision_table(root: Path) -> str:
    """Accuracy on two sets of images, and images per second."""
    digits, clothes, speed = (read(f"gka_vision_{name}", root) for name in ("digits", "fashion", "throughput"))
    lines = []
    for model in MODELS:
        shares = [
            spread_text(
                [
                    100 * row["accuracy"]
                    for row in chosen_rows([r for r in of["rows"] if "accuracy" in r], model=model)
                ],
                1,
            )
            for of in (digits, clothes)
        ]
        rows = {row["resolution"]: row for row in speed["rows"] if row["model"] == model}
        fast = [f"{rows[size]['inference_images_per_second']:,.0f}" if size in rows else "" for size in RESOLUTIONS]
        lines.append([model, *shares, *fast])
    head = ["model", "digits, %", "clothes, %", *(f"images/s, {size} px" for size in RESOLUTIONS)]
    return f"{markdown_table(head, lines, figures=True)}\n\n{SPREAD_NOTE} Images/s: inference. {measured_at(speed)}."
