"""Forward KL divergence of two rows of logits and its gradient. A program reads one row of each twice.

The first pass finds the maximum of each row, and the logarithm of sum e^(x - maximum). Both are subtracted one after
the other: their sum would round off what matters of large logits. Every lane keeps a maximum and a sum of its own, so
nothing is exchanged between threads before the end of the row.
"""

import triton
import triton.language as tl

from ..._recorder import launched


@triton.jit
def _add_to_sum(b_x, b_max, b_sum):
    """The maximum of each lane, and the sum of e^(x - maximum), after one more element."""
    b_new = tl.maximum(b_max, b_x)
    return b_new, b_sum * tl.exp(b_max - b_new) + tl.exp(b_x - b_new)


@triton.jit
def _log_sum(b_max, b_sum):
    """The maximum over all lanes, and log sum e^(x - maximum)."""
    b_all = tl.max(b_max, 0)
    return b_all, tl.log(tl.sum(b_sum * tl.exp(b_max - b_all), 0))


@launched
@triton.jit
def forward_kl_kernel(
    student, teacher, weight, kl, size, s_student, s_teacher, BLOCK: tl.constexpr, ACC: tl.constexpr
):
    """kl = sum p_t (log p_t - log p_s); the student's logits become weight (p_s - p_t)."""
    i_row = tl.program_id(0).to(tl.int64)
    p_s, p_t = student + i_row * s_student, teacher + i_row * s_teacher
    o_v = tl.arange(0, BLOCK)
    # finite, because -inf - -inf is NaN
    b_max_s = tl.full([BLOCK], -3e38, ACC)
    b_max_t = tl.full([BLOCK], -3e38, ACC)
    b_sum_s = tl.zeros([BLOCK], ACC)
    b_sum_t = tl.zeros([BLOCK], ACC)
    for i in range(0, size, BLOCK):
        m = i + o_v < size
        b_s = tl.load(p_s + i + o_v, mask=m, other=float("-inf")).to(ACC)
        b_t = tl.load(p_t + i + o_v, mask=m, other=float("-inf")).to(ACC)
        b_max_s, b_sum_s = _add_to_sum(b_s, b_max_s, b_sum_s)
        b_max_t, b_sum_t = _add_to_sum(b_t, b_max_t, b_sum_t)
    b_top_s, b_log_s = _log_sum(b_max_s, b_sum_s)
    b_top_t, b_log_t = _log_sum(b_max_t, b_sum_t)
    b_weight = tl.load(weight + i_row).to(ACC)
    b_kl = tl.zeros([BLOCK], ACC)
    for i in range(0, size, BLOCK):
        m = i + o_v < size
        b_s = tl.load(p_s + i + o_v, mask=m, other=float("-inf")).to(ACC) - b_top_s - b_log_s
        b_t = tl.load(p_t + i + o_v, mask=m, other=float("-inf")).to(ACC) - b_top_t - b_log_t
        b_p = tl.exp(b_t)
        # 0 log 0 = 0; a NaN stays
        b_kl += tl.where(b_p == 0, 0, b_p * (b_t - b_s))
        tl.store(p_s + i + o_v, (b_weight * (tl.exp(b_s) - b_p)).to(student.dtype.element_ty), mask=m)
    tl.store(kl + i_row, tl.sum(b_kl, 0))
