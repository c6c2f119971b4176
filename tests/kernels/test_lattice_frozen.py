"""The frozen-state mode of Lattice: its definition at several chunk sizes, and the table of errors in its
docstring.
"""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from checks import error
from lattice_rows import draw, draw_state
from ops_table import Shape

import hf_memmix_kernels as K
from hf_memmix_kernels.lattice.naive import naive_write

SHAPE = Shape(2, 12, 2, 2, 10, 7)
VARIANTS = ("dec", "enc", "sim")
BENCHMARKS = Path(__file__).parents[2] / "kernels" / "benchmarks"


def frozen_inputs(**tensors) -> tuple[list, dict]:
    inputs = draw(SHAPE, torch.float64) | tensors
    return list(inputs.values()), {"initial_state": draw_state(SHAPE, SHAPE.B, torch.float64)[0]}


def definition(q, k, v, gamma, start, chunk, variant):
    """The definition, token by token: the writes of a chunk are computed at the state before it, and their sum is then
    normalised.
    """
    outputs, state = [], start
    for t in range(q.shape[1]):
        if t % chunk == 0:
            first = total = state
        one = torch.ones_like(gamma[:, t, :, None, None])
        token = (x[:, t, ..., None] for x in (k, v, gamma[..., None]))
        # the write without its normalisation: `project=False` at slots of unit norm
        total = total + naive_write(first, *token, one, variant, False, 0.0) - first
        state = total / torch.linalg.vector_norm(total, dim=-2, keepdim=True)
        outputs.append((state @ q[:, t, ..., None])[..., 0])
    return torch.stack(outputs, 1), state


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("chunk", (1, 4, 12))
def test_frozen_is_its_definition(variant, chunk):
    """Output, state and gradients equal the definition; with chunks of one token they equal the recurrence."""
    inputs, start = frozen_inputs()
    tensors = [*inputs, start["initial_state"]]
    weights = [torch.randn(x.shape, dtype=torch.float64) for x in (inputs[2], tensors[-1])]

    def run(fn):
        leaves = [x.detach().clone().requires_grad_() for x in tensors]
        results = fn(*leaves)
        loss = sum((x * w).sum() for x, w in zip(results, weights, strict=True))
        return [*results, *torch.autograd.grad(loss, leaves)]

    found = run(lambda *x: K.frozen_lattice(*x[:4], chunk_size=chunk, variant=variant, initial_state=x[4]))
    if chunk == 1:
        wanted = run(lambda *x: K.naive_lattice(*x[:4], variant=variant, initial_state=x[4]))
    else:
        # the start is normalised when used
        norm = torch.linalg.vector_norm
        wanted = run(lambda *x: definition(*x[:4], x[4] / norm(x[4], dim=-2, keepdim=True), chunk, variant))
    for name, a, b in zip(("y", "S", "dq", "dk", "dv", "dgamma", "dS"), found, wanted, strict=True):
        assert error(a, b) <= 1e-12, name


def test_frozen_state_is_carried_from_chunk_to_chunk():
    (q, k, v, gamma), start = frozen_inputs()
    y, S = K.frozen_lattice(q, k, v, gamma, chunk_size=4, **start)
    first, middle = K.frozen_lattice(*(x[:, :8] for x in (q, k, v, gamma)), chunk_size=4, **start)
    last, end = K.frozen_lattice(*(x[:, 8:] for x in (q, k, v, gamma)), chunk_size=4, initial_state=middle)
    assert error(torch.cat([first, last], 1), y) <= 1e-12 and error(end, S) <= 1e-12


def test_frozen_padding_writes_nothing():
    (q, k, v, gamma), start = frozen_inputs()
    gamma[:, 6:8] = 0
    _, S = K.frozen_lattice(*(x[:, :8] for x in (q, k, v, gamma)), chunk_size=4, **start)
    _, four = K.frozen_lattice(*(x[:, :4] for x in (q, k, v, gamma)), chunk_size=4, **start)
    _, six = K.frozen_lattice(*(x[:, 4:6] for x in (q, k, v, gamma)), chunk_size=2, initial_state=four)
    assert error(S, six) <= 1e-12


def test_frozen_in_low_precision():
    (q, k, v, gamma), start = frozen_inputs()
    y, _ = K.frozen_lattice(q, k, v, gamma, chunk_size=4, **start)
    low, S = K.frozen_lattice(*(x.bfloat16() for x in (q, k, v)), gamma.float(), chunk_size=4)
    assert low.dtype == torch.bfloat16 and S.dtype == torch.float32
    low, _ = K.frozen_lattice(
        *(x.bfloat16() for x in (q, k, v)), gamma.float(), chunk_size=4, initial_state=start["initial_state"]
    )
    assert error(low, y) <= 2e-2


def test_huge_writes_stay_finite():
    """The squared norm of a sum of writes is a difference of large numbers; rounding must not make the result
    infinite.
    """
    inputs, start = frozen_inputs()
    q, k, v, gamma = (x.float().requires_grad_() for x in inputs)
    y, S = K.frozen_lattice(q, k, 1e4 * v, gamma, chunk_size=12, variant="sim")
    grads = torch.autograd.grad(y.sum() + S.sum(), (q, k, v, gamma))
    assert all(torch.isfinite(x).all() for x in (y, S, *grads))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_size": 5}, "12 tokens are not a multiple of chunk_size=5"),
        ({"chunk_size": 0}, "chunk_size=0"),
        ({"chunk_size": 2.0}, "chunk_size=2.0"),
        ({"variant": "delta"}, "no baselines"),
        ({"variant": "decoder"}, "variant='decoder'"),
        ({"initial_state": torch.zeros(1)}, "the state must be"),
    ],
)
def test_frozen_refuses(options, message):
    inputs, start = frozen_inputs()
    with pytest.raises(ValueError, match=message):
        K.frozen_lattice(*inputs, **{"chunk_size": 4, **start, **options})


def test_table_of_errors():
    """The table of the docstring equals the JSON, and a row of the JSON is measured again."""
    spec = importlib.util.spec_from_file_location("lattice_frozen", BENCHMARKS / "lattice_frozen.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    rows = json.loads((BENCHMARKS / "results" / "lattice_frozen_cpu.json").read_text())["rows"]
    for row in rows:
        assert f"        {script.line(row)}\n" in K.frozen_lattice.__doc__
    again = script.measure("sim", 0.5)
    (saved,) = (row for row in rows if (row["variant"], row["gamma"]) == ("sim", 0.5))
    assert again["error"] == pytest.approx(saved["error"], rel=1e-6)
