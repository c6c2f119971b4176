"""The command-line options that several experiments share; `hf_memmix.command_options` makes a command of them."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import typer

Out = Annotated[Path, typer.Option(help="JSON file of the results; if it exists, the run is resumed")]
Plot = Annotated[bool, typer.Option(help="also draw the results as a PNG beside --out")]
Workers = Annotated[int, typer.Option(help="processes that run rows at the same time")]
Streams = Annotated[
    int, typer.Option(help="rows that run at the same time in each process, on CUDA streams of their own")
]
Seconds = Annotated[float, typer.Option(help="time limit in seconds; the same command runs the remaining rows later")]
WholeRows = Annotated[
    bool, typer.Option(help="start no row that the time limit will stop, judged by the shortest row of this run")
]
TrainingText = Annotated[
    Path, typer.Option(help="training text: a .txt file, or the .npy file that common/text.py writes")
]
Rates = Annotated[list[float], typer.Option(help="learning rates to try; repeatable")]
FurtherRates = Annotated[
    int, typer.Option(help="further rates to try at most while the best one is the largest or the smallest")
]
Checkpoints = Annotated[
    Path | None,
    typer.Option(help="folder in which trainings are saved that the time limit stops; the next command resumes them"),
]
Points = Annotated[int, typer.Option(min=1, help="how many times in a training its loss is read")]
PointsBelow = Annotated[int, typer.Option(min=1, help="so many losses in a row below --enough end a training")]
HiddenSize = Annotated[
    int, typer.Option(help="hidden size of the Llama backbone; the transformer's MLP is 2.5 times as wide")
]
Layers = Annotated[int, typer.Option(help="decoder layers")]
Heads = Annotated[int, typer.Option(help="heads, each of hidden_size / heads channels")]
BatchTokens = Annotated[int, typer.Option(help="tokens per optimizer step")]
Tokens = Annotated[int, typer.Option(help="training tokens per model, the same for all models")]
Steps = Annotated[int, typer.Option(help="optimizer steps")]
MeasuredTokens = Annotated[int, typer.Option(help="number of tokens of each text that are measured")]


class Options:
    """The options of an experiment that the harness runs. An experiment adds its own in a subclass."""

    out: Out
    workers: Workers = 1
    streams: Streams = 1
    seconds: Seconds = float("inf")
    whole_rows: WholeRows = False


class PlottedOptions(Options):
    plot: Plot = False


class LanguageModelOptions(PlottedOptions):
    """Language models of one size, trained on the same tokens."""

    text: TrainingText
    hidden_size: HiddenSize = 256
    layers: Layers = 4
    heads: Heads = 4
    batch_tokens: BatchTokens = 32768
    tokens: Tokens = 16_000_000
    lrs: Rates = (4e-3, 2e-3)


class DistillationOptions(PlottedOptions):
    """Students of the bundled transformer, aligned and distilled."""

    text: TrainingText
    batch_size: int = 32
    block_size: int = 512
    measured_tokens: MeasuredTokens = 60_000


def draw_if_asked(args: SimpleNamespace, plot: Callable[[dict, Path], None], results: dict) -> None:
    """Draw the plot of the results beside --out if --plot is given."""
    if args.plot:
        plot(results, args.out.with_suffix(".png"))


def check_names(option: str, names: list[str], known) -> None:
    """Raise a usage error if one of `names` is not in `known`."""
    unknown = [name for name in names if name not in known]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is unknown; choose from {', '.join(known)}", param_hint=option)
