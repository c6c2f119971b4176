"""Mixers of trained students that are taken into a new one."""

from torch import Tensor
from transformers import PreTrainedModel

from hf_memmix.conversion.families import attention_module
from hf_memmix.conversion.model_files import check_converted
from hf_memmix.errors import UserError
from hf_memmix.mixers import MIXERS, BesideWindow, MemoryMixer


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
        load_mixer(attention_module(student, layer), theirs.state_dict(), theirs)


def layer_options(mixer: MemoryMixer) -> dict[str, dict]:
    """The options of a layer, as JSON values by the mixer that has them: its own, and those of a window beside it."""
    beside = {"window": mixer.window.options.to_dict()} if isinstance(mixer, BesideWindow) else {}
    return {mixer.name: mixer.options.to_dict()} | beside


def different_options(ours: dict[str, dict], theirs: dict[str, dict]) -> str:
    """Which `layer_options` of two layers differ, e.g. "gka.ridge is 0.05 and 0.02"; "" if they compute the same.

    Options that can be changed at inference (`inference_options`) are left out.
    """
    found = []
    for kind in (kind for kind in ours if kind in theirs):
        options_class = MIXERS[kind].options_class
        one, other = (options_class.from_dict(options[kind]).to_dict() for options in (ours, theirs))
        names = [name for name in one if name not in options_class.inference_options and one[name] != other[name]]
        found += [f"{kind}.{name} is {one[name]!r} and {other[name]!r}" for name in names]
    return ", ".join(found)


def load_mixer(mixer: MemoryMixer, values: dict[str, Tensor], trained: MemoryMixer) -> None:
    """Load the tensors of a trained mixer into a mixer, in place. `trained`: without values, for its kind and options.

    Raises:
        ValueError: the two have different kinds or options, except options that can be changed at inference.
    """
    if mixer.name == trained.name and (different := different_options(layer_options(mixer), layer_options(trained))):
        raise UserError(
            f"the mixers of layer {mixer.layer_idx} differ in options ({different}); convert with those of the trained"
            " student"
        )
    try:
        mixer.load_state_dict(values)
    except RuntimeError:
        kinds = f"{type(mixer).__name__}, {type(trained).__name__}"
        raise UserError(
            f"the mixers of layer {mixer.layer_idx} differ ({kinds}) in kind or options; convert with those of the"
            " trained student"
        ) from None
