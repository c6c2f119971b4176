"""Checks of arguments before torch and transformers are imported, which takes seconds.

A command first checks what it was given by the functions here, then imports under `library()`.
"""

import gc
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hf_memmix.errors import UserError
from hf_memmix.hub import model_folder

_STARTED_BY_OTHERS = hasattr(sys.modules["hf_memmix"], "__version__")
_DEVICE = re.compile(r"(cpu|cuda|mps|xpu)(:\d{1,3})?")


def start_library() -> None:
    """Run `hf_memmix/__init__.py`, which registers the models, if the console script has postponed it."""
    package = sys.modules["hf_memmix"]
    if not hasattr(package, "__version__"):
        package.__spec__.loader.exec_module(package)


@contextmanager
def library(models: bool = True) -> Iterator[None]:
    """Start the library for the imports in the block; without `models`, only what they import is run.

    The garbage collector does not look at the objects of modules, during the imports and at the end of the program: a
    third of the time of a short command. Where another program has imported the library, it stays as it is.
    """
    if _STARTED_BY_OTHERS:
        yield
        return
    gc.disable()
    try:
        if models:
            start_library()
        yield
        gc.freeze()
    finally:
        gc.enable()


def given_model(name: Path | None, check: Callable[[dict], None] | None = None) -> Path | None:
    """The folder of a model that a user has named, as `model_folder`, with a check of its files. None stays None.

    check: gets the content of config.json.
    """
    from hf_memmix.conversion.model_files import check_model_folder

    folder = model_folder(name)
    if folder is not None:
        config = check_model_folder(folder)
        if check is not None:
            check(config)
    return folder


def given_student(name: Path | None) -> Path | None:
    """As `given_model`. Raises UserError for a plain transformer."""
    from hf_memmix.conversion.model_files import check_converted

    return given_model(name, check_converted)


def given_teacher(name: Path) -> Path:
    """As `given_model`. Raises UserError for a converted model."""
    from hf_memmix.conversion.model_files import check_transformer

    return given_model(name, check_transformer)


def layers_of(folder: Path) -> int:
    """The number of layers of a model. The library is imported only if config.json does not have it."""
    from hf_memmix.conversion.model_files import read_json

    raw = read_json(folder / "config.json")
    for name in ("num_hidden_layers", "n_layer"):  # the second one is GPT-2's
        if type(raw.get(name)) is int:
            return raw[name]
    with library():
        from hf_memmix.conversion.loading import read_config
    return read_config(folder).num_hidden_layers


def check_stored_length(folder: Path, role: str, length: int, name: str, remedy: str) -> None:
    """As `conversion.limits.check_length`, of what config.json says by itself, without the library."""
    from hf_memmix.conversion.model_files import check_limit, read_json

    raw = read_json(folder / "config.json")
    limits = [raw.get(name) for name in ("max_position_embeddings", "n_positions")]  # the second one is GPT-2's
    for limit in limits:
        if type(limit) is int and limit:
            check_limit(limit, role, length, name, remedy)


def check_texts(texts: Iterable[Path], field: str | None = None) -> None:
    """Raise UserError unless all text files exist, and have fields if one is named. The Hub is not asked."""
    from hf_memmix.training.text_files import check_source

    for text in texts:
        check_source(text, field)


def check_device(device: str | None) -> None:
    """Raise UserError unless --device has the form of a device."""
    if device is not None and not _DEVICE.fullmatch(device):
        raise UserError(f"--device is {device!r}; give cpu, cuda or, for the second GPU, cuda:1")


def check_placement(device: str | None, device_map: str | None) -> None:
    """Raise UserError unless --device and --device-map fit together, and accelerate is there for the second one."""
    check_device(device)
    if device_map is None:
        return
    if device_map != "auto":
        raise UserError(f"--device-map is {device_map!r}; it can be auto")
    if device is not None:
        raise UserError(f"--device is {device!r}, but --device-map auto also chooses the devices; give one of them")
    with library():
        import accelerate  # noqa: F401, without it the library raises an error that does not name the remedy


def choice_of_layers(layers: str | None, count: str | None):
    """The `LayerChoice` of --keep-layers or --keep-count; None if none of them is given.

    Raises:
        UserError: both are given, or the text does not name layers.
    """
    from hf_memmix.conversion.layer_choice import LayerChoice

    if layers is not None and count is not None:
        raise UserError("--keep-layers and --keep-count both choose the layers that stay attention; give one of them")
    if layers is not None:
        return LayerChoice.listed(layers, "--keep-layers")
    return None if count is None else LayerChoice.counted(count, "--keep-count")
