"""GKA's gates: three projections of the layer's input, and their activations.

    log_decay = -e^A_log softplus(W_0 x + dt_bias);  beta = sigmoid(W_1 x + b_1) + eps;  alpha = sigmoid(W_2 x + b_2)

For one token per sequence a program computes one gate of BH heads of one sequence. For whole sequences, whose
projections are matrix products of torch, it computes the activations. Sums and results are float32.
"""

import triton
import triton.language as tl

from ..._recorder import launched
from ...rowwise.kernels.decay import softplus


@triton.jit
def _logits(x, w, bias, i_h, heads, hidden, BH: tl.constexpr, BD: tl.constexpr):
    """W x + bias of heads i_h, [BH]; rounded as a linear layer does, so that a step equals the chunk path."""
    m_h = i_h < heads
    b_sum = tl.zeros([BH, BD], tl.float32)
    for i_0 in range(0, hidden, BD):
        o_d = i_0 + tl.arange(0, BD)
        m_d = o_d < hidden
        b_x = tl.load(x + o_d, mask=m_d, other=0).to(tl.float32)
        p_w = w + i_h[:, None] * hidden + o_d[None, :]
        b_sum += tl.load(p_w, mask=m_h[:, None] & m_d[None, :], other=0).to(tl.float32) * b_x[None, :]
    b_z = tl.sum(b_sum, 1)
    if bias is not None:
        b_z += tl.load(bias + i_h, mask=m_h, other=0).to(tl.float32)
    return b_z.to(x.dtype.element_ty).to(tl.float32)


@launched
@triton.jit
def gka_gates_kernel(
    x, weights, biases, dt_bias, A_log, results, heads, hidden, beta_eps, BH: tl.constexpr, BD: tl.constexpr
):
    """x [B, hidden], weights [heads, hidden], biases [heads] or None, results [B, heads]."""
    i_b, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1) * BH + tl.arange(0, BH)
    m_h, o = i_h < heads, i_b * heads + i_h
    x += i_b * hidden
    if tl.program_id(2) == 0:
        b_z = _logits(x, weights[0], biases[0], i_h, heads, hidden, BH, BD)
        b_dt = softplus(b_z + tl.load(dt_bias + i_h, mask=m_h, other=0).to(tl.float32))
        b_rate = tl.exp(tl.load(A_log + i_h, mask=m_h, other=0).to(tl.float32))
        tl.store(results[0] + o, -b_rate * b_dt, mask=m_h)
    elif tl.program_id(2) == 1:
        b_z = _logits(x, weights[1], biases[1], i_h, heads, hidden, BH, BD)
        tl.store(results[1] + o, tl.sigmoid(b_z) + beta_eps, mask=m_h)
    else:
        b_z = _logits(x, weights[2], biases[2], i_h, heads, hidden, BH, BD)
        tl.store(results[2] + o, tl.sigmoid(b_z), mask=m_h)


@launched
@triton.jit
def gka_activations_kernel(logits, dt_bias, A_log, results, size, heads, beta_eps, BLOCK: tl.constexpr):
    """logits and results [tokens, heads], `size` numbers each."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m, i_h = o < size, o % heads
    b_z = tl.load(logits[0] + o, mask=m, other=0).to(tl.float32)
    b_dt = softplus(b_z + tl.load(dt_bias + i_h, mask=m, other=0).to(tl.float32))
    b_rate = tl.exp(tl.load(A_log + i_h, mask=m, other=0).to(tl.float32))
    tl.store(results[0] + o, -b_rate * b_dt, mask=m)
    b_z = tl.load(logits[1] + o, mask=m, other=0).to(tl.float32)
    tl.store(results[1] + o, tl.sigmoid(b_z) + beta_eps, mask=m)
    b_z = tl.load(logits[2] + o, mask=m, other=0).to(tl.float32)
    tl.store(results[2] + o, tl.sigmoid(b_z), mask=m)
