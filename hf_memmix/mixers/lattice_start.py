"""Where a Lattice layer starts that takes over a softmax attention.

q, k, v and o are the attention's: k says which slots a value is written to, q which are read, so a projection of its
own for each, without the SiLU that would lose their signs. The convolutions pass their last token on, the step size
and the gate are constants, whatever the token: all weights of both start at zero. S_0 stays orthonormal.
"""

import torch
from torch import nn

from .attention_start import projection_options, take_projections
from .attention_weights import AttentionWeights, TensorFate

GATE_BIAS = 0.46  # gelu of it is 0.31: slots of unit norm answer louder than the attention they replace


def options_for(attention: AttentionWeights) -> dict:
    """Options with which a Lattice layer has a place for all of an attention."""
    own = {"share_qk": False, "conv_activation": None, "use_o_norm": False, "gate_bias": True}
    return own | projection_options(attention)


@torch.no_grad()
def take_over(mixer: nn.Module, attention: AttentionWeights) -> list[TensorFate]:
    """Fill a `LatticeMixer` from an attention, in place; errors and result are those of `take_projections`.

    Raises:
        ValueError: besides, the mixer has one projection for q and k.
    """
    if mixer.options.share_qk:
        raise ValueError(
            f"layer {mixer.layer_idx}: an attention's q and k are two projections; convert with share_qk=False"
        )
    fates = take_projections(mixer, attention)
    for name, parameter in mixer.named_parameters():
        if name.endswith("conv1d.weight"):
            parameter.zero_()
            parameter[:, :, -1] = 1
        elif name == "gamma_proj.weight" or (name == "g_proj.weight" and mixer.options.gate_bias):
            parameter.zero_()
    if mixer.options.use_gate and mixer.options.gate_bias:
        mixer.g_proj.bias.fill_(GATE_BIAS)
    return fates
