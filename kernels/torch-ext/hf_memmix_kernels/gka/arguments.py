"""The arguments of the gka op in groups, as every path takes them; shapes as in `chunk_gka`."""

from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """Of the op: the gates in the dtype of sums."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    alpha: Tensor
    beta: Tensor


class States(NamedTuple):
    """H and U: before the first token, or those that a decode step updates in place, contiguous or in pages."""

    h: Tensor
    u: Tensor


class Solver(NamedTuple):
    """Iterations of every phase, the ridge, and the factor of the output."""

    phases: list[int]
    ridge: float
    scale: float


class Upstream(NamedTuple):
    """The gradients of the output and of the final states."""

    do: Tensor
    dh_final: Tensor
    du_final: Tensor


class Packing(NamedTuple):
    """The boundaries of packed sequences."""

    cu_seqlens: Tensor | None


class Chunks(NamedTuple):
    """Tokens per chunk of the torch path; the kernels choose their own."""

    chunk_size: int


class Solution(NamedTuple):
    """What forward keeps for backward: the solution x [B, T, H, D] of the normal equations."""

    x: Tensor


class Pages(NamedTuple):
    """The page of each row."""

    state_indices: Tensor | None


FORWARD = (Inputs, States, Packing, Solver, Chunks)
BACKWARD = (Upstream, Inputs, States, Solution, Packing, Solver, Chunks)
STEP = (Inputs, States, Pages, Solver)


class Gates(NamedTuple):
    """Of `op_gates.gates_of_token`: the layer's input and the three projections."""

    x: Tensor
    w_decay: Tensor
    w_beta: Tensor
    w_alpha: Tensor
    b_decay: Tensor | None
    b_beta: Tensor | None
    b_alpha: Tensor | None
    dt_bias: Tensor
    A_log: Tensor
    beta_eps: float
