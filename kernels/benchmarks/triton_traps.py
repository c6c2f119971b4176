"""What the kernels avoid because a compiler got it wrong (kernels/README.md, "Compiler traps"), tried on a GPU.

`triton_versions.py traps` measures it with the Triton that is installed. Each trap has two rows, for what the kernels
do ("kept") and for what they avoid ("avoided"): the largest error as a part of what the tests allow (1 is the limit),
and the time: of gla's backward that of its kernels, because the host takes as long to launch them.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl
from benchmark import measure_kernels
from checks import error, outputs_and_gradients
from ops_table import OPS, TOLERANCE, Op, Shape

from hf_memmix_kernels.gla import launch
from hf_memmix_kernels.gla.op import chunk_gla

NARROW = Shape(1, 200, 4, 4, 32, 64)  # key heads of 32 numbers: a tile's row takes 64 bytes
TIMED = (4, 8192, 16)  # B, T, H
CHUNK, WIDTH, CHUNKS = 64, 64, 16384
PROGRAMS, STEPS = 128, 64  # of stored_kernel


@contextlib.contextmanager
def narrow_tiles():
    """gla's backward takes tiles as wide as its keys, not at least 64 columns."""
    library = launch._tiles

    def tiles(q, chunk_size, keys, *others):
        return library(q, chunk_size, min(keys, q.shape[3]), *others)

    launch._tiles = tiles
    try:
        yield
    finally:
        launch._tiles = library


def parts_of_tolerance(op: Op, shape: Shape, dtype: torch.dtype) -> dict[str, float]:
    """The errors of outputs, states and gradients of an op, as parts of what the tests allow."""
    torch.manual_seed(0)
    inputs, state, weights = op.draw(shape, dtype), op.draw_state(shape, 1, dtype), []
    want = outputs_and_gradients(op, op.naive, inputs, state, weights=weights)
    got = outputs_and_gradients(op, op.fast, inputs, state, weights=weights)
    return {k: error(got[k], want[k]) / op.tolerance(dtype, grad=k.startswith("d ")) for k in want}


def gla_backward(dtype: torch.dtype) -> Callable[[], None]:
    """A function that runs the backward of gla once."""
    B, T, H = TIMED
    torch.manual_seed(0)
    sizes = (NARROW.D, NARROW.D, NARROW.Dv)
    inputs = [torch.randn(B, T, H, D, device="cuda", dtype=dtype).requires_grad_() for D in sizes]
    inputs.append((-torch.rand(B, T, H, device="cuda")).requires_grad_())
    output = chunk_gla(*inputs)[0]
    upstream = torch.randn_like(output)
    return lambda: torch.autograd.grad(output, inputs, upstream, retain_graph=True)


def narrow(dtype: torch.dtype) -> Iterator[tuple[str, float, float]]:
    """Way, error and ms of gla's backward with wide and with narrow tiles."""
    op = next(op for op in OPS if op.name == "gla")
    for way, tiles in (("kept", contextlib.nullcontext), ("avoided", narrow_tiles)):
        with tiles():
            part = max(parts_of_tolerance(op, NARROW, dtype).values())
            backward = gla_backward(dtype)
            backward()  # compiles
            yield way, part, measure_kernels(backward)


@triton.jit
def scores_kernel(q, k, x, out, C: tl.constexpr, D: tl.constexpr, TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr):
    """(k q^T) x of each chunk; k q^T is a dot product of its own, or the transpose of the accumulator of q k^T."""
    at = tl.program_id(0).to(tl.int64) * C * D + tl.arange(0, C)[:, None] * D + tl.arange(0, D)[None, :]
    b_q, b_k, b_x = tl.load(q + at), tl.load(k + at), tl.load(x + at)
    if TRANSPOSED:
        scores = tl.trans(tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION))
    else:
        scores = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)
    tl.store(out + at, tl.dot(scores.to(b_x.dtype), b_x, input_precision=PRECISION).to(out.dtype.element_ty))


def transposed(dtype: torch.dtype) -> Iterator[tuple[str, float, float]]:
    """Way, error and ms of a product with the transpose of an accumulator."""
    torch.manual_seed(0)
    q, k, x = (torch.randn(CHUNKS, CHUNK, WIDTH, device="cuda", dtype=dtype) for _ in range(3))
    want = k.double() @ q.double().mT @ x.double()
    limit = TOLERANCE["tf32" if dtype == torch.float32 else dtype]
    for way in ("kept", "avoided"):
        out = torch.empty_like(x)

        def launch_it(out=out, way=way):
            scores_kernel[(CHUNKS,)](q, k, x, out, CHUNK, WIDTH, TRANSPOSED=way == "avoided", PRECISION="tf32")

        launch_it()
        yield way, error(out, want) / limit, triton.testing.do_bench(launch_it)


@triton.jit
def stored_kernel(a, b, out, STEPS, C: tl.constexpr, D: tl.constexpr, DIRECT: tl.constexpr):
    """Stores the sum of a b_i after every step. The columns of b are permuted, so those of the accumulator are not in
    the order of memory, as in Lattice's walks: it is stored as it is, or in whole rows.
    """
    o_c, o_d = tl.arange(0, C)[:, None], tl.arange(0, D)[None, :]
    program = tl.program_id(0).to(tl.int64) * STEPS * C * D
    order = o_d % 8 * (D // 8) + o_d // 8
    b_a, acc = tl.load(a + o_c * D + o_d), tl.zeros([C, D], tl.float32)
    for i in range(STEPS):
        acc = tl.dot(b_a, tl.load(b + i * D * D + tl.arange(0, D)[:, None] * D + order), acc)
        p_out = out + program + i * C * D + o_c * D
        if DIRECT:
            tl.store(p_out + order, acc)
        else:
            rows = tl.reshape(tl.permute(tl.reshape(acc, [C, D // 8, 8]), 0, 2, 1), [C, D])
            tl.store(p_out + o_d, rows)


def stored(dtype: torch.dtype) -> Iterator[tuple[str, float, float]]:
    """Way, error and ms of stores of accumulators whose columns are not in the order of memory."""
    torch.manual_seed(0)
    a = torch.randn(CHUNK, WIDTH, device="cuda", dtype=dtype)
    b = torch.randn(STEPS, WIDTH, WIDTH, device="cuda", dtype=dtype)
    want = (a.double() @ b.double()).cumsum(0).expand(PROGRAMS, -1, -1, -1)
    limit = TOLERANCE["tf32" if dtype == torch.float32 else dtype]
    for way in ("kept", "avoided"):
        out = torch.empty(PROGRAMS, STEPS, CHUNK, WIDTH, device="cuda")

        def launch_it(out=out, way=way):
            stored_kernel[(PROGRAMS,)](a, b, out, STEPS, CHUNK, WIDTH, DIRECT=way == "avoided")

        launch_it()
        yield way, error(out, want) / limit, triton.testing.do_bench(launch_it)


# name in the file: (function, dtypes); Triton's float32 tiles of gla have rows of 128 bytes
TRAPS = {
    "narrow tiles": (narrow, (torch.bfloat16,)),
    "transposed accumulators": (transposed, (torch.bfloat16, torch.float32)),
    "stored accumulators": (stored, (torch.bfloat16,)),
}


def trap(name: str) -> Iterator[dict]:
    """One row per dtype and way."""
    function, dtypes = TRAPS[name]
    for dtype in dtypes:
        for way, part, ms in function(dtype):
            found = {"part": round(part, 4) if part < float("inf") else None, "ms": round(ms, 4)}
            yield {"op": name, "dtype": str(dtype).removeprefix("torch."), "pass": way, **found}
