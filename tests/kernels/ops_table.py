"""OPS, the table over which every contract test runs. A row describes one op: its inputs, padding and invalid
arguments.

Every call goes through `Op.run(fn, inputs, state, cu_seqlens)` -> (o, states). Per-token tensors [B, T, ...] and
parameters are in one dict and states in a tuple, so the tests are the same for all ops.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from bad_inputs import BAD_BOUNDARIES, BAD_STATE, bad_heads, replaced, three_heads
from coffee_rows import ROWS as COFFEE
from delta_rows import ROWS as DELTA
from draw import DEVICE, randn
from lattice_rows import ROWS as LATTICE
from ska_rows import ROWS as SKA
from torch import Tensor

import hf_memmix_kernels as K

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# RMS ratio against float64 for the outputs; the limit of gradients is twice as large. If an op amplifies rounding, its
# row has the factor.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, "tf32": 1e-3, torch.float16: 2e-3, torch.bfloat16: 5e-3}
# with float32 inputs, the error of a Triton path is at most this many times that of the torch path
RATIO_TO_TORCH = 2.0


class Shape(NamedTuple):
    """B sequences of T tokens, H query heads, Hk key/value heads, head sizes D and Dv."""

    B: int
    T: int
    H: int
    Hk: int
    D: int
    Dv: int

    def __str__(self):
        return "x".join(map(str, self))


@dataclass(frozen=True)
class Op:
    """One op of the contract.

    Attributes:
        fast, naive: the op and its float64 reference, called as fn(**inputs, **options, <state argument>,
            cu_seqlens=).
        step: fn(op, inputs of one token, state, state_indices=None) -> o; updates the state, or its pages, in place.
        converged: options with which an iterative op equals its reference in float64.
        smooth: options with which the gradient of the reference is compared with finite differences.
        draw: (shape, dtype) -> inputs. Names in `parameters` have no token axis.
        draw_state: (shape, number of sequences, dtype) -> tuple of states.
        silence: (inputs, mask [B, T] of padded tokens) -> inputs whose padded tokens leave the state as it is.
        rounding: factor by which the op may amplify the rounding of its inputs; it multiplies the tolerance.
        tf32: whether tensor cores compute float32 inputs in TF32 on a GPU.
        sequential: whether its kernels loop over tokens, which is slow in the interpreter.
        brief: whether the row differs from another row only by an option; the interpreter then runs one comparison.
        low_precision: whether the tolerances for float16 and bfloat16 hold for the op.
        unit_keys: whether the recurrence is stable for keys of norm 1 only; it then gets no larger ones.
        bad: calls that must raise ValueError: (part of the message, a function of the inputs to the changed
            arguments).
    """

    name: str
    fast: Callable
    naive: Callable
    step: Callable
    draw: Callable[[Shape, torch.dtype], dict[str, Tensor]]
    draw_state: Callable[[Shape, int, torch.dtype], tuple[Tensor, ...]]
    silence: Callable[[dict[str, Tensor], Tensor], dict[str, Tensor]] | None
    bad: list[tuple[str, Callable]]
    options: dict = field(default_factory=dict)
    converged: dict = field(default_factory=dict)
    smooth: dict = field(default_factory=dict)
    parameters: tuple[str, ...] = ()
    rounding: float = 1.0
    tf32: bool = False
    sequential: bool = False
    brief: bool = False
    low_precision: bool = True
    unit_keys: bool = False

    def __str__(self):
        return self.name

    def run(self, fn: Callable, inputs: dict, state: tuple | None = None, cu_seqlens: Tensor | None = None):
        """o and the tuple of final states."""
        if state is not None:
            state = state if len(state) > 1 else state[0]
        o, final = fn(**inputs, **self.options, initial_state=state, cu_seqlens=cu_seqlens)
        return o, final if isinstance(final, tuple) else (final,)

    def tokens(self, inputs: dict, rows: slice | Tensor) -> dict:
        """The inputs with a part of the tokens, or with the tokens in another order."""
        return {name: t if name in self.parameters else t[:, rows] for name, t in inputs.items()}

    def rows(self, inputs: dict, rows: slice | list[int]) -> dict:
        """The inputs with a part of the rows, or with the rows in another order."""
        return {name: t if name in self.parameters else t[rows] for name, t in inputs.items()}

    def tolerance(self, dtype: torch.dtype, grad: bool = False) -> float:
        if dtype == torch.float32 and self.tf32 and DEVICE == "cuda":
            return TOLERANCE["tf32"] * (2 if grad else 1)
        return TOLERANCE[dtype] * self.rounding * (2 if grad else 1)


def _draw_gla(shape: Shape, dtype: torch.dtype) -> dict[str, Tensor]:
    B, T, H, Hk, D, Dv = shape
    sizes = {"q": (H, D), "k": (Hk, D), "v": (Hk, Dv)}
    inputs = {name: randn(B, T, *size, dtype=torch.float64) for name, size in sizes.items()}
    inputs = {name: (F.normalize(t, dim=-1) if name in "qk" else t).to(dtype) for name, t in inputs.items()}
    inputs["log_decay"] = -0.3 * torch.rand(B, T, H, device=DEVICE).to(torch.promote_types(dtype, torch.float32))
    return inputs


def _draw_gla_shared(shape: Shape, dtype: torch.dtype) -> dict[str, Tensor]:
    """Heads that share q and k, as in Mamba-2; q, k and v are slices of one tensor, as after a fused projection."""
    B, T, H, Hk, D, Dv = shape
    inputs = _draw_gla(shape._replace(Hk=H), dtype)
    parts = [inputs["q"][:, :, :Hk], inputs["k"][:, :, :Hk], inputs["v"]]
    wide = torch.cat([t.flatten(2) for t in parts], -1).split([Hk * D, Hk * D, H * Dv], -1)
    inputs |= {name: t.unflatten(-1, (-1, size)) for name, t, size in zip("qkv", wide, (D, D, Dv), strict=True)}
    inputs["beta"] = 0.1 + 0.8 * torch.rand_like(inputs["log_decay"])
    inputs["skip"] = randn(H, dtype=inputs["log_decay"].dtype)
    return inputs


def _draw_gka(shape: Shape, dtype: torch.dtype) -> dict[str, Tensor]:
    inputs = _draw_gla(shape, dtype)
    for gate in ("alpha", "beta"):
        inputs[gate] = 0.1 + 0.8 * torch.rand_like(inputs["log_decay"])
    return inputs


def _draw_gka_sketched(shape: Shape, dtype: torch.dtype) -> dict[str, Tensor]:
    sketch = torch.linalg.qr(randn(shape.Hk, shape.D, _sketch_dim(shape), dtype=torch.float64)).Q
    return {**_draw_gka(shape, dtype), "sketch": sketch.to(dtype)}


def _sketch_dim(shape: Shape) -> int:
    return max(1, shape.D // 2)


def _draw_conv(shape: Shape, dtype: torch.dtype) -> dict[str, Tensor]:
    channels = shape.H * shape.D
    return {
        "x": randn(shape.B, shape.T, channels, dtype=dtype),
        "weight": randn(channels, 4, dtype=dtype),
        "bias": randn(channels, dtype=dtype),
    }


def _state_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _draw_gka_state(shape: Shape, sequences: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    # the state after 2 D earlier tokens, so H is positive semidefinite
    keys = F.normalize(randn(sequences, shape.H, 2 * shape.D, shape.D, dtype=torch.float64), dim=-1)
    values = randn(sequences, shape.H, 2 * shape.D, shape.Dv, dtype=torch.float64)
    return (keys.mT @ keys).to(_state_dtype(dtype)), (values.mT @ keys).to(_state_dtype(dtype))


def _draw_gka_sketched_state(shape: Shape, sequences: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return _draw_gka_state(shape._replace(D=_sketch_dim(shape)), sequences, dtype)


def _draw_gla_state(shape: Shape, sequences: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return (randn(sequences, shape.H, shape.D, shape.Dv, dtype=_state_dtype(dtype)),)


def _draw_conv_state(shape: Shape, sequences: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return (randn(sequences, shape.H * shape.D, 3, dtype=dtype),)


def _zeroed(inputs: dict[str, Tensor], mask: Tensor, names: tuple[str, ...]) -> dict[str, Tensor]:
    """The inputs in which the padded tokens of the named tensors are 0; the other tensors keep their padded values."""
    return {
        n: t.masked_fill(mask.view(*mask.shape, *[1] * (t.dim() - 2)), 0) if n in names else t
        for n, t in inputs.items()
    }


def _step_gla(op: Op, inputs: dict, state: tuple, state_indices: Tensor | None = None) -> Tensor:
    return K.gla_step(**inputs, state=state[0], state_indices=state_indices)


def _step_gka(op: Op, inputs: dict, state: tuple, state_indices: Tensor | None = None) -> Tensor:
    return K.gka_step(**inputs, state=state, **op.options, state_indices=state_indices)


def _step_conv(op: Op, inputs: dict, state: tuple, state_indices: Tensor | None = None) -> Tensor:
    return K.short_conv_step(**inputs, state=state[0], state_indices=state_indices)


_BAD_CONV = [
    ("must be \\[B, T, C\\]", replaced(x=lambda x: x[0])),
    ("squeeze", replaced(weight=lambda w: w[:, None])),
    ("bias", replaced(bias=lambda b: b[:-1])),
    ("activation", replaced(activation=lambda _: "relu")),
    ("initial_state", replaced(initial_state=lambda _: torch.zeros(1, 2, 3))),
    BAD_BOUNDARIES[0],
    (
        "not both",
        lambda inputs: {**inputs, "x": inputs["x"][:1], "cu_seqlens": torch.tensor([0, 3]), "lengths": torch.ones(1)},
    ),
    ("lengths", replaced(lengths=lambda _: torch.ones(7))),
]

_GKA = {
    "fast": K.chunk_gka,
    "naive": K.naive_gka,
    "step": _step_gka,
    "draw": _draw_gka,
    "draw_state": _draw_gka_state,
    # autograd of the reference differentiates the iterations themselves, even if they have not converged
    "smooth": {"num_iterations": 6},
    "silence": lambda inputs, mask: _zeroed(inputs, mask, ("log_decay", "beta")),
    # y = U x also reads the parts of x outside the span of the keys: rounding grows with the condition number, 51 at
    # ridge 0.02
    "rounding": 4.0,
    "tf32": True,
}

OPS = [
    Op(
        name="short_conv",
        fast=K.short_conv,
        naive=K.naive_short_conv,
        step=_step_conv,
        draw=_draw_conv,
        draw_state=_draw_conv_state,
        silence=None,
        bad=_BAD_CONV,
        parameters=("weight", "bias"),
    ),
    Op(
        name="gla",
        fast=K.chunk_gla,
        naive=K.naive_gla,
        step=_step_gla,
        draw=_draw_gla,
        draw_state=_draw_gla_state,
        silence=lambda inputs, mask: _zeroed(inputs, mask, ("log_decay", "v")),
        bad=[
            *bad_heads("gla"),
            ("log_decay", replaced(log_decay=lambda g: g[..., :1])),
            ("chunk_size", replaced(chunk_size=lambda _: 48)),
        ],
    ),
    Op(
        name="gla_shared",
        fast=K.chunk_gla,
        naive=K.naive_gla,
        step=_step_gla,
        draw=_draw_gla_shared,
        draw_state=_draw_gla_state,
        silence=lambda inputs, mask: _zeroed(inputs, mask, ("log_decay", "beta")),
        parameters=("skip",),
        bad=[
            ("value heads are not a multiple", replaced(q=three_heads, k=three_heads)),
            ("log_decay", replaced(log_decay=lambda g: g[..., :1])),
            ("beta", replaced(beta=lambda b: b[..., :1])),
            ("skip", replaced(skip=lambda s: s[:1])),
            BAD_STATE,
        ],
    ),
    # the gradients are those of the converged solution, so the rows use options that converge (with the paper's 30
    # iterations the gradients differ by 7e-4)
    Op(
        name="gka",
        **_GKA,
        options={"num_iterations": 48},
        converged={"num_iterations": 120},
        # in 16 bits iterations without refinement lose accuracy
        low_precision=False,
        bad=[
            *bad_heads("gka"),
            ("log_decay", replaced(log_decay=lambda g: g[..., :1])),
            ("alpha", replaced(alpha=lambda a: a[:, :1])),
            ("beta", replaced(beta=lambda b: b[..., :1])),
            ("ridge", replaced(ridge=lambda _: 0.0)),
            ("chunk_size", replaced(chunk_size=lambda _: 0)),
            ("num_iterations", replaced(num_iterations=lambda _: 0)),
        ],
    ),
    Op(
        name="gka_refined",
        **_GKA,
        options={"refinement": (16, 16, 16)},
        converged={"refinement": (40, 40, 40)},
        bad=[
            ("refinement", replaced(refinement=lambda _: (7, 0))),
            ("refinement", replaced(refinement=lambda _: ())),
            ("refinement", replaced(refinement=lambda _: (1,) * 9)),
        ],
    ),
    Op(
        name="gka_sketched",
        # keys of half the size round once more: where one key fills the state, the error of dk is 5e-5 to 9e-5; that
        # of `gka` with keys of the same size is 5e-5 to 7e-5
        **{**_GKA, "draw": _draw_gka_sketched, "draw_state": _draw_gka_sketched_state, "rounding": 6.0},
        options={"num_iterations": 48},
        converged={"num_iterations": 120},
        parameters=("sketch",),
        low_precision=False,
        bad=[
            (r"sketch must be \[Hk, D, s\]", replaced(sketch=lambda s: s[0])),
            ("with s of 1 to", replaced(sketch=lambda s: torch.cat([s, s, s], -1))),
            ("with s of 1 to", replaced(sketch=lambda s: s[..., :0])),
            (r"sketch must be \[Hk, D, s\]", replaced(sketch=lambda s: torch.cat([s, s]))),
            BAD_STATE,
        ],
    ),
    *(Op(**row) for row in DELTA),
    *(Op(**row) for row in COFFEE),
    *(Op(**row) for row in SKA),
    *(Op(**row) for row in LATTICE),
]
