"""The kernels between the projections of q, k and v and a memory, in one call: convolutions, then unit norms."""

from torch import Tensor

from .._tape import taped
from ..rowwise.launch import unit_heads_fwd_triton
from .launch import short_conv_fwd_triton


@taped
def prompt_heads_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w_q: Tensor,
    w_k: Tensor,
    w_v: Tensor | None,
    s_q: Tensor | None,
    s_k: Tensor | None,
    s_v: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    silu: bool,
    eps: float,
    head_dim: int,
) -> tuple[Tensor | None, ...]:
    """q, k, v and the final states of their convolutions, see `op.prompt_heads`. Tapes take tensors, not lists."""
    q, new_q = short_conv_fwd_triton(q, w_q, None, s_q, None, None, silu, None)
    k, new_k = short_conv_fwd_triton(k, w_k, None, s_k, None, None, silu, None)
    new_v = None
    if w_v is not None:
        v, new_v = short_conv_fwd_triton(v, w_v, None, s_v, None, None, silu, None)
    q, k = (unit_heads_fwd_triton(x.view(*x.shape[:2], -1, head_dim), cos, sin, eps) for x in (q, k))
    return q, k, v, new_q, new_k, new_v
