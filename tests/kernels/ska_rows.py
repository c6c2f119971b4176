"""The SKA row of OPS: chunk-causal, with states that were carried over within a chunk, and grouped key heads.

test_ska.py tests the factors gamma and eta: their gradient is one sum of terms with random signs and may be near zero,
which the RMS ratio cannot bound.
"""

import torch
import torch.nn.functional as F
from draw import rand, randn
from torch import Tensor

import hf_memmix_kernels as K

CHUNK = 16
# position of drawn states in their first chunk, such that decode tests of 8 and 9 tokens refresh the operator
POSITION = 11


def _rank(shape) -> int:
    """Triton runs ranks up to 64."""
    return min(shape.D, 64)


def _features(*size: int, dtype: torch.dtype) -> Tensor:
    """Vectors with norms between 1/2 and 1; the largest norm occurs once."""
    lengths = 0.5 + 0.5 * rand(*size[:-1], 1, dtype=torch.float64)
    return (F.normalize(randn(*size, dtype=torch.float64), dim=-1) * lengths).to(dtype)


def draw(shape, dtype: torch.dtype) -> dict[str, Tensor]:
    B, T, H, Hk, _, Dv = shape
    return {
        "q": _features(B, T, H, _rank(shape), dtype=dtype),
        "k": _features(B, T, Hk, _rank(shape), dtype=dtype),
        "v": randn(B, T, Hk, Dv, dtype=dtype),
    }


def draw_state(shape, sequences: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The state after 2 r earlier tokens."""
    heads, rank = (sequences, shape.Hk), _rank(shape)
    keys = _features(*heads, 2 * rank, rank, dtype=torch.float64)
    values = randn(*heads, 2 * rank, shape.Dv, dtype=torch.float64)
    statistics = [keys.mT @ keys, keys[..., :-1, :].mT @ keys[..., 1:, :], keys.mT @ values]
    state = (
        torch.cat(statistics, -1),
        randn(*heads, rank, shape.Dv, dtype=torch.float64),
        keys[..., -1, :].clone(),
        keys.norm(dim=-1).amax(-1),
        torch.full_like(keys[..., 0, 0], POSITION),
    )
    return tuple(s.to(torch.float64 if dtype == torch.float64 else torch.float32) for s in state)


def _step(op, inputs: dict, state: tuple, state_indices: Tensor | None = None) -> Tensor:
    tokens = {name: t for name, t in inputs.items() if name in "qkv"}
    where = {"state": state, "state_indices": state_indices}
    return K.ska_step(**tokens, mask=None, gamma=None, eta=None, **where, **op.options)


def _with(**changes) -> object:
    return lambda inputs: {**inputs, **{name: change(inputs.get(name)) for name, change in changes.items()}}


def _repeated(t: Tensor) -> Tensor:
    return t[:, :, :1].expand(-1, -1, 3, -1)


_BAD = [
    ("ska needs q", _with(q=lambda q: q[0])),
    ("ska needs q", _with(v=lambda v: v[:, :-1])),
    ("head size", _with(q=lambda q: q[..., :-1])),
    ("multiple", _with(k=_repeated, v=_repeated)),
    ("limit of 256", _with(v=lambda v: v[..., :1].expand(-1, -1, -1, 257))),
    (
        "rank 130 is over the limit of 128",
        _with(q=lambda q: q.repeat(1, 1, 1, 5)[..., :130], k=lambda k: k.repeat(1, 1, 1, 5)[..., :130]),
    ),
    ("empty", _with(**{name: lambda t: t[:, :0] for name in "qkv"})),
    ("state", _with(initial_state=lambda _: None)),
    ("state", _with(initial_state=lambda _: torch.zeros(2))),
    ("action mask must be", _with(mask=lambda _: torch.ones(2, 7))),
    ("action mask must be", _with(mask=lambda _: torch.ones(20, dtype=torch.bool))),
    ("gamma", _with(gamma=lambda _: torch.ones(3))),
    ("eta", _with(eta=lambda _: torch.ones(2, 1))),
    ("power", _with(power=lambda _: -1)),
    ("power", _with(power=lambda _: 1.5)),
    ("eps", _with(eps=lambda _: 0.0)),
    ("sigma_floor", _with(sigma_floor=lambda _: 0.0)),
    ("chunk_size", _with(chunk_size=lambda _: 0)),
    ("normalization", _with(normalization=lambda _: "max")),
    ("packed row", _with(cu_seqlens=lambda _: torch.tensor([0, 3]))),
    ("1-D", _with(cu_seqlens=lambda _: torch.tensor([[0.0, 3.0]]))),
    ("lengths must be", _with(lengths=lambda _: torch.ones(7))),
    (
        "not both",
        lambda inputs: {
            **{name: t[:1] if name in "qkv" else t for name, t in inputs.items()},
            "cu_seqlens": torch.tensor([0, 3]),
            "lengths": torch.ones(1),
        },
    ),
]

ROWS = [
    {
        "name": "ska",
        "fast": K.chunk_ska,
        "naive": K.naive_ska,
        "step": _step,
        "draw": draw,
        "draw_state": draw_state,
        # padding would move the boundaries of chunks, so SKA takes `lengths`: see test_ska.py
        "silence": None,
        "bad": _BAD,
        # a ridge of 0.05 nu^2 keeps the condition number below about 100; the paper's is tested in test_ska.py
        "options": {"chunk_size": CHUNK, "eps": 0.05},
        "converged": {"chunk_size": CHUNK, "eps": 0.05},
        # sigma is detached; chunks of 13 tokens refresh the operator
        "smooth": {"chunk_size": POSITION + 2, "eps": 0.05, "spectral_norm": False},
        # o = C P (M P)^2 q, and nu's gradient is a trace of products with P: rounding grows with the condition number
        "rounding": 4.0,
    }
]
