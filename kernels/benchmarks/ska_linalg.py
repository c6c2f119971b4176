"""Chunk-causal SKA as the paper computes it, by batched torch.linalg in float32. The fused kernels are compared with
it.
"""

import torch
from torch import Tensor

from hf_memmix_kernels.ska.naive import POWER_ITERATIONS, start_vector


def linalg_ska(
    q: Tensor, k: Tensor, v: Tensor, *, power: int = 2, eps: float = 1e-3, chunk_size: int = 64
) -> tuple[Tensor, Tensor]:
    """SKA of q, k [B, T, H, r] and v [B, T, H, P]. Returns o [B, T, H, P] and the Gram matrices before every chunk.

    T must be a multiple of chunk_size. The steps are a Cholesky factorisation, two triangular solves for A_w, a
    Cholesky solve for the value map, the power iteration by matrix-vector products and the power filter by matrix
    products. Autograd computes the gradients.
    """
    q, k, v = (t.float().unflatten(1, (-1, chunk_size)).permute(0, 3, 1, 2, 4) for t in (q, k, v))
    flat = k.flatten(2, 3)
    before = torch.cat([torch.zeros_like(flat[:, :, :1]), flat[:, :, :-1]], 2).view_as(k)
    G, M, C = ((left.mT @ k).cumsum(2) for left in (k, before, v))
    G, M, C = (torch.cat([torch.zeros_like(S[:, :, :1]), S[:, :, :-1]], 2) for S in (G, M.mT, C))
    nu = torch.linalg.vector_norm(k, dim=-1).amax(-1).cummax(2).values
    nu = torch.cat([torch.zeros_like(nu[:, :, :1]), nu[:, :, :-1]], 2).clamp_min(1e-6)
    eye = torch.eye(k.shape[-1], device=k.device)
    L, _ = torch.linalg.cholesky_ex(G + (eps * nu.square())[..., None, None] * eye)
    A = torch.linalg.solve_triangular(L, M, upper=False)
    A = torch.linalg.solve_triangular(L, A.mT, upper=False).mT
    with torch.no_grad():
        x = L.mT @ start_vector(L.shape[-1], L.dtype, L.device)[:, None]
        for _ in range(POWER_ITERATIONS):
            x = A @ (A.mT @ x)
            x = x / torch.linalg.vector_norm(x, dim=-2, keepdim=True).clamp_min(1e-30)
        sigma = torch.linalg.vector_norm(A.mT @ x, dim=-2, keepdim=True).clamp_min(0.1)
    A = A / sigma
    B = torch.linalg.solve_triangular(L.mT, torch.linalg.solve_triangular(L, C.mT, upper=False), upper=True).mT
    y = torch.linalg.solve_triangular(L, q.mT, upper=False)
    for _ in range(power):
        y = A @ y
    o = (B @ (L @ y)).mT
    return o.permute(0, 2, 3, 1, 4).flatten(1, 2), G
