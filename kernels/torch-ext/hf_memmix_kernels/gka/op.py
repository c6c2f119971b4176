"""The GKA op: checks of the arguments, choice of the path, registration with torch.library."""

import functools

import torch

from .._common import check_cu_seqlens, check_heads, compute_dtype, dense, num_sequences, without_autocast
from .._dispatch import native_library, use_triton
from .._pages import check_step_states
from .._registration import all_plain, chunk_op, needs_op, op_is_faster, or_zeros, step_op
from . import torch_path
from .gates import MAX_NATIVE_WORK, MAX_ROWS, gates_torch
from .native_path import gates_of_token_native, gka_backward_native, gka_forward_native, gka_step_native
from .schedule import as_phases
from .torch_path import gka_step_torch


def _chunk_path(q: torch.Tensor, v: torch.Tensor):
    """The module whose gka_forward and gka_backward run.

    It is the torch path for float64 inputs, because the Triton kernels would round them to float32, and for states
    that do not fit into shared memory.
    """
    largest = max(q.shape[-1], v.shape[-1])
    if use_triton(q, "gka", largest) and q.dtype != torch.float64:
        from . import launch

        if launch.chunk_length(largest, q.dtype) is not None:
            return launch
    return torch_path


def _native(h: torch.Tensor, *tensors: torch.Tensor):
    """The native code, if it should run on these tensors; else None."""
    return native_library("gka", *tensors, h) if h.dtype == torch.float32 else None


@chunk_op("hf_memmix::gka_fwd")
def _gka_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    h0: torch.Tensor,
    u0: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    phases: list[int],
    ridge: float,
    scale: float,
    chunk_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    if library := _native(h0, q, k, v, log_decay, alpha, beta, u0):
        return gka_forward_native(library, q, k, v, log_decay, alpha, beta, h0, u0, cu_seqlens, phases, ridge, scale)
    path = _chunk_path(q, v)
    outputs = path.gka_forward(q, k, v, log_decay, alpha, beta, h0, u0, cu_seqlens, phases, ridge, scale, chunk_size)
    return tuple(t.contiguous() for t in outputs)


@_gka_fwd.register_fake
def _(q, k, v, log_decay, alpha, beta, h0, u0, cu_seqlens, phases, ridge, scale, chunk_size):
    o = q.new_empty(*q.shape[:3], v.shape[-1])
    # dense, as the results are; empty_like would keep the strides of the arguments
    return o, q.new_empty(q.shape, dtype=h0.dtype), h0.new_empty(h0.shape), u0.new_empty(u0.shape)


@chunk_op("hf_memmix::gka_bwd")
def _gka_bwd(
    do: torch.Tensor,
    dh_final: torch.Tensor,
    du_final: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    h0: torch.Tensor,
    u0: torch.Tensor,
    x: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    phases: list[int],
    ridge: float,
    scale: float,
    chunk_size: int,
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]:
    library = _native(h0, q, k, v, log_decay, beta, do, x)
    backward = functools.partial(gka_backward_native, library) if library else _chunk_path(q, v).gka_backward
    grads = backward(
        do,
        dh_final,
        du_final,
        q,
        k,
        v,
        log_decay,
        alpha,
        beta,
        h0,
        u0,
        x,
        cu_seqlens,
        phases,
        ridge,
        scale,
        chunk_size,
    )
    return tuple(t.contiguous() for t in grads)


@_gka_bwd.register_fake
def _(do, dh, du, q, k, v, log_decay, alpha, beta, h0, u0, x, cu_seqlens, phases, ridge, scale, chunk_size):
    return tuple(t.new_empty(t.shape) for t in (q, k, v, log_decay, alpha, beta, h0, u0))


def _setup_context(ctx, inputs, output):
    *tensors, ctx.phases, ctx.ridge, ctx.scale, ctx.chunk_size = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, do, _dx, dh_final, du_final):
    *tensors, cu_seqlens, x = ctx.saved_tensors
    q, _, v, *_, h0, u0 = tensors
    do = or_zeros(do, q, (*q.shape[:3], v.shape[-1]))
    d_final = or_zeros(dh_final, h0), or_zeros(du_final, u0)
    grads = _gka_bwd(do, *d_final, *tensors, x, cu_seqlens, ctx.phases, ctx.ridge, ctx.scale, ctx.chunk_size)
    return *grads, None, None, None, None, None


_gka_fwd.register_autograd(_backward, setup_context=_setup_context)


@step_op("hf_memmix::gka_step", mutates_args=("h", "u"))
def _gka_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    h: torch.Tensor,
    u: torch.Tensor,
    state_indices: torch.Tensor | None,
    phases: list[int],
    ridge: float,
    scale: float,
) -> torch.Tensor:
    if library := _native(h, q, k, v, log_decay, alpha, beta, u):
        return gka_step_native(library, q, k, v, log_decay, alpha, beta, h, u, state_indices, phases, ridge, scale)
    if use_triton(q, "gka", 1):  # a step takes little shared memory at every size
        from .launch import gka_step_triton as step
    else:
        step = gka_step_torch
    return step(q, k, v, log_decay, alpha, beta, h, u, state_indices, phases, ridge, scale)


@_gka_step.register_fake
def _(q, k, v, log_decay, alpha, beta, h, u, state_indices, phases, ridge, scale):
    return q.new_empty(*q.shape[:3], v.shape[-1])


def check(q, k, v, log_decay, alpha, beta, sketch, state, cu_seqlens, ridge):
    """Raise ValueError unless the arguments of `chunk_gka` or `gka_step` fit together; without `state`, the state is
    not checked.
    """
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
    sequences: int, q: torch.Tensor, v: torch.Tensor, sketch: torch.Tensor | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of H and U."""
    heads, dim = q.shape[2], q.shape[3] if sketch is None else sketch.shape[2]
    return (sequences, heads, dim, dim), (sequences, heads, v.shape[-1], dim)


def sketched(x: torch.Tensor, sketch: torch.Tensor | None) -> torch.Tensor:
    """S^T x of queries or keys: [B, T, heads, D] -> [B, T, heads, s]; x itself without a sketch."""
    # first: every decode step comes here, and to ask for autocast costs microseconds
    return x if sketch is None else _project(x, sketch)


@without_autocast
def _project(x: torch.Tensor, sketch: torch.Tensor) -> torch.Tensor:
    groups = x.unflatten(2, (sketch.shape[0], -1))
    return torch.einsum("bthgd,hds->bthgs", groups, sketch.to(x.dtype)).flatten(2, 3)


def chunk_gka(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    alpha: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    *,
    sketch: torch.Tensor | None = None,
    num_iterations: int = 30,
    refinement: tuple[int, ...] | None = None,
    ridge: float = 0.02,
    scale: float | None = None,
    chunk_size: int = 64,
    initial_state: tuple[torch.Tensor, torch.Tensor] | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
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
        log_decay: g <= 0 [B, T, H].
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
    check(q, k, v, log_decay, alpha, beta, sketch, initial_state, cu_seqlens, ridge)
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
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    alpha: torch.Tensor | None,
    beta: torch.Tensor | None,
    state: tuple[torch.Tensor, torch.Tensor],
    *,
    sketch: torch.Tensor | None = None,
    num_iterations: int = 30,
    refinement: tuple[int, ...] | None = None,
    ridge: float = 0.02,
    scale: float | None = None,
    state_indices: torch.Tensor | None = None,
) -> torch.Tensor:
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
    check(q, k, v, log_decay, alpha, beta, sketch, None, None, ridge)
    if q.shape[1] != 1:
        raise ValueError(f"gka_step advances by one token, got {q.shape[1]}; use chunk_gka for several")
    check_step_states("gka_step", state, state_shapes(q.shape[0], q, v, sketch), state_indices)
    h, u = state
    alpha = torch.ones_like(log_decay) if alpha is None else alpha
    beta = torch.ones_like(log_decay) if beta is None else beta
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k = sketched(q, sketch), sketched(k, sketch)
    phases = as_phases(num_iterations, refinement)
    return _gka_step(q, k, v, log_decay, alpha, beta, h, u, state_indices, list(phases), ridge, scale)


@torch.library.custom_op("hf_memmix::gka_gates", mutates_args=())
def _gates_op(
    x: torch.Tensor,
    w_decay: torch.Tensor,
    w_beta: torch.Tensor,
    w_alpha: torch.Tensor,
    b_decay: torch.Tensor | None,
    b_beta: torch.Tensor | None,
    b_alpha: torch.Tensor | None,
    dt_bias: torch.Tensor,
    A_log: torch.Tensor,
    beta_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    path = _gates_triton if use_triton(x, "gka", 1) else gates_torch
    return path(x, w_decay, w_beta, w_alpha, b_decay, b_beta, b_alpha, dt_bias, A_log, beta_eps)


@_gates_op.register_fake
def _(x, w_decay, w_beta, w_alpha, b_decay, b_beta, b_alpha, dt_bias, A_log, beta_eps):
    shape = (x.shape[0], 1, w_decay.shape[0])
    return tuple(x.new_empty(shape, dtype=torch.float32) for _ in range(3))


def _gates_triton(*args) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from .launch_gates import gates_triton

    return gates_triton(*args)


def gates_of_token(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    dt_bias: torch.Tensor,
    A_log: torch.Tensor,
    beta_eps: float,
) -> tuple[torch.Tensor, ...] | None:
    """The gates of one token from the layer's input, in one call of native code or one kernel, without autograd.

    Arguments are not checked.

    Args:
        x: [B, 1, hidden].
        weights: three projections [H, hidden], and `biases` [H] or None: to the decay, to beta and to alpha.
        dt_bias, A_log: [H].
        beta_eps: added to beta.

    Returns:
        log_decay, beta and alpha, float32 [B, 1, H]; or None if neither native code nor the kernel can run, if
        gradients are needed, or if the matrix products of torch are faster.
    """
    tensors, dtype = (x, *weights, *biases, dt_bias, A_log), x.dtype
    through_op = needs_op(tensors)
    if through_op and not op_is_faster(x):  # first: torch.compile would make a guard of every other condition
        return None
    # under autocast the layers have another dtype; native code and the kernel have no float64
    if torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type) or dtype == torch.float64:
        return None
    if not all_plain(tensors):
        return None
    for t in (x, *weights, *biases):  # a loop takes half the time of any()
        if t is not None and (t.dtype != dtype or not t.is_contiguous()):
            return None
    arguments = (*weights, *biases, dt_bias, A_log, beta_eps)
    if through_op:
        return _gates_op(x, *arguments) if x.shape[0] <= MAX_ROWS else None
    if 3 * x.shape[0] * weights[0].numel() <= MAX_NATIVE_WORK and (library := native_library("gka", *tensors)):
        return gates_of_token_native(library, x, weights, biases, dt_bias, A_log, beta_eps)
    if x.shape[0] > MAX_ROWS or not use_triton(x, "gka", 1) or torch._C._are_functorch_transforms_active():
        return None
    return _gates_triton(x, *arguments)


def gates_of_products(
    z_decay: torch.Tensor,
    z_beta: torch.Tensor,
    z_alpha: torch.Tensor,
    dt_bias: torch.Tensor,
    A_log: torch.Tensor,
    beta_eps: float,
) -> tuple[torch.Tensor, ...] | None:
    """The gates of whole sequences from the three projections, in one kernel, without autograd.

    Arguments are not checked.

    Args:
        z_decay, z_beta, z_alpha: the projections with their biases [B, T, H].
        dt_bias, A_log: [H].
        beta_eps: added to beta.

    Returns:
        log_decay, beta and alpha, float32 [B, T, H]; or None if the kernel cannot run or gradients are needed.
    """
    tensors = z_decay, z_beta, z_alpha, dt_bias, A_log
    if needs_op(tensors) or torch.is_grad_enabled() or z_decay.dtype == torch.float64 or not z_decay.numel():
        return None
    if not use_triton(z_decay, "gka", 1) or torch._C._are_functorch_transforms_active():
        return None
    from .launch_gates import activations_triton

    return activations_triton(*tensors, beta_eps)
