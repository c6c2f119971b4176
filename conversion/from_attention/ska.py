"""How an SKA layer is initialised from a softmax attention: same values and output, and scores of a lower rank.

v and o are the attention's. Keys and queries become those of rank r whose scores are closest to the attention's before
the softmax, and before rotary embeddings: with q_h = A_h x and k = B x, the best sum_h |A_h^T B - U_h^T V|^2 over the
query heads h that share a key head is the truncated SVD of their stacked A_h^T B. A bias is one more column of A or B;
the scale of a norm of q or k is multiplied into the rows. eta starts small and the ridge eps large, because
solutions of a regression are larger than averages: training/experiments/conversion. Chunks of 16 tokens instead of
64 start a little closer to the attention, but need four times as many solutions. A lower rank starts closer too, but
has fewer parameters.
"""

import torch
from torch import Tensor, nn

from hf_memmix.conversion.attention_weights import AttentionWeights, TensorFate
from hf_memmix.conversion.from_attention.projections import FOLDED, check_heads, take_tensor, with_norm_scale
from hf_memmix.conversion.from_attention.registry import starts
from hf_memmix.errors import UserError
from hf_memmix_kernels._common import exact

RANK = 32  # at most, the paper's
ETA = 0.5
EPS = 1.0  # the paper's is 1e-3
REDUCED = "with {other} reduced to rank {rank} by the truncated SVD of the scores of a key head"


def options_for(attention: AttentionWeights) -> dict:
    """The options that an SKA layer needs to hold an attention's values and output projection."""
    return {
        "rank": min(attention.head_dim, RANK),
        "eps": EPS,
        "qkv_bias": any(bias is not None for bias in (attention.q_bias, attention.k_bias, attention.v_bias)),
        "o_bias": attention.o_bias is not None,
    }


@starts("ska", options=options_for)
@torch.no_grad()
def take_over(mixer: nn.Module, attention: AttentionWeights) -> list[TensorFate]:
    """Fill an `SKAMixer` from an attention, in place; one fate for each of the attention's tensors.

    Raises:
        ValueError: the heads differ, or the mixer's options give it no parameter for a bias.
    """
    check_heads(mixer, attention)
    for projection in (mixer.q_proj, mixer.k_proj, mixer.v_proj, mixer.o_proj):
        if projection.bias is not None:
            projection.bias.zero_()
    fates = [_take(mixer, field, tensor) for field, tensor in attention.tensors().items()]
    queries, keys = low_rank_scores(_augmented(attention, "q"), _augmented(attention, "k"), mixer.options.rank)
    for projection, rows in ((mixer.q_proj, queries), (mixer.k_proj, keys)):
        rows = rows.flatten(0, 1)
        projection.weight.copy_(rows[:, :-1])
        if projection.bias is not None:
            projection.bias.copy_(rows[:, -1])
    mixer.gamma.fill_(1)
    mixer.eta.fill_(ETA)
    return fates


def low_rank_scores(A: Tensor, B: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """U [H, rank, n], V [Hk, rank, n] of the best U_h^T V_g for A [H, D, n], B [Hk, D, n].

    V has the same norm as all U_h of its group together. Rows beyond the rank of the scores are zero.
    """
    heads, D, n = A.shape
    groups = A.view(B.shape[0], -1, D, n).mT.flatten(1, 2)  # [Hk, group n, D]: the A_h^T of a group, stacked
    Q, R = torch.linalg.qr(groups)
    Qk, Rk = torch.linalg.qr(B.mT)
    left, S, right = torch.linalg.svd(R @ Rk.mT)
    kept = min(rank, S.shape[-1])
    root = S[:, None, :kept].sqrt()
    U = (Q @ left[..., :kept] * root).unflatten(1, (-1, n)).flatten(0, 1).mT
    V = (Qk @ right.mT[..., :kept] * root).mT
    return tuple(torch.nn.functional.pad(t, (0, 0, 0, rank - kept)) for t in (U, V))


def _augmented(attention: AttentionWeights, role: str) -> Tensor:
    """[heads, D, hidden + 1], `exact`: the projection of q or k with its bias as the last column."""
    weight = getattr(attention, f"{role}_weight")
    bias = getattr(attention, f"{role}_bias")
    bias = weight.new_zeros(weight.shape[0]) if bias is None else bias
    whole = exact(torch.cat([weight, bias[:, None]], 1))
    return with_norm_scale(attention, role, whole).unflatten(0, (-1, attention.head_dim))


def _take(mixer: nn.Module, field: str, tensor: Tensor) -> TensorFate:
    role, _, kind = field.partition("_")
    if role not in ("q", "k"):
        return take_tensor(mixer, field, tensor)
    target = f"{role}_proj.{'bias' if kind == 'bias' else 'weight'}"
    if kind == "norm":
        return TensorFate(field, "transformed", (target,), FOLDED)
    if kind == "bias" and getattr(mixer, f"{role}_proj").bias is None:
        raise UserError(
            f"layer {mixer.layer_idx}: the attention's {field} would be lost; convert with the option qkv_bias=True"
        )
    other = "the queries" if role == "k" else "the keys"
    return TensorFate(field, "transformed", (target,), REDUCED.format(other=other, rank=mixer.options.rank))
