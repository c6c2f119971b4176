"""Forward pre-hooks of decoder layers: padding and packing must reach every mixer and every attention layer, or raise.

A family's decoder hands them on, or does not, in code that is not ours and changes between versions of transformers.
"""

import torch
from torch import Tensor, nn
from transformers.utils import is_torchdynamo_compiling

from ._transformers import attention_implementation


def carry_layout(layer: nn.Module, args, kwargs):
    """Of a layer with a mixer: the padding and packing travel in `attention_mask` too.

    Some families (StableLM, Nemotron) hand their attention module no further keyword arguments. The mask that the
    library made is of no use to a mixer, so its place is free; an argument survives gradient checkpointing, which an
    attribute of the module would not.
    """
    if "memmix_rows" not in kwargs:
        raise ValueError(
            f"{type(layer).__name__} is not handed the padding and packing of its tokens: this family's decoder drops"
            " further keyword arguments, so its layers cannot become memories"
        )
    if "attention_mask" in kwargs:
        kwargs = {**kwargs, "attention_mask": (kwargs.get("memmix_rows"), kwargs.get("memmix_cu_seqlens"))}
    return args, kwargs


def demand_packed_mask(layer: nn.Module, args, kwargs):
    """Of a layer that kept its attention: raise ValueError if packed sequences would see each other.

    Some families (GPT-OSS, BLOOM) make their masks without looking at the positions, and positions may contradict
    `cu_seq_lens_q`; the mask in hand tells for all of them.
    """
    boundaries = kwargs.get("memmix_cu_seqlens")
    if boundaries is None or _packs_by_itself(layer):
        return
    # GPT-2 hands it on by position
    masks = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.ndim == 4]
    if not masks or not (is_torchdynamo_compiling() or separates(masks[0], boundaries)):
        raise ValueError(
            f"the attention of {type(layer).__name__} would attend across packed sequences: this family ignores"
            " packing, or position_ids do not start again where cu_seq_lens_q or seq_idx say. Pad the sequences"
            " instead, give position_ids that fit, or convert all layers"
        )


def separates(mask: Tensor, boundaries: Tensor) -> bool:
    """Whether a mask [B or 1, heads or 1, T, T], boolean or additive, hides from the first token of every sequence the
    token before it; `boundaries` [N + 1] count over the flattened batch.
    """
    length = mask.shape[-1]
    first = boundaries[1:-1].long().to(mask.device)
    first = first[first % length != 0]  # a row is apart from the one before it anyway
    row, query = first // length if mask.shape[0] > 1 else torch.zeros_like(first), first % length
    entries = mask[row, :, query, query - 1]
    return bool(entries.logical_not().all() if mask.dtype == torch.bool else (entries < -1e3).all())


def _packs_by_itself(layer: nn.Module) -> bool:
    """Flash attention has no mask: it reads `cu_seq_lens_q` or the positions, which every family hands on to it."""
    configs = (getattr(module, "config", None) for module in layer.modules())
    return any("flash" in attention_implementation(config) for config in configs)
