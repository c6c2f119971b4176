"""Every op with the inputs of hard_inputs.py: outputs, states and gradients on each path, and decode steps."""

import dataclasses
import itertools
from functools import cache

import pytest
import torch
from checks import outputs_and_gradients
from draw import DEVICE
from hard_inputs import CHANGE, HARD, failures, rounded
from ops_table import OPS, Op, Shape
from paths import PATHS, VARIANTS, exists, parametrize
from torch import Tensor

# one chunk, two, two after a drawn state, and many
LENGTHS = {"short": 17, "chunks": 70, "carried": 70, "long": 200}


def shape_of(length: str) -> Shape:
    size = 64 if DEVICE == "cuda" else 32  # with 64, 16 bits and a GPU, Lattice runs its kernel in CUDA C++
    return Shape(1, LENGTHS[length], 2, 1, size, size)


def cancelled(op, want: dict, inputs: dict) -> dict[str, float]:
    """GKA sums terms <x, dx> of the other inputs for the gradient of the decay; they cancel where all is forgotten."""
    if not op.name.startswith("gka"):
        return {}
    terms = {n: t.double() * want[f"d {n}"] for n, t in inputs.items() if n not in op.parameters}
    sums = [t if t.dim() == 3 else t.sum(-1) for t in terms.values()]
    return {"d log_decay": max(t.abs().max().item() for t in sums)}


def changed(op, name: str, shape: Shape, dtype: torch.dtype) -> dict | None:
    """The inputs of this row; None if the op has no such inputs."""
    torch.manual_seed(0)
    before = op.draw(shape, dtype)
    after = HARD[name](before)
    if op.unit_keys and name == "large keys":
        after["k"] = before["k"]
    return None if all(torch.equal(after[n], before[n]) for n in before) else after


ROWS = {op.name: op for op in OPS}


def _with_decay(shape: Shape, dtype: torch.dtype) -> dict[str, Tensor]:
    inputs = ROWS["lattice"].draw(shape, dtype)
    return inputs | {"log_decay": -0.3 * torch.rand_like(inputs["gamma"])}


def _form(op: str, name: str, **changes) -> Op:
    return dataclasses.replace(ROWS[op], name=name, **changes)


FORMS = [
    _form("lattice", "lattice_decayed", draw=_with_decay),
    _form("lattice_free", "lattice_free_decayed", draw=_with_decay),
    _form("lattice", "lattice_l1", options={"l1": 0.01}),
    _form("lattice_free", "lattice_ttt", options={"variant": "ttt", "project": False}),
    _form("lattice_free", "lattice_delta", options={"variant": "delta", "project": False}),
]
ROWS |= {op.name: op for op in FORMS}


def pairs(ops: list[Op]) -> list[tuple[Op, str]]:
    """Each op with the rows of HARD that change its inputs."""
    smallest = Shape(1, 2, 1, 1, 4, 4)
    return [(op, name) for op in ops for name in HARD if changed(op, name, smallest, torch.float32) is not None]


def statistics(op, name: str, final: dict) -> tuple | None:
    """A first state as large as the rounding of the sums of equal keys that SKA keeps in float32: its README says how
    this rounding grows. None for all others.
    """
    if op.name != "ska" or not name.startswith("equal"):
        return None
    S, *rest = (final[f"state{i}"] for i in range(5))
    return CHANGE * S * torch.randn_like(S), *map(torch.zeros_like, rest)


@cache  # the paths come one after the other
def reference(op_name: str, name: str, length: str, dtype: torch.dtype):
    """Inputs, first state, weights of the loss, float64 results and those of rounded inputs; once for all paths."""
    op, shape = ROWS[op_name], shape_of(length)
    inputs, state, weights = changed(op, name, shape, dtype), None, []
    if length == "carried":
        state = op.draw_state(shape, 1, dtype)
    exact = {n: t.double() for n, t in inputs.items()}
    start = None if state is None else tuple(s.double() for s in state)
    want = outputs_and_gradients(op, op.naive, exact, start, weights=weights)
    moved_weights, moved_start = rounded_list(weights), statistics(op, name, want)
    if start is not None:
        moved_start = tuple(rounded_list(start))
    moved = outputs_and_gradients(op, op.naive, rounded(exact), moved_start, weights=moved_weights)
    return inputs, state, weights, want, moved


def rounded_list(tensors) -> list[Tensor]:
    return list(rounded(dict(enumerate(tensors))).values())


def compare(op, name: str, length: str, dtype: torch.dtype):
    inputs, state, weights, want, moved = reference(op.name, name, length, dtype)
    got = outputs_and_gradients(op, op.fast, inputs, state, weights=list(weights))
    bad = failures(got, want, moved, lambda n: op.tolerance(dtype, n.startswith("d ")), cancelled(op, want, inputs))
    assert not bad, bad


FEW = ("small values, common keys", "equal tokens", "no values")  # in the interpreter, every day


def place(op, name: str) -> int:
    """Of a row of HARD among those of an op: rows that come in turn are chosen by it."""
    return OPS.index(op) + [*HARD].index(name)


def length_of(op, name: str, path: str) -> str:
    """Those of more than a chunk come in turn: each op and each row of HARD meets each of them; all paths share one
    reference. The interpreter has time for the shortest only.
    """
    if path == "triton" and DEVICE == "cpu":
        return "short"
    if op.name.startswith("gka_"):  # they cross chunks in test_contract.py: their reference solves per token
        return "short"
    turns = [*LENGTHS][1:]
    turn = turns[place(op, name) % len(turns)]
    return "chunks" if turn == "long" and (op.name in VARIANTS or op.name == "gka") else turn


def rows_on_paths() -> list[tuple[Op, str, str]]:
    """Every row on the torch and native paths, and all on a GPU. In the interpreter each op meets `FEW` and a third of
    the rows of HARD, in turn: a kernel that is wrong at such inputs is wrong at several of them.
    """
    found = []
    for (op, name), path in itertools.product(pairs(OPS), PATHS):
        chosen = path != "triton" or DEVICE == "cuda" or name in FEW or place(op, name) % 3 == 0
        if exists(op, path) and chosen:
            found.append((op, name, path))
    return found


def float32_rows() -> list[tuple]:
    found = []
    for op, name, path in rows_on_paths():
        length = length_of(op, name, path)
        often = length in ("chunks", "carried") and op.name != "gka" and op.name not in VARIANTS
        if path == "triton":
            often = name in FEW and op.name in ("gla", "lattice", "coffee", "ska", "gated_delta")
        found.append((op, name, length, path, often))
    return found


@parametrize(("op", "name", "length", "backend"), float32_rows())
def test_float32(op, name, length, backend):
    compare(op, name, length, torch.float32)


IN_16_BITS = [pair for pair in pairs(OPS) if pair[0].low_precision and place(*pair) % 3 == 1]


@pytest.mark.product_rows(r"(?!lattice-)")
@pytest.mark.parametrize(("op", "name"), IN_16_BITS, ids=str)
def test_bfloat16(op, name, monkeypatch):
    monkeypatch.setenv("HF_MEMMIX_BACKEND", "native")
    compare(op, name, "chunks", torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("op", "name", "dtype"),
    [
        (*row, dtype)
        for dtype in (torch.bfloat16, torch.float32)
        for row in pairs(OPS)
        if row[0].low_precision or dtype == torch.float32
    ],
    ids=str,
)
def test_on_a_gpu(dtype, op, name, monkeypatch):
    monkeypatch.delenv("HF_MEMMIX_BACKEND", raising=False)
    compare(op, name, "chunks" if op.name.startswith("gka") else "long", dtype)


def other_forms() -> list[tuple]:
    """Without those too long for the interpreter; the torch and native paths in turn."""
    if DEVICE == "cuda":
        return [(*pair, path, False) for path in PATHS for pair in pairs(FORMS)]
    return [(*pair, PATHS[number % 2], False) for number, pair in enumerate(pairs(FORMS))]


@parametrize(("op", "name", "backend"), other_forms())
def test_other_forms(op, name, backend):
    """Options of an op, and methods that compute the same in another way."""
    compare(op, name, "chunks", torch.float32)


def step_rows() -> list[tuple]:
    return [(*row, row[2] != "triton" and row[0].name in ("gla", "ska", "short_conv")) for row in rows_on_paths()]


@torch.no_grad()
@parametrize(("op", "name", "backend"), step_rows())
def test_steps(op, name, backend):
    """Decode steps from a state that earlier tokens left; half as many in the interpreter, where each takes long."""
    shape = shape_of("short")
    if backend == "triton" and DEVICE == "cpu":
        shape = shape._replace(T=9)  # SKA computes its operator anew within these
    inputs, start = changed(op, name, shape, torch.float32), op.draw_state(shape, 1, torch.float32)
    exact = {n: t.double() for n, t in inputs.items()}
    states = [s.double() for s in start]
    want, moved = (op.run(op.naive, x, tuple(s)) for x, s in ((exact, states), (rounded(exact), rounded_list(states))))
    mine = tuple(s.clone() for s in start)
    o = torch.cat([op.step(op, op.tokens(inputs, slice(t, t + 1)), mine) for t in range(shape.T)], 1)
    got, want, moved = (dict(enumerate([o, *final])) for o, final in ((o, mine), want, moved))
    bad = failures(got, want, moved, lambda _: op.tolerance(torch.float32))
    assert not bad, bad
