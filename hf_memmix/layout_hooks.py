"""Forward pre-hooks of decoder layers: they make sure that padding and packing reach every mixer and attention layer.

Whether a family's decoder passes them on depends on the code of transformers, which changes between versions. If it
does not pass them on, the hooks raise an error.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers.utils import is_torchdynamo_compiling

from ._transformers import attention_implementation


def pass_layout(layer: nn.Module, args, kwargs):
    """Hook of a memory layer: put the `TokenLayout` into `attention_mask`, too.

    Some families (StableLM, Nemotron) pass no further keyword arguments to their attention module. A mixer does not
    need the mask that the library made, so this argument is free. An argument works with gradient checkpointing; an
    attribute of the module would not.
    """
    if "memmix_layout" not in kwargs:
        raise ValueError(
            f"{type(layer).__name__} does not receive the padding and packing of its tokens: this family's decoder"
            " drops further keyword arguments, so a mixer cannot replace its attention"
        )
    if "attention_mask" in kwargs:
        kwargs = {**kwargs, "attention_mask": kwargs["memmix_layout"]}
    return args, kwargs


def check_packed_mask(layer: nn.Module, args, kwargs):
    """Hook of a layer that kept its attention: raise ValueError if packed sequences would see each other.

    Some families (GPT-OSS, BLOOM) make their masks without reading the positions, and positions may contradict
    `cu_seq_lens_q`. So the hook checks the mask itself.
    """
    layout = kwargs.get("memmix_layout")
    if layout is None or layout.cu_seqlens is None or _packs_by_itself(layer):
        return
    mask = _mask_of(args, kwargs)
    if mask is None:  # causal over whole rows
        hidden_states = args[0] if args else kwargs["hidden_states"]
        separate = len(layout.cu_seqlens) == len(hidden_states) + 1  # as every row starts a sequence
    else:
        separate = is_torchdynamo_compiling() or sequences_are_separate(mask, layout.cu_seqlens)
    if not separate:
        raise ValueError(
            f"the attention of {type(layer).__name__} would attend across packed sequences: this family ignores"
            " packing, or position_ids do not start again where cu_seq_lens_q or seq_idx say. Pad the sequences"
            " instead, give position_ids that fit, or convert all layers"
        )


def without_rotation(attention: nn.Module, args, kwargs):
    """Hook of an attention whose queries and keys stay as they are: all of its rotary angles become zero."""
    if kwargs.get("position_embeddings") is None:
        raise ValueError(
            f"{type(attention).__name__} does not receive its rotary embeddings by name, so it cannot do without them:"
            " leave attention_without_rope out"
        )
    cos, sin = kwargs["position_embeddings"]
    return args, {**kwargs, "position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin))}


@contextmanager
def separate_documents(layers: Iterable[nn.Module], boundaries: Tensor | None) -> Iterator[None]:
    """Inside this context, the decoder layers of a transformer without mixers raise ValueError if packed documents
    would see each other.

    boundaries: [N + 1], see `packing_of`; None: nothing is packed, and nothing is checked.
    """
    checked: list[Tensor] = []  # most layers share one mask, and each look at one waits for the GPU

    def check(layer, args, kwargs):
        mask = _mask_of(args, kwargs)
        if _packs_by_itself(layer) or any(mask is other for other in checked):
            return
        if mask is None or not sequences_are_separate(mask, boundaries):
            raise ValueError(
                f"the teacher's {type(layer).__name__} would attend across packed documents, because this family"
                " ignores packing; set pack: false"
            )
        checked.append(mask)

    hooked = [] if boundaries is None else layers
    handles = [layer.register_forward_pre_hook(check, with_kwargs=True) for layer in hooked]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _mask_of(args, kwargs) -> Tensor | None:
    """The mask among the arguments of a layer. GPT-2 passes it as a positional argument."""
    values = (*args, *kwargs.values())
    return next((value for value in values if isinstance(value, Tensor) and value.ndim == 4), None)


def sequences_are_separate(mask: Tensor, boundaries: Tensor) -> bool:
    """Whether the first token of every packed sequence cannot see the token before it.

    `mask` [B or 1, heads or 1, T, T] is boolean or additive; `boundaries` [N + 1] count over the flattened batch.
    """
    length = mask.shape[-1]
    first = boundaries[1:-1].long().to(mask.device)
    first = first[first % length != 0]  # rows are separate anyway
    row, query = first // length if mask.shape[0] > 1 else torch.zeros_like(first), first % length
    entries = mask[row, :, query, query - 1]
    return bool(entries.logical_not().all() if mask.dtype == torch.bool else (entries < -1e3).all())


def _packs_by_itself(layer: nn.Module) -> bool:
    """Flash attention has no mask: it reads `cu_seq_lens_q` or the positions, which every family passes to it."""
    configs = (getattr(module, "config", None) for module in layer.modules())
    return any("flash" in attention_implementation(config) for config in configs if config is not None)
