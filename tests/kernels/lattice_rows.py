"""The Lattice rows of OPS: three ways to write a slot, and the recurrence without projection."""

import torch
import torch.nn.functional as F
from bad_inputs import BAD_BOUNDARIES, BAD_STATE, EMPTY, replaced
from draw import rand, randn
from torch import Tensor

import hf_memmix_kernels as K


def sizes(shape) -> tuple[int, int, int]:
    """Heads, slots m and their size d >= m for a Shape. Heads are few, because the interpreter runs them
    one by one.
    """
    d, m = (min(128, x) for x in (max(shape.D, shape.Dv), min(shape.D, shape.Dv)))
    return min(2, shape.H) if shape.T <= 20 else 1, m, d


def draw(shape, dtype: torch.dtype) -> dict[str, Tensor]:
    """Random inputs with gamma |v|^2 < 2. With larger steps "enc" diverges, and rounding errors grow without limit."""
    H, m, d = sizes(shape)
    inputs = {name: randn(shape.B, shape.T, H, n, dtype=torch.float64) for name, n in (("q", m), ("k", m), ("v", d))}
    inputs = {name: F.normalize(t, dim=-1).to(dtype) for name, t in inputs.items()}
    inputs["gamma"] = rand(shape.B, shape.T, H, dtype=torch.promote_types(dtype, torch.float32))
    return inputs


def draw_state(shape, sequences: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    H, m, d = sizes(shape)
    state = F.normalize(randn(sequences, H, d, m, dtype=torch.float64), dim=-2)
    return (state.to(torch.float64 if dtype == torch.float64 else torch.float32),)


def _step(op, inputs: dict, state: tuple, state_indices: Tensor | None = None) -> Tensor:
    return K.lattice_step(**inputs, state=state[0], **op.options, state_indices=state_indices)


_BAD = [
    ("lattice needs q", replaced(q=lambda q: q[0])),
    ("lattice needs q", replaced(k=lambda k: k[..., :-1])),
    ("lattice needs q", replaced(v=lambda v: v[:, :-1])),
    ("take m <= d", replaced(v=lambda v: v[..., :-1])),
    ("limit of 128", replaced(v=lambda v: v[..., :1].expand(-1, -1, -1, 129))),
    ("gamma must be", replaced(gamma=lambda g: g[..., :1])),
    ("log_decay must be", replaced(log_decay=lambda _: torch.zeros(1))),
    ("variant='decoder'", replaced(variant=lambda _: "decoder")),
    ("pass project=False", replaced(variant=lambda _: "delta")),
    ("l1=-0.1", replaced(l1=lambda _: -0.1)),
    BAD_STATE,
    EMPTY,
    *BAD_BOUNDARIES,
]

_COMMON = {
    "fast": K.chunk_lattice,
    "naive": K.naive_lattice,
    "step": _step,
    "draw": draw,
    "draw_state": draw_state,
    "silence": lambda inputs, mask: {
        name: t.masked_fill(mask[..., None], 0) if name == "gamma" else t for name, t in inputs.items()
    },
    "bad": [],
    "sequential": True,
}

ROWS = [
    {**_COMMON, "name": "lattice", "bad": _BAD},
    {**_COMMON, "name": "lattice_enc", "options": {"variant": "enc"}, "brief": True},
    {**_COMMON, "name": "lattice_sim", "options": {"variant": "sim"}, "brief": True},
    {**_COMMON, "name": "lattice_free", "options": {"project": False}, "brief": True},
]
