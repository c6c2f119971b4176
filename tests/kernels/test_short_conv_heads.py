"""All convolutions of a layer and the unit norm after them in one call: as one function after the other in float64."""

import itertools
import re

import pytest
import torch
from checks import error
from draw import DEVICE, randn
from ops_table import TOLERANCE
from pool import Pool
from torch._inductor.utils import run_and_get_code

from hf_memmix_kernels import naive_short_conv, short_conv
from hf_memmix_kernels.rowwise import naive_unit_heads, unit_heads
from hf_memmix_kernels.short_conv import Convolution, unit_heads_after_convolutions
from hf_memmix_kernels.short_conv import op as short_conv_op

EPS = 1e-6


def draw(batch, widths, head_dims, taps, pairs, dtype):
    """Convolutions with random inputs, taps and states; cos and sin, or None for no rotation."""
    torch.manual_seed(0)
    convolutions = [
        Convolution(
            randn(batch, 1, width, dtype=dtype),
            randn(width, taps, dtype=dtype),
            randn(batch, width, taps - 1, dtype=dtype),
            head_dim,
        )
        for width, head_dim in zip(widths, head_dims, strict=True)
    ]
    return convolutions, *(randn(batch, 1, pairs, dtype=dtype) if pairs else None for _ in "cs")


def expected(convolutions, cos, sin, silu):
    """Outputs and states after the token, in float64."""
    found, activation = [], "silu" if silu else None
    for x, weight, state, dim in convolutions:
        y, after = naive_short_conv(x, weight, initial_state=state, activation=activation)
        if dim:
            y = naive_unit_heads(y.unflatten(-1, (-1, dim)), cos, sin, EPS).flatten(2)
        found.append((y, after))
    return found


# batch, widths, head sizes, taps and pairs that rotate: as in GKA, as in Lattice without a convolution of v, a head
# that is rotated as a whole and a v of more than one block, and heads that fill no block
CASES = {
    "gka": (2, (64, 32, 32), (16, 16, 0), 4, 0),
    "two": (3, (48, 24), (24, 24), 4, 5),
    "whole": (1, (40, 40, 130), (20, 20, 0), 2, 10),
    "wide": (1, (264, 264, 40), (264, 264, 0), 3, 0),
}


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def rows_of_heads():
    """All combinations; in the rows of `make test`, every two values meet."""
    for path, case, paged, dtype in itertools.product(range(2), range(4), range(2), range(4)):
        everyday = DEVICE == "cuda" or dtype == (case + paged + 2 * path) % 4
        values = ("torch", "triton")[path], [*CASES][case], bool(paged), DTYPES[dtype]
        yield pytest.param(*values, marks=() if everyday else pytest.mark.product, id="-".join(map(str, values)))


@torch.no_grad()
@pytest.mark.parametrize(("path", "case", "paged", "dtype"), rows_of_heads())
def test_heads_equal_naive(path, case, paged, dtype, monkeypatch, poisoned_empty):
    monkeypatch.setenv("HF_MEMMIX_BACKEND", path)
    convolutions, cos, sin = draw(*CASES[case], dtype)
    silu, batch = case != "two", len(convolutions[0].x)
    want = expected(convolutions, cos, sin, silu)
    rows, indices = [c.state for c in convolutions], None
    if paged:
        pool = Pool(tuple(rows), list(range(batch))[::-1], batch + 1, gap=8)
        rows, indices = pool.states, torch.arange(batch, dtype=torch.int32, device=DEVICE).flip(0)
        convolutions = [c._replace(state=state) for c, state in zip(convolutions, rows, strict=True)]
    if path == "triton":
        got = unit_heads_after_convolutions(convolutions, cos, sin, EPS, silu, indices)
    else:
        x, weights, states, head_dims = ([c[i] for c in convolutions] for i in range(4))
        y = short_conv_op._heads_op(x, weights, states, head_dims, cos, sin, EPS, silu, indices)
        got = y.split([t.numel() for t in x])
    for y, state, (y_want, state_want) in zip(got, rows, want, strict=True):
        assert y.dtype == dtype and error(y.view(y_want.shape), y_want) <= 2 * TOLERANCE[dtype]
        assert torch.equal((state if indices is None else state[indices.long()]).double(), state_want)


@torch.no_grad()
def test_slices_of_one_projection(monkeypatch):
    """A server computes all products of a layer at once; its slices are read where they are."""
    monkeypatch.setenv("HF_MEMMIX_BACKEND", "triton")
    convolutions, cos, sin = draw(*CASES["gka"], torch.float32)
    want = expected(convolutions, cos, sin, True)
    joined = torch.cat([c.x for c in convolutions], -1).split([c.x.shape[-1] for c in convolutions], -1)
    convolutions = [c._replace(x=x) for c, x in zip(convolutions, joined, strict=True)]
    got = unit_heads_after_convolutions(convolutions, cos, sin, EPS, True, None)
    assert all(error(y, y_want) <= TOLERANCE[torch.float32] for y, (y_want, _) in zip(got, want, strict=True))


@torch.no_grad()
def test_several_steps_are_the_chunk(monkeypatch):
    """The steps round as the functions of a whole sequence do, so in bfloat16, too, the results are the same."""
    monkeypatch.setenv("HF_MEMMIX_BACKEND", "triton")
    convolutions, *_ = draw(*CASES["gka"], torch.bfloat16)
    tokens = [randn(2, 6, c.x.shape[-1], dtype=torch.bfloat16) for c in convolutions]
    chunks = [chunk(x, c) for x, c in zip(tokens, convolutions, strict=True)]
    for t in range(6):
        now = [c._replace(x=x[:, t : t + 1]) for x, c in zip(tokens, convolutions, strict=True)]
        for y, want in zip(unit_heads_after_convolutions(now, None, None, EPS, True, None), chunks, strict=True):
            assert error(y, want[:, t : t + 1]) <= 1e-3


def chunk(x, convolution):
    """The outputs of a whole sequence."""
    y, _ = short_conv(x, convolution.weight, initial_state=convolution.state)
    dim = convolution.head_dim
    return unit_heads(y.unflatten(-1, (-1, dim)), None, None, EPS).flatten(2) if dim else y


def call(convolutions, *options):
    """The function with what torch.compile cannot trace made inside: an argument of a named tuple's type."""
    return unit_heads_after_convolutions([Convolution(*parts) for parts in convolutions], *options)


@pytest.mark.compiles
@torch.no_grad()
@pytest.mark.parametrize(("case", "path"), [("gka", "triton"), ("two", "torch")])
def test_a_compiled_program_calls_one_op_and_copies_no_state(case, path, monkeypatch):
    """On a GPU, in the place of all convolutions and norms. A copy of a state would take longer than the op."""
    monkeypatch.setenv("HF_MEMMIX_BACKEND", path)
    monkeypatch.setattr(short_conv_op, "op_is_faster", lambda x: True)
    convolutions, cos, sin = draw(*CASES[case], torch.float32)
    want = expected(convolutions, cos, sin, True)
    torch._dynamo.reset()
    step = torch.compile(call, fullgraph=True)
    got, (code,) = run_and_get_code(step, [tuple(c) for c in convolutions], cos, sin, EPS, True, None)
    assert code.count("hf_memmix.short_conv_heads.default(") == 1
    made = re.findall(r"empty_strided_(?:cpu|cuda)\(\(([\d, ]*)\)", code)
    shapes = {tuple(int(size) for size in sizes.split(",") if size.strip()) for sizes in made}
    assert not shapes & {tuple(c.state.shape) for c in convolutions}
    for y, c, (y_want, state_want) in zip(got, convolutions, want, strict=True):
        assert error(y, y_want) <= TOLERANCE[torch.float32] and torch.equal(c.state.double(), state_want)
    x, weights, states, head_dims = ([c[i] for c in convolutions] for i in range(4))
    arguments = (x, weights, states, head_dims, cos, sin, EPS, True, None)
    torch.library.opcheck(short_conv_op._heads_op, arguments, test_utils=("test_schema", "test_faketensor"))


class Sharded(torch.Tensor):
    """As DTensor: what its memory holds is not the whole tensor."""


def test_the_layers_run_where_one_call_would_be_wrong(monkeypatch):
    """With gradients, parts of weights, two dtypes, states with gaps, wide heads or rotations, under torch.func."""
    monkeypatch.setenv("HF_MEMMIX_BACKEND", "triton")
    (q, k, v), *_ = draw(*CASES["gka"], torch.float32)

    def runs(*convolutions, angles=(None, None)):
        return unit_heads_after_convolutions(list(convolutions), *angles, EPS, True, None) is not None

    assert not runs(q, k, v)
    with torch.no_grad():
        assert runs(q, k, v)
        assert not runs(q._replace(weight=q.weight.as_subclass(Sharded)), k, v)
        assert not runs(q, k._replace(x=k.x.double()), v)
        assert not runs(q, k, v._replace(state=v.state.mT.contiguous().mT))
        assert not runs(q, k, v, angles=(torch.ones(2, 1, 9, device=DEVICE),) * 2)
        found = []
        torch.func.vmap(lambda x: found.append(runs(q._replace(x=x), k, v)) or x)(q.x[None])
        assert found == [False]
        monkeypatch.setattr(short_conv_op, "MAX_HEAD", 8)
        assert not runs(q, k, v)


@torch.no_grad()
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.compiles)], ids=["kernel", "op"])
def test_states_that_a_step_refuses_stay_as_they_were(compiled, monkeypatch):
    """The kernel would read pages with gaps, and indices with gaps, as if these had none, and change other pages."""
    monkeypatch.setenv("HF_MEMMIX_BACKEND", "triton")
    monkeypatch.setattr(short_conv_op, "op_is_faster", lambda x: True)
    convolutions, *_ = draw(*CASES["gka"], torch.float32)
    pools = [randn(10, *c.state.shape[1:], dtype=torch.float32) for c in convolutions]
    gaps = [pool.mT.contiguous().mT for pool in pools]
    every_other = torch.tensor([3, 9, 1, 9], device=DEVICE)[::2]
    short = [pool[:1] for pool in pools]
    torch._dynamo.reset()
    step = torch.compile(call, fullgraph=True) if compiled else call
    cases = [(pools, every_other, "contiguous int32"), (gaps, every_other.contiguous(), "must be contiguous")]
    cases += [(pools, every_other[:1], "contiguous int32"), (short, None, "state must be")]
    for states, indices, message in cases:
        before = [state.clone() for state in states]
        paged = [tuple(c._replace(state=state)) for c, state in zip(convolutions, states, strict=True)]
        with pytest.raises((ValueError, torch._dynamo.exc.Unsupported), match=None if compiled else message):
            step(paged, None, None, EPS, True, indices)
        assert all(torch.equal(a, b) for a, b in zip(states, before, strict=True))
