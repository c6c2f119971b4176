"""The scan of affine maps between segments of the backward pass."""

import triton
import triton.language as tl

from ..._recorder import launched


@launched
@triton.jit(do_not_specialize=("chunks", "lanes"))
def affine_scan_kernel(
    A, b, start, out, chunks, lanes, L: tl.constexpr, P: tl.constexpr, ACC: tl.constexpr
):  # fmt: skip
    """out[c] = the carry that enters chunk c of one sequence from its end, L lanes: h' = A h + b from h = start;
    [chunks, lanes].
    """
    blocks = (lanes + L - 1) // L
    i_n = (tl.program_id(0) // blocks).to(tl.int64)
    lane = tl.program_id(0) % blocks * L + tl.arange(0, L)
    m = lane < lanes
    h = tl.load(start + i_n * lanes + lane, mask=m, other=0).to(ACC)
    o_n = i_n * chunks * lanes + lane
    for c in range(0, chunks, P):
        rows_A, rows_b = (), ()
        for k in tl.static_range(P):
            i_c = tl.cast(chunks - 1 - (c + k), tl.int64)
            m_c = m & (c + k < chunks)
            rows_A = rows_A + (tl.load(A + o_n + i_c * lanes, mask=m_c, other=1).to(ACC),)
            rows_b = rows_b + (tl.load(b + o_n + i_c * lanes, mask=m_c, other=0).to(ACC),)
        for k in tl.static_range(P):
            i_c = tl.cast(chunks - 1 - (c + k), tl.int64)
            tl.store(out + o_n + i_c * lanes, h, mask=m & (c + k < chunks))
            h = rows_A[k] * h + rows_b[k]
