"""Which model a cache belongs to, by the fields of the configuration that decide what its states mean."""

import json

from .._transformers import tensor_parallel_size
from ..mixers import ATTENTION, MIXERS

# the meaning of a state depends on these fields of the backbone; a family may lack some of them
_FIELDS = (
    "backbone_model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "layer_types",
    "sliding_window",
    "rope_parameters",
    "no_rope_layers",  # with the next two, what `rotates` of a backbone reads
    "mlp_layer_types",
    "prefix_dense_sliding_window_pattern",
    "mixer_types",
    "attention_without_rope",
    "feed_forward",
)


def fingerprint(config) -> dict:
    """The fields of a configuration that decide what a state means, as JSON values."""
    fields = {name: getattr(config, name, None) for name in _FIELDS}
    # the options of windows beside memories stand under the name of a mixer that no layer needs to have
    for name in sorted(set(config.mixer_types) - {ATTENTION} | ({"window"} if config.windows() else set())):
        options = MIXERS[name].options_class.from_dict(config.mixers.get(name, {}))
        fields |= {
            f"mixers.{name}.{key}": value
            for key, value in options.to_dict().items()
            if key not in options.inference_options
        }
    if (ranks := tensor_parallel_size(config)) > 1:
        fields["tensor_parallel_size"] = ranks  # a rank's states are those of its own heads
    return json.loads(json.dumps(fields))


def check_same_model(saved, config):
    """Raise ValueError naming the fields in which two models (configs or fingerprints) differ."""
    saved, wanted = (x if isinstance(x, dict) else fingerprint(x) for x in (saved, config))
    differ = [name for name in sorted(saved.keys() | wanted.keys()) if saved.get(name) != wanted.get(name)]
    if differ:
        details = "; ".join(f"{name}: cache {saved.get(name)!r}, model {wanted.get(name)!r}" for name in differ)
        raise ValueError(f"this cache belongs to another model: {details}. Use it with the model that wrote it")
