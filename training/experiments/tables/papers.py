"""Tables of the papers' experiments that a card shows, and those that join several results."""

from statistics import fmean

from hf_memmix.conversion.records import markdown_table
from hf_memmix.training.experiments.coffee.report import epochs_text, table_of_images
from hf_memmix.training.experiments.common.averages import SPREAD_NOTE, median, spread_text
from hf_memmix.training.experiments.common.harness import measured_at
from hf_memmix.training.experiments.common.rates import chosen_rows, trained_and_failed
from hf_memmix.training.experiments.common.report import (
    above,
    language_section,
    mean_of_rows,
    memory_text,
    paper_above,
)
from hf_memmix.training.experiments.echo.report import mask_table
from hf_memmix.training.experiments.gka import variants_report
from hf_memmix.training.experiments.gka_vision.models import MODELS
from hf_memmix.training.experiments.gka_vision.report import INTERVAL_NOTE, accuracy_text
from hf_memmix.training.experiments.lattice.variants import PAPER
from hf_memmix.training.experiments.recall_teacher.raised_report import raised_table
from hf_memmix.training.experiments.results import read

FROM_SCRATCH = ("transformer", "linear-decay", "delta", "gdn", "dec", "gla")
FROM_SCRATCH += ("gka-equal", "gka", "mamba2-equal", "mamba2")
RESOLUTIONS = (224, 512, 1024)
# Figure 3b: the names of ops in files of the benchmark of ops, by the op and what has its own decay
LAYERS = {("gla", None): "GLA", ("gated_delta", "head"): "Gated DeltaNet", ("gated_delta", "channel"): "KDA"}
LAYERS |= {("gka", None): "GKA", ("sdpa", None): "attention"}
RAISED = ("gla", "gla_seed1", "gla_wide", "mamba2", "mamba2_seed1", "lattice", "lattice_seed1", "plain", "")
RAISED += ("seed1", "gla_long", "long")


def from_scratch() -> str:
    """Small language models at one protocol, with the paper's distances of the Lattice paper."""
    results = read("baselines_language")
    rows, _ = trained_and_failed(results)
    paper = {name: by[512] for name, by in PAPER.items()}
    found = {name: chosen_rows(rows, model=name, context=512) for name in FROM_SCRATCH}
    lines = []
    for name, chosen in found.items():
        cells = [memory_text(results["settings"], name)[0], mean_of_rows(chosen, "perplexity", 2)]
        lines.append([name, *cells, above(chosen, found["dec"]), paper_above(paper, name, "dec")])
    head = ["model", "memory, floats per layer", "perplexity at 512", "above dec", "the paper's distance"]
    return f"{markdown_table(head, lines, figures=True)}\n\n{SPREAD_NOTE} {measured_at(results)}."


def lattice_contexts() -> str:
    """The language models that were trained at several contexts, with the paper's distances (Table 2 of Lattice)."""
    results = read("baselines_language")
    longer = {row["model"] for row in results["rows"] if row["context"] > 512}
    rows = [row for row in results["rows"] if row["model"] in longer]
    settings = results["settings"] | {"models": [name for name in PAPER if name in longer]}
    return language_section(results | {"rows": rows, "settings": settings}, "dec", PAPER)


def induction() -> str:
    """COFFEE's tables beside the paper's: one line per setting."""
    lines: dict[str, list] = {}  # of two rates of one setting, the one with the higher median
    for name in ("coffee_table1", "coffee_table2", "coffee_fixed8", "coffee_table6"):
        for setting, run in read(name)["runs"].items():
            number, words = setting.split(": ")
            if number == "1" and "coffee" in words and "fixed=8" not in words:
                continue
            best, solved = median(run["best_accuracy_of_seeds"]), f"{run['seeds_at_0.99']} of {run['seeds']}"
            setting = words.rpartition(" rate=")[0]
            line = [number, setting, run["paper"], f"{best:.3f}", solved]
            lines[number + setting] = max(lines.get(number + setting, line), line, key=lambda of: float(of[3]))
    for found in map(read, ("coffee_mnist_5k", "coffee_mnist_5k_s6", "coffee_mnist_5k_more")):
        for setting, run in found["runs"].items():
            stopped = run["iterations"] < run["planned_iterations"]
            words = f" ({epochs_text(run, found['data']['train'])} epochs)" if stopped else ""
            number = table_of_images(setting).rpartition(" ")[2]
            accuracy = spread_text(run["last"]["accuracy"], 3)
            lines[number + setting] = [number, setting + words, run["paper_on_mnist"], accuracy, ""]
    head = ["table", "setting", "paper", "median of seeds (images: mean)", "seeds at 0.99"]
    return markdown_table(head, lines.values())


def images() -> str:
    """Accuracy on two sets of images, and images per second."""
    sets, speed = [read("digits"), read("fashion")], read("throughput")
    lines = []
    for model in MODELS:
        cells = []
        for of in sets:
            rows = chosen_rows([row for row in of["rows"] if "accuracy" in row], model=model)
            cells.append(accuracy_text(rows, 1))
        fast = {row["resolution"]: row for row in speed["rows"] if row["model"] == model}
        for size in RESOLUTIONS:
            cells.append(f"{fast[size]['inference_images_per_second']:,.0f}" if size in fast else "")
        lines.append([model, *cells])
    head = ["model", "digits, %", "clothes, %", *(f"images/s, {size} px" for size in RESOLUTIONS)]
    notes = f"{SPREAD_NOTE} {INTERVAL_NOTE} Images/s: inference. {measured_at(speed)}."
    return f"{markdown_table(head, lines, figures=True)}\n\n{notes}"


def echo_mask() -> str:
    """SKA with and without the true action mask, beside the models that get none."""
    return mask_table(read("echo_transfer"), read("echo_ablation"))


def gka_sketch() -> str:
    """GKA by the size of its sketch: recall, perplexity, bytes and times; in brackets the share of a time of s = D."""
    trained = variants_report.means_of_sketches([read(f"gka_variants_{name}") for name in ("sketches", "text")])
    rows, sizes, lines = read("gka_sketch_h200"), {}, []
    columns = {"fwd": ("fwd", 4), "fwd+bwd": ("fwd+bwd", 4)}
    columns |= {f"decode, B={B}": ("decode_graph", B) for B in (1, 8, 64)}
    for row in sorted(rows, key=lambda row: -row["sketch"]):
        sizes.setdefault(row["sketch"], {})[row["pass"], row["B"]] = row
    plain = next(iter(sizes.values()))
    for (size, found), of_training in zip(sizes.items(), trained.values(), strict=True):
        cells = [f"{found[key]['ms']:.3g} ({found[key]['ms'] / plain[key]['ms']:.2f})" for key in columns.values()]
        state, peak = found["fwd", 4]["state_bytes_per_head"] / 1024, found["fwd+bwd", 4]["peak_mib"]
        name = f"{size}: s = D" + (f"/{max(sizes) // size}" if size < max(sizes) else "")
        lines.append([name, *of_training, f"{state:g}", *cells, f"{peak:.0f}"])
    head = ["s", "MQAR, 32 pairs, %", "perplexity", "state per head, KiB", *(f"{name}, ms" for name in columns)]
    ((gpu, torch, triton, commit),) = {tuple(row[key] for key in ("gpu", "torch", "triton", "commit")) for row in rows}
    return (
        markdown_table([*head, "peak of fwd+bwd, MiB"], lines, figures=True)
        + "\n\nMQAR with heads of 32 channels and perplexity with heads of 64 after equal training, means over seeds"
        " (tables below). The rest: bf16, D=128, solver (12, 10); fwd and fwd+bwd: B=4, T=8192, H=8; decode: a step of"
        f" 32 heads inside a CUDA graph. s = 128 is without a sketch. {gpu}, torch {torch}, Triton {triton}, commit"
        f" {commit}."
    )


def gka_times() -> str:
    """GKA's op beside others: a forward and backward pass by GPU and tokens, as in Figure 3b."""
    versions, found, commits = read("triton_versions_h100"), {}, {}
    place = {name: versions[name] for name in ("gpu", "commit")}
    for row in [row | place for row in versions["ops"] if row["triton"] == "3.6.0"] + read("h200"):
        name = LAYERS.get((row["op"], row.get("decay_per")))
        alike = (row["pass"], row["B"], row["H"], row["D"]) == ("fwd+bwd", 4, 8, 128)
        if name and alike and row.get("iterations", [12, 10]) == [12, 10]:
            found[name, row["gpu"], row["T"]] = f"{row['ms']:.1f}"
            commits[row["commit"]] = None
    columns = sorted({key[1:] for key in found})
    lines = [[name, *(found.get((name, *column), "") for column in columns)] for name in LAYERS.values()]
    head = ["ms", *(f"{gpu}, {tokens:,} tokens" for gpu, tokens in columns)]
    return (
        f"{markdown_table(head, lines, figures=True)}\n\nbf16, 4 sequences, 8 heads of 128, solver (12, 10). Triton"
        f" 3.6.0, commit {', '.join(commits)}."
    )


def gka_equations() -> str:
    """The Kalman filter beside GKA's regression, Algorithm 2 reversed, and what a sketch and alpha do to readouts."""
    results = read("gka_equations")
    filters, reversals, contexts = (
        [row for row in results["rows"] if row["part"] == part] for part in ("kalman", "reversed", "context")
    )
    lines = [[name, *(f"{fmean(row['errors'][name]):.4f}" for row in filters)] for name in filters[0]["errors"]]
    tables = [markdown_table(["mean square error, state keeps", *(f"{row['keep']:g}" for row in filters)], lines)]
    reversals = [row for row in reversals if row["iterations"] == 30]
    lines = [
        [row["dtype"]]
        + [f"{10 ** fmean(logs):.0e}" for logs in row["log10_errors"].values()]
        + [f"{low:.1g} to {high:.1g}" for low, high in row["divisors"].values()]
        for row in reversals
    ]
    head = ["30 iterations", *reversals[0]["log10_errors"], *(f"divisor, {name}" for name in ("CH", "CG"))]
    tables.append(markdown_table(head, lines))
    lines = []
    for shared, names in ((0.0, ("s = D", "s = D/2", "s = D/4")), (0.5, ("s = D", "alpha 0.5", "linear attention"))):
        asked = [row for row in contexts if row["shared"] == shared and row["pairs"] in (16, 64, 256)]
        for name in names:
            shares = [f"{100 * fmean(row['answers'][name]):.0f}" for row in asked]
            lines.append([name + ", shared" * (shared > 0), *shares])
    tables.append(markdown_table(["right answers, %, pairs", "16", "64", "256"], lines))
    text = "\n\n".join(tables)
    return f"{text}\n\nMeans of 10 seeds; errors of dH: geometric means of 21 problems. {measured_at(results)}."


def recall_raised_runs() -> str:
    """The students with a longer training beside each other and their teacher."""
    names = ["raised" + (f"_{name}" if name else "") for name in RAISED]
    return raised_table({name: read(name) for name in names}, read("grid"))
