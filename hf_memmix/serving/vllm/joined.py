"""The linear layers of a mixer that read the same input, as one product: several small products take longer than one.

The product has the only copy of the weights, as a parameter like those of vLLM's own joined layers. So all that vLLM
does to parameters holds for it: checkpoints are loaded, loaded again while the engine runs, or sent by a trainer. In
the place of each layer stays a `JoinedPart`, which takes the tensors of that layer's name.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.model_executor.utils import set_weight_attrs

from ...mixers import MemoryMixer
from ...mixers.tp_plan import Cut


class JoinedLayers(nn.Module):
    """Linear layers of the same input as one product.

    Args:
        layers: by name, all with weights [features, hidden]; without memory.
        cuts: of their parameters that are divided over the ranks, by path.
        rank, ranks: of tensor parallelism.
        dtype, device: of the parameters. Layers without a bias have zeros in the joined one, if others have one.
    """

    def __init__(self, layers: dict[str, nn.Linear], cuts: dict[str, Cut], rank: int, ranks: int, dtype, device):
        super().__init__()
        self.cuts, self.rank, self.ranks = cuts, rank, ranks
        self.sizes, self.with_bias = {}, {name for name, layer in layers.items() if layer.bias is not None}
        for name, layer in layers.items():
            cut = cuts.get(f"{name}.weight")
            self.sizes[name] = layer.weight.shape[0] if cut is None else cut.local_size()
        features, hidden = sum(self.sizes.values()), next(iter(layers.values())).weight.shape[1]
        self.weight = self._parameter("weight", (features, hidden), dtype, device)
        self.bias = self._parameter("bias", (features,), dtype, device) if self.with_bias else None

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """The outputs of the layers [..., features of the layer] by name, as parts of one tensor."""
        outputs = F.linear(x, self.weight, self.bias).split(list(self.sizes.values()), -1)
        return dict(zip(self.sizes, outputs, strict=True))

    def load(self, name: str, leaf: str, loaded: Tensor):
        """Load the "weight" or "bias" of one of the layers, by the loader that vLLM may have put around ours."""
        getattr(self, leaf).weight_loader(getattr(self, leaf), loaded, name)
        if leaf == "weight" and self.bias is not None and name not in self.with_bias:
            self.bias.weight_loader(self.bias, loaded.new_zeros(loaded.shape[0]), name)

    def parts(self) -> dict[str, Tensor]:
        """What checkpoints have of the parameters: views by the names that the layers had in the mixer."""
        found = {f"{name}.weight": part for name, part in self._split(self.weight).items()}
        if self.bias is not None:
            found |= {f"{name}.bias": part for name, part in self._split(self.bias).items() if name in self.with_bias}
        return found

    def _split(self, parameter: Tensor) -> dict[str, Tensor]:
        return dict(zip(self.sizes, parameter.detach().split(list(self.sizes.values())), strict=True))

    def _parameter(self, leaf: str, shape: tuple[int, ...], dtype, device) -> nn.Parameter:
        # vLLM's reload gives the loader another tensor as `param`, and looks for an argument of this name
        def load(param: nn.Parameter, loaded_weight: Tensor, name: str):
            # a layer without bias is cut as its weight
            cut = self.cuts.get(f"{name}.{leaf}") or self.cuts.get(f"{name}.weight")
            load_part(self._split(param)[name], loaded_weight, cut, self.rank, self.ranks)

        parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
        set_weight_attrs(parameter, {"weight_loader": load})
        return parameter


class JoinedPart(nn.Module):
    """In the place of a layer that is a part of `JoinedLayers`: vLLM's loader gives it the tensors of this name."""

    def __init__(self, joined: JoinedLayers, name: str):
        super().__init__()
        self.name = name
        self._joined = (joined,)  # in a tuple: it is no child of this module

    def load_weights(self, weights) -> set[str]:
        """Load pairs of "weight" or "bias" and a tensor; the names of those that were loaded.

        Raises:
            ValueError: the layer has no parameter of a name, or one of another shape.
        """
        (joined,), loaded = self._joined, set()
        for leaf, tensor in weights:
            if leaf not in ("weight", "bias") or (leaf == "bias" and self.name not in joined.with_bias):
                raise ValueError(f"the checkpoint has {self.name}.{leaf}, but the model has no such parameter")
            joined.load(self.name, leaf, tensor)
            loaded.add(leaf)
        return loaded


def join_layers(mixer: MemoryMixer, cuts: dict[str, Cut], rank: int, ranks: int, dtype: torch.dtype, device):
    """Have all linear layers that read the mixer's input computed in one product, if there are several of one dtype.

    Args:
        mixer: without memory for its parameters.
        cuts: see `JoinedLayers`.
        dtype: of the parameters that are not in `mixer.fp32_parameters`.
    """
    names = (*mixer.input_layers, *mixer.output_layers)
    layers = {name: getattr(mixer, name) for name in names if hasattr(mixer, name)}
    exact = {f"{name}.weight" in mixer.fp32_parameters for name in layers}
    if len(layers) < 2 or len(exact) > 1:
        return
    joined = JoinedLayers(layers, cuts, rank, ranks, torch.float32 if exact.pop() else dtype, device)
    mixer.joined_layers = joined
    for name in layers:
        setattr(mixer, name, JoinedPart(joined, name))


def load_part(param: Tensor, loaded_weight: Tensor, cut: Cut | None, rank: int, ranks: int):
    """Copy what a rank holds of a tensor of a checkpoint. Raises ValueError if the shapes differ."""
    local = loaded_weight if cut is None else cut.local(loaded_weight, rank, ranks)
    if local.shape != param.shape:
        raise ValueError(
            f"a parameter of the checkpoint is {list(loaded_weight.shape)}, the model needs {list(param.shape)}"
            + (f" on each of {ranks} ranks" if ranks > 1 else "")
        )
    param.data.copy_(local)
