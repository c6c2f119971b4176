"""Ops as torch sees them: torch.compile without graph breaks, torch.library's own checks, and errors for bad input."""

import pytest
import torch
from checks import error
from ops_table import DEVICE, OPS, Shape
from torch.utils._python_dispatch import TorchDispatchMode

SHAPE = Shape(1, 20, 2, 1, 32, 32)
every_op = pytest.mark.parametrize("op", OPS, ids=str)
once_per_function = pytest.mark.parametrize(
    "op", [op for op in OPS if not (op.brief or "refinement" in op.options)], ids=str
)


class Recorder(TorchDispatchMode):
    """Collects the calls of our custom ops, so that the tests need no list of them."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "hf_memmix":
            tensors = [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args]
            self.calls.setdefault(func, (tensors, dict(kwargs or {})))
        return func(*args, **(kwargs or {}))


@once_per_function
@pytest.mark.parametrize("bounds", [None, [0, 7, 20]], ids=["batched", "packed"])
def test_compiles_to_one_graph(op, bounds, backend):
    if bounds and backend == "triton":
        pytest.skip("what torch.compile sees is the same on both paths")
    inputs = {name: t.requires_grad_() for name, t in op.draw(SHAPE, torch.float32).items()}
    cu_seqlens = None if bounds is None else torch.tensor(bounds, device=DEVICE)
    state = op.draw_state(SHAPE, 1 if bounds is None else len(bounds) - 1, torch.float32)

    def loss(inputs, state):
        o, final = op.run(op.fast, inputs, state, cu_seqlens)
        return o.square().sum() + sum(s.square().sum() for s in final)

    eager = torch.autograd.grad(loss(inputs, state), list(inputs.values()))
    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")(inputs, state)
    got = torch.autograd.grad(compiled, list(inputs.values()))
    assert all(error(a, b) <= 1e-5 for a, b in zip(got, eager, strict=True))


@every_op
def test_step_compiles_and_updates_in_place(op, backend):
    inputs = op.tokens(op.draw(SHAPE, torch.float32), slice(0, 1))
    state = op.draw_state(SHAPE, 1, torch.float32)
    mine, theirs = (tuple(s.clone() for s in state) for _ in range(2))
    want = op.step(op, inputs, theirs)
    torch._dynamo.reset()
    got = torch.compile(lambda inputs, state: op.step(op, inputs, state), fullgraph=True, backend="aot_eager")(
        inputs, mine
    )
    assert error(got, want) <= 1e-6
    assert all(error(a, b) <= 1e-6 for a, b in zip(mine, theirs, strict=True))


@once_per_function
def test_opcheck(op):
    inputs = {name: t.requires_grad_() for name, t in op.draw(SHAPE, torch.float32).items()}
    with Recorder() as recorder:
        o, final = op.run(op.fast, inputs)
        (o.sum() + sum(s.sum() for s in final)).backward()
        one = op.tokens({name: t.detach() for name, t in inputs.items()}, slice(0, 1))
        op.step(op, one, op.draw_state(SHAPE, 1, torch.float32))
    names = {func.name().rsplit("_", 1)[-1] for func in recorder.calls}
    assert names == {"fwd", "bwd", "step"}
    for func, (args, kwargs) in recorder.calls.items():
        if func.name().endswith("_fwd"):
            args = [a.requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
        torch.library.opcheck(func, args, kwargs)


class Fills(TorchDispatchMode):
    """Collects the sizes of all tensors that are filled with zeros."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if "zero" in func.name():
            self.sizes.append(result.numel())
        return result


@once_per_function
def test_an_unused_output_counts_as_one_with_a_zero_gradient(op, backend):
    """Autograd hands over None for it."""
    inputs = {name: t.requires_grad_() for name, t in op.draw(SHAPE, torch.float32).items()}
    state = tuple(s.requires_grad_() for s in op.draw_state(SHAPE, 1, torch.float32))
    o, final = op.run(op.fast, inputs, state)
    results = [t for t in (o, *final) if t.requires_grad]
    assert len(results) > 1
    for used in results:
        zeros = sum(t.square().sum() * (1 if t is used else 0) for t in results)
        got, want = (
            torch.autograd.grad(
                loss, [*inputs.values(), *state], retain_graph=True, allow_unused=True, materialize_grads=True
            )
            for loss in (used.square().sum(), zeros)
        )
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("op", [op for op in OPS if op.name in ("coffee", "lattice", "gka")], ids=str)
def test_what_forward_keeps_is_never_filled_with_zeros(op, backend):
    """It has no gradient, and it is the largest tensor of a call."""
    inputs = {name: t.requires_grad_() for name, t in op.draw(SHAPE, torch.float32).items()}
    with Recorder() as recorder:
        o, final = op.run(op.fast, inputs)
    ((forward, (args, kwargs)),) = recorder.calls.items()
    sizes = [t.numel() for t in forward(*args, **kwargs)]
    with Fills() as fills:
        (o.sum() + sum(t.sum() for t in final)).backward()
    kept = sizes[1] if op.name == "gka" else sizes[2]
    assert kept and kept not in fills.sizes


@pytest.mark.parametrize(("op", "message", "change"), [(op, *bad) for op in OPS for bad in op.bad])
def test_bad_input_raises(op, message, change):
    inputs = op.draw(SHAPE._replace(B=2), torch.float32)
    arguments = {**op.options, **change(inputs)}
    if "initial_state" in arguments and arguments["initial_state"] is None:
        wrong = op.draw_state(SHAPE, 3, torch.float32)
        arguments["initial_state"] = wrong if len(wrong) > 1 else wrong[0]
    with pytest.raises(ValueError, match=message):
        op.fast(**arguments)


@every_op
def test_step_refuses_two_tokens(op):
    inputs = op.tokens(op.draw(SHAPE, torch.float32), slice(0, 2))
    with pytest.raises(ValueError, match="token"):
        op.step(op, inputs, op.draw_state(SHAPE, 1, torch.float32))


@every_op
def test_step_refuses_the_state_of_another_batch(op):
    """It would be written out of bounds."""
    inputs = op.tokens(op.draw(SHAPE, torch.float32), slice(0, 1))
    with pytest.raises(ValueError, match="state"):
        op.step(op, inputs, op.draw_state(SHAPE, 3, torch.float32))


@once_per_function
def test_step_refuses_a_state_that_is_not_contiguous(op):
    """Each part of it: kernels write to where a contiguous one would lie. The convolution's, which any mixer may have
    cut out of a larger tensor, is written as it is.
    """
    shape = SHAPE._replace(B=2, H=4, Hk=2)
    inputs = op.tokens(op.draw(shape, torch.float32), slice(0, 1))
    state = op.draw_state(shape, 2, torch.float32)
    for i in range(len(state)):
        strided = [s.clone() for s in state]
        strided[i] = torch.stack([state[i], state[i]], -1)[..., 0]
        assert not strided[i].is_contiguous()
        if op.name == "short_conv":
            whole = tuple(s.clone() for s in state)
            assert torch.equal(op.step(op, inputs, tuple(strided)), op.step(op, inputs, whole))
            assert torch.equal(strided[i], whole[i])
            continue
        with pytest.raises(ValueError, match="contiguous"):
            op.step(op, inputs, tuple(strided))


def test_triton_without_a_gpu_raises(monkeypatch):
    monkeypatch.setenv("HF_MEMMIX_BACKEND", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    op = OPS[0]
    with pytest.raises(ValueError, match="needs a GPU"):
        op.run(op.fast, {name: t.cpu() for name, t in op.draw(SHAPE, torch.float32).items()})


@pytest.mark.parametrize("value", ["cuda", ""])
def test_unknown_backend_raises(value, monkeypatch):
    monkeypatch.setenv("HF_MEMMIX_BACKEND", value)
    op = OPS[0]
    with pytest.raises(ValueError, match="HF_MEMMIX_BACKEND"):
        op.run(op.fast, op.draw(SHAPE, torch.float32))


def test_short_conv_pads_by_lengths(backend):
    """Right-padded rows equal the rows alone, whatever the padding holds; no gradient reaches it."""
    import hf_memmix_kernels as K

    op, shape = OPS[0], Shape(3, 19, 1, 1, 40, 1)
    inputs, (state,) = op.draw(shape, torch.float32), op.draw_state(shape, 3, torch.float32)
    lengths = torch.tensor([19, 0, 2], device=state.device)
    padded = torch.arange(19, device=state.device) >= lengths[:, None]
    x = inputs["x"].masked_fill(padded[..., None], float("nan")).requires_grad_()
    y, final = K.short_conv(x, inputs["weight"], inputs["bias"], initial_state=state, lengths=lengths)
    want, want_final = K.naive_short_conv(
        inputs["x"], inputs["weight"], inputs["bias"], initial_state=state, lengths=lengths
    )
    assert error(y, want) <= 1e-5 and error(final, want_final) <= 1e-5
    (grad,) = torch.autograd.grad(y.square().sum() + final.square().sum(), x)
    assert torch.isfinite(grad).all() and not grad[padded].any()
