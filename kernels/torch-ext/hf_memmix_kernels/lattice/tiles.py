"""The state of a head as its kernels hold it, and one update of it.

A tile is [M, D1, D2]: slots, and a slot's d = D1 * D2 entries, entry i1 * D2 + i2, along the two other axes. Triton
deals the last axis to the lanes, four entries a lane, then the slots to the lanes and warps that are left: D2 says how
many lanes share a slot, and D1 stays inside of a lane.

s_i' = a_i s_i + b_i h: `coefficients` and `advance` follow naive.py.
"""

import triton
import triton.language as tl


@triton.jit
def over_entries(x):
    """Sum a tile over the entries of every slot: [M]."""
    return tl.sum(tl.sum(x, 1), 1)


@triton.jit
def total(x):
    """Sum a vector [D1, D2] of entries."""
    return tl.sum(tl.sum(x, 0), 0)


@triton.jit
def slots(x):
    """[M] against a tile."""
    return x[:, None, None]


@triton.jit
def entries(x):
    """[D1, D2] against a tile."""
    return x[None, :, :]


@triton.jit
def rsqrt(x):
    """1 / sqrt(x) to the last place: a GPU's own is biased, and the bias adds up over tokens."""
    r = tl.rsqrt(x)
    return r + 0.5 * r * (1 - x * r * r)


@triton.jit
def inverse_norm(S):
    """1 / |s_i|, 0 for the empty slots that fill up a tile."""
    squared = over_entries(S * S)
    return tl.where(squared > 0, rsqrt(tl.where(squared > 0, squared, 1)), 0)


@triton.jit
def inverse_size(z):
    """1 / |z| of a vector [D1, D2], 0 where z = 0."""
    squared = total(z * z)
    return tl.where(squared > 0, rsqrt(tl.where(squared > 0, squared, 1)), 0)


@triton.jit
def direction(z, v, VARIANT: tl.constexpr):
    """h from the read z = S k, for the variants that read."""
    if VARIANT == "ttt":
        inverse = inverse_size(z)
        unit = z * inverse
        return (unit * total(unit * v) - v) * inverse
    else:
        return z - v


@triton.jit
def known(v, VARIANT: tl.constexpr):
    """h of "enc" and "sim", which do not read."""
    return v if VARIANT == "enc" else -v


@triton.jit
def coefficients(k, p, inverse, gamma, mu, VARIANT: tl.constexpr, PROJECT: tl.constexpr):
    """c, and alpha and keep of the update before any normalisation: keep_i s_i + alpha_i h."""
    c = k
    if VARIANT == "enc":
        c = p - k if PROJECT else p * inverse - k
    if VARIANT == "ttt" or VARIANT == "delta":
        return c, -gamma * c, mu + tl.zeros_like(c)
    elif PROJECT:
        return c, -gamma * c, 1 + gamma * c * p
    else:
        alpha = -gamma * c * inverse
        return c, alpha, mu - alpha * p * inverse * inverse


@triton.jit
def rescale(alpha, p, hh):
    """1 / |s_i + Delta_i| of a unit slot: Delta_i is orthogonal to it."""
    return rsqrt(1 + alpha * alpha * tl.maximum(hh - p * p, 0))


@triton.jit
def shrink(x, threshold):
    """Soft threshold of a tile, and which slots [M] it leaves something of."""
    kept = tl.where(x > threshold, x - threshold, tl.where(x < -threshold, x + threshold, 0))
    return kept, over_entries(tl.abs(kept)) > 0


@triton.jit
def advance(S, h, p, alpha, keep, threshold, PROJECT: tl.constexpr, L1: tl.constexpr):
    """The tile after the update."""
    if L1:
        new = slots(keep) * S + slots(alpha) * entries(h)
        kept, alive = shrink(new, threshold)
        new = tl.where(slots(alive), kept, new)
        if PROJECT:
            new *= slots(inverse_norm(new))
        return new
    elif PROJECT:
        scale = rescale(alpha, p, total(h * h))
        return slots(scale * keep) * S + slots(scale * alpha) * entries(h)
    else:
        return slots(keep) * S + slots(alpha) * entries(h)
