"""The command-line options that several experiments share; `hf_memmix.command_options` makes a command of them."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import typer

from hf_memmix.training.experiments.common.mqar import check_cell

Out = Annotated[Path, typer.Option(help="JSON file of the results; if it exists, the run is resumed")]
Workers = Annotated[int, typer.Option(help="processes that run rows at the same time")]
Seconds = Annotated[float, typer.Option(help="time limit in seconds; the same command runs the remaining rows later")]
TrainingText = Annotated[
    Path, typer.Option(help="training text: a .txt file, or the .npy file that common/text.py writes")
]
Models = Annotated[list[str], typer.Option(help="models to compare; repeatable")]
Cells = Annotated[str, typer.Option(help="[[length, pairs], ...] as JSON")]
Images = Annotated[Path, typer.Option(help="the .npz file that gka_vision/make_images.py wrote")]
ImageBatch = Annotated[int, typer.Option(help="images per optimizer step")]
Rates = Annotated[list[float], typer.Option(help="learning rates to try; repeatable")]
HiddenSize = Annotated[
    int, typer.Option(help="hidden size of the Llama backbone; the transformer's MLP is 2.5 times as wide")
]
Layers = Annotated[int, typer.Option(help="decoder layers")]
Heads = Annotated[int, typer.Option(help="heads, each of hidden_size / heads channels")]
BatchTokens = Annotated[int, typer.Option(help="tokens per optimizer step")]
Tokens = Annotated[int, typer.Option(help="training tokens per model, the same for all models")]
Steps = Annotated[int, typer.Option(help="optimizer steps")]
Seeds = Annotated[list[int], typer.Option(help="seeds; the first one chooses the learning rate; repeatable")]
WarmupSteps = Annotated[int, typer.Option(help="steps in which the learning rate grows linearly")]


class Options:
    """The options of an experiment that the harness runs. An experiment adds its own in a subclass."""

    out: Out
    workers: Workers = 1
    seconds: Seconds = float("inf")


class LanguageModelOptions(Options):
    """Language models of one size, trained on the same tokens."""

    text: TrainingText
    hidden_size: HiddenSize = 256
    layers: Layers = 4
    heads: Heads = 4
    batch_tokens: BatchTokens = 32768
    tokens: Tokens = 16_000_000
    lrs: Rates = (4e-3, 2e-3)


def check_names(option: str, names: list[str], known) -> None:
    """Raise a usage error if one of `names` is not in `known`."""
    unknown = [name for name in names if name not in known]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is unknown; choose from {', '.join(known)}", param_hint=option)


def read_cells(args: SimpleNamespace) -> None:
    """Replace the text of --cells by its list; raises ValueError if a cell has no room for its pairs."""
    args.cells = json.loads(args.cells)
    for cell in args.cells:
        check_cell(*cell)
