"""Weights of transformers' layers of the gated delta rule, for layers of ours: Qwen3-Next and Kimi Linear.

    load_delta_layer(mixer, qwen3_next.model.layers[0].linear_attn)

The mixer has a key/value head for each head, and as many heads of the same size as the layer. With the default options
and the layer's epsilon of the norm it then computes what the layer does. Where Qwen3-Next has fewer heads of q and k
than of v, the mixer gets q and k of each head: the same function, with more parameters.
"""

import torch
from torch import Tensor, nn

from hf_memmix.errors import UserError

# transformers' class: our mixer
DELTA_LAYERS = {"Qwen3NextGatedDeltaNet": "gated_delta", "KimiLinearDeltaAttention": "kda"}


@torch.no_grad()
def load_delta_layer(mixer: nn.Module, layer: nn.Module) -> None:
    """Copy the weights of a layer of transformers into a mixer, in place.

    Args:
        mixer: a `GatedDeltaMixer` for a `Qwen3NextGatedDeltaNet`, a `KDAMixer` for a `KimiLinearDeltaAttention`.
        layer: the layer of transformers.

    Raises:
        ValueError: the layer is of another class, or the two differ in a parameter or its shape.
    """
    kind = type(layer).__name__
    if DELTA_LAYERS.get(kind) != mixer.name:
        known = ", ".join(f"{name} into {ours}" for name, ours in DELTA_LAYERS.items())
        raise UserError(f"weights of a {kind} do not fit into a {mixer.name} layer; known: {known}")
    found = _of_qwen3_next(layer) if kind == "Qwen3NextGatedDeltaNet" else _of_kimi(layer)
    own = dict(mixer.named_parameters())
    shapes = [{name: list(t.shape) for name, t in tensors.items()} for tensors in (own, found)]
    differ = sorted(name for name in own.keys() | found.keys() if shapes[0].get(name) != shapes[1].get(name))
    if differ:
        name = differ[0]
        raise UserError(
            f"layer {mixer.layer_idx}: {name} is {shapes[0].get(name, 'missing')} in the mixer and"
            f" {shapes[1].get(name, 'missing')} in the {kind}; {len(differ)} parameters differ. Give the mixer"
            " the same heads and default options"
        )
    for name, parameter in own.items():
        parameter.copy_(found[name])


def _convolutions(weight: Tensor, sizes: list[int]) -> dict[str, Tensor]:
    """Those of q, k and v from one convolution of all their channels."""
    return {f"{name}_conv1d.weight": part for name, part in zip("qkv", weight.split(sizes), strict=True)}


def _of_qwen3_next(layer: nn.Module) -> dict[str, Tensor]:
    heads, key_heads, D, V = layer.num_v_heads, layer.num_k_heads, layer.head_k_dim, layer.head_v_dim
    shared = heads // key_heads
    # for each head of q and k: q, k, then v and z of the heads that share them; beta and decay likewise
    rows = layer.in_proj_qkvz.weight.unflatten(0, (key_heads, -1))
    q, k, v, z = rows.split([D, D, shared * V, shared * V], 1)
    beta, decay = layer.in_proj_ba.weight.unflatten(0, (key_heads, -1)).split([shared, shared], 1)
    convolutions = _convolutions(layer.conv1d.weight, [key_heads * D, key_heads * D, heads * V])
    for name in ("q_conv1d.weight", "k_conv1d.weight"):
        convolutions[name] = convolutions[name].unflatten(0, (key_heads, D))
        convolutions[name] = convolutions[name].repeat_interleave(shared, 0).flatten(0, 1)
    q, k = (t.repeat_interleave(shared, 0) for t in (q, k))
    names = ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj")
    weights = dict(zip(names, (q, k, v, z, beta, decay), strict=True))
    return (
        convolutions
        | {f"{name}.weight": t.flatten(0, 1) for name, t in weights.items()}
        | {
            "A_log": layer.A_log,
            "dt_bias": layer.dt_bias,
            "o_norm.weight": layer.norm.weight,
            "o_proj.weight": layer.out_proj.weight,
        }
    )


def _of_kimi(layer: nn.Module) -> dict[str, Tensor]:
    gate = layer.forget_gate
    names = ("q_proj", "k_proj", "v_proj", "b_proj", "g_a_proj", "g_b_proj", "o_norm", "o_proj")
    return _convolutions(layer.conv1d.weight, [layer.qkv_dim] * 3) | {
        **{f"{name}.weight": getattr(layer, name).weight for name in names},
        "f_a_proj.weight": gate.f_a_proj.weight,
        "f_b_proj.weight": gate.f_b_proj.weight,
        "A_log": gate.A_log.flatten(),
        "dt_bias": gate.dt_bias,
    }
