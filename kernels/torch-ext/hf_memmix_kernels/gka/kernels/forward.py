"""GKA's forward kernel after the solver: the read-out."""

import triton
import triton.language as tl

from ..._recorder import launched
from .tiles import decay_from, dot, load_gate, load_rows, load_state, locate_chunk, split_dot, store_rows


@launched
@triton.jit(do_not_specialize=["length", "per_sequence", "N"])
def gka_fwd_kernel_read(
    inputs, UT0, x, o, layout, N, length, per_sequence, scale,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DVR: tl.constexpr, DK: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """o = scale * U_t (q + alpha (x - q)) of one chunk and head."""
    q, k, v, log_decay, alpha, beta = inputs
    i_h, i_chunk = tl.program_id(0) % H, tl.program_id(0) // H
    _, token, rows = locate_chunk(i_chunk, layout, N, length, per_sequence, C)
    if rows <= 0:
        return
    head, kv_head = token * H + i_h, token * HK + i_h // (H // HK)
    b_q = load_rows(q + head * D, rows, H * D, D, C, DK).to(tl.float32)
    b_x = load_rows(x + head * D, rows, H * D, D, C, DK)
    # reading amplifies rounding of x by up to its condition number: x goes in two parts
    mixed = b_q + load_gate(alpha + head, rows, H, C)[:, None] * (b_x - b_q)
    b_k = load_rows(k + kv_head * D, rows, HK * D, D, C, DK)
    b_v = load_rows(v + kv_head * DVR, rows, HK * DVR, DVR, C, DK)
    G = tl.cumsum(load_gate(log_decay + head, rows, H, C), 0)
    b = load_gate(beta + head, rows, H, C)
    scores = split_dot(mixed, tl.trans(b_k)) * decay_from(G, C) * (b * b)[None, :]
    b_UT0 = load_state(UT0 + (i_chunk.to(tl.int64) * H + i_h) * DK * DK, DK, DK)
    b_o = split_dot(mixed, b_UT0) * tl.exp(G)[:, None] + dot(scores.to(b_v.dtype), b_v)
    store_rows(o + head * DVR, scale * b_o, rows, H * DVR, DVR, C, DK)
