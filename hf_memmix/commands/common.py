"""What the commands of `memmix` share: consoles, options, and functions that load models and tokenizers.

Results go to stdout, everything else to stderr. torch and transformers are imported only when a command needs them.
"""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, ConsoleDimensions


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
    list[Path], typer.Option(help="Text, .jsonl or .parquet file, or hub:NAME with a streaming recipe; repeatable.")
]
KeepLayers = Annotated[
    str | None, typer.Option("--keep-layers", help='Layers that stay attention, by index: "0-3,8", or "none".')
]
KeepCount = Annotated[
    str | None, typer.Option("--keep-count", help='How many layers stay attention: "2", or a share of them: "0.25".')
]
OldKeep = Annotated[str | None, typer.Option("--keep", hidden=True, help="Old name of the two options above.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the output folder when the new one is complete.")
]


def start_library() -> None:
    """Run `hf_memmix/__init__.py`, which registers the models, if the console script has postponed it."""
    package = sys.modules["hf_memmix"]
    if not hasattr(package, "__version__"):
        package.__spec__.loader.exec_module(package)


def quiet_library() -> None:
    """Silence transformers' own progress bars and warnings: one bar per command is enough."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def check_placement(device: str | None, device_map: str | None) -> None:
    """Raise ValueError unless --device and --device-map fit together, and accelerate is there for the second one."""
    if device_map is None:
        return
    if device_map != "auto":
        raise ValueError(f"--device-map is {device_map!r}; it can be auto")
    if device is not None:
        raise ValueError(f"--device is {device!r}, but --device-map auto also chooses the devices; give one of them")
    import accelerate  # noqa: F401, without it the library raises an error that does not name the remedy


def load(folder: Path, device: str | None, dtype=None, device_map: str | None = None):
    """Load a model on a device. `dtype` None: the stored dtype on a GPU; fp32 on a CPU, because bf16 is slow there.

    device_map: "auto" in place of `device`, see `check_placement`.
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
        raise ValueError(f"cannot put {folder} on the device {device!r}: {str(error).splitlines()[0]}") from None


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
        raise ValueError(f"{folder} has no tokenizer; save the teacher's tokenizer there")
    return tokenizer


def shared_tokenizer(folder: Path, other: Path):
    """The tokenizer of a folder. Raises ValueError if the tokenizer of `other` has another vocabulary or BOS."""
    from hf_memmix.conversion.text_rows import beginning_of

    ours, theirs = tokenizer_of(folder), tokenizer_of(other, required=False)
    if theirs is not None and theirs.get_vocab() != ours.get_vocab():
        raise ValueError(
            f"{other} and {folder} have different vocabularies, so their models cannot read the same tokens"
        )
    if theirs is not None and beginning_of(theirs) != beginning_of(ours):
        raise ValueError(
            f"the tokenizers of {other} and {folder} begin a text with other tokens ({beginning_of(theirs)} and"
            f" {beginning_of(ours)}); copy the teacher's tokenizer to the student"
        )
    return ours


def print_json(value: dict) -> None:
    typer.echo(json.dumps(value))


def choice_of_layers(layers: str | None, count: str | None, keep: str | None, keep_counts: bool):
    """The `LayerChoice` of --keep-layers, --keep-count or the old --keep; None if none of them is given.

    `keep_counts`: whether --keep meant a number of layers in this command.

    Raises:
        ValueError: more than one is given, or the text does not name layers.
    """
    from hf_memmix.conversion.layer_choice import LayerChoice

    given = {"--keep-layers": layers, "--keep-count": count, "--keep": keep}
    given = {name: text for name, text in given.items() if text is not None}
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} both choose the layers that stay attention; give one of them")
    if not given:
        return None
    ((name, text),) = given.items()
    counts = name == "--keep-count" or (name == "--keep" and (keep_counts or "." in text))
    if name == "--keep":
        new = "--keep-count" if counts else "--keep-layers"
        err.print(f"warning: --keep has a new name; write {new} {text}", markup=False, soft_wrap=True)
    return (LayerChoice.counted if counts else LayerChoice.listed)(text, name)
