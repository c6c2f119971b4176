"""GKAVision: the hierarchy of MambaVision for images, whose recurrent mixer blocks are GKA layers.

    config = GKAVisionConfig.preset("tiny")                    # 31.8 million parameters, 1000 classes
    model = AutoModelForImageClassification.from_config(config)

Two stages of convolutions, then two stages of blocks over the tokens of a window. The first half of the blocks of a
stage mixes tokens by GKA, which reads a window row by row in one direction; the other blocks have softmax attention.

Papers: Peng et al., "Gated KalmaNet" (ImageNet experiment); Hatamizadeh and Kautz, "MambaVision" (arXiv:2407.08083).
The model is in `gka_vision_model`, which is imported when a configuration is first made.
"""

import dataclasses
from typing import ClassVar

from transformers import AutoConfig, PreTrainedConfig

from ..configuration_memmix import model_makers
from ..errors import UserError
from ..mixers import ATTENTION, MIXERS

STRIDE = 32  # pixels of the image per token of the last stage, in each direction
_POSITIVE_LISTS = {"depths": 4, "attention_heads": 2, "mixer_heads": 2, "window_sizes": 2}
_POSITIVE = ("num_channels", "stem_size", "embed_dim", "image_size")
# the release's GKA layer without its output gate and with half of the stage's width: as many parameters per block as
# MambaVision's mixer, whose recurrence also works on half of the channels
DEFAULT_OPTIONS = {"gka": {"use_gate": False}}


@dataclasses.dataclass(frozen=True)
class StageShape:
    """What a mixer reads of a configuration, for the blocks of one stage."""

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    mixers: dict


class GKAVisionConfig(PreTrainedConfig):
    """Sizes of a GKAVision model. The defaults are those of the preset "tiny".

    Args:
        image_size: height and width of the images of the training; a model takes every size from 32 pixels on.
        num_channels: channels of an image.
        stem_size: channels after the first convolution.
        embed_dim: channels of the first stage; each later stage has twice as many.
        depths: blocks of the four stages.
        attention_heads: heads of softmax attention in the third and the fourth stage.
        mixer_heads: heads of the mixer in these stages; a head has the size of an attention head of the stage.
        window_sizes: height and width, in tokens, of a window in these stages. A stage whose height or width is not a
            multiple is padded with zeros, as in MambaVision.
        mixer: a name in `MIXERS`, or "attention" for attention in all blocks.
        mixer_options: options of the mixer; None means {"use_gate": False} for GKA and the defaults of other mixers.
        mlp_ratio: hidden size of a block's MLP divided by the channels of the stage.
        drop_path_rate: in training, the probability that the last block adds nothing; it grows linearly from 0 at
            the first block.
        layer_scale: initial value of a learned factor per channel of what a block adds; None means no factor.
        initializer_range: standard deviation of the initial weights.

    Raises:
        ValueError: a size is not a positive whole number or list of them, the channels cannot be divided into the
            heads, or the mixer or one of its options is unknown.
    """

    model_type: ClassVar[str] = "memmix_gka_vision"
    presets: ClassVar[dict[str, dict]] = {"tiny": {}}

    image_size: int = 224
    num_channels: int = 3
    stem_size: int = 32
    embed_dim: int = 80
    depths: list[int] = dataclasses.field(default_factory=lambda: [1, 3, 8, 4])
    attention_heads: list[int] = dataclasses.field(default_factory=lambda: [8, 16])
    mixer_heads: list[int] = dataclasses.field(default_factory=lambda: [4, 8])
    window_sizes: list[int] = dataclasses.field(default_factory=lambda: [14, 7])
    mixer: str = "gka"
    mixer_options: dict | None = None
    mlp_ratio: float | int = 4.0
    drop_path_rate: float | int = 0.2
    layer_scale: float | int | None = None
    initializer_range: float | int = 0.02

    def __post_init__(self, **kwargs):
        self._check()
        super().__post_init__(**kwargs)
        for make_models in model_makers:  # a model is always built after its configuration
            make_models(type(self))

    @classmethod
    def preset(cls, name: str, **overrides) -> "GKAVisionConfig":
        """The configuration named `name` in `presets`; `overrides` are fields.

        It has 1000 classes, as in ImageNet, unless `num_labels` or `id2label` says something else.

        Raises:
            ValueError: there is no such preset.
        """
        if name not in cls.presets:
            raise UserError(f"unknown preset {name!r}; known: {sorted(cls.presets)}")
        classes = {} if overrides.get("id2label") else {"num_labels": 1000}
        return cls(**{**classes, **cls.presets[name], **overrides})

    @property
    def hidden_sizes(self) -> list[int]:
        """Channels of the four stages."""
        return [self.embed_dim * 2**stage for stage in range(4)]

    @property
    def hidden_size(self) -> int:
        """Features per image: the channels of the last stage."""
        return self.hidden_sizes[-1]

    def stage_shape(self, stage: int) -> StageShape:
        """What the mixers of stage 2 or 3 (the third or the fourth) read."""
        channels, heads = self.hidden_sizes[stage], self.mixer_heads[stage - 2]
        size = channels // self.attention_heads[stage - 2]
        return StageShape(channels, heads, heads, size, {self.mixer: self.mixer_options})

    def block_mixers(self, stage: int) -> list[str]:
        """The mixer of each block of stage 2 or 3: the first half, rounded up, has the memory mixer."""
        depth = self.depths[stage]
        return [self.mixer if i < (depth + 1) // 2 else ATTENTION for i in range(depth)]

    def _check(self):
        for name in _POSITIVE:
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise UserError(f"{name}={value!r} must be a whole number >= 1")
        for name, length in _POSITIVE_LISTS.items():
            value = getattr(self, name)
            right = isinstance(value, (list, tuple)) and len(value) == length
            if not right or any(type(n) is not int or n < 1 for n in value):
                raise UserError(f"{name}={value!r} must be a list of {length} whole numbers >= 1")
            setattr(self, name, list(value))
        for name, low, high in (("mlp_ratio", 0.1, 64), ("drop_path_rate", 0, 0.99), ("initializer_range", 0, 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
                raise UserError(f"{name}={value!r} must be a number from {low} to {high}")
        if self.layer_scale is not None and not isinstance(self.layer_scale, (int, float)):
            raise UserError(f"layer_scale={self.layer_scale!r} must be a number, or None for no factor")
        for channels, heads in zip(self.hidden_sizes[2:], self.attention_heads, strict=True):
            if channels % heads:
                raise UserError(
                    f"attention_heads={self.attention_heads} must divide the channels of the last two stages,"
                    f" {self.hidden_sizes[2:]} (4 and 8 times embed_dim={self.embed_dim})"
                )
        self._check_mixer()

    def _check_mixer(self):
        if self.mixer == ATTENTION:
            if self.mixer_options:
                raise UserError(f"mixer_options={self.mixer_options!r} without a mixer: mixer is {ATTENTION!r}")
            return
        if self.mixer not in MIXERS:
            raise UserError(f"unknown mixer {self.mixer!r}; known: {[ATTENTION, *sorted(MIXERS)]}")
        if self.mixer_options is not None and not isinstance(self.mixer_options, dict):
            raise UserError(f"mixer_options={self.mixer_options!r} must be a dictionary of options, or None")
        options = DEFAULT_OPTIONS.get(self.mixer, {}) if self.mixer_options is None else self.mixer_options
        options = MIXERS[self.mixer].options_class.from_dict(options)
        if options.local_window:
            raise UserError(
                f"local_window={options.local_window} in mixer_options: the windows of images are short, and half of"
                " the blocks are attention; leave it out"
            )
        # every output is read, not only those before the last token
        shortest, window = MIXERS[self.mixer].minimum_training_length(options) - 1, min(self.window_sizes)
        if window**2 < shortest:
            raise UserError(
                f"{self.mixer} learns from sequences of {shortest} tokens on; window_sizes={self.window_sizes} give"
                f" windows of {window**2} tokens: choose larger windows or another mixer"
            )
        self.mixer_options = options.to_dict()


AutoConfig.register(GKAVisionConfig.model_type, GKAVisionConfig)
