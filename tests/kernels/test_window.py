"""A window equals its definition: whole, in parts, token by token, packed, padded, on pages; forward and backward."""

import itertools

import pytest
import torch
from checks import assert_close
from draw import DEVICE, randn
from ops_table import TOLERANCE

from hf_memmix_kernels import chunk_window, naive_window, window_step
from hf_memmix_kernels.window import torch_path, window_state_shapes

# window, sinks
SIZES = [(1, 0), (1, 1), (3, 0), (8, 0), (8, 3), (5, 5)]
LENGTHS = (1, 7, 19)
FORMS = {
    "plain": {},
    "capped": {"softcap": 2.0, "scale": 0.7},
    "sink logits": {"sink_logits": True},
}


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    """So that a few tokens are several blocks."""
    monkeypatch.setattr(torch_path, "SMALLEST_BLOCK", 4)


def draw(length, dtype, heads=4, kv_heads=2, dim=8, batch=2):
    return [randn(batch, length, n, dim, dtype=dtype) for n in (heads, kv_heads, kv_heads)]


def options(size, form):
    given = dict(FORMS[form])
    if given.pop("sink_logits", False):
        given["sink_logits"] = torch.linspace(-1, 1, 4, dtype=torch.float64, device=DEVICE)
    return {"window": size[0], "sinks": size[1], **given}


def empty_state(batch, size, dtype, kv_heads=2, dim=8):
    shapes = window_state_shapes(batch, kv_heads, dim, *size)
    return [
        torch.zeros(shape, dtype=d, device=DEVICE) for shape, d in zip(shapes, (dtype, dtype, torch.long), strict=True)
    ]


@pytest.fixture
def dtype(backend):
    """float64 on the torch path; the kernels run in float32, on a GPU with its IEEE products."""
    return torch.float32 if backend == "triton" else torch.float64


def rows(**tables):
    """Every combination on the torch path; on Triton, which is slow in the interpreter, `make test` runs a few."""
    found = []
    for place, values in enumerate(itertools.product(SIZES, FORMS, *tables.values())):
        everyday = values[0] in ((3, 0), (8, 3)) and place % 5 == 0
        for path in ("torch", "triton"):
            marks = () if path == "torch" or everyday else pytest.mark.product
            found.append(pytest.param(path, *values, marks=marks, id="-".join(map(str, (path, *values)))))
    return pytest.mark.parametrize(("backend", "size", "form", *tables), found, indirect=["backend"])


every_size = pytest.mark.parametrize(
    ("backend", "size"),
    [
        pytest.param(path, size, marks=pytest.mark.product if path == "triton" and size != (3, 0) else ())
        for path in ("torch", "triton")
        for size in SIZES
    ],
    ids=str,
    indirect=["backend"],
)


@rows(length=LENGTHS)
def test_equals_naive_in_any_split(size, form, length, dtype):
    q, k, v = draw(length, dtype)
    given = options(size, form)
    want = naive_window(q, k, v, **given)
    for cuts in ({0, length}, {0, length // 3, length // 2, length}, range(length + 1)):
        state, parts = None, []
        for a, b in itertools.pairwise(sorted(cuts)):
            o, state = chunk_window(*(x[:, a:b] for x in (q, k, v)), initial_state=state, **given)
            parts.append(o)
        assert_close({"o": torch.cat(parts, 1)}, {"o": want}, lambda name: TOLERANCE[dtype])
        assert state[2].unique().tolist() == [length]


@rows()
def test_gradients_of_a_split_equal_those_of_naive(size, form, dtype):
    inputs = draw(13, dtype)
    given, weight = options(size, form), randn(2, 13, 4, 8, dtype=torch.float64)

    def gradients(fn):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        return torch.autograd.grad((fn(*leaves) * weight).sum(), leaves)

    def split(q, k, v):
        first, state = chunk_window(*(x[:, :6] for x in (q, k, v)), **given)
        second, _ = chunk_window(*(x[:, 6:] for x in (q, k, v)), initial_state=state, **given)
        return torch.cat([first, second], 1)

    want = gradients(lambda q, k, v: naive_window(q, k, v, **given))
    for fn in (split, lambda q, k, v: chunk_window(q, k, v, **given)[0]):
        named = dict(zip("qkv", gradients(fn), strict=True))
        assert_close(named, dict(zip("qkv", want, strict=True)), lambda name: 2 * TOLERANCE[dtype])


@rows(paged=[False, True])
def test_steps_equal_naive(size, form, paged, backend):
    """Also on dirty pages, and with the same states as the chunk form at the end."""
    length, dtype = 2 * sum(size) + 3, torch.float32
    q, k, v = draw(length, dtype)
    given = options(size, form)
    state = empty_state(2, size, dtype)
    where, pools = {}, state
    if paged:
        pages = torch.tensor([4, 1], device=DEVICE)
        pools = [torch.full((6, *t.shape[1:]), 7, dtype=t.dtype, device=DEVICE) for t in state]
        for pool, t in zip(pools, state, strict=True):
            pool[pages] = t
        where = {"state_indices": pages}
    parts = [window_step(*(x[:, t : t + 1] for x in (q, k, v)), pools, **given, **where) for t in range(length)]
    want = naive_window(q, k, v, **given)
    assert_close({"o": torch.cat(parts, 1)}, {"o": want}, lambda name: TOLERANCE[dtype])
    _, expected = chunk_window(q, k, v, **given)
    for pool, t in zip(pools, expected, strict=True):
        assert torch.equal(pool[pages] if paged else pool, t)
        if paged:
            assert (pool[[0, 2, 3, 5]] == 7).all()


@every_size
def test_packed_sequences_are_separate(size, dtype):
    bounds = torch.tensor([0, 4, 4, 11, 30], device=DEVICE)
    q, k, v = draw(30, dtype, batch=1)
    given = options(size, "plain")
    o, state = chunk_window(q, k, v, cu_seqlens=bounds, **given)
    assert_close({"o": o}, {"o": naive_window(q, k, v, cu_seqlens=bounds, **given)}, lambda name: TOLERANCE[dtype])
    for n, (a, b) in enumerate(itertools.pairwise(bounds.tolist())):
        if a == b:
            assert not state[2][n].any()
            continue
        own = chunk_window(*(x[:, a:b] for x in (q, k, v)), **given)[1]
        again = [randn(1, 3, heads, 8, dtype=dtype) for heads in (4, 2, 2)]
        mine = tuple(t[n : n + 1] for t in state)
        assert torch.equal(mine[2], own[2])
        first, second = (chunk_window(*again, initial_state=s, **given)[0] for s in (mine, own))
        assert_close({"o": first}, {"o": second}, lambda name: TOLERANCE[dtype])


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_row_ends_at_its_length(size):
    q, k, v = draw(9, torch.float64)
    given = options(size, "plain")
    _, state = chunk_window(q, k, v, lengths=torch.tensor([4, 0], device=DEVICE), **given)
    _, want = chunk_window(*(x[:1, :4] for x in (q, k, v)), **given)
    assert all(torch.equal(t[:1], w) for t, w in zip(state, want, strict=True))
    assert not state[2][1].any()


def test_memory_is_linear_in_the_number_of_tokens(monkeypatch):
    """No tensor has an element for each pair of a query and a key."""
    largest = {}

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(t, torch.Tensor):
                    largest[length] = max(largest.get(length, 0), t.numel())
            return out

    for length in (512, 1024):
        q, k, v = draw(length, torch.float32, batch=1)
        with Sizes():
            chunk_window(q, k, v, window=16)
    assert largest[1024] <= 2.1 * largest[512]


BAD = {
    "at least 1": {"window": 0},
    "from 0 to the window": {"window": 2, "sinks": 3},
    r"sink_logits must be \[H\]": {"window": 2, "sink_logits": torch.zeros(3)},
}


@pytest.mark.parametrize("text", BAD)
def test_bad_arguments_are_refused(text):
    with pytest.raises(ValueError, match=text):
        chunk_window(*draw(3, torch.float32), **BAD[text])


def test_a_step_takes_one_token():
    with pytest.raises(ValueError, match="window_step advances by one token, got 2"):
        window_step(*draw(2, torch.float32), empty_state(2, (4, 0), torch.float32), window=4)
