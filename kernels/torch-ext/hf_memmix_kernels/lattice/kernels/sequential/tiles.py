"""Device functions for the state of one head, held as a tile, and for one update of it.

A tile is [M, D1, D2]: M slots, and the d = D1 * D2 entries of a slot along the two other axes, entry i1 * D2 + i2.
Triton distributes the last axis over lanes, four entries per lane, and then the slots over the other lanes and warps.
D2 therefore decides how many lanes share a slot, and D1 stays within a lane.

s_i' = a_i s_i + b_i h: `coefficients` and `advance` follow naive.py.
"""

import triton
import triton.language as tl


@triton.jit
def fetch(address):
    """Prefetch the 32 bytes around each address (int64) into L2; nothing waits for them."""
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], tl.int32, False, 1)


@triton.jit
def fetch_rows(p, stride, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """`fetch` of rows [WIDTH], BLOCK the next power of two."""
    PART: tl.constexpr = 256 // p.dtype.element_ty.primitive_bitwidth
    o_part = tl.minimum(tl.arange(0, BLOCK // PART) * PART, WIDTH - 1)
    fetch((p + tl.arange(0, ROWS)[:, None] * stride + o_part[None, :]).to(tl.int64, bitcast=True))


@triton.jit
def over_entries(x):
    """Sum a tile over the entries of every slot: [M]."""
    return tl.sum(tl.sum(x, 1), 1)


@triton.jit
def fold(x):
    """Sum over the last axis. Every thread reads the whole axis, so the sum passes through shared memory once."""
    A: tl.constexpr = x.shape[0]
    B: tl.constexpr = x.shape[1]
    N: tl.constexpr = x.shape[2]
    if N == 1:
        return tl.reshape(x, [A, B])
    else:
        one, other = tl.split(tl.reshape(x, [A, B, N // 2, 2]))
        return fold(one + other)


@triton.jit
def over_lanes(x):
    """Sum [W, L, D1, D2] over L, the lanes that share entries: [W, D1, D2].

    Of every pair of lanes each adds up one half of the rows D1: half the shuffles, and half the words to exchange.
    """
    W: tl.constexpr = x.shape[0]
    L: tl.constexpr = x.shape[1]
    D1: tl.constexpr = x.shape[2]
    D2: tl.constexpr = x.shape[3]
    if L == 1 or D1 == 1:
        return tl.sum(x, 1)
    else:
        even, odd = tl.split(tl.permute(tl.reshape(x, [W, L // 2, 2, D1 // 2, 2, D2]), 0, 1, 2, 3, 5, 4))
        first = tl.arange(0, 2)[None, None, :, None, None] == 0
        sent = tl.where(first, odd, even)
        bits = sent.to(tl.int64 if sent.dtype == tl.float64 else tl.int32, bitcast=True)
        received = (bits ^ tl.xor_sum(bits, 2, keep_dims=True)).to(sent.dtype, bitcast=True)
        x = tl.sum(tl.where(first, even, odd) + received, 1)
        return tl.reshape(tl.permute(x, 0, 2, 1, 3), [W, D1, D2])


@triton.jit
def over_slots(x, WARPS: tl.constexpr, LANES: tl.constexpr):
    """Sum a tile over its slots: [D1, D2]. LANES lanes and WARPS warps hold different slots."""
    D1: tl.constexpr = x.shape[1]
    D2: tl.constexpr = x.shape[2]
    x = tl.reshape(x, [x.shape[0] // (WARPS * LANES), WARPS, LANES, D1, D2])
    return fold(tl.permute(over_lanes(tl.sum(x, 0)), 1, 2, 0))


@triton.jit
def over_slots_but(x, weights, h, WARPS: tl.constexpr, LANES: tl.constexpr):
    """`over_slots` of x - weights h, for weights [M]: [D1, D2]."""
    D1: tl.constexpr = x.shape[1]
    D2: tl.constexpr = x.shape[2]
    R: tl.constexpr = x.shape[0] // (WARPS * LANES)
    x = tl.sum(tl.reshape(x, [R, WARPS, LANES, D1, D2]), 0)
    weight = tl.sum(tl.reshape(weights, [R, WARPS, LANES]), 0)
    return fold(tl.permute(over_lanes(x - weight[:, :, None, None] * h[None, None, :, :]), 1, 2, 0))


@triton.jit
def share_over_slots(x, WARPS: tl.constexpr, LANES: tl.constexpr):
    """Partial sums over slots that every thread can compute on its own: [WARPS * LANES, D1 * D2]."""
    D1: tl.constexpr = x.shape[1]
    D2: tl.constexpr = x.shape[2]
    x = tl.reshape(x, [x.shape[0] // (WARPS * LANES), WARPS, LANES, D1, D2])
    return tl.reshape(tl.sum(x, 0), [WARPS * LANES, D1 * D2])


@triton.jit
def over_shares(shares, GROUP: tl.constexpr):
    """Sums [GROUP, D] of the shares of GROUP tokens, with one pass through shared memory."""
    N: tl.constexpr = shares[0].shape[0]
    D: tl.constexpr = shares[0].shape[1]
    if GROUP == 1:
        x = tl.reshape(shares[0], [N, D, 1])
    elif GROUP == 2:
        x = tl.join(shares[0], shares[1])
    else:
        x = tl.join(tl.join(shares[0], shares[2]), tl.join(shares[1], shares[3]))
    return fold(tl.permute(tl.reshape(x, [N, D, GROUP]), 2, 1, 0))


@triton.jit
def squared(h, M: tl.constexpr):
    """|h|^2 [M]: every slot computes it, together with its own h . s_i."""
    wide = tl.broadcast_to(entries(h), [M, h.shape[0], h.shape[1]])
    return over_entries(wide * wide)


@triton.jit
def total(x):
    """Sum a vector [D1, D2] of entries."""
    return tl.sum(tl.sum(x, 0), 0)


@triton.jit
def slots(x):
    """[M] with the shape that broadcasts against a tile."""
    return tl.expand_dims(tl.expand_dims(x, 1), 1)


@triton.jit
def entries(x):
    """[D1, D2] with the shape that broadcasts against a tile."""
    return x[None, :, :]


@triton.jit
def rsqrt(x):
    """1 / sqrt(x) to the last place. The GPU's own instruction is biased, and the bias adds up over tokens."""
    r = tl.rsqrt(x)
    return r + 0.5 * r * (1 - x * r * r)


@triton.jit
def inverse_norm(S):
    """1 / |s_i|; 0 for the empty slots that pad a tile."""
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
    """Soft threshold of a tile, and which slots [M] are not zero after it."""
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
        scale = rescale(alpha, p, squared(h, S.shape[0]))
        return slots(scale * keep) * S + slots(scale * alpha) * entries(h)
    else:
        return slots(keep) * S + slots(alpha) * entries(h)
