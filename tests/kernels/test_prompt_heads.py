"""q, k and v of a prompt in one call of kernels: as in float64, and bit by bit as one function after the other."""

import inspect

import pytest
import torch
from checks import error
from draw import DEVICE, randn
from ops_table import TOLERANCE
from torch._subclasses import FakeTensorMode

from hf_memmix_kernels import naive_short_conv, short_conv
from hf_memmix_kernels.rowwise import naive_unit_heads, unit_heads
from hf_memmix_kernels.short_conv import Convolution, prompt_heads
from hf_memmix_kernels.short_conv import op as short_conv_op

EPS, HEAD = 1e-6, 8
HALF = (torch.float16, torch.bfloat16)
tape = pytest.importorskip("hf_memmix_kernels._tape")


class Subclass(torch.Tensor):
    """A tensor that may hold its elements elsewhere."""


@pytest.fixture(autouse=True)
def triton(monkeypatch):
    monkeypatch.setenv("HF_MEMMIX_BACKEND", "triton")


def launch():
    return short_conv_op.module(".launch_prompt", short_conv_op.__package__)


def draw(dtype, with_v: bool, with_state: bool, with_angles: bool):
    """The convolutions of 2 x 9 tokens, with twice as many heads of q as of k, and cos and sin, or None."""
    widths = (32, 16, 16)
    wide = randn(2, 9, sum(widths), dtype=dtype).split(widths, -1)  # not contiguous
    convolutions = []
    for x, name, width in zip(wide, "qkv", widths, strict=True):
        has = name != "v" or with_v
        state = randn(2, width, 3, dtype=dtype) if has and with_state else None
        weight = randn(width, 4, dtype=dtype) if has else None
        convolutions.append(Convolution(x, weight, state, 0 if name == "v" else HEAD))
    angles = randn(2, 9, 3, dtype=dtype) if with_angles else None
    return convolutions, *((None, None) if angles is None else (angles.cos(), angles.sin()))


def apart(convolutions, cos, sin, convolve=short_conv, norm=unit_heads):
    """One function after the other."""
    outputs, states = [], []
    for x, weight, state, head_dim in convolutions:
        y, final = (x, None) if weight is None else convolve(x, weight, initial_state=state, activation="silu")
        outputs.append(norm(y.unflatten(-1, (-1, head_dim)), cos, sin, EPS) if head_dim else y)
        states.append(final)
    return *outputs, *states


@torch.no_grad()
@pytest.mark.parametrize("case", [(True, False, True), (False, True, False), (True, True, True)], ids=str)
@pytest.mark.parametrize(
    "dtype", [torch.float32, *(pytest.param(x, marks=pytest.mark.product) for x in HALF)], ids=str
)
def test_values(dtype, case, monkeypatch):
    """The first call is without a tape, the second writes one, and the third plays it."""
    monkeypatch.setattr(tape, "ENABLED", True)
    tape.forget()
    for count in range(3):
        given = draw(dtype, *case)
        found = prompt_heads(*given, EPS, True)
        if count == 1:
            continue
        exact = apart(*given, naive_short_conv, naive_unit_heads)
        for got, same, want in zip(found, apart(*given), exact, strict=True):
            assert (got is None) == (want is None) == (same is None)
            if got is not None:
                assert torch.equal(got, same) and got.dtype == dtype
                assert error(got, want) <= 2 * TOLERANCE[dtype]
    written = [play for played, _ in tape._tables for play in played.values() if not isinstance(play, str)]
    arguments = len(inspect.signature(launch().prompt_heads_triton).parameters)
    assert arguments in [play.arguments for play in written]  # a tape of the whole call
    tape.forget()


def misfits():
    """Arguments for which one call would be wrong, by name."""
    (q, k, v), cos, sin = draw(torch.float32, True, True, True)
    whole, angles = [q, k, v], (cos, sin)

    def ones(*shape):
        return torch.ones(*shape, device=DEVICE)

    def with_taps(taps):
        return k._replace(weight=ones(16, taps), state=None)

    yield "state of another batch", [q, k, v._replace(state=v.state[:1])], angles
    yield "another dtype", [q, k, v._replace(x=v.x.double())], angles
    yield "another batch", [q, k._replace(x=k.x[:1], state=None), v], angles
    yield "another length", [q, k._replace(x=k.x[:, :1]), v], angles
    yield "two dimensions", [q, k, v._replace(x=v.x[:, 0], state=None)], angles
    yield "q of two dimensions", [q._replace(x=q.x[:, 0], state=None), k, v], angles
    yield "no tokens", [c._replace(x=c.x[:, :0]) for c in whole], (cos[:, :0], sin[:, :0])
    yield "weight of fewer channels", [q, k._replace(weight=k.weight[:8]), v], angles
    yield "weight of a Conv1d", [q, k._replace(weight=k.weight[:, None]), v], angles
    yield "one tap", [q, with_taps(1), v], angles
    yield "too many taps", [q, with_taps(short_conv_op.MAX_TAPS + 1), v], angles
    yield "state without weight", [q, k, v._replace(weight=None)], angles
    yield "q without weight", [q._replace(weight=None, state=None), k, v], angles
    yield "k without weight", [q, k._replace(weight=None, state=None), v], angles
    yield "two head sizes", [q, k._replace(head_dim=4), v], angles
    yield "head size that does not divide", [c._replace(head_dim=12) for c in (q, k)] + [v], angles
    yield "no heads", [c._replace(head_dim=0) for c in whole], angles
    yield "heads of v", [q, k, v._replace(head_dim=HEAD)], angles
    yield "angles of another batch", whole, (cos[:1], sin[:1])
    yield "too many angles", whole, (ones(2, 9, 5), ones(2, 9, 5))
    yield "no angles", whole, (cos[..., :0], sin[..., :0])
    yield "fewer angles in sin", whole, (cos, sin[..., :2])
    yield "angles of two dimensions", whole, (cos[:, 0], sin[:, 0])
    yield "cos alone", whole, (cos, None)
    yield "sin alone", whole, (None, sin)


def test_the_functions_run_where_one_call_would_be_wrong(monkeypatch):
    """With gradients, under torch.func and dispatch modes, for tensor subclasses and for arguments that do not fit."""
    given = draw(torch.float32, True, True, True)

    def runs(convolutions, cos, sin):
        return prompt_heads(convolutions, cos, sin, EPS, True) is not None

    assert not runs(*given)
    with torch.no_grad():
        (q, k, v), cos, sin = given
        assert runs(*given)
        assert [name for name, convolutions, angles in misfits() if runs(convolutions, *angles)] == []
        found = []
        torch.func.vmap(lambda x: found.append(runs([q._replace(x=x), k, v], cos, sin)) or x)(q.x[None])
        assert found == [False]
        with FakeTensorMode():
            assert not runs(*given)
        for name in ("x", "weight", "state"):
            changed = k._replace(**{name: getattr(k, name).as_subclass(Subclass)})
            assert not runs([q, changed, v], cos, sin)
        assert not runs([q, k, v], cos, sin.as_subclass(Subclass))
        with monkeypatch.context() as m:
            m.setattr(short_conv_op, "MAX_HEAD", 0)
            assert not runs(*given)
        assert runs(*given)
        monkeypatch.setenv("HF_MEMMIX_BACKEND", "torch")
        assert not runs(*given)


OPTIONS = [{"use_v_conv": False, "use_rope": True}, {"conv_activation": None, "qk_norm": "full"}, {"sketch_dim": 4}]


@pytest.mark.parametrize("options", [{}, *(pytest.param(x, marks=pytest.mark.product) for x in OPTIONS)], ids=str)
def test_a_layer_of_gka(options, monkeypatch):
    """A prompt, whole and in two parts: the same bits with the call and without it. It does not run for padded and
    packed prompts, nor with gradients.
    """
    from core.mixer_variants import made

    layer, x, rotary = made("gka", options)
    layer, x, rotary = layer.float().to(DEVICE), x.float().to(DEVICE), tuple(t.float().to(DEVICE) for t in rotary)
    calls, run = [], launch().prompt_heads_triton
    monkeypatch.setattr(launch(), "prompt_heads_triton", lambda *a: calls.append(1) or run(*a))

    def inputs():
        tokens = layer.project(x, rotary)
        first = {name: t[:, :5] for name, t in tokens.items()}
        rest = {name: t[:, 5:] for name, t in tokens.items()}
        *whole, _ = layer.memory_inputs(tokens, None, None, None)
        *some, states = layer.memory_inputs(first, None, None, None)
        *more, new = layer.memory_inputs(rest, {k: s.double() for k, s in states.items()}, None, None)
        return [*whole, *some, *more, *states.values(), *new.values()]

    with torch.no_grad():
        got = inputs()
        assert len(calls) == 3
        tokens = layer.project(x, rotary)
        layer.memory_inputs(tokens, None, torch.tensor([13, 4, 7], device=DEVICE), None)
        one, bounds = {name: t[:1] for name, t in tokens.items()}, [0, 6, 13]
        layer.memory_inputs(one, None, None, torch.tensor(bounds, dtype=torch.int32, device=DEVICE))
        assert len(calls) == 3  # neither for padded rows nor for packed ones
        monkeypatch.setattr(short_conv_op, "MAX_HEAD", 0)
        want = inputs()
    assert len(calls) == 3
    monkeypatch.undo()
    monkeypatch.setenv("HF_MEMMIX_BACKEND", "triton")
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and a.stride() == b.stride() and torch.equal(a, b)
    loss = sum(t.square().sum() for t in layer.memory_inputs(layer.project(x, rotary), None, None, None)[:3])
    loss.backward()
    assert layer.q_conv1d.weight.grad.abs().max() > 0


@torch.no_grad()
def test_hooks_of_a_convolution_run():
    from core.mixer_variants import made

    layer, x, rotary = made("gka", {})
    layer, x = layer.float().to(DEVICE), x.float().to(DEVICE)
    seen = []
    layer.k_conv1d.register_forward_hook(lambda *a: seen.append(1))
    layer.memory_inputs(layer.project(x, None), None, None, None)
    assert seen == [1]


if DEVICE == "cuda":
    pytestmark = pytest.mark.gpu
