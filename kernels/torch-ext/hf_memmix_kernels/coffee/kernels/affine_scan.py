"""The scan of affine maps between segments of the backward pass, or between chunks of multiple shooting."""

import triton
import triton.language as tl

from ..._recorder import launched


@launched
@triton.jit(do_not_specialize=("chunks", "lanes"))
def affine_scan_kernel(
    A, b, start, base, shift, out, chunks, lanes,
    L: tl.constexpr, P: tl.constexpr, REVERSE: tl.constexpr, NEWTON: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """out[c] = the carry that enters chunk c of one sequence, L lanes: h' = A h + b from h = start; [chunks, lanes].

    With NEWTON the maps are of the update: h' = base + (b + A (h - shift)), with the trajectory's present end of the
    chunk in `base` and what it entered with in `shift`.
    """
    blocks = (lanes + L - 1) // L
    i_n = (tl.program_id(0) // blocks).to(tl.int64)
    lane = tl.program_id(0) % blocks * L + tl.arange(0, L)
    m = lane < lanes
    h = tl.load(start + i_n * lanes + lane, mask=m, other=0).to(ACC)
    o_n = i_n * chunks * lanes + lane
    for c in range(0, chunks, P):
        rows_A, rows_b, rows_base, rows_shift = (), (), (), ()
        for k in tl.static_range(P):
            i_c = tl.cast(chunks - 1 - (c + k) if REVERSE else c + k, tl.int64)
            m_c = m & (c + k < chunks)
            rows_A = rows_A + (tl.load(A + o_n + i_c * lanes, mask=m_c, other=1).to(ACC),)
            rows_b = rows_b + (tl.load(b + o_n + i_c * lanes, mask=m_c, other=0).to(ACC),)
            if NEWTON:
                rows_base = rows_base + (tl.load(base + o_n + i_c * lanes, mask=m_c, other=0).to(ACC),)
                rows_shift = rows_shift + (tl.load(shift + o_n + i_c * lanes, mask=m_c, other=0).to(ACC),)
        for k in tl.static_range(P):
            i_c = tl.cast(chunks - 1 - (c + k) if REVERSE else c + k, tl.int64)
            tl.store(out + o_n + i_c * lanes, h, mask=m & (c + k < chunks))
            if NEWTON:
                h -= rows_shift[k]
            h = rows_A[k] * h + rows_b[k]
            if NEWTON:
                h += rows_base[k]
