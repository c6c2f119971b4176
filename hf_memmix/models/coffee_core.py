"""The paper's core module: an embedding, one COFFEE layer, and logits from distances to the embeddings; no matrices.

    u_k = E[token_k];  y = COFFEE(u);  d_m = |y - E[m]|;  p = softmin(d);  logits = log(p / (1 - p))

Paper: Zattra et al., "Context-Selective State Space Models: Feedback is All You Need", Appendix F and H.2. 24
parameters can solve the induction head task. Many such models train as fast as one, because the layer is elementwise:
`copies` independent models share each call of the op.

Shapes: S copies, B batch, L tokens, M symbols, D features, n states per feature.
"""

import torch
from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor, nn

from hf_memmix_kernels import check_coffee, chunk_coffee

from ..errors import UserError
from ..mixers.weight_decay import SparedFromDecay

FEEDBACKS = ("sigmoid", "linear", "input")


class CoreModule(nn.Module):
    """Embedding, a layer that a subclass writes as `mix`, and logits by distance to every embedding.

    Args:
        symbols: M.
        dim: D.
        copies: S independent models in one.
        fixed: a symbol whose embedding is (1, ..., 1) and not learned: by Proposition 1 one embedding can be fixed
            if it is not needed to scale the input. None: all are learned.

    Raises:
        ValueError: `fixed` is not a symbol.
    """

    def __init__(self, symbols: int, dim: int, copies: int = 1, fixed: int | None = None):
        super().__init__()
        if fixed is not None and not 0 <= fixed < symbols:
            raise UserError(f"fixed={fixed} is not a symbol: there are {symbols}, counted from 0")
        self.symbols, self.dim, self.copies, self.fixed = symbols, dim, copies, fixed
        rows = torch.stack([_orthonormal(symbols, dim) for _ in range(copies)])
        if fixed is not None:
            rows = torch.cat([rows[:, :fixed], rows[:, fixed + 1 :]], 1)
        self.embedding = nn.Parameter(rows)

    def mix(self, u: Tensor, last: int) -> Tensor:
        """The layer: inputs [B, L, S * D] to the outputs [B, last, S * D] at the last tokens."""
        raise NotImplementedError

    def embeddings(self) -> Tensor:
        """[S, M, D], the fixed one in its place."""
        if self.fixed is None:
            return self.embedding
        ones = torch.ones_like(self.embedding[:, :1])
        return torch.cat([self.embedding[:, : self.fixed], ones, self.embedding[:, self.fixed :]], 1)

    def outputs(self, ids: Tensor, last: int | None = None) -> Tensor:
        """y [S, B, last, D] of tokens [S, B, L]; all L positions when `last` is None."""
        table = self.embeddings()
        # a product instead of a lookup: with nine rows, the atomic additions of a lookup's backward are slow. One
        # product per sequence: in one of all tokens, backward would be a sum over B * L that few programs share
        one_hot = (ids[..., None] == torch.arange(self.symbols, device=ids.device)).to(table.dtype)
        u = (one_hot @ table[:, None]).permute(1, 2, 0, 3).flatten(2)
        y = self.mix(u, ids.shape[2] if last is None else last)
        return y.unflatten(2, (self.copies, self.dim)).permute(2, 0, 1, 3)

    def forward(self, ids: Tensor, last: int | None = None) -> Tensor:
        """Logits of tokens: [B, L] -> [B, L, M] for one model, [S, B, L] -> [S, B, L, M] for several.

        Args:
            ids: tokens from 0 to M - 1.
            last: compute only the logits of this many last positions.

        Raises:
            ValueError: the ids have another shape, or their first dimension is not the number of copies.
        """
        if ids.dim() == 2 and self.copies == 1:
            return self(ids[None], last)[0]
        if ids.dim() != 3 or ids.shape[0] != self.copies:
            raise UserError(
                f"tokens of shape {tuple(ids.shape)}: {self.copies} models need [{self.copies}, batch, tokens]"
            )
        y = self.outputs(ids, last)
        distance = torch.linalg.vector_norm(y[..., None, :] - self.embeddings()[:, None, None], dim=-1)
        return logit_of_softmin(distance)


class CoffeeCore(CoreModule, SparedFromDecay, PyTorchModelHubMixin):
    """The core module with COFFEE; `save_pretrained` and `from_pretrained` keep it in a folder.

        model = CoffeeCore(symbols=9, dim=2, states=1)   # 24 parameters
        model(tokens).argmax(-1)
        optimizer.step(); model.project_()

    `lam`, `w`, `C` (and `w_filter`) are [S, D, n]. lambda starts at 0, on the border of the stable range [-2, 0], as
    in the paper, and `project_()` brings it back after each step. A file with a lambda outside is refused on loading.

    Args:
        states: n.
        output_filter: Remark 2.
        feedback: "sigmoid" (eq. 5), or one of the ablation: "linear", or "input", which means no feedback.
    """

    no_weight_decay = ("lam", "w", "C", "w_filter")

    def __init__(
        self,
        symbols: int,
        dim: int,
        states: int,
        copies: int = 1,
        fixed: int | None = None,
        output_filter: bool = False,
        feedback: str = "sigmoid",
    ):
        super().__init__(symbols, dim, copies, fixed)
        if feedback not in FEEDBACKS:
            raise UserError(f"feedback={feedback!r} must be one of {FEEDBACKS}")
        shape = (copies, dim, states)
        self.feedback = feedback
        self.lam = nn.Parameter(torch.zeros(shape))
        self.w = nn.Parameter(torch.randn(shape))
        self.C = nn.Parameter(torch.randn(shape))
        self.w_filter = nn.Parameter(torch.zeros(shape)) if output_filter else None
        self.register_load_state_dict_post_hook(lambda module, _: check_coffee(module.lam))

    def mix(self, u, last):
        w_filter = None if self.w_filter is None else self.w_filter.flatten(0, 1)
        parameters = (p.flatten(0, 1) for p in (self.lam, self.w, self.C))
        return chunk_coffee(u, *parameters, w_filter, feedback=self.feedback)[0][:, u.shape[1] - last :]

    @torch.no_grad()
    def project_(self):
        """Bring lambda back into [-2, 0], after every optimizer step."""
        self.lam.clamp_(-2, 0)


def logit_of_softmin(distance: Tensor) -> Tensor:
    """log(p / (1 - p)) with p = softmin(distance) over the last dimension, accurate even if p rounds to 1."""
    score = -distance
    itself = torch.eye(score.shape[-1], dtype=torch.bool, device=score.device)
    others = score[..., None, :].masked_fill(itself, float("-inf"))
    return score - others.logsumexp(-1)


def _orthonormal(symbols: int, dim: int) -> Tensor:
    """[M, D]: orthonormal rows from the QR decomposition of U[0, 1); orthonormal columns where M > D."""
    if symbols <= dim:
        return torch.linalg.qr(torch.rand(dim, symbols)).Q.T
    return torch.linalg.qr(torch.rand(symbols, dim)).Q
