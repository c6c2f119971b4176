"""Spectral Koopman Attention token by token in float64, whitened as in the paper: the reference for the fast paths.

    Gt = G + eps I = L L^T,  A_w = L^-1 M L^-T,  y = eta B_v L (gamma A_w / sigma)^K L^-1 q,  B_v = C Gt^-1

"Echo: Spectral Koopman Attention", sections 3.2.1 to 3.2.4, equations (4) to (13). The statistics of the state are raw
sums. Only this file divides them by the key norm nu before every use, as the paper does. The paper takes nu before it
masks keys, here nu is over the stored keys; `sigma_floor` is not in the paper either.
"""

import torch
from torch import Tensor

POWER_ITERATIONS = 6
SMALLEST_NORM = 1e-6
JITTERS = (0.0, 10.0, 100.0, 1000.0)  # the paper's retries, as multiples of the ridge


def start_vector(r: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Where the power iteration starts: entries in [1/2, 3/2) without a pattern, so that no pattern is orthogonal."""
    steps = torch.arange(1, r + 1, dtype=dtype, device=device) * 0.6180339887498949
    return 0.5 + steps - steps.floor()


def naive_cholesky(G: Tensor, ridge: float) -> Tensor:
    """L with L L^T = G + ridge I [..., r, r]; where that fails the ridge grows tenfold, three times.

    Raises:
        ValueError: G is not positive semidefinite, even so.
    """
    eye = torch.eye(G.shape[-1], dtype=G.dtype, device=G.device)
    for jitter in JITTERS:
        L, info = torch.linalg.cholesky_ex(G + max(1.0, jitter) * ridge * eye)
        if not info.any():
            return L
    place = tuple(info.nonzero()[0].tolist())
    raise ValueError(
        f"ska: the Gram matrix at {place} of its batch is not positive definite, even with a ridge of"
        f" {JITTERS[-1] * ridge:g}; statistics must come from keys, and be finite"
    )


def naive_spectral_norm(A: Tensor, L: Tensor) -> Tensor:
    """|A|_2 [...] of A [..., r, r] by `POWER_ITERATIONS` steps on A A^T from L^T e, without gradient; 0 for A = 0."""
    with torch.no_grad():
        x = L.mT @ start_vector(A.shape[-1], A.dtype, A.device)[:, None]
        for _ in range(POWER_ITERATIONS):
            x = x / torch.linalg.vector_norm(x, dim=(-1, -2), keepdim=True)
            new = A @ (A.mT @ x)
            x = torch.where((new == 0).all(-2, keepdim=True), x, new)
        size = torch.linalg.vector_norm(x, dim=(-1, -2))
        return torch.linalg.vector_norm(A.mT @ x, dim=(-1, -2)) / size


def naive_operator(
    G: Tensor, M: Tensor, C: Tensor, nu: Tensor, power: int, eps: float, spectral_norm: bool, sigma_floor: float
) -> Tensor:
    """W [..., P, r] of y = eta gamma^K W q, from G, M [..., r, r], C [..., P, r] and the norm nu [...] of the keys."""
    nu = nu.clamp_min(SMALLEST_NORM)[..., None, None]
    L = naive_cholesky((G + G.mT) / 2 / nu**2, eps)
    A = torch.linalg.solve_triangular(L, M / nu**2, upper=False)
    A = torch.linalg.solve_triangular(L, A.mT, upper=False).mT
    if spectral_norm:
        A = A / naive_spectral_norm(A, L).clamp_min(sigma_floor)[..., None, None]
    X = torch.linalg.solve_triangular(L, (C / nu).mT, upper=False)
    B = torch.linalg.solve_triangular(L.mT, X, upper=True).mT
    eye = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device).expand(L.shape)
    return B @ L @ torch.linalg.matrix_power(A, power) @ torch.linalg.solve_triangular(L, eye, upper=False) / nu


def naive_ska(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    gamma: Tensor | None = None,
    eta: Tensor | None = None,
    *,
    power: int = 2,
    eps: float = 1e-3,
    chunk_size: int = 64,
    spectral_norm: bool = True,
    sigma_floor: float = 0.1,
    normalization: str = "running_max",
    initial_state: tuple[Tensor, ...] | None = None,
    cu_seqlens: Tensor | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The recurrence as in the paper, in float64, differentiable by autograd.

    Shapes and meaning of the arguments as in `chunk_ska`; chunk_size=1 is the paper's re-estimation at every token.
    """
    if cu_seqlens is not None or q.shape[0] > 1 or lengths is not None:
        if cu_seqlens is not None:
            bounds = [(0, a, b) for a, b in zip(cu_seqlens.tolist()[:-1], cu_seqlens.tolist()[1:], strict=True)]
        else:
            stops = [q.shape[1]] * q.shape[0] if lengths is None else lengths.tolist()
            bounds = [(n, 0, stop) for n, stop in enumerate(stops)]
        options = {"power": power, "eps": eps, "chunk_size": chunk_size, "spectral_norm": spectral_norm}
        options |= {"sigma_floor": sigma_floor, "normalization": normalization}
        o = q.new_zeros(*q.shape[:3], v.shape[-1], dtype=torch.float64)
        states = []
        for n, (row, start, stop) in enumerate(bounds):
            part = [None if t is None else t[row : row + 1, start:stop] for t in (q, k, v, mask)]
            state = None if initial_state is None else tuple(s[n : n + 1] for s in initial_state)
            y, state = naive_ska(*part, gamma, eta, **options, initial_state=state)
            o = o.index_put((torch.tensor([row]), torch.arange(start, stop)), y[0])
            states.append(state)
        return o, tuple(torch.cat(parts) for parts in zip(*states, strict=True))

    q, k, v = (t[0].double() for t in (q, k, v))
    z = k if mask is None else k * mask[0].double().view(-1, 1, 1)
    (T, heads, r), kv_heads, P = q.shape, k.shape[1], v.shape[-1]
    gain = torch.ones(heads, dtype=torch.float64, device=q.device)
    gain = gain if gamma is None else gain * gamma.double() ** power
    gain = gain if eta is None else gain * eta.double()
    if initial_state is None:
        S, WT = q.new_zeros(kv_heads, r, 2 * r + P), q.new_zeros(kv_heads, r, P)
        previous, nu, position = q.new_zeros(kv_heads, r), q.new_zeros(kv_heads), q.new_zeros(kv_heads)
    else:
        S, WT, previous, nu, position = (s[0].double() for s in initial_state)
    G, M, C, W = S[..., :r], S[..., r : 2 * r].mT, S[..., 2 * r :].mT, WT.mT
    filled = start = round(position[0].item())
    norms = torch.linalg.vector_norm(z, dim=-1)
    ahead = norms.amax(0) if normalization == "sequence_max" and T else nu

    outputs = []
    for t in range(T):
        outputs.append(W.repeat_interleave(heads // kv_heads, 0) @ q[t, :, :, None])
        G = G + z[t, :, :, None] * z[t, :, None, :]
        M = M + z[t, :, :, None] * previous[:, None, :]
        C = C + v[t, :, :, None] * z[t, :, None, :]
        previous, nu, filled = z[t], torch.maximum(nu, norms[t]), filled + 1
        if filled == chunk_size:
            largest, filled = torch.maximum(nu, ahead), 0
            W = naive_operator(G, M, C, largest, power, eps, spectral_norm, sigma_floor)
    o = torch.stack(outputs)[..., 0] * gain[:, None] if outputs else v.new_zeros(0, heads, P)
    state = (torch.cat([G, M.mT, C.mT], -1), W.mT, previous, nu, position + (filled - start))
    return o[None], tuple(s[None] for s in state)


def cg_lift(x: Tensor) -> Tensor:
    """Invariant and second harmonic of complex pairs w = a + ib: [..., r] -> [|w|^2, Re w^2, Im w^2] [..., 3 r / 2].

    A rotation of the pair does not change |w|^2, and rotates w^2 by twice its angle (the Clebsch-Gordan lift of the
    appendix). A linear map then goes back to rank r.
    """
    if x.shape[-1] % 2:
        raise ValueError(f"cg_lift pairs neighbouring features, their number {x.shape[-1]} must be even")
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.cat([a * a + b * b, a * a - b * b, 2 * a * b], -1)
