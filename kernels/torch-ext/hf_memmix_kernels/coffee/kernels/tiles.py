"""What the COFFEE kernels share: lanes, gates and their derivatives, and one update of the states.

A lane is one (feature, split) of a sequence. It holds NS states of the feature in registers: state j = i * S + split
is element i of a tuple. S adjacent lanes hold all states of a feature. All tensors are one-dimensional over lanes, so
no layout is ever converted. C x costs NS products in the lane and log2(S) shuffles.
"""

import triton
import triton.language as tl

# forms of the gate, s = gate * phi: phi = sigmoid(w x), sigmoid(w u), w x, 1; the even ones feed the state back
FORMS = {"sigmoid": 0, "input": 1, "linear": 2, "token": 3}
SIGMOID = tl.constexpr(0)
INPUT = tl.constexpr(1)
LINEAR = tl.constexpr(2)

LOG2E = tl.constexpr(1.4426950408889634)
# 1 + 2^z is finite up to here
LARGEST_FINITE = tl.constexpr(126.0)

# MATH: special functions as instructions of the GPU (odd) or portable (even). INSTRUCTIONS, for 16-bit inputs, takes
# the GPU's tanh. From REFINED on, for float32 inputs, a sigmoid is 1 / (1 + 2^z) with -w log2(e) in two parts and an
# exact reciprocal: an error of the one is the same in every token and adds up over them
PORTABLE = 0
INSTRUCTIONS = tl.constexpr(1)
REFINED = tl.constexpr(2)


@triton.jit
def exp2(x, MATH: tl.constexpr):
    """2^x, on a GPU in one instruction of the special function unit."""
    if MATH % 2 == 1:
        y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        y = tl.exp2(x)
    return y


@triton.jit
def reciprocal(x, MATH: tl.constexpr):
    """1 / x, on a GPU in one instruction, to one unit in the last place; REFINED by a Newton step, for finite x."""
    if MATH % 2 == 1:
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
        if MATH >= REFINED:
            y += y * (1 - x * y)
    else:
        y = 1 / x
    return y


@triton.jit
def argument(x, MATH: tl.constexpr):
    """What `sigmoid` takes for x."""
    return x * 0.5 if MATH == INSTRUCTIONS else x * -LOG2E


@triton.jit
def sigmoid(z, MATH: tl.constexpr):
    """1 / (1 + e^-x) of z = `argument`(x): (1 + tanh z) / 2 by one special function, or 1 / (1 + 2^z) by two."""
    if MATH == INSTRUCTIONS:
        t = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [z], tl.float32, True, 1)
        s = 0.5 + 0.5 * t
    else:
        if MATH >= REFINED:
            z = tl.minimum(z, LARGEST_FINITE)
        s = reciprocal(1 + exp2(z, MATH), MATH)
    return s


@triton.jit
def sigmoids(z, NS: tl.constexpr, MATH: tl.constexpr):
    """`sigmoid` of NS values."""
    s = ()
    for i in tl.static_range(NS):
        s = s + (sigmoid(z[i], MATH),)
    return s


@triton.jit
def gates(x, u, w, NS: tl.constexpr, FORM: tl.constexpr, MATH: tl.constexpr):
    """phi of NS states; for the two sigmoids w is `scaled`."""
    z = ()
    for i in tl.static_range(NS):
        if FORM % 2 == 0:
            of = x[i]
        elif FORM == INPUT:
            of = u
        else:
            of = x[i] * 0 + 1
        if FORM > LINEAR:
            z = z + (of,)
        elif FORM <= INPUT and MATH >= REFINED:
            z = z + (w[i] * of + w[NS + i] * of,)
        else:
            z = z + (w[i] * of,)
    if FORM <= INPUT:
        z = sigmoids(z, NS, MATH)
    return z


@triton.jit
def over_states(x, L: tl.constexpr, S: tl.constexpr):
    """Sum over the S lanes of every feature, known to all of them."""
    if S > 1:
        y = tl.sum(tl.reshape(x, [L // S, S]), 1)
        y = tl.reshape(tl.broadcast_to(y[:, None], [L // S, S]), [L])
    else:
        y = x
    return y


@triton.jit
def dot(x, c, NS: tl.constexpr, L: tl.constexpr, S: tl.constexpr):
    """c . x over all states of every feature."""
    y = x[0] * c[0]
    for i in tl.static_range(1, NS):
        y += x[i] * c[i]
    return over_states(y, L, S)


@triton.jit
def load_states(p, offset, mask, stride, NS: tl.constexpr, ACC: tl.constexpr, limit):
    """Elements `offset + i * stride` for i < NS, zero from `limit` on: one state tensor or parameter of a lane."""
    x = ()
    for i in tl.static_range(NS):
        x = x + (tl.load(p + offset + i * stride, mask=mask & (i * stride < limit), other=0).to(ACC),)
    return x


@triton.jit
def store_states(p, offset, mask, stride, x, NS: tl.constexpr, limit):
    for i in tl.static_range(NS):
        tl.store(p + offset + i * stride, x[i].to(p.dtype.element_ty), mask=mask & (i * stride < limit))


@triton.jit
def scaled(w, NS: tl.constexpr, FORM: tl.constexpr, MATH: tl.constexpr):
    """`argument` of w where phi is a sigmoid, REFINED as NS rounded values and NS remainders; w elsewhere."""
    z = w
    if FORM <= INPUT:
        z, rest = (), ()
        for i in tl.static_range(NS):
            if MATH >= REFINED:
                exact = w[i].to(tl.float64) * -LOG2E
                z = z + (exact.to(tl.float32),)
                rest = rest + ((exact - z[i].to(tl.float64)).to(tl.float32),)
            else:
                z = z + (argument(w[i], MATH),)
        z = z + rest
    return z


@triton.jit
def load_rows(p, offset, stride, mask, left, P: tl.constexpr, ACC: tl.constexpr, CUT: tl.constexpr):
    """P rows of a per-token tensor; with CUT zeros from row `left` on."""
    rows = ()
    for k in tl.static_range(P):
        if CUT:
            rows = rows + (tl.load(p + offset + k * stride, mask=mask & (k < left), other=0).to(ACC),)
        else:
            rows = rows + (tl.load(p + offset + k * stride, mask=mask, other=0).to(ACC),)
    return rows


@triton.jit
def load_gates(gate, offset, stride, mask, left, P: tl.constexpr, ACC: tl.constexpr, GATE: tl.constexpr):
    """The gate's factors of P tokens, 0 from row `left` on; without a gate, P values that are never read."""
    rows = ()
    if GATE:
        rows = load_rows(gate, offset, stride, mask, left, P, ACC, True)
    else:
        for _k in tl.static_range(P):
            rows = rows + (1,)
    return rows


@triton.jit
def advance(
    x, u, factor, lam, w,
    NS: tl.constexpr, FORM: tl.constexpr, GATE: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """One token: the states after it and phi; GATE says whether there is a gate factor."""
    phi = gates(x, u, w, NS, FORM, MATH)
    y = ()
    for i in tl.static_range(NS):
        v = lam[i] * x[i] + u
        s = phi[i]
        if GATE:
            s = s * factor
        y = y + (x[i] + s * v,)
    return y, phi


@triton.jit
def advance_short(x, z, u, lam, w, NS: tl.constexpr, MATH: tl.constexpr):
    """`advance` of phi = sigmoid(w x) given z = w x; also the next z, without waiting for the next x."""
    phi = sigmoids(z, NS, MATH)
    y, after = (), ()
    for i in tl.static_range(NS):
        v = lam[i] * x[i] + u
        y = y + (x[i] + phi[i] * v,)
        after = after + (w[i] * x[i] + phi[i] * (w[i] * v),)
    return y, after
