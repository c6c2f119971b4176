"""States in pages of a pool, as servers keep them: steps in place, dirty pages, sequences that start anew.

The pool is memory full of NaN, with gaps between the states of a page and between pages; a byte that no step may
write must keep its value.
"""

import pytest
import torch

from core.mixer_variants import VARIANTS, every_third_variant, every_variant, made
from hf_memmix.mixers import pages
from testing import MIXERS, TOLERANCES, assert_same

PAGES = 7
INDICES = (5, 1, 4)  # pages of the three sequences
GARBAGE = 0
GAP = 192  # bytes between two pages

every_mixer = pytest.mark.parametrize("mixer", sorted(MIXERS))


def dirty_pool(layer, dtype, device="cpu"):
    """All memory, and the views of the states in it. Its bytes of 255 are NaN in every floating point format."""
    shapes = layer.state_shapes(1, dtype)
    size = pages.page_layout(shapes)[1]
    memory = torch.full((PAGES, size + GAP), 255, dtype=torch.uint8, device=device)
    return memory, pages.carve(memory[:, :size], shapes)


def bytes_outside(layer, dtype, memory, used):
    """A copy of the memory in which the states of the `used` pages are zero: what no one may have changed."""
    rest = memory.clone()
    for state in pages.carve(rest[:, : rest.shape[1] - GAP], layer.state_shapes(1, dtype)).values():
        state[list(used)] = 0
    return rest


def part(tokens, tokens_of):
    return {name: t[:, tokens_of] for name, t in tokens.items()}


def pack(tokens, lengths):
    """The first tokens of every row, one row after the other: [1, sum of lengths, ...]."""
    return {name: torch.cat([t[b : b + 1, :n] for b, n in enumerate(lengths)], 1) for name, t in tokens.items()}


def bounds(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def assert_same_states(actual, expected, what=""):
    assert actual.keys() == expected.keys()
    for name, state in expected.items():
        limit = TOLERANCES.get(state.dtype, 0)
        assert_same(actual[name].double(), state.double(), f"{what} state {name}", limit)


@torch.no_grad()
@every_variant
def test_steps_on_pages(mixer, options):
    """Two steps in place equal those on states of their own; two padding rows share one dirty page; all else stays."""
    layer, x, rotary = made(mixer, options)
    tokens = layer.project(x, rotary)
    _, states = layer.scan(part(tokens, slice(0, 7)), None)
    states = {name: state.contiguous().clone() for name, state in states.items()}
    memory, pools = dirty_pool(layer, torch.float64)
    pages.write_pages(pools, torch.tensor(INDICES), states)
    untouched = bytes_outside(layer, torch.float64, memory, {*INDICES, GARBAGE})
    indices = torch.tensor([*INDICES, GARBAGE, GARBAGE], dtype=torch.int32)
    for t in (7, 8):
        one = part(tokens, slice(t, t + 1))
        want = layer.step(one, states)
        padded = {name: torch.cat([token, token[:2]]) for name, token in one.items()}
        got = layer.step(padded, pools, state_indices=indices)
        assert_same(got[:3], want, f"token {t}")
    assert_same_states(pages.read_pages(pools, indices[:3]), states)
    assert torch.equal(bytes_outside(layer, torch.float64, memory, {*INDICES, GARBAGE}), untouched)


@torch.no_grad()
@every_mixer
def test_kernels_copy_no_page(mixer, monkeypatch):
    """On a GPU, here in Triton's interpreter, a step runs no gather and no scatter."""
    pytest.importorskip("triton")
    layer, x, _ = made(mixer, {})
    layer, x = layer.float(), x[:, :1].float()
    states = layer.initial_states(3, "cpu", torch.float32)
    _, pools = dirty_pool(layer, torch.float32)
    pages.write_pages(pools, torch.tensor(INDICES), states)
    monkeypatch.setenv("HF_MEMMIX_BACKEND", "triton")
    for name in ("index_select", "index_copy_", "gather", "scatter_", "__getitem__", "__setitem__"):
        monkeypatch.setattr(torch.Tensor, name, _refuse_pages(getattr(torch.Tensor, name), name))
    layer.step(layer.project(x, None), pools, torch.tensor(INDICES))


def _refuse_pages(method, name):
    def call(tensor, *args, **kwargs):
        assert tensor.shape[:1] != (PAGES,), f"{name} of a pool: the kernel of a step reads and writes pages itself"
        return method(tensor, *args, **kwargs)

    return call


@torch.no_grad()
@every_mixer
def test_steps_on_pages_in_bf16(mixer):
    """Convolutions keep their inputs in bf16 beside the memory in fp32, in one page."""
    layer, x, rotary = made(mixer, {})
    layer = layer.bfloat16()
    tokens = {name: t.bfloat16() for name, t in layer.project(x.bfloat16(), None).items()}
    _, states = layer.scan(tokens, None)
    states = {name: state.contiguous().clone() for name, state in states.items()}
    memory, pools = dirty_pool(layer, torch.bfloat16)
    assert {name: pool.dtype for name, pool in pools.items()} == {name: s.dtype for name, s in states.items()}
    pages.write_pages(pools, torch.tensor(INDICES), states)
    one = part(tokens, slice(0, 1))
    want = layer.step(one, states)
    assert torch.equal(layer.step(one, pools, torch.tensor(INDICES)), want)
    for name, state in pages.read_pages(pools, torch.tensor(INDICES)).items():
        assert torch.equal(state, states[name]), name


@pytest.mark.gpu
@torch.no_grad()
@every_mixer
def test_steps_on_pages_inside_a_cuda_graph(mixer):
    """Projection, step and read-out in one graph; sequences change rows between replays, and one row is padding."""
    layer, x, _ = made(mixer, {})
    layer, x = layer.float().to("cuda"), x.float().to("cuda")
    tokens = layer.project(x, None)
    y, states = layer.scan(part(tokens, slice(0, 7)), None)
    want = [layer.readout(layer.step(part(tokens, slice(t, t + 1)), states), x[:, t : t + 1]) for t in range(7, 13)]
    _, before = layer.scan(part(tokens, slice(0, 7)), None)
    memory, pools = dirty_pool(layer, torch.float32, "cuda")
    pages.write_pages(pools, torch.tensor(INDICES, device="cuda"), before)
    untouched = bytes_outside(layer, torch.float32, memory, {*INDICES, GARBAGE})
    row, indices = torch.zeros(4, 1, x.shape[-1], device="cuda"), torch.full((4,), GARBAGE, device="cuda")

    def decode():
        return layer.readout(layer.step(layer.project_rows(row), pools, indices), row)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        decode()  # compile before capture
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode()
    for t in range(7, 13):
        places = [(n + t) % 4 for n in range(3)]
        where = [GARBAGE] * 4
        for n, place in enumerate(places):
            where[place] = INDICES[n]
            row[place] = x[n, t]
        indices.copy_(torch.tensor(where))
        graph.replay()
        assert_same(out[places], want[t - 7], f"token {t}")
    assert_same_states(pages.read_pages(pools, torch.tensor(INDICES, device="cuda")), states)
    assert torch.equal(bytes_outside(layer, torch.float32, memory, {*INDICES, GARBAGE}), untouched)


@torch.no_grad()
@every_third_variant
def test_initial_states(mixer, options):
    """They have the shapes and dtypes of the states; a scan and a step from them equal those from None."""
    layer, x, rotary = made(mixer, options)
    tokens = layer.project(x, rotary)
    initial = layer.initial_states(3, "cpu", torch.float64)
    shapes = layer.state_shapes(3, torch.float64)
    assert {name: (tuple(s.shape), s.dtype) for name, s in initial.items()} == shapes
    want, want_states = layer.scan(tokens, None)
    got, states = layer.scan(tokens, initial)
    assert_same(got, want)
    assert_same_states(states, want_states)
    outputs = [layer.step(part(tokens, slice(t, t + 1)), initial) for t in range(x.shape[1])]
    assert_same(torch.cat(outputs, 1), want, "in steps")


@torch.no_grad()
@every_third_variant
@pytest.mark.parametrize("lengths", [(5, 6, 2), (4, 0, 6)], ids=str)
@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_new_sequences_among_continued_ones(mixer, options, paged, lengths):
    """In one packed scan, a new one on a dirty page equals a fresh sequence, a continued one goes on; one is empty."""
    layer, x, rotary = made(mixer, options)
    tokens = layer.project(x, rotary)
    anew = torch.tensor([True, False, 0 not in lengths])
    _, before = layer.scan(part(tokens, slice(0, 7)), None)
    rest = part(tokens, slice(7, None))
    memory, states = dirty_pool(layer, torch.float64)
    indices = torch.tensor(INDICES, dtype=torch.int32)
    pages.write_pages(states, indices[~anew], {name: state[~anew] for name, state in before.items()})
    untouched = bytes_outside(layer, torch.float64, memory, INDICES)
    where = {"state_indices": indices}
    if not paged:
        states, where = pages.read_pages(states, indices), {}
    y, after = layer.scan_sequences(pack(rest, lengths), states, bounds(lengths), anew, **where)
    start = 0
    for b, length in enumerate(lengths):
        own = None if anew[b] else {name: state[b : b + 1] for name, state in before.items()}
        if length:
            expected, own = layer.scan({name: t[b : b + 1, :length] for name, t in rest.items()}, own)
            assert_same(y[:, start : start + length], expected, f"sequence {b}")
        elif options.get("refresh_every") == 1:
            own["operator"] = after["operator"][b : b + 1]  # computed anew, from the same statistics
        assert_same_states({name: state[b : b + 1] for name, state in after.items()}, own, f"sequence {b}")
        start += length
    if paged:
        assert_same_states(pages.read_pages(states, indices), after, "in the pages,")
        assert torch.equal(bytes_outside(layer, torch.float64, memory, INDICES), untouched)


@torch.no_grad()
@every_mixer
def test_starts_anew_needs_no_packing(mixer):
    """One sequence per row, as in a batch without cu_seqlens."""
    layer, x, rotary = made(mixer, {})
    tokens = layer.project(x, rotary)
    _, dirty = layer.scan(tokens, None)
    anew = torch.tensor([False, True, True])
    y, _ = layer.scan_sequences(tokens, {n: s.clone() for n, s in dirty.items()}, starts_anew=anew)
    assert_same(y[1:], layer.scan(part(tokens, slice(None)), None)[0][1:])
    assert_same(y[:1], layer.scan(tokens, dirty)[0][:1])
    memory, pools = dirty_pool(layer, torch.float64)
    indices = torch.tensor(INDICES)
    y, after = layer.scan_sequences(tokens, pools, starts_anew=True, state_indices=indices)
    want, states = layer.scan(tokens, None)
    assert_same(y, want)
    assert_same_states(after, states)
    assert_same_states(pages.read_pages(pools, indices), states, "in the pages,")


@torch.no_grad()
@pytest.mark.parametrize(("mixer", "options"), [row for row in VARIANTS if not row[1]], ids=str)
def test_rows_of_several_sequences(mixer, options):
    """Tokens of several sequences in one row: their own positions, and what a decoder's forward makes of them."""
    layer, x, (cos, sin) = made(mixer, options)
    want = layer(x, position_embeddings=(cos, sin))[0]
    flat = x.reshape(1, -1, x.shape[-1])
    tokens = layer.project_rows(flat, tuple(t.reshape(1, -1, t.shape[-1]) for t in (cos, sin)))
    y, _ = layer.scan_sequences(
        tokens,
        layer.initial_states(3, "cpu", torch.float64),
        bounds([x.shape[1]] * 3),
        starts_anew=torch.ones(3, dtype=torch.bool),
    )
    assert_same(layer.readout(y, flat).view_as(want), want)


@torch.no_grad()
def test_rows_of_tokens_share_their_angles():
    """cos and sin [1, T, d] serve every row, as in a decoder's forward."""
    layer, x, rotary = made("gka", {"use_rope": True})
    shared = tuple(t[:1] for t in rotary)
    want = layer.project(x, tuple(t.expand(3, -1, -1) for t in shared))
    for name, token in layer.project_rows(x, shared).items():
        assert torch.equal(token, want[name]), name


def test_token_arguments_of_rows():
    layer, x, _ = made("ska", {})
    mask = torch.ones(3, 13, dtype=torch.bool)
    assert layer.project_rows(x, None, action_mask=mask, position_ids=None)["action_mask"] is mask
    with pytest.raises(ValueError, match=r"action_mask of layer 0 is \[3, 12\], expected \[3, 13\]"):
        layer.project_rows(x, None, action_mask=mask[:, :12])


def test_pools_that_do_not_fit_are_refused():
    shapes = {"a": ((1, 3), torch.bfloat16), "b": ((1, 5), torch.float32)}
    assert pages.page_layout(shapes) == ({"a": 0, "b": 64}, 128)
    memory = torch.zeros(4, 160, dtype=torch.uint8)
    assert {n: s.shape[1:].numel() for n, s in pages.carve(memory, shapes).items()} == {"a": 3, "b": 5}
    for pool, message in (
        (memory[:, :127], "at least 128 bytes"),
        (memory.float(), "uint8"),
        (memory[:, :158].contiguous(), "page stride of 158"),
        (memory[:, 2:], "multiples of 4 bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            pages.carve(pool, shapes)
