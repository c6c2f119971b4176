"""Checks of a backbone's configuration: whether mixers can stand in it, and whether its values are possible."""

from transformers import ROPE_INIT_FUNCTIONS, PreTrainedConfig

from ._transformers import (
    ACT2FN,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)
from .backbones import USE_ANOTHER, backbone_of, family_name, layer_rotates, refusal_of
from .errors import UserError
from .mixers import ATTENTION


def check_without_rope(config: PreTrainedConfig, kinds: list[str]):
    """Raise ValueError if a layer of `attention_without_rope` has no attention that rotates its queries and keys."""
    layers = config.attention_without_rope
    if layers is None:
        return
    name = f"attention_without_rope={layers!r}"
    if not all(type(layer) is int for layer in layers) or len(set(layers)) != len(layers):
        raise UserError(f"{name} must be a list of different layer indices")
    if backbone_of(config).rotary is None:
        raise UserError(f"{name}, but {family_name(config)!r} has no rotary embeddings; leave it out")
    for layer in layers:
        if not 0 <= layer < len(kinds) or kinds[layer] != ATTENTION:
            kept = [i for i, kind in enumerate(kinds) if kind == ATTENTION]
            raise UserError(f"{name}, but layer {layer} is no attention layer; these are {kept}")
        if not layer_rotates(config, layer):
            raise UserError(f"{name}, but the attention of layer {layer} has no rotary embeddings; leave it out")


_SIZES = {
    "num_hidden_layers": 10_000,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "head_dim": 2**16,
    "hidden_size": 2**20,
    "intermediate_size": 2**24,
    "vocab_size": 2**31,
    "max_position_embeddings": 2**40,
}
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps")
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")


def check_sizes(config: PreTrainedConfig):
    """Raise ValueError if a size, epsilon or activation of a backbone has an impossible value."""
    for name, largest in _SIZES.items():
        value = getattr(config, name, None)
        if value is None or isinstance(value, list):  # a few families have one value per layer
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= largest:
            raise UserError(f"{name}={value!r} must be an integer from 1 to {largest}")
    for name in _EPSILONS:
        value = getattr(config, name, None)
        if value is not None and (not isinstance(value, (int, float)) or not 1e-12 <= value <= 1):
            raise UserError(
                f"{name}={value!r} must be 1e-12 to 1: smaller ones vanish in float32, and larger ones outweigh the"
                " inputs of a norm"
            )
    for name in _ACTIVATIONS:
        value = getattr(config, name, None)
        if isinstance(value, str) and value not in ACT2FN:
            raise UserError(
                f"{name}={value!r} is not an activation of transformers; known: {', '.join(sorted(ACT2FN))}"
            )


def check_rope(config: PreTrainedConfig):
    """Raise ValueError if the parameters of the rotary embeddings are invalid or transformers has no such type."""
    known = sorted({"default", *ROPE_INIT_FUNCTIONS})
    parameters = getattr(config, "rope_parameters", None)
    if parameters is None:
        return
    if not isinstance(parameters, dict):
        raise UserError(f"rope_parameters={parameters!r} must be a dictionary with rope_type and rope_theta")
    # one dictionary for the model, or one per layer type
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for one in nested or [parameters]:
        kind, theta = one.get("rope_type", "default"), one.get("rope_theta")
        if kind not in known:
            raise UserError(f"rope_parameters: rope_type={kind!r} is unknown; known: {', '.join(known)}")
        if theta is not None and (
            isinstance(theta, bool) or not isinstance(theta, (int, float)) or not 0 < theta < float("inf")
        ):
            raise UserError(f"rope_parameters: rope_theta={theta!r} must be a positive finite number")


def check_backbone(config: PreTrainedConfig):
    """Raise ValueError unless memory mixers can take the place of this model's attention."""
    kind = family_name(config)
    if config.is_encoder_decoder:
        reason = "it is an encoder-decoder model (is_encoder_decoder)"
    elif kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        reason = "it is an encoder, not a decoder"
    elif config.get_text_config(decoder=True) is not config:
        reason = "it contains a language model; pass `config.get_text_config()` and convert that model"
    elif kind not in MODEL_MAPPING_NAMES or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        reason = "it is not a causal language model of transformers"
    else:
        reason = refusal_of(config, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])
    if reason is not None:
        raise UserError(f"backbone {kind!r} is not supported: {reason}. {USE_ANOTHER}")
