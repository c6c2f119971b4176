"""Mixers of trained students that are taken into a new one."""

from torch import Tensor
from transformers import PreTrainedModel

from hf_memmix.conversion.families import attention_module
from hf_memmix.conversion.model_files import check_converted
from hf_memmix.errors import UserError
from hf_memmix.mixers import MIXERS, MemoryMixer


def no_mixer(layer: int) -> UserError:
    """The error for a layer whose mixer no trained student has."""
    return UserError(
        f"layer {layer} of the trained student is attention, so there is no mixer to take; keep this layer"
        " as attention here, too"
    )


def take_mixers(student: PreTrainedModel, *trained: PreTrainedModel) -> None:
    """Load the mixers of trained models, e.g. aligned students without attention, into the same layers of `student`.

    Each layer takes the mixer of the first model that has one of the same kind in this layer.

    Raises:
        ValueError: in one of these layers, all models have attention or a mixer of another kind or other options.
    """
    for model in (student, *trained):
        check_converted(model.config.to_dict())
    for layer in student.config.memory_layers:
        models = [model for model in trained if layer in model.config.memory_layers]
        if not models:
            raise no_mixer(layer)
        kind = student.config.mixer_types[layer]
        source = next((model for model in models if model.config.mixer_types[layer] == kind), models[0])
        theirs = attention_module(source, layer)
        options = theirs.options.to_dict()
        load_mixer(attention_module(student, layer), theirs.state_dict(), theirs.name, options)


def different_options(kind: str, ours: dict, theirs: dict) -> str:
    """Which options of two mixers of one kind differ, e.g. "ridge is 0.05 and 0.02"; "" if they compute the same.

    Options that can be changed at inference (`inference_options`) are left out.
    """
    options_class = MIXERS[kind].options_class
    ours, theirs = (options_class.from_dict(options).to_dict() for options in (ours, theirs))
    names = [name for name in ours if name not in options_class.inference_options and ours[name] != theirs[name]]
    return ", ".join(f"{name} is {ours[name]!r} and {theirs[name]!r}" for name in names)


def load_mixer(mixer: MemoryMixer, values: dict[str, Tensor], kind: str, options: dict) -> None:
    """Load the tensors of a trained mixer of some kind, with its options, into a mixer, in place.

    Raises:
        ValueError: the two have different kinds or options, except options that can be changed at inference.
    """
    if mixer.name == kind and (different := different_options(kind, mixer.options.to_dict(), options)):
        raise UserError(
            f"the mixers of layer {mixer.layer_idx} differ in options ({different}); convert with those of the trained"
            " student"
        )
    try:
        mixer.load_state_dict(values)
    except RuntimeError:
        kinds = f"{type(mixer).__name__}, {MIXERS[kind].__name__}"
        raise UserError(
            f"the mixers of layer {mixer.layer_idx} differ ({kinds}) in kind or options; convert with those of the"
            " trained student"
        ) from None
