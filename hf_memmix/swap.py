"""The swap itself: finding a decoder layer's attention module, or its MLP, and putting another in its place."""

from torch import nn

from .layout_hooks import carry_layout, demand_packed_mask
from .mixers import ATTENTION, MIXERS, MemoryMixer

# the names under which transformers' decoders keep their layers and, in a layer, the attention
LAYER_NAMES = ("layers", "h")
ATTENTION_NAMES = ("self_attn", "attention", "attn", "self_attention")
FEED_FORWARD_NAMES = ("mlp", "feed_forward")


def layers_name(base: nn.Module) -> str:
    """The attribute of a base model that holds its decoder layers. Raises ValueError if it has an unknown name."""
    for name in LAYER_NAMES:
        if isinstance(getattr(base, name, None), nn.ModuleList):
            return name
    raise ValueError(f"{type(base).__name__} is not supported: none of {LAYER_NAMES} are its decoder layers")


def decoder_layers(base: nn.Module) -> nn.ModuleList:
    """The decoder layers of a base model."""
    return getattr(base, layers_name(base))


def attention_name(layer: nn.Module) -> str:
    """The attribute of a decoder layer that holds its attention. Raises ValueError if there is none."""
    return _name_of("attention", layer, ATTENTION_NAMES)


def _name_of(what: str, layer: nn.Module, names: tuple[str, ...]) -> str:
    for name in names:
        if hasattr(layer, name):
            return name
    raise ValueError(f"{type(layer).__name__} is not supported: it has no {what} under {names}")


def swap_attention(base: nn.Module, config):
    """Replace the attention of the layers that `config.mixer_types` gives a mixer, under the family's own name."""
    config.validate_mixers()
    layers = decoder_layers(base)
    for i, kind in enumerate(config.mixer_types):
        if kind != ATTENTION:
            setattr(layers[i], attention_name(layers[i]), MIXERS[kind](config, i))
            layers[i].register_forward_pre_hook(carry_layout, with_kwargs=True)
        else:
            layers[i].register_forward_pre_hook(demand_packed_mask, with_kwargs=True)


def swap_feed_forward(base: nn.Module, config):
    """Replace the MLPs for which the configuration makes another module, under the family's own name."""
    for i, layer in enumerate(decoder_layers(base)):
        feed_forward = config.make_feed_forward(i)
        if feed_forward is not None:
            setattr(layer, _name_of("feed-forward", layer, FEED_FORWARD_NAMES), feed_forward)


def memory_mixers(model: nn.Module) -> dict[int, MemoryMixer]:
    """The mixers of a model by layer index."""
    return {module.layer_idx: module for module in model.modules() if isinstance(module, MemoryMixer)}


def fp32_parameters(config) -> set[str]:
    """Names of the parameters that the mixers of a model keep in fp32."""
    kinds = set(config.mixer_types) - {ATTENTION}
    return {name for kind in kinds for name in MIXERS[kind].fp32_parameters}
