"""The models of `gka_vision`: stem and convolution blocks, window blocks with a mixer or attention, and a classifier.

    stem: 3x3 convolutions with stride 2, twice      4 x 4 pixels per position
    stages 1, 2: x = x + norm(conv(gelu(norm(conv(x)))))
    stages 3, 4: x = x + mixer(norm(x));  x = x + mlp(norm(x))     over the tokens of a window
    classes: W mean of positions(norm(x))

The order of the parts is that of MambaVision. Importing this file registers the classes with the Auto classes.

Shapes: B images, C channels, H and W height and width in positions, N windows of all images, T tokens of a window.
"""

import contextlib

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import (
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    GradientCheckpointingLayer,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.modeling_outputs import (
    BaseModelOutputWithPoolingAndNoAttention,
    ImageClassifierOutputWithNoAttention,
)
from transformers.utils import can_return_tuple, is_torchvision_available

from .._model_hooks import ImageModelHooks
from .._transformers import keep_in_fp32
from ..errors import UserError
from ..mixers import ATTENTION, MIXERS, MemoryMixer
from ..swap import fp32_patterns
from .gka_vision import STRIDE, GKAVisionConfig


def split_windows(x: Tensor, size: int) -> Tensor:
    """[B, C, H, W] -> [N, size * size, C]: windows from left to right and top to bottom, tokens row by row.

    H and W are padded with zeros, at the right and at the bottom, to multiples of `size`.
    """
    x = F.pad(x, (0, -x.shape[3] % size, 0, -x.shape[2] % size))
    x = x.unflatten(3, (-1, size)).unflatten(2, (-1, size))
    return x.permute(0, 2, 4, 3, 5, 1).flatten(3, 4).flatten(0, 2)


def join_windows(tokens: Tensor, size: int, height: int, width: int) -> Tensor:
    """The inverse of `split_windows`, without the padding: [N, size * size, C] -> [B, C, height, width]."""
    rows, columns = -(-height // size), -(-width // size)
    x = tokens.unflatten(1, (size, size)).unflatten(0, (-1, rows, columns))
    return x.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)[..., :height, :width]


class DropPath(nn.Module):
    """In training, sets rows of a batch to zero with probability `rate` and scales the others by 1 / (1 - rate)."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.rate:
            return x
        kept = x.new_empty(len(x), *[1] * (x.dim() - 1)).bernoulli_(1 - self.rate)
        return x * kept / (1 - self.rate)


class LayerScale(nn.Module):
    """A learned factor per channel; channels are in dimension `dim`."""

    def __init__(self, channels: int, value: float, dim: int):
        super().__init__()
        self.value, self.dim = value, dim
        self.weight = nn.Parameter(torch.empty(channels))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.weight if self.dim == -1 else self.weight[:, None, None])

    def init_weights(self):
        init.constant_(self.weight, self.value)


def layer_scale(config: GKAVisionConfig, channels: int, dim: int) -> nn.Module:
    return nn.Identity() if config.layer_scale is None else LayerScale(channels, config.layer_scale, dim)


class ConvolutionBlock(GradientCheckpointingLayer):
    """Two 3 x 3 convolutions around a residual connection, [B, C, H, W] -> [B, C, H, W]."""

    def __init__(self, config: GKAVisionConfig, channels: int, drop_path: float):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(channels)
        self.scale = layer_scale(config, channels, 1)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.norm1(self.conv1(x)), approximate="tanh")
        return x + self.drop_path(self.scale(self.norm2(self.conv2(y))))


class WindowAttention(nn.Module):
    """Softmax attention of all tokens of a window to each other, [N, T, C] -> [N, T, C]."""

    def __init__(self, channels: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(channels, 3 * channels)
        self.proj = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class WindowBlock(GradientCheckpointingLayer):
    """A mixer or attention, and an MLP, [N, T, C] -> [N, T, C]."""

    def __init__(self, config: GKAVisionConfig, stage: int, kind: str, index: int, drop_path: float):
        super().__init__()
        channels = config.hidden_sizes[stage]
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        if kind == ATTENTION:
            self.mixer = WindowAttention(channels, config.attention_heads[stage - 2])
        else:
            self.mixer = MIXERS[kind](config.stage_shape(stage), index)
        hidden = round(config.mlp_ratio * channels)
        self.mlp = nn.Sequential(nn.Linear(channels, hidden), nn.GELU(), nn.Linear(hidden, channels))
        self.scale1, self.scale2 = layer_scale(config, channels, -1), layer_scale(config, channels, -1)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mixer(self.norm1(x))
        y = y[0] if isinstance(y, tuple) else y  # a memory mixer returns (output, None), as attention in a decoder
        x = x + self.drop_path(self.scale1(y))
        return x + self.drop_path(self.scale2(self.mlp(self.norm2(x))))


class Stage(nn.Module):
    """The blocks of a stage and, except in the last one, a convolution that halves height and width."""

    def __init__(self, config: GKAVisionConfig, stage: int, drop_paths: list[float]):
        super().__init__()
        channels, first = config.hidden_sizes[stage], sum(config.depths[:stage])
        if stage < 2:
            self.window, blocks = None, [ConvolutionBlock(config, channels, rate) for rate in drop_paths]
        else:
            self.window = config.window_sizes[stage - 2]
            kinds = zip(config.block_mixers(stage), drop_paths, strict=True)
            blocks = [WindowBlock(config, stage, kind, first + i, rate) for i, (kind, rate) in enumerate(kinds)]
        self.blocks = nn.ModuleList(blocks)
        last = stage == len(config.depths) - 1
        self.downsample = nn.Identity() if last else nn.Conv2d(channels, 2 * channels, 3, 2, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        if self.window is not None:
            x = split_windows(x, self.window)
        for block in self.blocks:
            x = block(x)
        if self.window is not None:
            x = join_windows(x, self.window, height, width)
        return self.downsample(x)


class GKAVisionPreTrainedModel(ImageModelHooks, PreTrainedModel):
    """Base class of the two models."""

    config_class = GKAVisionConfig
    base_model_prefix = "model"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    supports_gradient_checkpointing = True
    own_modules = (LayerScale, MemoryMixer)
    undivided_modules = ("ConvolutionBlock", "WindowBlock")


class GKAVisionModel(GKAVisionPreTrainedModel):
    """Images to a map of features and one vector per image."""

    def __init__(self, config: GKAVisionConfig):
        super().__init__(config)
        self.stem = nn.Sequential(
            nn.Conv2d(config.num_channels, config.stem_size, 3, 2, 1, bias=False),
            nn.BatchNorm2d(config.stem_size, eps=1e-4),
            nn.ReLU(),
            nn.Conv2d(config.stem_size, config.embed_dim, 3, 2, 1, bias=False),
            nn.BatchNorm2d(config.embed_dim, eps=1e-4),
            nn.ReLU(),
        )
        rates = torch.linspace(0, config.drop_path_rate, sum(config.depths), device="cpu").split(config.depths)
        self.stages = nn.ModuleList(Stage(config, i, rate.tolist()) for i, rate in enumerate(rates))
        self.norm = nn.BatchNorm2d(config.hidden_size)
        keep_in_fp32(self, fp32_patterns(self))
        self.post_init()

    @can_return_tuple
    def forward(
        self, pixel_values: Tensor, output_hidden_states: bool | None = None, **kwargs
    ) -> BaseModelOutputWithPoolingAndNoAttention:
        """The features of images.

        Args:
            pixel_values: [B, num_channels, height, width], each at least 32 pixels.
            output_hidden_states: also return the input of the first stage and the outputs of the four stages.

        Returns:
            `last_hidden_state` [B, hidden_size, height / 32, width / 32], rounded up, and `pooler_output`
            [B, hidden_size], its mean over positions.

        Raises:
            ValueError: `pixel_values` has another number of dimensions or channels, or is too small.
        """
        self._check(pixel_values)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        x = self.stem(pixel_values.to(self.stem[0].weight.dtype))
        states = [x]
        for stage in self.stages:
            x = stage(x)
            states.append(x)
        x = self.norm(x)
        return BaseModelOutputWithPoolingAndNoAttention(
            last_hidden_state=x,
            pooler_output=x.mean((2, 3)),
            hidden_states=tuple(states) if output_hidden_states else None,
        )

    def _check(self, pixel_values: Tensor):
        if pixel_values is None or pixel_values.dim() != 4:
            shape = None if pixel_values is None else tuple(pixel_values.shape)
            raise UserError(f"pixel_values {shape} must have the shape [images, channels, height, width]")
        count, channels, height, width = pixel_values.shape
        if not count:
            raise UserError("pixel_values hold no image; give at least one")
        if channels != self.config.num_channels:
            raise UserError(
                f"pixel_values have {channels} channels, the model takes {self.config.num_channels}"
                " (num_channels of its configuration)"
            )
        if min(height, width) < STRIDE:
            raise UserError(
                f"images of {height} x {width} pixels are too small: the last stage has one token per {STRIDE} x"
                f" {STRIDE} pixels; resize them to at least {STRIDE} x {STRIDE}"
            )


class GKAVisionForImageClassification(GKAVisionPreTrainedModel):
    """A linear layer on the mean of the features of an image."""

    def __init__(self, config: GKAVisionConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = GKAVisionModel(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        keep_in_fp32(self, fp32_patterns(self))
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **kwargs,
    ) -> ImageClassifierOutputWithNoAttention:
        """Logits [B, num_labels] of images, and the loss if there are labels.

        Args:
            pixel_values, output_hidden_states: as in `GKAVisionModel`.
            labels: int64 [B]; or as the `problem_type` of the configuration says, as in other image classifiers.

        Raises:
            ValueError: as `GKAVisionModel`.
        """
        found = self.model(pixel_values, output_hidden_states=output_hidden_states)
        logits = self.classifier(found.pooler_output)
        return ImageClassifierOutputWithNoAttention(
            loss=None if labels is None else self.loss_function(labels, logits, self.config, **kwargs),
            logits=logits,
            hidden_states=found.hidden_states,
        )


AutoModel.register(GKAVisionConfig, GKAVisionModel)
AutoModelForImageClassification.register(GKAVisionConfig, GKAVisionForImageClassification)
_processors = {"pil": "ViTImageProcessorPil", "torchvision": "ViTImageProcessor"}
if not is_torchvision_available():  # the library would replace the second one by the first, with a warning
    del _processors["torchvision"]
with contextlib.suppress(ImportError):  # without Pillow (in 5.17, torchvision) the library has no AutoImageProcessor
    AutoImageProcessor.register(
        GKAVisionConfig,
        image_processor_classes={backend: getattr(transformers, name) for backend, name in _processors.items()},
    )
