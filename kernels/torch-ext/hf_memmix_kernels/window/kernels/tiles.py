"""Scores and masks of a tile of queries and keys: device code of all passes."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def capped(x, softcap):
    """softcap tanh(x / softcap), or x without a cap."""
    if softcap is None:
        return x
    else:
        return softcap * (2 / (1 + tl.exp(-2 * x / softcap)) - 1)


@triton.jit
def reads(o_q, o_k, first, before, window, keys):
    """Which keys the queries read. Query i stands at place before + i of the keys; its sequence begins at `first`."""
    place = o_q[:, None] + before
    inside = (o_k[None, :] <= place) & (o_k[None, :] > place - window) & (o_k[None, :] < keys)
    return inside & (o_k[None, :] >= first[:, None])


@triton.jit
def first_keys(firsts, s_b, s_t, i_b, o_q, m_q):
    """The place of the first key of each query's sequence."""
    if firsts is None:
        return tl.zeros_like(o_q)
    else:
        return tl.load(firsts + i_b * s_b + o_q * s_t, mask=m_q, other=0).to(tl.int32)
