"""The properties that every op must have, forward and backward, on both paths. ops_table.py has one row per op."""

import dataclasses
import functools
import itertools

import pytest
import torch
from checks import assert_close, error, outputs_and_gradients
from ops_table import DEVICE, OPS, Shape
from paths import PATHS, VARIANTS, everyday, on_paths, parametrize, quick
from pool import Pool

# lengths around the chunk size of 64, head sizes that are not powers of two, grouped heads
SHAPES = [
    Shape(2, 1, 2, 2, 32, 32),
    Shape(1, 17, 4, 2, 48, 32),
    Shape(1, 63, 2, 1, 32, 64),
    Shape(2, 64, 1, 1, 64, 48),
    Shape(1, 65, 1, 1, 96, 96),
    Shape(1, 130, 2, 1, 32, 40),
    Shape(1, 66, 1, 1, 128, 128),
]
LARGEST = Shape(1, 20, 1, 1, 256, 256)
SMALL = Shape(1, 70, 2, 1, 32, 32)

every_op = pytest.mark.parametrize("op", OPS, ids=str)
everywhere, quickly = on_paths(), on_paths(quick)


def within(op, dtype=torch.float32):
    return lambda name: op.tolerance(dtype, grad=name.startswith("d "))


def rows_of(op, path: str) -> list[tuple[Shape, bool]]:
    """Shapes, and whether a state is carried in. On a CPU each row differs from the others in what it reaches."""
    if DEVICE == "cuda":
        return [(shape, carried) for shape in [*SHAPES, LARGEST] for carried in (False, True)]
    one, grouped, short, chunk, _, several, _ = SHAPES
    if op.name in VARIANTS:
        return [(grouped, True)] + [(several, True)] * (path == "torch")
    if path == "torch":
        return [(one, False), (grouped, True), (short, False), (chunk, False), (several, True), (LARGEST, True)]
    if path == "native":
        return [(one, False), (grouped, True), (several, True)]
    # few tokens where heads are wide; token by token, the shape of 65 crosses a checkpoint
    longest = (Shape(1, 65, 1, 1, 32, 32), False) if op.sequential else (several, True)
    widest = Shape(1, 5, 1, 1, 256, 256) if op.name in ("gla", "gka") else Shape(1, 5, 1, 1, 128, 128)
    return [(one, False), (grouped, True), (short, False), longest, (widest, True)]


def contract_rows() -> list[tuple]:
    found = []
    for op, path in itertools.product(OPS, PATHS):
        for shape, carried in rows_of(op, path):
            often = carried and shape == SHAPES[1] and (path != "triton" or op.name in ("gla", "coffee"))
            found.append((op, shape, "carried" if carried else "fresh", path, often))
    return found


@parametrize(("op", "shape", "start", "backend"), contract_rows())
def test_equals_naive(op, shape, start, backend):
    carried = start == "carried"
    inputs, state, weights, want = reference(op.name, shape, carried)
    got = outputs_and_gradients(op, op.fast, inputs, state, weights=weights)
    assert_close(got, want, within(op))


@functools.cache  # the paths come one after the other
def reference(op_name: str, shape: Shape, carried: bool):
    """Inputs, first state, weights of the loss and the results in float64, the same for all paths."""
    op, weights = next(op for op in OPS if op.name == op_name), []
    torch.manual_seed(0)
    inputs = op.draw(shape, torch.float32)
    state = op.draw_state(shape, shape.B, torch.float32) if carried else None
    return inputs, state, weights, outputs_and_gradients(op, op.naive, inputs, state, weights=weights)


@every_op
def test_each_gradient_alone(op):
    """If only one input requires a gradient, the gradient is the same as if all inputs require one."""
    shape = Shape(1, 70, 2, 1, 8, 8)  # 70 tokens, so that forward keeps more than one state for backward
    inputs, state = op.draw(shape, torch.float64), op.draw_state(shape, 1, torch.float64)
    weights = []

    def gradients(*names):
        leaves = {name: t.clone().requires_grad_(name in names) for name, t in inputs.items()}
        start = tuple(t.clone().requires_grad_(f"state {i}" in names) for i, t in enumerate(state))
        o, final = op.run(op.fast, leaves, start)
        outputs = [o, *final]
        weights.extend(torch.randn_like(t) for t in outputs if len(weights) < len(outputs))
        loss = sum((weight * t).sum() for weight, t in zip(weights, outputs, strict=True))
        found = leaves | {f"state {i}": t for i, t in enumerate(start)}
        grads = torch.autograd.grad(loss, [found[name] for name in names], allow_unused=True)
        return dict(zip(names, grads, strict=True))

    names = [name for name, t in inputs.items() if t.is_floating_point()]
    names += [f"state {i}" for i, t in enumerate(state) if t.is_floating_point()]
    for name, expected in gradients(*names).items():
        (alone,) = gradients(name).values()
        assert (alone is None) == (expected is None), name
        if expected is not None:
            torch.testing.assert_close(alone, expected, msg=name)


# native code has no float64, and a GPU's Triton kernels never get it; the variants of GKA run the same solver
IN_FLOAT64 = [op for op in OPS if op.name not in ("gka_refined", "gka_sketched")]


@on_paths(ops=IN_FLOAT64, paths=("torch",) if DEVICE == "cuda" else ("torch", "triton"))
def test_float64(op, backend):
    """In float64, where rounding is small: outputs, states and every gradient, on each path that accepts float64."""
    op = dataclasses.replace(op, options=op.converged)
    inputs, state = op.draw(SMALL, torch.float64), op.draw_state(SMALL, 1, torch.float64)
    weights = []
    want = outputs_and_gradients(op, op.naive, inputs, state, weights=weights)
    got = outputs_and_gradients(op, op.fast, inputs, state, weights=weights)
    assert {t.dtype for t in got.values()} == {torch.float64}
    assert_close(got, want, within(op, torch.float64))


def low_precision_rows() -> list[tuple]:
    """The interpreter multiplies no bfloat16, and some rows make no promise in 16 bits for their kernels."""
    rows = [(op, dtype, path) for path in PATHS for dtype in (torch.float16, torch.bfloat16) for op in OPS]
    rows = [row for row in rows if row[2] != "triton" or row[0].low_precision]
    if DEVICE == "cpu":
        rows = [(op, dtype, path) for op, dtype, path in rows if op.name not in VARIANTS]
        rows = [row for row in rows if row[1] == (torch.float16 if row[2] == "triton" else torch.bfloat16)]
    return [(*row, everyday(row[0], row[2]) and row[0].name != "gka") for row in rows]


@parametrize(("op", "dtype", "backend"), low_precision_rows())
def test_low_precision(op, dtype, backend):
    """With inputs of 16 bits, o and gradients have the inputs' dtype and the states are float32."""
    shape = SHAPES[2]
    inputs, state, weights = op.draw(shape, dtype), op.draw_state(shape, shape.B, dtype), []
    want = outputs_and_gradients(op, op.naive, inputs, state, weights=weights)
    got = outputs_and_gradients(op, op.fast, inputs, state, weights=weights)
    assert got["o"].dtype == dtype
    assert all(got[f"state{i}"].dtype == s.dtype for i, s in enumerate(state))
    assert all(got[f"d {name}"].dtype == t.dtype for name, t in inputs.items())
    assert_close(got, want, within(op, dtype))


def in_parts(op, cuts):
    """`op.fast` called once per part of the sequence; each part starts from the final state of the part before it."""

    def split(**leaves):
        parts, state = [], leaves.pop("initial_state")
        leaves.pop("cu_seqlens")
        options = {name: leaves.pop(name) for name in op.options}
        for start, stop in zip(cuts[:-1], cuts[1:], strict=True):
            o, state = op.fast(**op.tokens(leaves, slice(start, stop)), **options, initial_state=state)
            parts.append(o)
        return torch.cat(parts, 1), state

    return split


@everywhere
def test_split_with_carried_state_equals_whole(op, backend):
    """Outputs, final state and all gradients are equal; gradients reach earlier parts through the carried states."""
    inputs, state, weights = op.draw(SMALL, torch.float32), op.draw_state(SMALL, 1, torch.float32), []
    want = outputs_and_gradients(op, op.fast, inputs, state, weights=weights)
    got = outputs_and_gradients(op, in_parts(op, (0, 1, 30, SMALL.T)), inputs, state, weights=weights)
    assert_close(got, want, within(op))


@pytest.mark.parametrize("options", [{"num_iterations": 8}, {"refinement": (3, 4)}], ids=str)
@on_paths(ops=[op for op in OPS if op.name == "gka"])
def test_gka_gradients_of_few_iterations_do_not_depend_on_splits(op, options, backend):
    """With few iterations the solver has not converged. The gradients still do not depend on splits of the
    sequence.
    """
    op = dataclasses.replace(op, options=options)
    shape, dtype = SMALL._replace(T=150), torch.float64 if backend == "torch" else torch.float32
    tolerance = 1e-12 if backend == "torch" else op.tolerance(dtype)
    inputs, state, weights = op.draw(shape, dtype), op.draw_state(shape, 1, dtype), []
    want = outputs_and_gradients(op, op.fast, inputs, state, weights=weights)
    ways = {"split": in_parts(op, (0, 1, 50, shape.T))}
    if backend == "torch":  # the Triton path has one chunk length
        ways["chunks of 16"] = lambda **x: op.fast(**x, chunk_size=16)
    for fn in ways.values():
        got = outputs_and_gradients(op, fn, inputs, state, weights=weights)
        assert_close(got, want, lambda name: tolerance)


@quickly
def test_steps_equal_chunks(op, backend):
    shape = SMALL._replace(B=2, T=9, H=4, Hk=2, D=48)
    inputs, state = op.draw(shape, torch.float32), op.draw_state(shape, 2, torch.float32)
    want, want_state = op.run(op.fast, inputs, state)
    state = tuple(s.clone() for s in state)
    got = torch.cat([op.step(op, op.tokens(inputs, slice(t, t + 1)), state) for t in range(shape.T)], 1)
    assert error(got, want) <= op.tolerance(torch.float32)
    assert all(error(a, b) <= op.tolerance(torch.float32) for a, b in zip(state, want_state, strict=True))


# with the second gap, no state begins at a multiple of 16 bytes
@pytest.mark.parametrize(("gap", "index_dtype"), [(64, torch.int32), (24, torch.int64)], ids=["64-int32", "24-int64"])
@quickly
def test_steps_on_pages(op, gap, index_dtype, backend):
    """Two steps on pages, in two orders of the rows, equal steps on contiguous states and the float64 reference.

    Two padding rows share a page full of NaN. No byte of other pages or between the states changes.
    """
    shape = Shape(5, 2, 4, 2, 48, 32)
    inputs, start = op.draw(shape, torch.float32), op.draw_state(shape, 3, torch.float32)
    garbage, where = 0, [4, 1, 3]
    pool, mine = Pool(start, where, pages=6, gap=gap), tuple(s.clone() for s in start)
    untouched = pool.outside([garbage, *where])
    outputs = []
    for t, order in enumerate(([0, 1, 2], [2, 0, 1])):
        one = op.tokens(inputs, slice(t, t + 1))
        indices = torch.tensor([*(where[row] for row in order), garbage, garbage], dtype=index_dtype, device=DEVICE)
        got = op.step(op, op.rows(one, [*order, 3, 4]), pool.states, indices)
        want = op.step(op, op.rows(one, slice(0, 3)), mine)
        assert error(got[:3], want[order]) <= op.tolerance(torch.float32)
        outputs.append(want)
    assert all(
        error(pages[where], state) <= op.tolerance(torch.float32)
        for pages, state in zip(pool.states, mine, strict=True)
    )
    assert torch.equal(pool.outside([garbage, *where]), untouched)
    truth, final = op.run(op.naive, op.rows(inputs, slice(0, 3)), start)
    assert error(torch.cat(outputs, 1), truth) <= op.tolerance(torch.float32)
    assert all(
        error(pages[where], state) <= op.tolerance(torch.float32)
        for pages, state in zip(pool.states, final, strict=True)
    )


@everywhere
def test_packed_equals_separate(op, backend):
    inputs = op.draw(SMALL, torch.float32)
    bounds = [0, 0, 1, 1, 40, SMALL.T, SMALL.T]  # empty ones first, between and last, and one token
    state = op.draw_state(SMALL, 6, torch.float32)

    def separate(**leaves):
        states, _ = leaves.pop("initial_state"), leaves.pop("cu_seqlens")
        options = {name: leaves.pop(name) for name in op.options}
        states = states if isinstance(states, tuple) else (states,)
        outputs, finals = [], []
        for n, (start, stop) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
            own = tuple(s[n : n + 1] for s in states)
            if start < stop:
                part = op.tokens(leaves, slice(start, stop))
                o, own = op.fast(**part, **options, initial_state=own if len(own) > 1 else own[0])
                outputs.append(o)
            finals.append(own if isinstance(own, tuple) else (own,))
        return torch.cat(outputs, 1), tuple(torch.cat(parts) for parts in zip(*finals, strict=True))

    weights, dtypes = [], [torch.int32, torch.int64]
    want = outputs_and_gradients(op, separate, inputs, state, weights=weights)
    if backend == "triton" and DEVICE == "cpu":  # where each takes seconds, the ops have them in turn
        dtypes = [dtypes[OPS.index(op) % 2]]
    for dtype in dtypes:
        cu_seqlens = torch.tensor(bounds, dtype=dtype, device=DEVICE)
        got = outputs_and_gradients(op, op.fast, inputs, state, cu_seqlens, weights=weights)
        assert_close(got, want, within(op))


@on_paths(quick, [op for op in OPS if op.silence])
def test_padding_writes_nothing(op, backend):
    """Rows padded on the left or on both sides equal the rows without padding; gradients at padded tokens are zero."""
    shape = SMALL._replace(B=2)
    mask = torch.zeros(2, shape.T, dtype=torch.bool, device=DEVICE)
    mask[0, :21] = mask[1, :5] = mask[1, 33:] = True
    leaves = {name: t.requires_grad_() for name, t in op.draw(shape, torch.float32).items()}
    o, final = op.run(op.fast, op.silence(leaves, mask))
    assert torch.isfinite(o).all()
    # outputs at padded tokens are not used
    loss = o.masked_fill(mask.view(*mask.shape, *[1] * (o.dim() - 2)), 0).square().sum()
    loss = loss + sum(s.square().sum() for s in final)
    grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    shared = dict.fromkeys(op.parameters, 0)
    for b in range(2):
        own = {name: t.detach() if name in shared else t.detach()[b : b + 1, ~mask[b]] for name, t in leaves.items()}
        alone = {name: t.requires_grad_() for name, t in own.items()}
        o_alone, final_alone = op.run(op.fast, alone)
        assert error(o[b : b + 1, ~mask[b]], o_alone) <= op.tolerance(torch.float32)
        assert all(
            error(s[b : b + 1], a) <= op.tolerance(torch.float32) for s, a in zip(final, final_alone, strict=True)
        )
        loss = o_alone.square().sum() + sum(s.square().sum() for s in final_alone)
        alone_grads = dict(zip(alone, torch.autograd.grad(loss, list(alone.values())), strict=True))
        shared = {name: total + alone_grads[name] for name, total in shared.items()}
        for name, grad in grads.items():
            if name in shared:
                continue
            assert error(grad[b : b + 1, ~mask[b]], alone_grads[name]) <= op.tolerance(torch.float32, grad=True), name
            assert not grad[b, mask[b]].any(), name  # NaN counts as true
    for name, total in shared.items():
        assert error(grads[name], total) <= op.tolerance(torch.float32, grad=True), name


@everywhere
def test_is_causal(op, backend):
    inputs = op.draw(SMALL, torch.float32)
    changed = {name: t if name in op.parameters else t.clone() for name, t in inputs.items()}
    for name, t in changed.items():
        if name not in op.parameters:
            t[:, 40:] *= 0.5
    o, changed_o = (op.run(op.fast, x)[0] for x in (inputs, changed))
    assert torch.equal(o[:, :40], changed_o[:, :40])


@pytest.mark.product_rows(r"(lattice_|gka_sketched)")  # variants of an op
@pytest.mark.parametrize("op", [op for op in OPS if "refinement" not in op.options], ids=str)
def test_gradcheck_of_naive(op):
    """The gradients of the reference by autograd equal finite differences in float64."""
    op = dataclasses.replace(op, options=op.smooth)
    shape = Shape(1, 4, 2, 1, 3, 2)
    inputs, state = op.draw(shape, torch.float64), op.draw_state(shape, 1, torch.float64)
    names = list(inputs)

    def fn(*tensors):
        given, state = dict(zip(names, tensors, strict=False)), tensors[len(names) :]
        o, final = op.run(op.naive, given, state)
        return o, *final

    assert torch.autograd.gradcheck(fn, [t.requires_grad_() for t in (*inputs.values(), *state)])


DECAYED = [op for op in OPS if "log_decay" in op.draw(SMALL, torch.float32)]


# too long for the interpreter; the reference of GKA solves per token
@on_paths(
    lambda op, path: everyday(op, path) and op.name != "gka",
    [op for op in DECAYED if op.name not in VARIANTS],
    PATHS[: 2 + (DEVICE == "cuda")],
)
def test_gradient_of_log_decay_stays_local(op, backend):
    """The gradient of the decay is summed within chunks, so its error does not grow with the length of the
    sequence.
    """
    shape = Shape(1, 320, 1, 1, 32, 32)
    inputs, weights = op.draw(shape, torch.float32), []
    inputs["log_decay"] *= 0.01
    want = outputs_and_gradients(op, op.naive, inputs, None, weights=weights)
    got = outputs_and_gradients(op, op.fast, inputs, None, weights=weights)
    assert error(got["d log_decay"], want["d log_decay"]) <= op.tolerance(torch.float32, grad=True)


@pytest.mark.parametrize("decay", [0.0, -1e4], ids=["none", "total"])  # test_hard_inputs.py has those between
@on_paths(lambda op, path: everyday(op, path) and op.name != "gka", DECAYED)
def test_extreme_decay(op, decay, backend):
    inputs = op.draw(SMALL, torch.float32)
    inputs["log_decay"].fill_(decay)
    weights = []
    want = outputs_and_gradients(op, op.naive, inputs, None, weights=weights)
    got = outputs_and_gradients(op, op.fast, inputs, None, weights=weights)
    if decay < 0:
        # zero in exact arithmetic; in floats it is the rounding error of sums of order ten
        assert got.pop("d log_decay").abs().max() <= 1e-4
        want.pop("d log_decay")
    assert_close(got, want, within(op))


@on_paths(ops=DECAYED)
def test_tokens_that_forget(op, backend):
    """A log decay of -inf among others: nothing before the token counts, and what comes after it is as exact."""
    check_decays(op, slice(3, None, 30), float("-inf"))


@on_paths(ops=[op for op in DECAYED if op.name.startswith("gated_delta")])
def test_decays_that_meet_in_a_block(op, backend):
    """Pairs of tokens of a block of 16 meet inside it, but those of a chunk of 32 do not meet at its middle."""
    check_decays(op, slice(None), -3.9)


def check_decays(op, tokens: slice, decay: float):
    inputs, weights = op.draw(SMALL, torch.float32), []
    inputs["log_decay"][:, tokens] = decay
    want = outputs_and_gradients(op, op.naive, inputs, None, weights=weights)
    got = outputs_and_gradients(op, op.fast, inputs, None, weights=weights)
    assert_close(got, want, within(op))
