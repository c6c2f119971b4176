"""The rows of OPS of the gated delta rule: one decay per head, one per key channel, heads that share q and k."""

import torch
import torch.nn.functional as F
from bad_inputs import bad_heads, replaced, three_heads
from draw import rand, randn
from torch import Tensor

import hf_memmix_kernels as K


def _draw(shape, dtype: torch.dtype, channels: bool = False, largest_beta: float = 1.0) -> dict[str, Tensor]:
    B, T, H, Hk, D, Dv = shape
    gates = torch.promote_types(dtype, torch.float32)
    q, k = (F.normalize(randn(B, T, heads, D, dtype=torch.float64), dim=-1).to(dtype) for heads in (H, Hk))
    return {
        "q": q,
        "k": k,
        "v": randn(B, T, Hk, Dv, dtype=dtype),
        "log_decay": -0.3 * rand(B, T, H, *([D] if channels else []), dtype=gates),
        "beta": largest_beta * (0.1 + 0.8 * rand(B, T, H, dtype=gates)),
    }


def _draw_channels(shape, dtype: torch.dtype) -> dict[str, Tensor]:
    """Write strengths above 1 reflect what the memory holds for a key."""
    return _draw(shape, dtype, channels=True, largest_beta=2.0)


def _draw_shared(shape, dtype: torch.dtype) -> dict[str, Tensor]:
    """Heads that share q and k, as in Qwen3-Next; q, k and v are slices of one tensor, as after a fused projection."""
    B, T, H, Hk, D, Dv = shape
    inputs = _draw(shape._replace(Hk=H), dtype)
    parts = [inputs["q"][:, :, :Hk], inputs["k"][:, :, :Hk], inputs["v"]]
    wide = torch.cat([t.flatten(2) for t in parts], -1).split([Hk * D, Hk * D, H * Dv], -1)
    return inputs | {name: t.unflatten(-1, (-1, size)) for name, t, size in zip("qkv", wide, (D, D, Dv), strict=True)}


def _draw_state(shape, sequences: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return (randn(sequences, shape.H, shape.D, shape.Dv, dtype=torch.promote_types(dtype, torch.float32)),)


def _silence(inputs: dict[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
    """Padded tokens neither decay nor write."""
    gates = {name: inputs[name] for name in ("log_decay", "beta")}
    return inputs | {n: t.masked_fill(mask.view(*mask.shape, *[1] * (t.dim() - 2)), 0) for n, t in gates.items()}


def _step(op, inputs: dict, state: tuple, state_indices: Tensor | None = None) -> Tensor:
    return K.gated_delta_step(**inputs, state=state[0], state_indices=state_indices)


_BAD = [
    *bad_heads("gated_delta"),
    ("log_decay", replaced(log_decay=lambda g: g[:, :, :1])),
    ("beta", replaced(beta=lambda b: b[..., :1])),
]

_OP = {
    "fast": K.chunk_gated_delta,
    "naive": K.naive_gated_delta,
    "step": _step,
    "draw_state": _draw_state,
    "silence": _silence,
    "unit_keys": True,
}

ROWS = [
    {"name": "gated_delta", "draw": _draw, "bad": _BAD, **_OP},
    {
        "name": "gated_delta_channels",
        "draw": _draw_channels,
        "bad": [("log_decay", replaced(log_decay=lambda g: g[..., :-1])), *_BAD],
        **_OP,
    },
    {
        "name": "gated_delta_shared",
        "draw": _draw_shared,
        "bad": [("value heads are not a multiple", replaced(q=three_heads, k=three_heads))],
        **_OP,
    },
]
