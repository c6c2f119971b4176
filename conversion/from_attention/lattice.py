"""How a Lattice layer is initialised from a softmax attention.

q, k, v and o are the attention's: k selects the slots to which a value is written, q those that are read. So q and k
have separate projections, without the SiLU, which would lose their signs. The convolutions return their last token.
The step size and the gate do not depend on the token: their weights start at zero. S_0 stays orthonormal. Slots
always have unit norm. So the values are scaled up, and the output is scaled back: large values soon replace the
content of S_0, which the attention does not have. The scale is measured: training/experiments/conversion; the gate:
training/experiments/smollm2. Step sizes above one half start a little closer to the attention, but are worse after a
short alignment.
"""

from dataclasses import replace

import torch
from torch import nn

from hf_memmix.conversion.attention_weights import AttentionWeights, TensorFate
from hf_memmix.conversion.from_attention.projections import pass_convolutions, projection_options, take_projections
from hf_memmix.conversion.from_attention.registry import starts
from hf_memmix.errors import UserError

GATE_BIAS = 0.26  # gelu of it is 0.157
VALUE_SIZE = 10.0  # root mean square norm of a head's values, for inputs of unit variance
SCALED = "each head's values scaled to root mean square norm {size:g}, what is read from them scaled back"


def options_for(attention: AttentionWeights) -> dict:
    """The options that a Lattice layer needs to hold all tensors of an attention."""
    own = {"share_qk": False, "conv_activation": None, "use_o_norm": False, "gate_bias": True}
    return own | projection_options(attention)


@starts("lattice", options=options_for)
@torch.no_grad()
def take_over(mixer: nn.Module, attention: AttentionWeights) -> list[TensorFate]:
    """Fill a `LatticeMixer` from an attention, in place; errors and result are those of `take_projections`.

    Raises:
        ValueError: also if the mixer has one projection for q and k together.
    """
    if mixer.options.share_qk:
        raise UserError(
            f"layer {mixer.layer_idx}: an attention's q and k are two projections; convert with share_qk=False"
        )
    fates = take_projections(mixer, attention)
    pass_convolutions(mixer)
    if mixer.options.step_size != "constant":
        mixer.gamma_proj.weight.zero_()
    if mixer.options.use_gate and mixer.options.gate_bias:
        mixer.g_proj.weight.zero_()
        mixer.g_proj.bias.fill_(GATE_BIAS)
    if mixer.options.variant == "enc":  # its values have unit norm
        return fates
    scale_values(mixer)
    scaled = ("v_weight", "v_bias", "o_weight")
    reason = SCALED.format(size=VALUE_SIZE)
    return [replace(fate, fate="transformed", reason=reason) if fate.field in scaled else fate for fate in fates]


@torch.no_grad()
def scale_values(mixer: nn.Module, size: float = VALUE_SIZE) -> None:
    """Scale each head's values in `v_proj` to a root mean square norm for white inputs, and `o_proj` back."""
    v, o = mixer.v_proj, mixer.o_proj
    rows = v.weight.unflatten(0, (mixer.kv_heads, -1))
    # a head of zeros stays zero
    scale = (size / torch.linalg.vector_norm(rows.float(), dim=(1, 2))).nan_to_num(posinf=1.0)
    per_row = scale.repeat_interleave(mixer.head_dim)
    v.weight.mul_(per_row[:, None])
    if v.bias is not None:
        v.bias.mul_(per_row)
    per_column = scale.repeat_interleave(mixer.heads // mixer.kv_heads).repeat_interleave(mixer.head_dim)
    o.weight.div_(per_column)
