"""Logits of a chunk of last hidden states, scaled and capped as the model does it.

`ForCausalLM.forward` does not take hidden states. So its last step is repeated here, according to the family's row in
`hf_memmix.backbones`, and the result is compared with the model's own logits once.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from hf_memmix._transformers import execution_device
from hf_memmix.backbones import backbone_of
from hf_memmix.errors import UserError


class LogitsHead:
    """A function from last hidden states [..., d] to logits [..., V], with its parameters.

    No step keeps the logits for its backward pass, so their memory may be used for something else.
    """

    def __init__(self, projection: nn.Module, divisor: float | None, factor: float | None, softcap: float | None):
        self._projection, self._divisor, self._factor, self._softcap = projection, divisor, factor, softcap

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = self._projection(hidden)
        if self._divisor is not None:
            logits = logits / self._divisor
        if self._factor is not None:
            logits = logits * self._factor
        return logits if self._softcap is None else self._softcap * torch.tanh(logits / self._softcap)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those of the projection."""
        return self._projection.parameters()


def logits_head(model: nn.Module) -> LogitsHead:
    """The head of a model, whose logits equal the model's own.

    Raises:
        ValueError: the logits differ from the model's; then the family's row in `hf_memmix.backbones` is incomplete.
    """
    config, named = model.config, backbone_of(model.config).logits
    numbers = (
        None if name is None else getattr(config, name, None) for name in (named.divisor, named.factor, named.softcap)
    )
    head = LogitsHead(model.get_output_embeddings(), *numbers)
    _check(model, head)
    return head


@torch.no_grad()
def _check(model: nn.Module, head: LogitsHead) -> None:
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
