"""The read-out operator of SKA from its statistics, batched in torch, with its gradient.

With S = [G | M^T | C^T] and ridge lambda = eps nu^2 (otherwise the paper's division by nu cancels):

    P = (G + lambda I)^-1,  N = M P,  Q = s P N^K,  W = C Q,  s = max(|A_w|_2, floor)^-K detached

All matrices are kept transposed, as the kernels need them: N^T = P M^T, Q^T = s (N^T)^K P, W^T = Q^T C^T.
"""

import torch
from torch import Tensor

from .._common import without_autocast
from .arguments import Estimate
from .naive import JITTERS, POWER_ITERATIONS, SMALLEST_NORM, start_vector


def split_statistics(S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """G, M^T [..., r, r] and C^T [..., r, P], views of S [..., r, 2 r + P]."""
    r = S.shape[-2]
    return S[..., :r], S[..., r : 2 * r], S[..., 2 * r :]


def ridge_of(nu: Tensor, eps: float) -> Tensor:
    """lambda = eps nu^2, nu at least 1e-6."""
    return eps * nu.clamp_min(SMALLEST_NORM).square()


def inverse(G: Tensor, ridge: Tensor, check: bool, refuse: bool = True) -> tuple[Tensor, Tensor]:
    """(Gt, Gt^-1) with Gt = G + ridge I; with `check` a ridge 10, 100, 1000 times as large where that fails.

    Raises:
        ValueError: `check` and `refuse`, and a matrix is not positive definite even so.
    """
    eye = torch.eye(G.shape[-1], dtype=G.dtype, device=G.device)
    ridge = ridge[..., None, None]
    regular = G + ridge * eye
    L, info = torch.linalg.cholesky_ex(regular)
    if check:
        for jitter in JITTERS[1:]:
            if not info.any():
                break
            regular = torch.where((info > 0)[..., None, None], G + jitter * ridge * eye, regular)
            L, info = torch.linalg.cholesky_ex(regular)
        if refuse and info.any():
            place = info.nonzero()[0].tolist()
            raise ValueError(
                f"ska: the statistics of sequence {place[0]}, head {place[1]} are not positive definite, even with a"
                f" ridge {JITTERS[-1]:g} times as large; they must come from keys, and be finite"
            )
    return regular, torch.cholesky_inverse(L)


def spectral_scale(Gt: Tensor, P: Tensor, MT: Tensor, NT: Tensor, power: int, sigma_floor: float) -> Tensor:
    """s = max(sigma, floor)^-power [...]: power iteration on A_w A_w^T in the coordinates x = L^T u, no factor."""
    with torch.no_grad():
        u = start_vector(P.shape[-1], P.dtype, P.device)[:, None].expand(*P.shape[:-1], 1)
        for _ in range(POWER_ITERATIONS):
            new = P @ (MT.mT @ (NT @ u))
            size = new.abs().amax(-2, keepdim=True)
            u = torch.where(size > 0, new / size, u)
        a = NT @ u
        sigma = ((a * (Gt @ a)).sum((-1, -2)) / (u * (Gt @ u)).sum((-1, -2))).clamp_min(0).sqrt()
        return sigma.clamp_min(sigma_floor) ** -power


class Operator:
    """P, N^T, s and Q^T of a batch of statistics S [..., r, 2 r + P] with key norms nu [...]."""

    @without_autocast
    def __init__(self, S: Tensor, nu: Tensor, estimate: Estimate, check: bool, refuse: bool = True):
        power, eps, spectral_norm, sigma_floor = estimate
        self.power, self.eps, self.nu = power, eps, nu
        G, self.MT, self.CT = split_statistics(S)
        Gt, self.P = inverse(G, ridge_of(nu, eps), check, refuse)
        self.NT = self.P @ self.MT
        self.scale = torch.ones_like(nu)
        if spectral_norm and power:
            self.scale = spectral_scale(Gt, self.P, self.MT, self.NT, power, sigma_floor)
        self.QT = self.P
        for _ in range(power):
            self.QT = self.NT @ self.QT
        self.QT = self.scale[..., None, None] * self.QT
        self.WT = self.QT @ self.CT

    def backward(self, dWT: Tensor) -> tuple[Tensor, Tensor]:
        """(dS, dnu) from the gradient of W^T."""
        P, NT, scale = self.P, self.NT, self.scale[..., None, None]
        dQ = self.CT @ dWT.mT
        dCT = self.QT.mT @ dWT
        E = P @ dQ
        dN, tail = torch.zeros_like(P), E
        direct = scale * dQ
        for _ in range(self.power):  # dN = s sum_i (N^T)^i P dQ (N^T)^(K-1-i)
            dN, tail = NT @ dN + tail, tail @ NT
            direct = direct @ NT
        dN = scale * dN
        dP = direct + self.MT @ dN
        dG = -P @ dP @ P
        dG = (dG + dG.mT) / 2
        trace = dG.diagonal(dim1=-2, dim2=-1).sum(-1)
        dnu = torch.where(self.nu > SMALLEST_NORM, 2 * self.eps * self.nu * trace, 0)
        return torch.cat([dG, P @ dN.mT, dCT], -1), dnu
