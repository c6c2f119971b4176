"""A window equals its definition: whole, in parts, token by token, packed, padded, on pages; forward and backward."""

import itertools

import pytest
import torch
from checks import assert_close
from draw import DEVICE, randn
from ops_table import TOLERANCE
from pool import Pool

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


def rows(native: bool = False, **tables):
    """Every combination on the torch path, with `native` also on that path; of a table with three values, `make test`
    runs those in which every two values of size, form and table meet. Of these, Triton's interpreter, which is slow,
    has the values of other tables in turn, and without a table a third; `make test` runs a few of them.
    """
    found, wide = [], len(next(iter(tables.values()), ())) == 3
    every = [[*enumerate(table)] for table in (SIZES, FORMS, *tables.values())]
    for number, row in enumerate(itertools.product(*every)):
        places, values = zip(*row, strict=True)
        few = values[0] in ((3, 0), (8, 3)) and number % 5 == 0
        third = sum(places[:3]) % 3 == 0
        in_turn = all(sum(places[:2]) % 2 == place for place in places[2 + wide :])
        paths = [("torch", third or not wide), *([("native", third or not wide)] if native else [])]
        if few or ((third or (tables and not wide)) and in_turn) or DEVICE == "cuda":
            paths.append(("triton", few))
        for path, everyday in paths:
            marks = () if everyday else pytest.mark.product
            found.append(pytest.param(path, *values, marks=marks, id="-".join(map(str, (path, *values)))))
    return pytest.mark.parametrize(("backend", "size", "form", *tables), found, indirect=["backend"])


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
    check_gradients(13, 6, dtype, options(size, form))


@pytest.mark.parametrize("backend", ["torch", "triton"], indirect=True)
@pytest.mark.parametrize("sinks", [0, 1])
def test_gradients_of_several_tiles_equal_those_of_naive(sinks, dtype):
    """The last query that reads a tile of 32 keys is alone in its own tile of 32."""
    check_gradients(70, 64, dtype, {"window": 34, "sinks": sinks})


def check_gradients(length, first, dtype, given):
    """Gradients of the whole and of two parts, the first with `first` tokens, equal those of naive."""
    inputs, weight = draw(length, dtype), randn(2, length, 4, 8, dtype=torch.float64)

    def gradients(fn):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        return torch.autograd.grad((fn(*leaves) * weight).sum(), leaves)

    def split(q, k, v):
        begin, state = chunk_window(*(x[:, :first] for x in (q, k, v)), **given)
        second, _ = chunk_window(*(x[:, first:] for x in (q, k, v)), initial_state=state, **given)
        return torch.cat([begin, second], 1)

    want = gradients(lambda q, k, v: naive_window(q, k, v, **given))
    for fn in (split, lambda q, k, v: chunk_window(q, k, v, **given)[0]):
        named = dict(zip("qkv", gradients(fn), strict=True))
        assert_close(named, dict(zip("qkv", want, strict=True)), lambda name: 2 * TOLERANCE[dtype])


@rows(native=True, paged=[False, True])
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
    if paged:  # a padding row's page may hold a negative number of tokens
        pools[-1][0] = -9
        window_step(*(x[:1, :1] for x in (q, k, v)), pools, **given, state_indices=pages.new_zeros(1))
        assert (pools[-1][0] == 1).all()


def naive_states(history, new, state, size, ends):
    """The slots of `state` after the first `ends` of the new tokens of one sequence, token by token."""
    window, sinks = size
    slots = list(state.unbind())
    for p in range(history, history + ends):
        slots[p if p < sinks else sinks + (p - sinks) % window] = new[p - history]
    return torch.stack(slots)


def naive_from(state, q, k, v, size, given, ends):
    """o [T, H, D] and the state after the first `ends` tokens of one sequence, of tensors without a batch."""
    window, sinks = size
    history = int(state[2][0])
    slots = [p if p < sinks else sinks + (p - sinks) % window for p in range(history)]  # of unreadable tokens, too
    with_past = [torch.cat([t[slots], new])[None] for t, new in zip(state, (k, v), strict=False)]
    queries = torch.cat([q.new_zeros(history, *q.shape[1:]), q])[None]
    o = naive_window(queries, *with_past, **given)[0, history:]
    after = [naive_states(history, new, t, size, ends) for t, new in zip(state, (k, v), strict=False)]
    return o, after, history + ends


NEW = {"rows": ([9, 9, 9], None), "padded": ([9, 9, 9], [9, 0, 4]), "packed": ([40, 0, 3, 2], None)}


def case_of(size, form, layout, stateful, dtype, heads=4, kv_heads=2, dim=8, new=NEW, seen=(0, 2, 31, 64)):
    """Inputs; functions of them to the results of each sequence by `chunk_window` and by `naive_from`; how many tokens
    of each sequence count.
    """
    lengths, ends = new[layout]
    packed, N = layout == "packed", len(lengths)
    given = options(size, form)
    rows = (1, sum(lengths)) if packed else (N, lengths[0])
    inputs = {n: randn(*rows, h, dim, dtype=dtype) for n, h in zip("qkv", (heads, kv_heads, kv_heads), strict=True)}
    if "sink_logits" in given:
        inputs["sink_logits"] = torch.linspace(-1, 1, heads, dtype=dtype, device=DEVICE)
    counts = torch.tensor(seen[:N] if stateful else [0] * N, device=DEVICE)
    state = empty_state(N, size, dtype, kv_heads, dim)
    state = [*(randn(*t.shape, dtype=dtype) for t in state[:2]), counts[:, None].expand(-1, kv_heads).contiguous()]
    filled = (torch.arange(sum(size), device=DEVICE) < counts[:, None])[..., None, None]
    inputs |= {n: t * filled for n, t in zip(("keys", "values"), state, strict=False)}
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], device=DEVICE) if packed else None
    where = {"cu_seqlens": bounds, "lengths": None if ends is None else torch.tensor(ends, device=DEVICE)}

    def fast(q, k, v, keys, values, sink_logits=None):
        start = (keys, values, state[2]) if stateful else None
        more = given | ({} if sink_logits is None else {"sink_logits": sink_logits})
        o, after = chunk_window(q, k, v, initial_state=start, **where, **more)
        parts = o[0].split(lengths) if packed else o.unbind()
        return [(part, [t[n] for t in after[:2]], int(after[2][n, 0])) for n, part in enumerate(parts)]

    def naive(q, k, v, keys, values, sink_logits=None):
        more = given | ({} if sink_logits is None else {"sink_logits": sink_logits})
        parts = [t[0].split(lengths) if packed else t.unbind() for t in (q, k, v)]
        return [
            naive_from((keys[n], values[n], state[2][n]), *(t[n] for t in parts), size, more, (ends or lengths)[n])
            for n in range(N)
        ]

    return inputs, fast, naive, ends or lengths


def differentiated(function, inputs, valid, weights):
    """Results by name and gradients "d <input>" of a random linear function of the valid ones."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in inputs.items()}
    results = {}
    for n, (o, after, count) in enumerate(function(**leaves)):
        results |= {f"o{n}": o[: valid[n]], f"keys{n}": after[0], f"values{n}": after[1]}
        results[f"count{n}"] = torch.tensor(float(count), device=o.device)
    if not weights:
        weights.extend(torch.randn_like(t, dtype=torch.float64) for t in results.values())
    loss = sum((t.double() * w).sum() for t, w in zip(results.values(), weights, strict=True))
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    named = {
        f"d {name}": torch.zeros_like(t) if g is None else g
        for (name, t), g in zip(leaves.items(), grads, strict=True)
    }
    return {name: t.detach() for name, t in results.items()} | named


@rows(layout=list(NEW), stateful=[False, True])
def test_sequences_with_and_without_states_equal_naive(size, form, layout, stateful, dtype, poisoned_empty):
    """Forward, states and all gradients; sequences of many lengths, none and one token among them."""
    inputs, fast, naive, valid = case_of(size, form, layout, stateful, dtype)
    weights = []
    want = differentiated(naive, {name: t.double() for name, t in inputs.items()}, valid, weights)
    got = differentiated(fast, inputs, valid, weights)
    if not stateful:  # there is no state to have a gradient
        want |= {name: torch.zeros_like(t) for name, t in want.items() if name in ("d keys", "d values")}
    assert_close(got, want, lambda name: TOLERANCE[dtype] * (2 if name.startswith("d ") else 1))


GPU_ROWS = [
    *itertools.product((torch.bfloat16, torch.float32), (64, 128), ((64, 0), (64, 1), (100, 4)), NEW),
    *itertools.product((torch.float16,), (32, 48, 256), ((64, 1),), ("rows", "packed")),
]


@pytest.mark.gpu
@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize(("place", "row"), list(enumerate(GPU_ROWS)), ids=str)
def test_on_a_gpu_all_gradients_equal_float64(place, row, stateful, poisoned_empty):
    """float64 runs the torch path, which the tests above compare with the definition."""
    dtype, dim, size, layout = row
    lengths = {"rows": ([150] * 2, None), "padded": ([150] * 2, [150, 40]), "packed": ([130, 0, 1, 70], None)}
    check_on_gpu(size, list(FORMS)[(place + place // 3) % 3], layout, stateful, dtype, dim, lengths)


@pytest.mark.gpu
@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 16, 17])
def test_on_a_gpu_few_tokens_at_any_address(tokens, stateful):
    """Triton compiles other code for a size of 1, for multiples of 16 and for other addresses."""
    for moved in (False, True):
        lengths = {"rows": ([tokens] * 2, None)}
        check_on_gpu((16, 2), "capped", "rows", stateful, torch.bfloat16, 64, lengths, moved)


def check_on_gpu(size, form, layout, stateful, dtype, dim, lengths, moved=False):
    sizes = {"dim": dim, "new": lengths, "seen": (300, 2, 0, 64)}
    inputs, fast, _, valid = case_of(size, form, layout, stateful, dtype, **sizes)
    weights = []
    want = differentiated(fast, {name: t.double() for name, t in inputs.items()}, valid, weights)

    def elsewhere(**leaves):
        """With tensors that begin at an odd address."""
        return fast(**{name: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape) for name, t in leaves.items()})

    got = differentiated(elsewhere if moved else fast, inputs, valid, weights)
    assert_close(got, want, lambda name: TOLERANCE[dtype] * (2 if name.startswith("d ") else 1))


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
def test_on_a_gpu_a_graph_captures_both_passes(packed):
    """Nothing waits for the GPU, and two runs give the same bits, also with other boundaries."""
    B, T = (1, 512) if packed else (2, 256)
    q, k, v, do = (randn(B, T, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2, 4))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    state = empty_state(3 if packed else B, (64, 2), torch.bfloat16, 2, 64)
    state[2] += 70
    bounds = torch.tensor([0, 200, 201, 512], device=DEVICE) if packed else None

    def both():
        o, _ = chunk_window(*leaves, window=64, sinks=2, initial_state=state, cu_seqlens=bounds)
        # detached: a live result keeps the node of each leaf, and that waits on the stream on which it was made first
        return o.detach(), *torch.autograd.grad(o, leaves, do)

    for _ in range(3):
        first = both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    for cuts in ([0, 200, 201, 512], [0, 1, 390, 512]):
        if packed:
            bounds.copy_(torch.tensor(cuts))
        graph.replay()
        first = both()
        assert all(torch.equal(a, b) for a, b in zip(captured, first, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("sinks", [0, 1, 4])
@pytest.mark.parametrize("rows", [256, 300])
def test_on_a_gpu_rows_that_share_a_page(rows, sinks):
    """As vLLM warms up: all rows only pad the batch, and share a page that is empty at first. Nothing is written
    outside the page, and a sequence that comes later is not disturbed.
    """
    window, heads, kv_heads, dim, pages = 512, 32, 8, 64, 256
    q, k, v = draw(1, torch.bfloat16, heads, kv_heads, dim, rows)
    given, shared = {"window": window, "sinks": sinks}, 1
    where = torch.full((rows,), shared, dtype=torch.int32, device=DEVICE)
    pool = Pool(empty_state(1, (window, sinks), torch.bfloat16, kv_heads, dim), [shared], pages, gap=64)
    empty, untouched = pool.memory[shared].clone(), pool.outside([shared])

    def step():
        return window_step(q, k, v, pool.states, state_indices=where, **given)

    for _ in range(10):  # threads are most likely to disagree while the count is small
        pool.memory[shared] = empty
        for _ in range(20):
            step()
            torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    pool.memory[shared] = empty
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    assert (pool.states[2][shared] > 0).all()
    assert torch.equal(pool.outside([shared]), untouched)
    where[:2] = torch.tensor([7, 3])
    for state in pool.states:
        state[[7, 3]] = 0
    graph.replay()
    got = step()[:2]
    want = naive_window(*(x[:2].double().repeat(1, 2, 1, 1) for x in (q, k, v)), **given)[:, 1:]
    assert_close({"o": got}, {"o": want}, lambda name: TOLERANCE[torch.bfloat16])
    assert (pool.states[2][[7, 3]] == 2).all()


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
