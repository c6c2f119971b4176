"""The product of a SwiGLU: silu(gate) * up. A program holds BLOCK elements."""

import triton
import triton.language as tl

from ..._recorder import launched


@launched
@triton.jit
def gated_product_fwd_kernel(gate, up, out, size, BLOCK: tl.constexpr, ACC: tl.constexpr):
    """out = silu(gate) * up."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = o < size
    b_g = tl.load(gate + o, mask=m, other=0).to(ACC)
    b_u = tl.load(up + o, mask=m, other=0).to(ACC)
    tl.store(out + o, (b_g / (1 + tl.exp(-b_g)) * b_u).to(out.dtype.element_ty), mask=m)


@launched
@triton.jit
def gated_product_bwd_kernel(do, gate, up, dgate, dup, size, BLOCK: tl.constexpr, ACC: tl.constexpr):
    """dup = do silu(gate), dgate = do up silu'(gate)."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = o < size
    b_do = tl.load(do + o, mask=m, other=0).to(ACC)
    b_g = tl.load(gate + o, mask=m, other=0).to(ACC)
    b_u = tl.load(up + o, mask=m, other=0).to(ACC)
    b_s = 1 / (1 + tl.exp(-b_g))
    tl.store(dup + o, (b_do * b_g * b_s).to(dup.dtype.element_ty), mask=m)
    b_dg = b_do * b_u * b_s * (1 + b_g * (1 - b_s))
    tl.store(dgate + o, b_dg.to(dgate.dtype.element_ty), mask=m)
