"""The compared image classifiers: GKAVision, its backbone with other mixers, and a ViT, with equal parameters.

The width of the MLPs gives every model as many parameters as the GKAVision model of the same setting has.
"""

import torch
from torch import nn
from transformers import AutoModelForImageClassification, ViTConfig

from hf_memmix import GKAVisionConfig

# mixers of the backbone: the first half of the blocks of the last two stages
MIXERS = {"gka": {}, "mamba2": {"expand": 0.5, "head_dim": 32, "state_size": 64}, "attention": None}
MODELS = (*MIXERS, "vit")
# ViTs with about as many layers and channels as a GKAVision model of the size; the patch of 16 x 16 pixels gives as
# many tokens as the third stage has
SMALL = {
    "backbone": {
        "stem_size": 16,
        "embed_dim": 32,
        "depths": [1, 1, 4, 2],
        "attention_heads": [4, 8],
        "mixer_heads": [2, 4],
        "window_sizes": [8, 4],
        "drop_path_rate": 0.1,
    },
    "vit": {"hidden_size": 192, "num_hidden_layers": 6, "num_attention_heads": 6},
}
TINY_PRESET = {
    "backbone": {},
    "vit": {"hidden_size": 448, "num_hidden_layers": 12, "num_attention_heads": 7},
}
CLOSE = 2e-3  # largest relative difference between the numbers of parameters


def _config(model: str, sizes: dict, ratio: float, common: dict):
    """The configuration of a model whose MLPs are `ratio` times as wide as its hidden size."""
    if model == "vit":
        fields = sizes["vit"]
        return ViTConfig(**fields, **common, intermediate_size=round(ratio * fields["hidden_size"]), patch_size=16)
    options = MIXERS[model]
    options = {"mixer": model} | ({"mixer_options": options} if options else {})
    return GKAVisionConfig(**{**sizes["backbone"], **common}, **options, mlp_ratio=ratio)


def parameter_count(config) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForImageClassification.from_config(config).parameters())


def equal_config(model: str, sizes: dict, **common):
    """The configuration of a model of `MODELS` with as many parameters as "gka" has with MLPs 4 times as wide.

    Args:
        sizes: `SMALL` or `TINY_PRESET`.
        common: fields of all models: image_size, num_channels, num_labels.

    Raises:
        ValueError: no width of the MLPs gives this number of parameters.
    """
    wanted, low, high = parameter_count(_config("gka", sizes, 4.0, common)), 0.5, 8.0
    if model == "gka":
        return _config("gka", sizes, 4.0, common)
    for _ in range(20):
        ratio = (low + high) / 2
        config = _config(model, sizes, ratio, common)
        count = parameter_count(config)
        if abs(count / wanted - 1) < CLOSE:
            return config
        low, high = (ratio, high) if count < wanted else (low, ratio)
    raise ValueError(f"{model} of these sizes cannot have {wanted} parameters; change the sizes in models.py")


def build(model: str, sizes: dict, seed: int, **common) -> nn.Module:
    """A model of `equal_config` with the initial weights of a seed."""
    config = equal_config(model, sizes, **common)
    torch.manual_seed(seed)
    return AutoModelForImageClassification.from_config(config)
