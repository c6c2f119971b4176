"""Whether checkpoints fill a model: at the start, and when weights are loaded again while the engine runs."""

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .joined import JoinedLayers

MOST_NAMES = 8  # in a message


def mark_unloaded(model: nn.Module):
    """Fill the parameters of a model with NaN, by which `check_loaded` finds those that no checkpoint has filled.

    vLLM joins parameters of the checkpoint in one of the model, so names do not show which of them were loaded.
    """
    for parameter in _loaded_from_checkpoints(model).values():
        parameter.data.fill_(torch.nan)


def check_loaded(model: nn.Module):
    """Raise ValueError if a checkpoint has left a parameter, or a part of it, as `mark_unloaded` has made it."""
    parameters = _loaded_from_checkpoints(model)
    empty = [name for name, parameter in parameters.items() if parameter.detach().amin().isnan()]
    if empty:
        raise ValueError(
            f"the checkpoint lacks {len(empty)} parameters of the model, or parts of them, or has NaN there:"
            f" {_some(empty)}. Load it with transformers to see which tensors are missing; save or download the model"
            " again"
        )


class CheckpointNames:
    """The names of the tensors of a model's checkpoint, as the first complete one has them."""

    def __init__(self):
        self.first = True  # until weights are loaded
        self.expected: set[str] = set()
        self.found: set[str] = set()

    def noted(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same pairs of name and tensor; their names become `found`."""
        self.found = set()
        for name, tensor in weights:
            self.found.add(name)
            yield name, tensor

    def check_reload(self):
        """Raise ValueError if the last iterator had not all names: vLLM would go on with old or random weights."""
        if missing := sorted(self.expected - self.found):
            raise ValueError(
                f"the checkpoint lacks {len(missing)} tensors of the model: {_some(missing)}. The model is half loaded"
                " now: load a complete checkpoint before the next request"
            )


def forget_packed_weights(model: nn.Module):
    """Called before weights change: on a CPU vLLM computes from packed copies, and does not pack all of them anew.

    A head that shares its weight with the embeddings computes from the weight itself from now on.

    Raises:
        ValueError: the model has experts; vLLM packs them once.
    """
    if any(getattr(getattr(m, "quant_method", None), "moe_kernel", None) is not None for m in model.modules()):
        raise ValueError(
            "on a CPU vLLM cannot load the weights of experts again: it would go on with those of the start. Start a"
            " new engine with the new checkpoint"
        )
    head = getattr(model, "lm_head", None)
    if hasattr(head, "cpu_linear") and model.text_config.tie_word_embeddings:
        head.cpu_linear = F.linear


def check_not_packed(model: nn.Module, error: AssertionError):
    """Raise ValueError if vLLM has packed linear layers for a CPU: no weights are left to copy a tensor to."""
    if any(hasattr(m, "cpu_linear") and not m.weight.numel() for m in model.modules()):
        raise ValueError(
            "on a CPU vLLM has packed the weights of linear layers: new ones must come between its"
            " initialize_layerwise_reload and finalize_layerwise_reload, or by reload_weights"
        ) from error


def _some(names: list[str]) -> str:
    return ", ".join(names[:MOST_NAMES]) + (", ..." if len(names) > MOST_NAMES else "")


def _loaded_from_checkpoints(model: nn.Module) -> dict[str, Tensor]:
    """The parameters with memory, by name, without scales and without experts that vLLM pads for a kernel.

    Of joined layers, the parts that checkpoints have.
    """
    found, joined = {}, set()
    for path, module in model.named_modules():
        if isinstance(module, JoinedLayers):
            joined |= set(map(id, module.parameters()))
            mixer = path.rpartition(".")[0]
            found |= {f"{mixer}.{name}": part for name, part in module.parts().items()}
    found |= {name: parameter for name, parameter in model.named_parameters() if id(parameter) not in joined}
    return {
        name: parameter
        for name, parameter in found.items()
        if parameter.is_floating_point()
        and parameter.dim()
        and parameter.numel()
        and not parameter.is_meta
        and parameter.numel() == getattr(parameter, "weight_loader_numel", parameter.numel())
    }
