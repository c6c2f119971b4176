"""SKA in prefix mode: one operator from a whole prefix, which all queries of the prefix read (agentic inference).

    G = sum z z^T, M = sum z_t z_{t-1}^T, C = sum v z^T over the prefix;  o_t = gain W q_t for every t

"Echo", equations (4) to (6). The statistics are three matrix products, and the operator is one small factorisation per
sequence and head. This mode therefore runs in torch on every device, and autograd differentiates it.
"""

import torch
from torch import Tensor

from .._common import SequenceLayout, compute_dtype, num_sequences, without_autocast
from .op import check, check_ends, gain_of, masked, sequence_max
from .operator import Operator
from .state import State, check_state, state_shapes


@without_autocast
def prefix_ska(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    gamma: Tensor | None = None,
    eta: Tensor | None = None,
    *,
    power: int = 2,
    eps: float = 1e-3,
    spectral_norm: bool = True,
    sigma_floor: float = 0.1,
    initial_state: State | None = None,
    cu_seqlens: Tensor | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, State]:
    """Spectral Koopman Attention in which every query reads the statistics of its whole sequence; it is not causal.

    With `mask` this is the paper's masked mode. Arguments and errors as in `chunk_ska`.

    Returns:
        o [B, T, H, P] in q's dtype and the state after the prefix, from which `chunk_ska` and `ska_step` can continue:
        its operator is that of the whole prefix, its position is 0.
    """
    check(q, k, v, mask, gamma, eta, initial_state, power, eps, 1, sigma_floor, "running_max")
    batch, T, heads, rank = q.shape
    kv_heads, dtype = k.shape[2], compute_dtype(q.dtype)
    check_ends(cu_seqlens, lengths, batch)
    shapes = state_shapes(num_sequences(batch, cu_seqlens), kv_heads, rank, v.shape[3])
    if initial_state is None:
        initial_state = tuple(q.new_zeros(shape, dtype=dtype) for shape in shapes)
    check_state(initial_state, shapes)
    S, _, previous, nu, position = (s.to(dtype) for s in initial_state)
    if lengths is not None:
        real = torch.arange(T, device=q.device) < lengths[:, None]
        k, v = (t.masked_fill(~real[:, :, None, None], 0) for t in (k, v))
    z = masked(k, mask)

    longest = T if cu_seqlens is None else int(cu_seqlens.diff().max())
    layout = SequenceLayout(batch, T, max(longest, 1), cu_seqlens)
    keys, values, queries = (layout.split(t.to(dtype))[:, 0].transpose(1, 2) for t in (z, v, q))
    before = torch.cat([previous[:, :, None], keys[:, :, :-1]], 2)
    S = S + torch.cat([keys.mT @ keys, before.mT @ keys, keys.mT @ values], -1)
    nu = sequence_max(z, nu, cu_seqlens, lengths)
    check_values = q.device.type == "cpu" and not torch.compiler.is_compiling()
    operator = Operator(S, nu, power, eps, spectral_norm, sigma_floor, check_values).WT
    o = queries @ operator.repeat_interleave(heads // kv_heads, 1) * gain_of(q, gamma, eta, power)[:, None, None]
    o = layout.merge(o.transpose(1, 2)[:, None]).to(q.dtype)
    if lengths is not None:
        o = o.masked_fill(~real[:, :, None, None], 0)
    if cu_seqlens is not None:
        counts = cu_seqlens.diff().long()
    else:
        counts = torch.full((batch,), T, device=q.device) if lengths is None else lengths.long()
    end = torch.cat([previous[:, :, None], keys], 2).gather(2, counts.view(-1, 1, 1, 1).expand(-1, kv_heads, 1, rank))
    return o, (S, operator, end[:, :, 0], nu, torch.zeros_like(position))
