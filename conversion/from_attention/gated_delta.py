"""How layers of the gated delta rule, `gated_delta` and `kda`, are initialised from a softmax attention.

q, k, v and o are the attention's, with q and k of norm 1; the convolutions return their last token, and the gates do
not depend on the token: beta is 1/2, which replaces half of what the memory holds for a key. The half-lives of the
memory are log-spaced over the heads.
"""

import torch
from torch import nn

from hf_memmix.conversion.attention_weights import AttentionWeights, TensorFate
from hf_memmix.conversion.from_attention.half_lives import (
    inverse_silu,
    share_of_heads,
    start_decay,
    start_half_lives,
)
from hf_memmix.conversion.from_attention.projections import pass_convolutions, projection_options, take_projections
from hf_memmix.conversion.from_attention.registry import starts

HALF_LIVES = (1.0, 16.0)  # tokens, log-spaced over the heads
# layer of the output gate, and the inverse of its activation. Of gates from .1 to 1 and of betas from .05 to
# .9, a gate of 3/4 and a beta of 1/2 have the lowest error of the bundled teacher's layers on the development text
GATE = 0.75
GATES = {"gated_delta": ("g_proj", inverse_silu), "kda": ("g_b_proj", torch.logit)}


def options_for(attention: AttentionWeights) -> dict:
    """The options that a layer needs to hold all tensors of an attention."""
    # signs, positions and output size like those of attention
    own = {"conv_activation": None, "use_o_norm": False, "gate_bias": True}
    return own | projection_options(attention)


@starts("kda", options=options_for)
@starts("gated_delta", options=options_for)
@torch.no_grad()
def take_over(mixer: nn.Module, attention: AttentionWeights) -> list[TensorFate]:
    """Fill a `GatedDeltaMixer` or `KDAMixer` from an attention, in place; errors and result are those of
    `take_projections`.
    """
    fates = take_projections(mixer, attention)
    pass_convolutions(mixer)
    mixer.b_proj.weight.zero_()  # beta is one half, or 1 with negative eigenvalues
    half_lives = start_half_lives(mixer, HALF_LIVES)
    start_decay(mixer, half_lives, mixer.f_b_proj if mixer.name == "kda" else mixer.a_proj)
    if mixer.options.use_gate:
        name, inverse = GATES[mixer.name]
        gate = getattr(mixer, name)
        if gate.bias is not None:
            share = GATE * share_of_heads(mixer, HALF_LIVES)
            gate.weight.zero_()
            gate.bias.copy_(inverse(share).repeat_interleave(mixer.head_dim))
        elif mixer.name == "kda":
            gate.weight.zero_()  # the gate is 1/2; a silu of 0 would let nothing through, so that gate stays random
    return fates
