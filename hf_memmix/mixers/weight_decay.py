"""Parameters that weight decay must not change: those that steer a memory, such as its decays and initial states.

Decay pulls them to zero, which changes how long a memory holds what it has read. They are marked as Mamba marks its
own, by the attribute `_no_weight_decay`.
"""

from typing import ClassVar

from torch import nn

from ..errors import UserError


class SparedFromDecay(nn.Module):
    """Base class of a module with `no_weight_decay`, names of its own parameters. They carry the mark at any time:
    also after loading, casts, moves from the meta device, and in copies.
    """

    no_weight_decay: ClassVar[tuple[str, ...]] = ()

    def register_parameter(self, name, param):
        super().register_parameter(name, param)
        self._mark()

    def _apply(self, fn, recurse=True):  # it may make new parameters
        super()._apply(fn, recurse)
        self._mark()
        return self

    def __setstate__(self, state):  # of a copy, or from a pickle
        super().__setstate__(state)
        self._mark()

    def _mark(self) -> None:
        for name in self.no_weight_decay:
            if (parameter := self._parameters.get(name)) is not None:
                parameter._no_weight_decay = True


def no_weight_decay_names(model: nn.Module) -> set[str]:
    """Full names of the parameters of a model, or of a wrapper of one, that weight decay must not change."""
    return {
        f"{path}.{name}".removeprefix(".")
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, SparedFromDecay)
        for name in module.no_weight_decay
        if module._parameters.get(name) is not None
    }


def spare_from_decay(trainer):
    """A `Trainer` of transformers, or of a library on it such as TRL, with weight decay for all parameters that it
    decays but those of `no_weight_decay_names`. Call it before `train()`; returns the trainer.

    Raises:
        ValueError: the trainer has made its optimizer already.
    """
    if trainer.optimizer is not None:
        raise UserError("the trainer has an optimizer already; call spare_from_decay before train()")
    names_of = trainer.get_decay_parameter_names

    def get_decay_parameter_names(model: nn.Module) -> list[str]:
        spared = no_weight_decay_names(model)
        return [name for name in names_of(model) if name not in spared]

    trainer.get_decay_parameter_names = get_decay_parameter_names
    return trainer
