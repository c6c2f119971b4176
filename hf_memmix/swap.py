"""Finds the attention module or the MLP of a decoder layer, and replaces it."""

import dataclasses
import re
from collections.abc import Iterable

from torch import nn

from ._transformers import fp32_patterns_of
from .backbones import backbone_of
from .errors import UserError
from .frozen import plain
from .layout_hooks import check_packed_mask, pass_layout, without_rotation
from .mixers import ATTENTION, MIXERS, MemoryMixer, new_layer


def layers_name(base: nn.Module) -> str:
    """The attribute of a base model that holds its decoder layers. Raises ValueError if it has an unknown name."""
    names = backbone_of(base.config).layers
    for name in names:
        if isinstance(getattr(base, name, None), nn.ModuleList):
            return name
    raise UserError(f"{type(base).__name__} is not supported: it has no list of decoder layers under {names}")


def decoder_layers(base: nn.Module) -> nn.ModuleList:
    """The decoder layers of a base model."""
    return getattr(base, layers_name(base))


def attention_name(base: nn.Module, layer_idx: int) -> str:
    """The attribute of a decoder layer that holds its attention. Raises ValueError if there is none."""
    return _name_of("attention", decoder_layers(base)[layer_idx], backbone_of(base.config).attention)


def _name_of(what: str, layer: nn.Module, names: tuple[str, ...]) -> str:
    for name in names:
        if hasattr(layer, name):
            return name
    raise UserError(f"{type(layer).__name__} is not supported: it has no {what} under {names}")


def swap_attention(base: nn.Module, config):
    """Replace the attention of the layers that `config.mixer_types` gives a mixer, under the family's own name."""
    config.validate_mixers()
    config.freeze_mixers()
    layers = decoder_layers(base)
    for i, kind in enumerate(config.mixer_types):
        if kind != ATTENTION:
            setattr(layers[i], attention_name(base, i), new_layer(kind, config, i))
            layers[i].register_forward_pre_hook(pass_layout, with_kwargs=True)
        else:
            layers[i].register_forward_pre_hook(check_packed_mask, with_kwargs=True)
        if i in (config.attention_without_rope or ()):
            attention = getattr(layers[i], attention_name(base, i))
            attention.register_forward_pre_hook(without_rotation, with_kwargs=True)


def swap_feed_forward(base: nn.Module, config):
    """Replace the MLPs for which the configuration makes another module, under the family's own name."""
    for i, layer in enumerate(decoder_layers(base)):
        feed_forward = config.make_feed_forward(i)
        if feed_forward is not None:
            setattr(layer, _name_of("feed-forward", layer, backbone_of(config).feed_forward), feed_forward)


def modules_of(model: nn.Module, kinds: tuple[type, ...]) -> dict[str, nn.Module]:
    """The modules of some kinds by their paths; of a module that holds others of these kinds, only itself."""
    found = {}
    for path, module in model.named_modules():  # a module stands before those that it holds
        if isinstance(module, kinds) and path.rpartition(".")[0] not in found:
            found[path] = module
    return found


def memory_mixers(model: nn.Module) -> dict[int, MemoryMixer]:
    """The mixers of a model by layer index; of a mixer that holds others, only itself."""
    return {module.layer_idx: module for module in modules_of(model, (MemoryMixer,)).values()}


def set_mixer_options(model: nn.Module, config, mixer: str | None, changes: dict):
    """See `MemMixModel.set_mixer_options`."""
    kinds = sorted(set(config.mixer_types) - {ATTENTION})
    if mixer is not None and mixer not in kinds:
        raise UserError(f"the model has no mixer {mixer!r}; it has {kinds}")
    chosen, taken = {}, set()
    for kind in kinds if mixer is None else [mixer]:
        options_class = MIXERS[kind].options_class
        known = {field.name for field in dataclasses.fields(options_class)}
        for name, value in changes.items():
            if name not in known:
                continue
            if name not in options_class.inference_options:
                allowed = ", ".join(options_class.inference_options) or "none"
                raise UserError(
                    f"{name} of {kind} is part of the model and cannot be changed; options that can: {allowed}"
                )
            chosen.setdefault(kind, {})[name] = value
            taken.add(name)
    if unknown := sorted(changes.keys() - taken):
        able = {kind: list(MIXERS[kind].options_class.inference_options) for kind in kinds}
        raise UserError(f"no mixer of the model has an option {unknown[0]!r}; options that can be changed: {able}")
    mixers = plain(config.mixers)
    for kind, named in chosen.items():
        mixers[kind] = MIXERS[kind].options_class.from_dict(mixers[kind] | named).to_dict()
    for layer in memory_mixers(model).values():
        if layer.name in chosen:
            layer.options = type(layer.options).from_dict(mixers[layer.name])
    config.replace_mixers(mixers)


def fp32_parameter_names(model: nn.Module) -> set[str]:
    """Full names of the parameters of a model (or a wrapper of one) that stay in fp32 when the rest is cast.

    `from_pretrained(dtype=torch.bfloat16)` leaves the same parameters in fp32: those that the mixers declare in
    `MemoryMixer.fp32_parameters`, and those that the backbone's own class declares.
    """
    return set(_fp32_names(model)) | names_matching(
        (name for name, _ in model.named_parameters()), fp32_patterns_of(model)
    )


def names_matching(names: Iterable[str], patterns: set[str]) -> set[str]:
    """The names of tensors that match one of the library's patterns of fp32 modules."""
    # the library reads them in the same way, in `build_glob_alternation`
    compiled = [re.compile(pattern.replace("*", ".*")) for pattern in patterns]
    return {name for name in names if any(pattern.search(name) for pattern in compiled)}


def fp32_patterns(base: nn.Module) -> set[str]:
    """Regular expressions for `keep_in_fp32` that match the mixers' own parameters and no others.

    transformers searches for them anywhere in a parameter's name, with or without the base model's prefix, and reads
    "*" as ".*": a bare name such as COFFEE's "w" would match every weight. Its own tests put "(?:^|\\.)" before and
    "(?:\\.|$)" after each pattern, and these match there too: what anchors the name takes up no character.
    """
    return {rf"(?<![^.]){re.escape(name)}$" for name in _fp32_names(base)}


def _fp32_names(model: nn.Module) -> list[str]:
    return [
        f"{path}.{name}".removeprefix(".")  # the model may be a mixer itself
        for path, mixer in model.named_modules()
        if isinstance(mixer, MemoryMixer)
        for name, _ in mixer.named_parameters()
        if name in mixer.fp32_parameters
    ]
