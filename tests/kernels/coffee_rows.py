"""The COFFEE rows of OPS: eq. 7 without options, and with every option that adds a tensor."""

import torch
from bad_inputs import BAD_BOUNDARIES, replaced
from draw import rand, randn
from torch import Tensor

import hf_memmix_kernels as K


def _sizes(shape) -> tuple[int, int]:
    """Features and states for a Shape. They include 3 and 6 states, and numbers of features that do not
    fill a warp.
    """
    return max(1, shape.H * shape.D // 12), max(1, shape.Dv // 16)


def _draw(shape, dtype: torch.dtype) -> dict[str, Tensor]:
    D, n = _sizes(shape)
    return {
        "u": randn(shape.B, shape.T, D, dtype=dtype),
        "lam": -rand(D, n, dtype=dtype),
        "w": randn(D, n, dtype=dtype),
        "C": randn(D, n, dtype=dtype),
    }


def _draw_filtered(shape, dtype: torch.dtype) -> dict[str, Tensor]:
    inputs = _draw(shape, dtype)
    return {
        **inputs,
        "w_filter": randn(*inputs["lam"].shape, dtype=dtype),
        "gate": 0.2 + 0.8 * rand(*inputs["u"].shape, dtype=dtype),
    }


def _draw_state(shape, sequences: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    D, n = _sizes(shape)
    return (randn(sequences, D, n, dtype=torch.float64 if dtype == torch.float64 else torch.float32),)


def _step(op, inputs: dict, state: tuple, state_indices: Tensor | None = None) -> Tensor:
    return K.coffee_step(**inputs, state=state[0], state_indices=state_indices)


_BAD = [
    ("must be \\[B, T, D\\]", replaced(u=lambda u: u[0])),
    ("empty", replaced(u=lambda u: u[:, :0])),
    ("lam must be", replaced(lam=lambda p: p[:-1])),
    ("n <= 64", replaced(lam=lambda p: p[:, :1].expand(-1, 65))),
    ("w must be", replaced(w=lambda p: p[:, :1].expand(-1, 3))),
    ("w must be", replaced(w=lambda _: None)),
    ("C must be", replaced(C=lambda p: p[:-1])),
    ("w_filter must be", replaced(w_filter=lambda _: torch.zeros(1))),
    ("gate must be", replaced(gate=lambda _: torch.zeros(2, 3))),
    ("pass gate", replaced(feedback=lambda _: "token")),
    ("feedback='tanh'", replaced(feedback=lambda _: "tanh")),
    ("initial_state must be", replaced(initial_state=lambda _: None)),
    *BAD_BOUNDARIES,
]

_COMMON = {
    # gradients of parameters are sums of large terms that cancel: if dy is rounded to bfloat16, as on every path with
    # bfloat16 outputs, even the float64 reference errs by up to 2.5 times the limit in 1 of 40 draws
    "rounding": 3.0,
    "fast": K.chunk_coffee,
    "naive": K.naive_coffee,
    "step": _step,
    "draw_state": _draw_state,
}

ROWS = [
    {
        **_COMMON,
        "name": "coffee",
        "draw": _draw,
        "silence": None,
        "bad": _BAD,
        "parameters": ("lam", "w", "C"),
    },
    {
        **_COMMON,
        "name": "coffee_filtered",
        "draw": _draw_filtered,
        "silence": lambda inputs, mask: {**inputs, "gate": inputs["gate"].masked_fill(mask[..., None], 0)},
        "bad": [],
        "parameters": ("lam", "w", "C", "w_filter"),
    },
]
