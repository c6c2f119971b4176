"""Functions for all ops: checks of inputs, the layout of sequences, and chunks with decay on the torch path.

Letters in shapes: N sequences, B batch, T tokens, H heads, D head size. A packed input is [1, sum of lengths, ...],
and `cu_seqlens` [N+1] holds the boundaries of its sequences.
"""

import functools
from collections.abc import Callable

import torch

MAX_HEAD_DIM = 256
# smallest log decay in a chunk: its power of e is 0. Sums of -inf would be NaN, and large ones round what follows
FLOOR = {torch.float32: -104.0, torch.float64: -746.0}


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of states and accumulations: float64 for float64 inputs, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def has_float64(device: torch.device) -> bool:
    """Whether the device has float64: Apple's GPUs have not, and of Intel's only those for servers."""
    if device.type == "xpu":
        return bool(torch.xpu.get_device_properties(device).has_fp64)
    return device.type != "mps"


def exact(x: torch.Tensor) -> torch.Tensor:
    """x in float64, on its own device or, where this has no float64, on the CPU."""
    return (x if has_float64(x.device) else x.cpu()).double()


# torch refuses to tell for "meta" whether autocast is on, and torch.compile of torch 2.11 cannot trace the question
# whether it may be asked
AUTOCAST_DEVICES = frozenset(
    kind for kind in ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla") if torch.amp.is_autocast_available(kind)
)


def without_autocast(function: Callable) -> Callable:
    """`function`, computed in the dtypes of its tensors also where the caller has switched autocast on.

    Autocast would multiply matrices, also states, in half precision. It is switched off for the device of the first
    tensor among the arguments.
    """

    @functools.wraps(function)
    def call(*args, **options):
        device = next(a for a in (*args, *options.values()) if isinstance(a, torch.Tensor)).device.type
        if device not in AUTOCAST_DEVICES or not torch.is_autocast_enabled(device):
            return function(*args, **options)
        with torch.autocast(device, enabled=False):
            return function(*args, **options)

    return call


def check_heads(op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **gates: torch.Tensor | None) -> None:
    """Raise ValueError unless q [B, T, H, D], k [B, T, Hk, D], v [B, T, Hk, Dv] and gates [B, T, H] fit together.

    It does not check values, because that would wait for the device.
    """
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4 or k.shape[:3] != v.shape[:3] or k.shape[:2] != q.shape[:2]:
        raise ValueError(
            f"{op} needs q [B, T, H, D], k [B, T, Hk, D], v [B, T, Hk, Dv], got"
            f" {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    dim, largest = q.shape[-1], max(q.shape[-1], v.shape[-1])
    if k.shape[-1] != dim:
        raise ValueError(f"{op}: k has head size {k.shape[-1]}, q has {dim}; they must be equal")
    if largest > MAX_HEAD_DIM:
        raise ValueError(f"{op}: head size {largest} is over the limit of {MAX_HEAD_DIM}; use more, smaller heads")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{op}: {q.shape[2]} query heads are not a multiple of {k.shape[2]} key/value heads")
    if q.shape[1] == 0:
        raise ValueError(f"{op}: the sequence is empty (T = 0); pass at least one token")
    for name, gate in gates.items():
        if gate is not None and gate.shape != q.shape[:3]:
            raise ValueError(f"{op}: {name} must be [B, T, H] = {tuple(q.shape[:3])}, got {tuple(gate.shape)}")


def check_shared_heads(op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Size:
    """As `check_heads`; or q and k [B, T, Hk, D] serve the value heads v [B, T, H, Dv] in groups, as in Mamba-2.

    Returns the shape [B, T, H] of the gates.
    """
    if q.dim() == v.dim() == 4 and q.shape[2] != v.shape[2] and q.shape == k.shape:
        # heads that share q and k: as many values as keys are enough for the other checks
        if v.shape[2] % k.shape[2]:
            raise ValueError(f"{op}: {v.shape[2]} value heads are not a multiple of {k.shape[2]} query/key heads")
        check_heads(op, q, k, v[:, :, : k.shape[2]])
        return v.shape[:3]
    check_heads(op, q, k, v)
    return q.shape[:3]


def check_cu_seqlens(cu_seqlens: torch.Tensor, batch: int) -> None:
    """Raise ValueError unless `cu_seqlens` is a 1-D integer tensor that belongs to a packed batch of one row.

    It does not check the values: boundaries that do not rise from 0 to T give wrong results.
    """
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.numel() < 2:
        raise ValueError(
            "cu_seqlens must be a 1-D int32 or int64 tensor [N+1] of boundaries 0 .. T, got"
            f" {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}"
        )
    if batch != 1:
        raise ValueError(
            f"cu_seqlens describes one packed row, the batch is {batch}; flatten it to [1, B*T, ...] first"
        )


def dense(x: torch.Tensor | None) -> torch.Tensor | None:
    """x with contiguous memory: kernels read boundaries, lengths and biases one after the other."""
    return None if x is None else x.contiguous()


def num_sequences(batch: int, cu_seqlens: torch.Tensor | None) -> int:
    """The number of independent sequences, and therefore of states, in an input."""
    return batch if cu_seqlens is None else cu_seqlens.numel() - 1


def start_state(
    op: str, x: torch.Tensor, cu_seqlens: torch.Tensor | None, shape: tuple[int, ...], given: torch.Tensor | None
) -> torch.Tensor:
    """The state [N, *shape] before the first token of x [B, ...], in the dtype of sums: `given`, or zeros.

    Raises:
        ValueError: the boundaries do not fit x, or `given` has another shape.
    """
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, x.shape[0])
    expected, dtype = (num_sequences(x.shape[0], cu_seqlens), *shape), compute_dtype(x.dtype)
    if given is None:
        return x.new_zeros(expected, dtype=dtype)
    if tuple(given.shape) != expected:
        raise ValueError(f"{op}: initial_state must be {expected}, got {tuple(given.shape)}")
    return given.to(dtype)


def heads_of_token(x: torch.Tensor, heads: int, dtype: torch.dtype) -> torch.Tensor:
    """One token [B, 1, Hx, D] as [B, heads, D]: head h is head h // (heads / Hx)."""
    x = x[:, 0].to(dtype)
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


class SequenceLayout:
    """Cuts [B, T, ...] tensors, batched or packed, into chunks [N, chunks, C, ...], zero-padded, and back."""

    def __init__(self, batch: int, length: int, chunk_size: int, cu_seqlens: torch.Tensor | None):
        self.batch, self.length, self.chunk_size = batch, length, chunk_size
        self.index = self.valid = None
        longest = length
        if cu_seqlens is not None:
            cu_seqlens = cu_seqlens.long()
            lengths = cu_seqlens.diff()
            longest = int(lengths.max())
        self.chunks = max(1, -(-longest // chunk_size))
        self.padded = self.chunks * chunk_size
        if cu_seqlens is not None:
            steps = torch.arange(self.padded, device=cu_seqlens.device)
            self.valid = steps < lengths[:, None]
            self.index = torch.where(self.valid, cu_seqlens[:-1, None] + steps, 0)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, ...] -> [N, chunks, C, ...]; positions beyond a sequence's end are zero."""
        if self.index is None:
            pad = self.padded - self.length
            if pad:
                x = torch.cat([x, x.new_zeros(self.batch, pad, *x.shape[2:])], dim=1)
        else:
            valid = self.valid.view(*self.valid.shape, *[1] * (x.dim() - 2))
            x = torch.where(valid, x[0, self.index], torch.zeros((), dtype=x.dtype, device=x.device))
        return x.reshape(x.shape[0], self.chunks, self.chunk_size, *x.shape[2:])

    def merge(self, x: torch.Tensor) -> torch.Tensor:
        """[N, chunks, C, ...] -> [B, T, ...], the inverse of `split`."""
        x = x.reshape(x.shape[0], self.padded, *x.shape[3:])
        if self.index is None:
            return x[:, : self.length]
        out = x.new_zeros(1, self.length, *x.shape[2:])
        out[0, self.index[self.valid]] = x[self.valid]
        return out


def decay_matrix(g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """G = cumsum(g) [..., C] and D [..., C, C] with D[t, j] = e^(G_t - G_j) for j <= t, else 0."""
    G = g.cumsum(-1)
    causal = torch.ones(g.shape[-1], g.shape[-1], dtype=torch.bool, device=g.device).tril()
    return G, (G[..., :, None] - G[..., None, :]).masked_fill(~causal, float("-inf")).exp()


def scan_chunks(
    additions: torch.Tensor, chunk_decay: torch.Tensor, initial: torch.Tensor, reverse: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """S' = decay * S + addition over the chunks, from the last to the first if `reverse`.

    Args:
        additions: [..., chunks, I, J].
        chunk_decay: [..., chunks].
        initial: [..., I, J].

    Returns:
        S before every chunk [..., chunks, I, J], in the order of the chunks, and S after all of them.
    """
    states, state = [], initial
    steps = list(zip(additions.unbind(-3), chunk_decay[..., None, None].unbind(-3), strict=True))
    for addition, decay in reversed(steps) if reverse else steps:
        states.append(state)
        state = decay * state + addition
    return torch.stack(states[::-1] if reverse else states, -3), state
