"""Files that hold the trained mixers of one kind in many layers, without the rest of the model: `<mixer>.safetensors`.

`memmix select` writes a folder of them, one file per candidate; the student of its plan takes each layer's mixer from
there. Names of tensors are `<layer>.<name in the mixer>`. The metadata hold the options of each layer and the identity
of the training.
"""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from hf_memmix.conversion.convert import convert_model
from hf_memmix.conversion.families import attention_module
from hf_memmix.conversion.hashes import open_sealed, save_sealed
from hf_memmix.conversion.layer_plan import plan_arguments, read_plan, trained_folder
from hf_memmix.conversion.saving import explain_write_errors, replace_file
from hf_memmix.conversion.taken_mixers import different_options, layer_options
from hf_memmix.errors import UserError
from hf_memmix.mixers import MemoryMixer

AGAIN = "remove this file and run memmix select again"


def mixer_file(folder: str | Path, mixer: str) -> Path:
    """The file of a mixer in a folder."""
    return Path(folder) / f"{mixer}.safetensors"


def write_mixers(student: PreTrainedModel, path: str | Path, identity: dict) -> None:
    """Write the mixers of a student with one kind of mixer, atomically. `identity`: what they were trained from."""
    layers = student.config.memory_layers
    (mixer,) = {student.config.mixer_types[layer] for layer in layers}
    tensors = {
        f"{layer}.{name}": tensor.detach().cpu().contiguous()
        for layer in layers
        for name, tensor in attention_module(student, layer).state_dict().items()
    }
    record = {"mixer": mixer, "options": options_of_layers(student), "identity": identity}
    with explain_write_errors(path, "Make room and run the same command again"), replace_file(path) as part:
        save_sealed(tensors, part, record)


def options_of_layers(student: PreTrainedModel) -> dict[str, dict]:
    """`layer_options` of the mixers of a student, by layer, as a file holds them."""
    return {str(layer): layer_options(attention_module(student, layer)) for layer in student.config.memory_layers}


def read_metadata(path: str | Path) -> dict | None:
    """`{"mixer", "options", "identity"}` of a file; None if there is none. Raises ValueError if it was changed."""
    if not Path(path).is_file():
        return None
    with open_sealed(path, AGAIN) as file:
        return file.record


def load_mixers(student: PreTrainedModel, folder: str | Path) -> None:
    """Fill every mixer of `student` from the files of a folder; errors as in `load_aligned`."""
    for layer in student.config.memory_layers:
        load_aligned(attention_module(student, layer), folder)


def load_aligned(mixer: MemoryMixer, folder: str | Path) -> None:
    """Fill the mixer of one layer from the files of a folder.

    Raises:
        ValueError: the folder lacks a mixer, or the file lacks a layer or was changed, or its mixers have options
            other than those of `mixer`, except options that can be changed at inference.
    """
    layer, path = mixer.layer_idx, mixer_file(folder, mixer.name)
    if not path.is_file():
        raise UserError(f"{str(folder)!r} has no {path.name}, the trained mixers of layer {layer}")
    lacks = UserError(
        f"{str(path)!r} does not fit layer {layer}: it lacks the layer, or was trained with other options; convert"
        " with the options of the trained mixers"
    )
    with open_sealed(path, AGAIN) as file:
        if (trained := file.record["options"].get(str(layer))) is None:
            raise lacks
        if different := different_options(layer_options(mixer), trained):
            raise UserError(
                f"{str(path)!r} does not fit layer {layer}: it was trained with other options ({different}); convert"
                " with the options of the trained mixers"
            )
        start = f"{layer}."
        tensors = {name.removeprefix(start): file.read(name) for name in file.names if name.startswith(start)}
    try:
        with torch.no_grad():
            mixer.load_state_dict(tensors)
    except RuntimeError:
        raise lacks from None


def convert_by_plan(teacher: PreTrainedModel, path: str | Path, **options) -> PreTrainedModel:
    """The student that a plan of `memmix select` describes, with the plan's aligned mixers if it names their folder.

    options: of `convert_model`; those of a mixer replace the plan's. Raises ValueError as in `read_plan`,
    `convert_model` and `load_mixers`.
    """
    plan = read_plan(path, teacher.config.num_hidden_layers)
    folder = trained_folder(plan, path)
    arguments = plan_arguments(plan)
    for own in arguments.get("mixers", {}).values():
        for name in own.keys() & options.keys():
            del own[name]
    student = convert_model(teacher, **arguments, **options)
    if folder is not None:
        load_mixers(student, folder)
    return student
