"""What the commands of `memmix` share: consoles, options, and functions that load models and tokenizers.

Results go to stdout, everything else to stderr. torch and transformers are imported only when a command needs them.
"""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, ConsoleDimensions

from hf_memmix.errors import UserError


class _Console(Console):
    """Wraps lines on a terminal only: a file or another program receives whole lines, for every value of COLUMNS."""

    @property
    def size(self) -> ConsoleDimensions:
        return super().size if self.is_terminal else ConsoleDimensions(10_000, 25)


out, err = _Console(), _Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout.")]
Device = Annotated[
    str | None, typer.Option(help="Where it runs: cpu, cuda or cuda:1; default: a GPU if there is one.")
]
DeviceMap = Annotated[
    str | None,
    typer.Option(help='"auto" spreads a model that is larger than one GPU over all GPUs, the memory and the disk.'),
]
Teacher = Annotated[Path, typer.Option(help="The transformer that was converted: a folder or a Hub id.")]
Student = Annotated[Path, typer.Option(help="The converted model: a folder or a Hub id.")]
Texts = Annotated[
    list[Path],
    typer.Option(
        help="Text, .jsonl, .json, .csv, .tsv or .parquet file, also with .gz, or hub:NAME of a data set; repeatable."
    ),
]
TextField = Annotated[
    str | None,
    typer.Option(
        "--text-field",
        help="Field of a row that holds its text, or its messages for the chat template.",
        show_default="text or messages",
    ),
]
Loss = Annotated[
    str | None,
    typer.Option("--loss", help="Tokens that count: all, or those of the assistant's answers.", show_default="all"),
]
KeepLayers = Annotated[
    str | None, typer.Option("--keep-layers", help='Layers that stay attention, by index: "0-3,8", or "none".')
]
KeepCount = Annotated[
    str | None, typer.Option("--keep-count", help='How many layers stay attention: "2", or a share of them: "0.25".')
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the output folder when the new one is complete.")
]


def quiet_library() -> None:
    """Silence transformers' own progress bars and warnings: one bar per command is enough."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def load(folder: Path, device: str | None, dtype=None, device_map: str | None = None):
    """Load a model on a device. `dtype` None: the stored dtype on a GPU; fp32 on a CPU, because bf16 is slow there.

    device_map: "auto" in place of `device`, see `checks.check_placement`.
    """
    import tempfile

    import torch

    from hf_memmix.conversion import load_model

    quiet_library()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or ("float32" if device == "cpu" else "auto")
    if device_map is not None:
        offloaded = tempfile.TemporaryDirectory(prefix="memmix-offload-")
        model = load_model(folder, dtype, device_map=device_map, offload_folder=offloaded.name)
        model.memmix_offloaded = offloaded  # removed together with the model
        return model
    model = load_model(folder, dtype)
    try:
        return model.to(device)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"cannot put {folder} on the device {device!r}: {str(error).splitlines()[0]}") from None


def shape_of(folder: Path):
    """A model on the meta device, for its configuration, number of parameters and dtype."""
    import torch

    from hf_memmix.conversion.loading import meta_teacher

    model = meta_teacher(folder)
    return model if torch.cuda.is_available() else model.float()  # as `load`


def tokenizer_of(folder: Path, required: bool = True):
    from hf_memmix.conversion.loading import load_tokenizer, read_config

    tokenizer = load_tokenizer(folder)
    if tokenizer is None and required:
        read_config(folder)  # a folder without a model gets a message of its own
        raise UserError(f"{folder} has no tokenizer; save the teacher's tokenizer there")
    return tokenizer


def shared_tokenizer(folder: Path, other: Path):
    """The tokenizer of a folder. Raises ValueError if the tokenizer of `other` has another vocabulary or BOS."""
    from hf_memmix.conversion.text_rows import beginning_of

    ours, theirs = tokenizer_of(folder), tokenizer_of(other, required=False)
    if theirs is not None and theirs.get_vocab() != ours.get_vocab():
        raise UserError(
            f"{other} and {folder} have different vocabularies, so their models cannot read the same tokens"
        )
    if theirs is not None and beginning_of(theirs) != beginning_of(ours):
        raise UserError(
            f"the tokenizers of {other} and {folder} begin a text with other tokens ({beginning_of(theirs)} and"
            f" {beginning_of(ours)}); copy the teacher's tokenizer to the student"
        )
    return ours


def print_json(value: dict) -> None:
    typer.echo(json.dumps(value))
