"""The SKA row of OPS: chunk-causal, with states that were carried over within a chunk, and grouped key heads.

test_ska.py tests the factors gamma and eta: their gradient is one sum of terms with random signs and may be near zero,
which the RMS ratio cannot bound.
"""

import torch
import torch.nn.functional as F
from bad_inputs import bad_heads, replaced
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


_BAD = [
    *bad_heads("ska"),
    (
        "rank 130 is over the limit of 128",
        replaced(q=lambda q: q.repeat(1, 1, 1, 5)[..., :130], k=lambda k: k.repeat(1, 1, 1, 5)[..., :130]),
    ),
    ("state", replaced(initial_state=lambda _: torch.zeros(2))),
    ("action mask must be", replaced(mask=lambda _: torch.ones(2, 7))),
    ("action mask must be", replaced(mask=lambda _: torch.ones(20, dtype=torch.bool))),
    ("gamma", replaced(gamma=lambda _: torch.ones(3))),
    ("eta", replaced(eta=lambda _: torch.ones(2, 1))),
    ("power", replaced(power=lambda _: -1)),
    ("power", replaced(power=lambda _: 1.5)),
    ("eps", replaced(eps=lambda _: 0.0)),
    ("sigma_floor", replaced(sigma_floor=lambda _: 0.0)),
    ("chunk_size", replaced(chunk_size=lambda _: 0)),
    ("normalization", replaced(normalization=lambda _: "max")),
    ("lengths must be", replaced(lengths=lambda _: torch.ones(7))),
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
