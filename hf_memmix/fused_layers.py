"""The backbone's RMSNorms and gated MLPs in fewer GPU kernels.

In eager PyTorch the RMSNorm of most decoder families is seven kernels and keeps a float32 copy of its input for the
backward pass; silu(gate) * up is two kernels and keeps silu(gate). On a GPU the layers below run one kernel each way
and keep their inputs only: for a Llama of 1 billion parameters, 8 GiB less at 8 x 2048 tokens in training. On a CPU,
under torch.compile (which fuses the operators itself) and in dispatch modes the family's own operators run.

A layer takes part if its class computes word for word what `backbones.RMS_NORM` or `backbones.GATED_MLP` computes. It
keeps its parameters, the name of its class, and its native class as a base.
"""

import functools
from typing import ClassVar

import torch
from torch import nn

from hf_memmix_kernels.rowwise import gated_product, rms_norm

from ._transformers import ACT2FN, same_forward
from .backbones import GATED_MLP, RMS_NORM


class _Fused:
    """Goes before the native class of a layer."""

    native: ClassVar[type[nn.Module]]

    def __reduce_ex__(self, protocol):
        # the class is made at run time, so a pickle names the native one
        return _new_layer, (self.native,), self.__dict__


def _native_rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """What `backbones.RMS_NORM` computes, with the same operators."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * wide.to(x.dtype)


class FusedRMSNorm(_Fused):
    """x / rms(x) * weight."""

    def forward(self, hidden_states):
        found = None
        if hidden_states.dtype == self.weight.dtype:
            found = rms_norm(hidden_states, self.weight, self.variance_epsilon)
        # the native operators: a program that torch 2.11 compiles would check the layer before each token
        # if it read `native` of its class
        return _native_rms_norm(hidden_states, self.weight, self.variance_epsilon) if found is None else found


class FusedMLP(_Fused):
    """W_down (silu(W_gate x) * W_up x)."""

    def forward(self, x):
        return self.down_proj(gated_product(self.gate_proj(x), self.up_proj(x)))


@functools.cache
def fused_class(native: type[nn.Module]) -> type[nn.Module] | None:
    """The class that a layer of a native class gets, or None if it computes something else."""
    for fused, reference in ((FusedRMSNorm, RMS_NORM), (FusedMLP, GATED_MLP)):
        if same_forward(native, *reference):
            return type(native.__name__, (fused, native), {"__module__": __name__, "native": native})
    return None


def fuse_layers(model: nn.Module):
    """Let the RMSNorms and gated MLPs of a model run in fewer kernels."""
    silu = type(ACT2FN["silu"])
    for module in model.modules():
        found = None if isinstance(module, _Fused) else fused_class(type(module))
        if found is not None and (issubclass(found, FusedRMSNorm) or isinstance(module.act_fn, silu)):
            module.__class__ = found


def _new_layer(native: type[nn.Module]) -> nn.Module:
    found = fused_class(native)
    return found.__new__(found)
