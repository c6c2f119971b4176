"""The kernels between the projections of q, k and v and a memory, in one call: convolutions, then unit norms."""

from torch import Tensor

from .._groups import flat
from .._tape import taped
from ..rowwise.launch import unit_heads_fwd_triton
from .arguments import Prompt
from .launch import short_conv_fwd_triton


@taped
@flat(Prompt)
def prompt_heads_triton(a: Prompt) -> tuple[Tensor | None, ...]:
    """q, k, v and the final states of their convolutions, see `op.prompt_heads`."""

    def convolved(x, weight, state):
        if weight is None:
            return x, None
        return short_conv_fwd_triton(x, weight, None, state, None, None, a.silu, None)

    (q, new_q), (k, new_k), (v, new_v) = map(convolved, a[:3], a[3:6], a[6:9])
    q, k = (unit_heads_fwd_triton(x.view(*x.shape[:2], -1, a.head_dim), a.cos, a.sin, a.eps) for x in (q, k))
    return q, k, v, new_q, new_k, new_v
