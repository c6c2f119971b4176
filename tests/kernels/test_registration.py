"""Registration of the ops: torch.compile without graph breaks, the checks of torch.library, and errors for
bad input.
"""

import contextlib
import re

import pytest
import torch
from checks import error, outputs_and_gradients
from ops_table import DEVICE, OPS, Shape
from paths import PATHS, everyday, exists, on_paths, parametrize
from pool import Pool
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

SHAPE = Shape(1, 20, 2, 1, 32, 32)
every_op = pytest.mark.parametrize("op", OPS, ids=str)
ONCE = [op for op in OPS if not (op.brief or "refinement" in op.options)]
once_per_function = pytest.mark.parametrize("op", ONCE, ids=str)


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


def compiled_rows() -> list[tuple]:
    """What torch.compile sees of packed inputs is the same on all paths: they come in turn, in the rows of `make test`
    each path has both.
    """
    rows = [(op, path, bounds) for path in PATHS for op in ONCE for bounds in ("batched", "packed")]
    rows = [row for row in rows if exists(*row[:2]) and row[1:] != ("triton", "packed")]
    turns = {path: place for place, path in enumerate(("torch", "native"))}
    return [
        (op, bounds, path, often(op, path, bounds))
        for op, path, bounds in rows
        if often(op, path, bounds) or path == "triton" or (OPS.index(op) + turns[path] + (bounds == "packed")) % 2
    ]


def often(op, path: str, bounds: str) -> bool:
    return (op.name == "gla" and path == "triton") or (op.name == "gka" and path != "triton")


@parametrize(("op", "bounds", "backend"), compiled_rows())
def test_compiles_to_one_graph(op, bounds, backend):
    bounds = [0, 7, 20] if bounds == "packed" else None
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


@once_per_function
@pytest.mark.parametrize("path", ["torch", "native"])
def test_inputs_that_are_not_contiguous_compile(op, path, monkeypatch):
    """The compiler is told the strides of results and gradients, and its code checks them."""
    monkeypatch.setenv("HF_MEMMIX_BACKEND", path)
    shape = Shape(2, 20, 2, 1, 32, 32)
    inputs, state = op.draw(shape, torch.float32), op.draw_state(shape, 2, torch.float32)

    def strided(t):
        return t.transpose(0, 1).contiguous().transpose(0, 1)

    inputs = {name: (strided(t) if t.dim() > 1 else t).requires_grad_() for name, t in inputs.items()}
    leaves, state = list(inputs.values()), tuple(map(strided, state))
    with Recorder() as recorder:
        o, final = op.run(op.fast, inputs, state)
        torch.autograd.grad(o.square().sum() + sum(s.square().sum() for s in final), leaves)
    for func, (args, kwargs) in recorder.calls.items():
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = func(*[mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args], **kwargs)
        for told, got in zip(fake, func(*args, **kwargs), strict=True):
            assert (told.shape, told.stride(), told.dtype) == (got.shape, got.stride(), got.dtype), func


@pytest.mark.parametrize("op", [op for op in OPS if op.name in ("gla", "gla_shared", "short_conv")], ids=str)
def test_inputs_with_heads_before_tokens(op, backend):
    """[B, H, T, D].transpose(1, 2), as attention has them: results and gradients are those of contiguous inputs."""
    inputs, weights = op.draw(Shape(2, 5, 2, 2, 16, 16), torch.float32), []
    want = outputs_and_gradients(op, op.fast, inputs, None, weights=weights)
    inputs = {name: t.transpose(1, 2).contiguous().transpose(1, 2) if t.dim() > 2 else t for name, t in inputs.items()}
    got = outputs_and_gradients(op, op.fast, inputs, None, weights=weights)
    assert all(error(got[name], want[name]) <= 1e-5 for name in want)


@once_per_function
def test_boundaries_that_are_not_contiguous(op, backend):
    inputs = op.draw(Shape(1, 5, 2, 2, 16, 16), torch.float32)
    bounds = torch.tensor([[0, 3], [5, 3]], dtype=torch.int32, device=DEVICE)
    got, want = (op.run(op.fast, inputs, None, cu_seqlens) for cu_seqlens in (bounds[:, 0], bounds[:, 0].clone()))
    assert torch.equal(got[0], want[0])
    assert all(torch.equal(a, b) for a, b in zip(got[1], want[1], strict=True))


def test_a_bias_and_lengths_that_are_not_contiguous(backend):
    import hf_memmix_kernels as K

    x, weight, bias = (torch.randn(shape, device=DEVICE) for shape in ((2, 5, 4), (4, 3), (4, 2)))
    lengths = torch.tensor([3], device=DEVICE).expand(2)
    got = K.short_conv(x, weight, bias[:, 0], lengths=lengths)
    want = K.short_conv(x, weight, bias[:, 0].clone(), lengths=lengths.clone())
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.product_rows(r"(?!(gka|lattice)\])")  # variants of an op
@pytest.mark.compiles
@torch.no_grad()
@once_per_function
def test_a_compiled_step_copies_no_state(op):
    """Inductor gives the op the state itself. A copy per layer and token would cost as much as the step."""
    inputs = op.tokens(op.draw(SHAPE, torch.float32), slice(0, 1))
    state = op.draw_state(SHAPE, 1, torch.float32)
    torch._dynamo.reset()
    step = torch.compile(lambda inputs, state: op.step(op, inputs, state), fullgraph=True)
    _, (code,) = run_and_get_code(step, inputs, state)
    made = re.findall(r"empty_strided_cpu\(\(([\d, ]*)\)", code) + re.findall(
        r"empty_strided_cuda\(\(([\d, ]*)\)", code
    )
    shapes = {tuple(int(size) for size in sizes.split(",") if size.strip()) for sizes in made}
    assert ".default(" in code and not shapes & {tuple(s.shape) for s in state}


@pytest.mark.product_rows(r"(?!gla\])")  # variants of an op
@once_per_function
def test_opcheck(op):
    inputs = {name: t.requires_grad_() for name, t in op.draw(SHAPE, torch.float32).items()}
    with Recorder() as recorder:
        o, final = op.run(op.fast, inputs)
        (o.sum() + sum(s.sum() for s in final)).backward()
        one = op.tokens({name: t.detach() for name, t in inputs.items()}, slice(0, 1))
        pool = Pool(op.draw_state(SHAPE, 1, torch.float32), [1], pages=2, gap=64)
        op.step(op, one, pool.states, torch.tensor([1], device=DEVICE))
    names = {func.name().rsplit("_", 1)[-1] for func in recorder.calls}
    assert names == {"fwd", "bwd", "step"}
    for func, (args, kwargs) in recorder.calls.items():
        if func.name().endswith("_fwd"):
            args = [a.requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
        torch.library.opcheck(func, args, kwargs)


@on_paths(lambda op, path: everyday(op, path) and path == "torch" and op.name in ("gla", "gka"))
def test_step_on_pages_compiles(op, backend):
    """The compiled function gets the memory of a pool and makes views of its states; the page indices change."""
    shape = SHAPE._replace(B=2)
    inputs = op.tokens(op.draw(shape, torch.float32), slice(0, 1))
    state = op.draw_state(shape, 2, torch.float32)
    mine, theirs = (Pool(state, [3, 1], pages=4, gap=64) for _ in range(2))
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda memory, indices: op.step(op, inputs, mine.carve(memory), indices), fullgraph=True, backend="aot_eager"
    )
    for order in ([3, 1], [1, 3]):
        indices = torch.tensor(order, device=DEVICE)
        got, want = compiled(mine.memory, indices), op.step(op, inputs, theirs.states, indices)
        assert error(got, want) <= 1e-6
        for a, b in zip(mine.states, theirs.states, strict=True):
            assert error(a[[1, 3]], b[[1, 3]]) <= 1e-6
    assert torch.equal(mine.outside([1, 3]), theirs.outside([1, 3]))


@once_per_function
@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("int32 or int64", lambda states, indices: (states, indices.float())),
        (r"\[B\] = \[2\]", lambda states, indices: (states, indices[:1])),
        (r"\[B\] = \[2\]", lambda states, indices: (states, indices[None])),
        ("contiguous int32", lambda states, indices: (states, indices.repeat_interleave(2)[::2])),
        (r"must be \[pages", lambda states, indices: ([s[..., :-1] for s in states], indices)),
        ("must be contiguous", lambda states, indices: ([torch.stack([s, s], -1)[..., 0] for s in states], indices)),
        ("apart from", lambda states, indices: ([s[:1].expand(s.shape) for s in states], indices)),
    ],
)
def test_bad_pages_raise(op, message, change):
    shape = SHAPE._replace(B=2)
    inputs = op.tokens(op.draw(shape, torch.float32), slice(0, 1))
    pool = Pool(op.draw_state(shape, 2, torch.float32), [3, 1], pages=4, gap=64)
    states, indices = change(pool.states, torch.tensor([3, 1], device=DEVICE))
    with pytest.raises(ValueError, match=message):
        op.step(op, inputs, tuple(states), indices)


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


@pytest.mark.product_rows(r"triton-(?!gla\])")  # one row per kernel stays in the interpreter
@once_per_function
def test_an_unused_output_counts_as_one_with_a_zero_gradient(op, backend):
    """The gradient of an unused output is None in backward."""
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


@pytest.mark.product_rows(r"triton-(lattice|gka)")  # one row per kernel stays in the interpreter
@pytest.mark.parametrize("op", [op for op in OPS if op.name in ("coffee", "lattice", "gka")], ids=str)
def test_what_forward_keeps_is_never_filled_with_zeros(op, backend):
    """The tensor kept for backward has no gradient and is the largest of a call."""
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
def test_step_refuses_two_tokens_and_the_state_of_another_batch(op):
    """Otherwise the step would write outside the tensor."""
    inputs = op.draw(SHAPE, torch.float32)
    for tokens, rows, message in ((2, 1, "one token"), (1, 3, "state")):
        with pytest.raises(ValueError, match=message):
            op.step(op, op.tokens(inputs, slice(0, tokens)), op.draw_state(SHAPE, rows, torch.float32))


@once_per_function
def test_step_refuses_a_state_that_is_not_contiguous(op):
    """Kernels compute addresses for contiguous states, so each state of the op must be contiguous. The state of the
    convolution may have any strides, because a mixer may slice it from a larger tensor.
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


@pytest.mark.parametrize(("value", "message"), [("triton", "needs a GPU"), ("cuda", "is not one"), ("", "is not one")])
def test_a_backend_that_cannot_run_raises(value, message, monkeypatch):
    monkeypatch.setenv("HF_MEMMIX_BACKEND", value)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    op = OPS[0]
    with pytest.raises(ValueError, match=f"HF_MEMMIX_BACKEND.*{message}"):
        op.run(op.fast, {name: t.cpu() for name, t in op.draw(SHAPE, torch.float32).items()})


@pytest.mark.product_rows(r"triton")  # one row per kernel stays in the interpreter
def test_short_conv_pads_by_lengths(backend):
    """Right-padded rows equal the rows without padding for any values at the padding, whose gradient is zero."""
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


@once_per_function
def test_eager_calls_bypass_the_registered_op(op, monkeypatch):
    """The layers of a registered op cost more host time than small kernels run. Results and gradients are the same."""
    inputs, state = op.draw(SHAPE, torch.float32), op.draw_state(SHAPE, 1, torch.float32)
    weights = []
    with Recorder():
        want = outputs_and_gradients(op, op.fast, inputs, state, weights=weights)
    called = []
    monkeypatch.setattr(torch.library.CustomOpDef, "__call__", lambda self, *args: called.append(self))
    got = outputs_and_gradients(op, op.fast, inputs, state, weights=weights)
    assert not called
    assert all(torch.equal(got[name], want[name]) for name in want)


@once_per_function
def test_autocast_does_not_round_what_an_op_computes(op, monkeypatch):
    """The torch paths multiply matrices, also states, which autocast would round to bfloat16."""
    monkeypatch.setenv("HF_MEMMIX_BACKEND", "torch")
    inputs, weights = op.draw(SHAPE, torch.float32), []

    def results():
        # a fresh state, because a step changes its state
        torch.manual_seed(0)
        state = op.draw_state(SHAPE, 1, torch.float32)
        found = outputs_and_gradients(op, op.fast, inputs, state, weights=weights)
        if "sketch" in inputs:  # autograd multiplies by the sketch for its gradients, as for those of any linear layer
            found = {name: t for name, t in found.items() if not name.startswith("d ")}
        return [*found.values(), op.step(op, op.tokens(inputs, slice(0, 1)), state), *state]

    want = results()
    with torch.autocast(torch.device(DEVICE).type, torch.bfloat16):
        got = results()
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(got, want, strict=True))


@once_per_function
@pytest.mark.parametrize("by", ["backward", "grad", "grad of a constant", "torch.func", "the registered op"])
def test_a_gradient_cannot_be_differentiated_again(op, by, monkeypatch):
    """Kernels compute the gradient, so autograd would return a wrong second derivative; it must raise instead.

    Also if it is taken by one input only, and if the gradient of the outputs does not depend on the inputs.
    """
    if by == "torch.func":  # native code has no part in it
        monkeypatch.setenv("HF_MEMMIX_BACKEND", "torch")
    inputs = {name: t.requires_grad_(by != "torch.func") for name, t in op.draw(SHAPE, torch.float32).items()}
    name = next(name for name, t in inputs.items() if t.is_floating_point())

    def loss(leaf):
        with Recorder() if by == "the registered op" else contextlib.nullcontext():
            o, _ = op.run(op.fast, inputs | {name: leaf})
        return o.sum() if by == "grad of a constant" else o.square().sum()

    def gradient(leaf):
        return torch.autograd.grad(loss(leaf), leaf, create_graph=True)[0].square().sum()

    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        if by == "backward":
            gradient(inputs[name]).backward()
        elif by == "torch.func":
            torch.func.grad(lambda leaf: torch.func.grad(loss)(leaf).square().sum())(inputs[name])
        else:
            torch.autograd.grad(gradient(inputs[name]), inputs[name])


@once_per_function
def test_a_gradient_with_a_graph_through_a_checkpoint(op):
    """It is allowed for the first gradient, and the hooks of checkpoints let saved tensors be read once only."""
    inputs = {name: t.requires_grad_() for name, t in op.draw(SHAPE, torch.float32).items()}

    def loss(*tensors):
        return op.run(op.fast, dict(zip(inputs, tensors, strict=True)))[0].square().sum()

    plain = torch.autograd.grad(loss(*inputs.values()), list(inputs.values()))
    checkpointed = checkpoint(loss, *inputs.values(), use_reentrant=False)
    found = torch.autograd.grad(checkpointed, list(inputs.values()), create_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(found[0].square().sum(), list(inputs.values()))


@once_per_function
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_forward_mode_is_refused(op, mode):
    """Also where nothing requires a gradient: kernels would leave out the tangent, and SKA's torch path gave another
    one than its gradient.
    """
    inputs = op.draw(SHAPE, torch.float32)
    name = next(name for name, t in inputs.items() if t.is_floating_point())
    with mode(), forward_ad.dual_level():
        dual = forward_ad.make_dual(inputs[name], torch.ones_like(inputs[name]))
        with pytest.raises(NotImplementedError, match="forward mode AD"):
            op.run(op.fast, inputs | {name: dual})


@once_per_function
def test_torch_func_gives_the_gradient(op, monkeypatch):
    # native code has no part in torch.func, so the same path runs on both sides only without it: test_native.py
    monkeypatch.setenv("HF_MEMMIX_BACKEND", "torch")
    inputs = op.draw(SHAPE, torch.float32)
    name = next(name for name, t in inputs.items() if t.is_floating_point())

    def loss(leaf):
        return op.run(op.fast, inputs | {name: leaf})[0].square().sum()

    leaf = inputs[name].clone().requires_grad_()
    (want,) = torch.autograd.grad(loss(leaf), leaf)
    assert error(torch.func.grad(loss)(inputs[name]), want) <= 1e-6
