"""What a mixer gives to native code for the decode step of its whole layer: the parameters of its inner layers.

Only where a call of each inner layer does nothing but its class's forward: hooks (offload, tensor parallelism), an
adapter around a layer or a quantised one would be passed by.
"""

from torch import Tensor, nn

from hf_memmix_kernels._layer_step import Layer, runs_layer_step

from .layers import RMSNorm, ShortConvolution, has_hooks, one_angle_per_pair

NORMS = ("q_norm", "k_norm", "o_norm")
PLAIN = frozenset((nn.Linear, RMSNorm, ShortConvolution))


def parameters_of(
    mixer: nn.Module, names: tuple[str, ...], plain: frozenset[type] = PLAIN
) -> tuple[list, list] | None:
    """Weights and biases of inner layers by name, None where there is none; or None if a call of one does more than
    the forward of its class, one of `plain`."""
    weights, biases, modules = [], [], mixer._modules  # quicker than attributes
    for name in names:
        layer = modules.get(name)
        if layer is None:
            weights.append(None)
            biases.append(None)
            continue
        own = vars(layer)
        if type(layer) not in plain or has_hooks(layer) or own.get("average_over_ranks") is not None:
            return None
        found = layer._parameters  # by name: pruning and parametrizations that are removed leave them in another order
        if "weight" not in found or own.get("bias") is not None:  # a plain tensor in the place of a parameter
            return None
        weights.append(found["weight"])
        biases.append(found.get("bias"))
    return weights, biases


def layer_around(
    op: str, mixer: nn.Module, x: Tensor, rotary, states: dict[str, Tensor], gate: tuple[str, ...] = (),
    value: str = "v", **options,
) -> Layer | None:  # fmt: skip
    """What lies around the memory of a mixer with some of the layers of `HeadsMixer`; None if native code may not
    compute it.

    Args:
        op: whose native code is asked for.
        mixer: with the options qk_norm, rope_layout, norm_eps and conv_activation, if it has what they change.
        x, rotary, states: of `MemoryMixer.layer_step`.
        gate: names of the output gate's layers.
        value: what the names of v's projection and convolution begin with.
        options: `unit_eps` and `activation` of `Layer`.
    """
    if not runs_layer_step(op, x) or mixer.joined_layers is not None or (mixer.use_rope and rotary is None):
        return None
    of_keys = ("qk_proj", "qk_proj") if "qk_proj" in mixer._modules else ("q_proj", "k_proj")
    convolved = ("q", "k", value)
    convolutions = [f"{name}_conv1d" for name in convolved]
    found = parameters_of(mixer, (*of_keys, f"{value}_proj", "o_proj", *NORMS, *convolutions, *gate))
    if found is None:
        return None
    weights, biases = found
    # native code adds biases to the four projections and to the gate's last layer only
    without_bias = biases[4 : len(biases) - bool(gate)]
    if without_bias != [None] * len(without_bias):
        return None
    plain, angles = mixer.plain, (None, None, 0)
    if mixer.use_rope:
        angles = *[t.contiguous() for t in rotary], rotary[0].shape[-1] // 2
        if plain["rope_layout"] != "half":  # whose first half is what is asked for: slicing it takes time
            cos, sin = [one_angle_per_pair(t, plain["rope_layout"]).contiguous() for t in rotary]
            angles = cos, sin, cos.shape[-1]
    return Layer(
        x.contiguous(), weights[:4], biases[:4], weights[4:7], *angles, plain.get("norm_eps", 0.0), weights[7:10],
        [states.get(f"conv_{name}") for name in convolved], plain.get("conv_activation") == "silu",
        gate=[None] * (2 - len(gate)) + weights[10:], gate_bias=biases[-1] if gate else None, **options,
    )  # fmt: skip
