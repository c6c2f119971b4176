"""Logits of a chunk of last hidden states, scaled and capped as the model does it.

`ForCausalLM.forward` does not take hidden states. So its last step is repeated here, according to the family's row in
`hf_memmix.backbones`, and the result is compared with the model's own logits once.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hf_memmix._transformers import execution_device
from hf_memmix.backbones import backbone_of
from hf_memmix.errors import UserError


def logits_head(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """A function from last hidden states [..., d] to logits [..., V] that equals the model's own.

    Raises:
        ValueError: the logits differ from the model's; then the family's row in `hf_memmix.backbones` is incomplete.
    """
    config, projection, named = model.config, model.get_output_embeddings(), backbone_of(model.config).logits
    divisor, factor, softcap = (
        None if name is None else getattr(config, name, None) for name in (named.divisor, named.factor, named.softcap)
    )

    def head(hidden: Tensor) -> Tensor:
        logits = projection(hidden)
        if divisor is not None:
            logits = logits / divisor
        if factor is not None:
            logits = logits * factor
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    _check(model, head)
    return head


@torch.no_grad()
def _check(model: nn.Module, head: Callable[[Tensor], Tensor]) -> None:
    training = model.training
    model.eval()
    probe = torch.arange(4, device=execution_device(model.get_input_embeddings()))[None]
    own = model(input_ids=probe, use_cache=False).logits.float()
    ours = head(model.base_model(input_ids=probe, use_cache=False).last_hidden_state).float()
    model.train(training)
    if not torch.allclose(own, ours, rtol=1e-2, atol=1e-2 * own.abs().max().item()):
        raise UserError(
            f"{type(model).__name__} changes its logits in a way that its row in hf_memmix/backbones.py does not"
            " describe; add it there"
        )
