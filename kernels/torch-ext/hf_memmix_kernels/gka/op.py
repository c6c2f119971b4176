"""The GKA op: checks of the arguments, choice of the path, registration with torch.library."""

import torch
from torch import Tensor

from .._common import check_cu_seqlens, check_heads, compute_dtype, dense, num_sequences, without_autocast
from .._dispatch import native_library, use_triton
from .._groups import flat, tensors
from .._pages import check_step_states
from .._registration import chunk_op, or_zeros, step_op
from . import torch_path
from .arguments import BACKWARD, FORWARD, STEP, Chunks, Inputs, Packing, Pages, Solver, States
from .native_path import gka_backward_native, gka_forward_native, gka_step_native
from .schedule import as_phases
from .torch_path import gka_step_torch


def _chunk_path(inputs: Inputs):
    """The module whose gka_forward and gka_backward run.

    It is the torch path for float64 inputs, because the Triton kernels would round them to float32, and for states
    that do not fit into shared memory.
    """
    q, largest = inputs.q, max(inputs.q.shape[-1], inputs.v.shape[-1])
    if use_triton(q, "gka", largest) and q.dtype != torch.float64:
        from . import launch

        if launch.chunk_length(largest, q.dtype) is not None:
            return launch
    return torch_path


def _native(states: States, *tensors: Tensor):
    """The native code, if it should run on these tensors; else None."""
    return native_library("gka", *tensors, *states) if states.h.dtype == torch.float32 else None


@chunk_op("hf_memmix::gka_fwd")
@flat(*FORWARD)
def _gka_fwd(inputs: Inputs, states: States, packing: Packing, solver: Solver, chunks: Chunks) -> tensors(4):
    if library := _native(states, *inputs):
        return gka_forward_native(library, inputs, states, packing.cu_seqlens, solver)
    outputs = _chunk_path(inputs).gka_forward(*inputs, *states, *packing, *solver, *chunks)
    return tuple(t.contiguous() for t in outputs)


@_gka_fwd.register_fake
def _(q, k, v, log_decay, alpha, beta, h0, u0, *rest):
    o = q.new_empty(*q.shape[:3], v.shape[-1])
    # dense, as the results are; empty_like would keep the strides of the arguments
    return o, q.new_empty(q.shape, dtype=h0.dtype), h0.new_empty(h0.shape), u0.new_empty(u0.shape)


@chunk_op("hf_memmix::gka_bwd")
@flat(*BACKWARD)
def _gka_bwd(upstream, inputs, states, kept, packing, solver, chunks) -> tensors(8):
    if library := _native(states, *inputs, upstream.do, kept.x):
        grads = gka_backward_native(library, upstream, inputs, states, kept.x, packing.cu_seqlens, solver)
    else:
        backward = _chunk_path(inputs).gka_backward
        grads = backward(*upstream, *inputs, *states, *kept, *packing, *solver, *chunks)
    return tuple(t.contiguous() for t in grads)


@_gka_bwd.register_fake
@flat(*BACKWARD)
def _(upstream, inputs, states, *rest):
    return tuple(t.new_empty(t.shape) for t in (*inputs, *states))


def _setup_context(ctx, inputs, output):
    *tensors, ctx.options = *inputs[:9], inputs[9:]
    ctx.save_for_backward(*tensors, output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, do, _dx, dh_final, du_final):
    *tensors, cu_seqlens, x = ctx.saved_tensors
    q, _, v, *_, h0, u0 = tensors
    do = or_zeros(do, q, (*q.shape[:3], v.shape[-1]))
    d_final = or_zeros(dh_final, h0), or_zeros(du_final, u0)
    grads = _gka_bwd(do, *d_final, *tensors, x, cu_seqlens, *ctx.options)
    return *grads, *[None] * 5


_gka_fwd.register_autograd(_backward, setup_context=_setup_context)


@step_op("hf_memmix::gka_step", mutates_args=("h", "u"))
@flat(*STEP)
def _gka_step(inputs: Inputs, states: States, pages: Pages, solver: Solver) -> Tensor:
    if library := _native(states, *inputs):
        return gka_step_native(library, inputs, states, pages.state_indices, solver)
    if use_triton(inputs.q, "gka", 1):  # a step takes little shared memory at every size
        from .launch import gka_step_triton as step
    else:
        step = gka_step_torch
    return step(*inputs, *states, *pages, *solver)


@_gka_step.register_fake
def _(q, k, v, *rest):
    return q.new_empty(*q.shape[:3], v.shape[-1])


def check(inputs: tuple[Tensor | None, ...], sketch, ridge: float, state=None, cu_seqlens=None):
    """Raise ValueError unless the arguments of `chunk_gka` or `gka_step` fit together; without `state`, the state is
    not checked.
    """
    q, k, v, log_decay, alpha, beta = inputs
    check_heads("gka", q, k, v, log_decay=log_decay, alpha=alpha, beta=beta)
    sizes = k.shape[2], q.shape[-1]
    if sketch is not None and not (
        sketch.dim() == 3 and sketch.shape[:2] == sizes and 1 <= sketch.shape[2] <= sizes[1]
    ):
        raise ValueError(
            f"gka: the sketch must be [Hk, D, s] = [{sizes[0]}, {sizes[1]}, s] with s of 1 to {sizes[1]}, got"
            f" {tuple(sketch.shape)}"
        )
    if not ridge > 0:
        raise ValueError(f"gka: ridge={ridge} must be positive; the paper's is 0.02")
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, q.shape[0])
    if state is not None:
        expected = state_shapes(num_sequences(q.shape[0], cu_seqlens), q, v, sketch)
        got = tuple(tuple(s.shape) for s in state)
        if got != expected:
            raise ValueError(f"gka: the state (H, U) must have the shapes {expected}, got {got}")


def state_shapes(
    sequences: int, q: Tensor, v: Tensor, sketch: Tensor | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of H and U."""
    heads, dim = q.shape[2], q.shape[3] if sketch is None else sketch.shape[2]
    return (sequences, heads, dim, dim), (sequences, heads, v.shape[-1], dim)


def sketched(x: Tensor, sketch: Tensor | None) -> Tensor:
    """S^T x of queries or keys: [B, T, heads, D] -> [B, T, heads, s]; x itself without a sketch."""
    # first: every decode step comes here, and to ask for autocast costs microseconds
    return x if sketch is None else _project(x, sketch)


@without_autocast
def _project(x: Tensor, sketch: Tensor) -> Tensor:
    groups = x.unflatten(2, (sketch.shape[0], -1))
    return torch.einsum("bthgd,hds->bthgs", groups, sketch.to(x.dtype)).flatten(2, 3)


def chunk_gka(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    alpha: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    sketch: Tensor | None = None,
    num_iterations: int = 30,
    refinement: tuple[int, ...] | None = None,
    ridge: float = 0.02,
    scale: float | None = None,
    chunk_size: int = 64,
    initial_state: tuple[Tensor, Tensor] | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Gated KalmaNet's memory over a sequence, in chunks (Peng et al., "Gated KalmaNet").

        H_t = e^g H + beta^2 k k^T;  U_t = e^g U + beta^2 v k^T;  x_t = CH(H_t + ridge |H_t| I, q_t)
        o_t = scale * U_t (q_t + alpha_t (x_t - q_t))

    A padded token has log_decay = 0 and beta = 0: it neither writes nor decays. If H_t = 0, then x_t = 0.

    With a sketch S of orthonormal columns (Appendix H), the normal equations are projected to s dimensions and solved
    there, (S^T H_t S + ridge |S^T H_t S| I) z = S^T q_t, and U_t reads the solution S z and, beside it, S S^T q_t. No
    more of H_t and U_t is needed than S^T H_t S and U_t S, so these are the states.

    Args:
        q: queries [B, T, H, D], D <= 256; unit norm in the GKA layer.
        k: keys [B, T, Hk, D] with Hk dividing H; query head h reads key head h // (H / Hk).
        v: values [B, T, Hk, Dv], Dv <= 256.
        log_decay: g <= 0 [B, T, H]; -inf forgets all.
        alpha: blend of solution and query in [0, 1] [B, T, H]; None is 1, the pure solution.
        beta: write strength [B, T, H]; None is 1.
        sketch: S [Hk, D, s], 1 <= s <= D, of each key head and its query heads; None is the identity. It may be
            learned: S with other columns than orthonormal ones is a linear layer of q and k.
        num_iterations: Chebyshev iterations, the paper's r.
        refinement: iteration counts of the phases of iterative refinement; replaces `num_iterations`.
        ridge: a in lambda = a |H|_F.
        scale: factor of the output; None is D^-1/2.
        chunk_size: tokens per chunk on the torch path; Triton chooses its own. It does not change the result.
        initial_state: (H [N, H, D, D] symmetric, U [N, H, Dv, D]) before the first token, with s in the place of D if
            there is a sketch; None is zero.
        cu_seqlens: boundaries [N + 1] of packed sequences; B is 1 then. Without it N = B.

    Returns:
        o [B, T, H, Dv] in q's dtype and the final (H, U), float32 (float64 for float64 inputs). Differentiable in
        every tensor and through both results; the gradient is that of the converged solution (Lemmas 1 and 2), so
        train with num_iterations >= 21, and the gradient of an initial H is its symmetric part.

    Raises:
        ValueError: shapes, head sizes, iteration counts, the ridge or the chunk size do not fit.
    """
    check((q, k, v, log_decay, alpha, beta), sketch, ridge, initial_state, cu_seqlens)
    if chunk_size < 1:
        raise ValueError(f"gka: chunk_size={chunk_size} must be at least 1; the default is 64")
    phases = as_phases(num_iterations, refinement)
    dtype = compute_dtype(q.dtype)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, cu_seqlens = sketched(q, sketch), sketched(k, sketch), dense(cu_seqlens)
    batch, _, heads, dim = q.shape
    if initial_state is None:
        states, values = num_sequences(batch, cu_seqlens), v.shape[-1]
        if values == dim:  # one kernel
            h0, u0 = q.new_zeros(2, states, heads, dim, dim, dtype=dtype)
        else:
            h0, u0 = (q.new_zeros(states, heads, rows, dim, dtype=dtype) for rows in (dim, values))
    else:
        h0, u0 = (s.to(dtype) for s in initial_state)
    log_decay = log_decay.to(dtype)
    alpha = torch.ones_like(log_decay) if alpha is None else alpha.to(dtype)
    beta = torch.ones_like(log_decay) if beta is None else beta.to(dtype)
    o, _, h, u = _gka_fwd(q, k, v, log_decay, alpha, beta, h0, u0, cu_seqlens, list(phases), ridge, scale, chunk_size)
    return o, (h, u)


def gka_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    alpha: Tensor | None,
    beta: Tensor | None,
    state: tuple[Tensor, Tensor],
    *,
    sketch: Tensor | None = None,
    num_iterations: int = 30,
    refinement: tuple[int, ...] | None = None,
    ridge: float = 0.02,
    scale: float | None = None,
    state_indices: Tensor | None = None,
) -> Tensor:
    """One decoding step of `chunk_gka`, without autograd.

    Args:
        q, k, v: [B, 1, H, D], [B, 1, Hk, D], [B, 1, Hk, Dv]; log_decay, alpha, beta: [B, 1, H]; as in `chunk_gka`.
        state: contiguous (H [B, H, D, D], U [B, H, Dv, D]), float32 or float64, updated IN PLACE. With
            `state_indices` pages [pages, ...] of them.
        sketch: S [Hk, D, s] as in `chunk_gka`; the states then have s in the place of D.
        state_indices: int32 or int64 [B], the page of each row; see kernels/README.md.

    Returns:
        o [B, 1, H, Dv] in q's dtype.

    Raises:
        ValueError: more than one token, shapes that do not fit, or a state that is not contiguous.
    """
    check((q, k, v, log_decay, alpha, beta), sketch, ridge)
    check_step_states("gka_step", q.shape[1], state, state_shapes(q.shape[0], q, v, sketch), state_indices)
    h, u = state
    alpha = torch.ones_like(log_decay) if alpha is None else alpha
    beta = torch.ones_like(log_decay) if beta is None else beta
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k = sketched(q, sketch), sketched(k, sketch)
    phases = as_phases(num_iterations, refinement)
    return _gka_step(q, k, v, log_decay, alpha, beta, h, u, state_indices, list(phases), ridge, scale)
