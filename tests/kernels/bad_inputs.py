"""Inputs that an op refuses: rows of a part of the message, and a function that makes them from good inputs."""

from collections.abc import Callable

import torch
from torch import Tensor


def replaced(**changes: Callable) -> Callable:
    """A function of the inputs that replaces some tensors by functions of the old ones."""
    return lambda inputs: {**inputs, **{name: change(inputs.get(name)) for name, change in changes.items()}}


def three_heads(t: Tensor) -> Tensor:
    return t[:, :, :1].expand(-1, -1, 3, -1)


BAD_STATE = ("state", replaced(initial_state=lambda _: None))
BAD_BOUNDARIES = [
    ("packed row", replaced(cu_seqlens=lambda _: torch.tensor([0, 3]))),
    ("1-D", replaced(cu_seqlens=lambda _: torch.tensor([[0.0, 3.0]]))),
]
EMPTY = ("empty", replaced(**{name: lambda t: t[:, :0] for name in "qkv"}))


def bad_heads(op: str) -> list[tuple[str, Callable]]:
    """Of an op with q, k and v, where several query heads may read a key head."""
    return [
        (f"{op} needs q", replaced(q=lambda q: q[0])),
        (f"{op} needs q", replaced(v=lambda v: v[:, :-1])),
        ("head size", replaced(q=lambda q: q[..., :-1])),
        ("multiple", replaced(k=three_heads, v=three_heads)),
        ("limit of 256", replaced(v=lambda v: v[..., :1].expand(-1, -1, -1, 257))),
        BAD_STATE,
        EMPTY,
        *BAD_BOUNDARIES,
    ]
