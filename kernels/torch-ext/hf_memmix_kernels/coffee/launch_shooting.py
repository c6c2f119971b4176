"""Multiple shooting for COFFEE on a GPU: Newton's method on the states between chunks, all chunks in parallel.

Let F_c(s) be the state at the end of chunk c if the chunk starts from s. The unknowns solve s_{c+1} = F_c(s_c). An
iteration computes every chunk exactly and forms its slope A_c = F_c'(s_c); then s'_{c+1} = F_c(s_c) + A_c (s'_c - s_c)
is a scan over the chunks. After k iterations the first k chunks are exact, whatever the slopes are. Where states
forget, slopes vanish and a few iterations are enough. After convergence one forward pass over the chunks side by side
gives the outputs and the checkpoints.
"""

import torch
from torch import Tensor

from .._launch import accumulator, cdiv, contiguous, next_power_of_2
from .kernels.shooting import coffee_chunk_kernel
from .kernels.tiles import FORMS
from .launch import _gate_strides, _math, _pad_states, affine_scan, coffee_fwd_triton
from .sizes import CHECKPOINT, padded_states, shooting_chunk

# iterations between two checks of convergence; each check waits for the GPU
CHECK_EVERY = 2
# largest number of iterations: if it is not enough, too many chunks amplify errors, and more iterations rarely help
MAX_ITERATIONS = 18
# from this iteration on, give up if more than this share of the programs (32 lanes of a chunk or fewer) still move
PATIENCE = 6
UNSETTLED = 0.4


def shooting_fwd(
    u: Tensor,
    lam: Tensor,
    w: Tensor,
    C: Tensor,
    w_filter: Tensor | None,
    gate: Tensor | None,
    initial_state: Tensor,
    feedback: str,
    save: bool,
    tolerance: float,
) -> tuple[Tensor, Tensor, Tensor, int] | None:
    """`coffee_fwd_triton` with all chunks in parallel, and the number of iterations; None if they did not converge."""
    u, lam, w, C, w_filter, gate = contiguous(u, lam, w, C, w_filter, gate)
    (B, T, D), n = u.shape, lam.shape[1]
    NP, length = padded_states(n), shooting_chunk(T)
    chunks = cdiv(T, length)
    lanes = D * NP
    L = min(32, next_power_of_2(lanes))
    programs = B * chunks * cdiv(lanes, L)
    start = _pad_states(initial_state)
    entered = entering = start[:, None].expand(B, chunks, lanes).contiguous()
    zeros = torch.zeros_like(entered)
    A, ends = torch.empty_like(entered), torch.empty_like(entered)
    worst = start.new_empty(programs)
    for iteration in range(MAX_ITERATIONS + 1):
        coffee_chunk_kernel[(programs,)](
            (u, lam, w, gate), (entered, entering), (A, ends), worst, T, chunks, length, *_gate_strides(gate, D),
            D=D, N=n, NP=NP, L=L, P=16, FORM=FORMS[feedback], GATE=gate is not None,
            MATH=_math(u, smooth=True), ACC=accumulator(u.dtype), num_warps=1,
        )  # fmt: skip
        entered, entering = entering, affine_scan(A, zeros, start, base=ends, shift=entering)
        # the first iteration has nothing to compare with
        due = iteration and (iteration % CHECK_EVERY == 0 or iteration == MAX_ITERATIONS)
        if due:
            unsettled = (worst > tolerance).float().mean().item()
            if unsettled == 0:
                break
            if iteration >= PATIENCE and unsettled > UNSETTLED:
                return None
    else:
        return None
    first = torch.arange(chunks, device=u.device) * length
    bounds = torch.cat([(torch.arange(B, device=u.device)[:, None] * T + first).flatten(), first.new_tensor([B * T])])
    y, final, kept = coffee_fwd_triton(
        u.view(1, B * T, D), lam, w, C, w_filter, None if gate is None else gate.view(1, B * T, *gate.shape[2:]),
        entering.view(B * chunks, D, NP)[..., :n], bounds, feedback, save,
    )  # fmt: skip
    if save:
        # from the rows of packed sequences to those of whole ones
        token = torch.arange(0, T, CHECKPOINT, device=u.device)
        sequence = torch.arange(B, device=u.device)[:, None] * chunks + token // length
        kept = kept[(bounds[sequence] // CHECKPOINT + sequence + token % length // CHECKPOINT).flatten()]
    return y.view(B, T, D), final.view(B, chunks, D, n)[:, -1].contiguous(), kept, iteration
