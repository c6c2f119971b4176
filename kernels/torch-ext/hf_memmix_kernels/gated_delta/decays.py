"""Decays inside a chunk on the torch path: one per head, or one per key channel.

With G = cumsum(g) inside a chunk, both classes have from_start = e^G, to_end = e^(G_C - G), whole = e^(G_C) as a
factor of a state [K, V], and the products of pairs, P_ij = sum_d a_i b_j e^(G_i - G_j) for j <= i. Exponents are
differences that are never positive, so nothing overflows however strong the decay is.

Shapes: [..., C, D], g [..., C, 1] per head and [..., C, K] per channel.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .._common import decay_matrix

BLOCK = 16  # tokens of a chunk whose pairs have their own decay per channel; other pairs meet at a block's first token


def _after(x: Tensor) -> Tensor:
    """sum_(i >= t) x_i over the tokens of a chunk."""
    return x.flip(-2).cumsum(-2).flip(-2)


def _before(x: Tensor) -> Tensor:
    """sum_(j < t) x_j, without x_t added and removed: beside fast decays its rounding would stay."""
    return F.pad(x[..., :-1, :], (0, 0, 1, 0)).cumsum(-2)


class HeadDecays:
    """One decay per head and token: g [..., C, 1]."""

    def __init__(self, g: Tensor):
        G, self.D = decay_matrix(g[..., 0])
        self.from_start = G.exp()[..., None]
        self.to_end = (G[..., -1:] - G).exp()[..., None]
        self.whole = G[..., -1].exp()[..., None, None]

    def pairs(self, readers: tuple[Tensor, ...], b: Tensor) -> list[Tensor]:
        """P of each a in `readers`."""
        return [(a @ b.mT) * self.D for a in readers]

    def pairs_backward(self, upstream, pairs, readers, b: Tensor):
        """The gradients of `readers`, of b, and of g by all pairs with j < i."""
        decayed = [dP * self.D for dP in upstream]
        db = sum(dP.mT @ a for dP, a in zip(decayed, readers, strict=True))
        products = sum(P * dP for P, dP in zip(pairs, upstream, strict=True))
        dg = F.pad(products, (1, -1)).cumsum(-1).tril().sum(-2)[..., None]
        return [dP @ b for dP in decayed], db, dg

    def gradient(self, reads: Tensor, writes: Tensor, through: Tensor) -> Tensor:
        """dg [..., C, 1] by what the tokens read and write, and by the state that passes through."""
        reads, writes = (t.sum(-1, keepdim=True) for t in (reads, writes))
        return _after(reads) + _before(writes) + self.whole * through.sum((-1, -2))[..., None, None]


class ChannelDecays:
    """One decay per key channel, head and token: g [..., C, K]."""

    def __init__(self, g: Tensor):
        self.G = g.cumsum(-2)
        self.from_start = self.G.exp()
        self.to_end = (self.G[..., -1:, :] - self.G).exp()
        self.whole = self.G[..., -1, :].exp()[..., None]

    def _blocks(self):
        """For each block: its tokens, e^(G_i - G_j) of its pairs, and with G_0 of its first token e^(G_i - G_0) and
        e^(G_0 - G_j) of the tokens before it.
        """
        inside = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=self.G.device).tril()[..., None]
        for start in range(0, self.G.shape[-2], BLOCK):
            here = slice(start, start + BLOCK)
            G = self.G[..., here, :]
            D = (G[..., :, None, :] - G[..., None, :, :]).masked_fill(~inside, float("-inf")).exp()
            first = G[..., :1, :]
            yield here, D, (G - first).exp(), (first - self.G[..., :start, :]).exp()

    def pairs(self, readers: tuple[Tensor, ...], b: Tensor) -> list[Tensor]:
        """P of each a in `readers`."""
        rows = [[] for _ in readers]
        for here, D, late, early in self._blocks():
            inside, before = D * b[..., None, here, :], (early * b[..., : here.start, :]).mT
            for a, found in zip(readers, rows, strict=True):
                a = a[..., here, :]
                row = torch.cat([(late * a) @ before, (inside @ a[..., None])[..., 0]], -1)
                found.append(F.pad(row, (0, self.G.shape[-2] - here.stop)))
        return [torch.cat(found, -2) for found in rows]

    def pairs_backward(self, upstream, pairs, readers, b: Tensor):
        """The gradients of `readers`, of b, and of g by all pairs with j < i."""
        b = b.expand_as(self.G)
        own = [dP.diagonal(dim1=-2, dim2=-1)[..., None] for dP in upstream]  # pairs i = i have no decay
        others = [dP.tril(-1) for dP in upstream]
        da, db = [[] for _ in readers], torch.zeros_like(self.G)
        for here, D, late, early in self._blocks():
            before = early * b[..., : here.start, :]
            for dP, a, found in zip(others, readers, da, strict=True):
                a, far, near = a[..., here, :], dP[..., here, : here.start], dP[..., here, here]
                near = near[..., None] * D
                found.append(late * (far @ before) + (near * b[..., None, here, :]).sum(-2))
                db[..., : here.start, :] += early * (far.mT @ (late * a))
                db[..., here, :] += (near * a[..., :, None, :]).sum(-3)
        da = [torch.cat(found, -2) for found in da]
        dg = _after(sum(a * found for a, found in zip(readers, da, strict=True)) - b * db)
        db = db + sum(dP * a for dP, a in zip(own, readers, strict=True))
        return [found + dP * b for dP, found in zip(own, da, strict=True)], db, dg

    def gradient(self, reads: Tensor, writes: Tensor, through: Tensor) -> Tensor:
        """dg [..., C, K] by what the tokens read and write, and by the state that passes through."""
        return _after(reads) + _before(writes) + (self.whole * through).sum(-1)[..., None, :]
