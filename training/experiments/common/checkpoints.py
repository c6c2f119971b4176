"""Saves a training that a time limit stops, so that the next command goes on with it."""

from pathlib import Path

import torch
from torch import nn

from hf_memmix.conversion.records import atomic_file


class Checkpoint:
    """The file of one row's training: the steps that have run, the weights, and the moments of AdamW in bfloat16.

    The rounding of the moments makes a training in two parts differ slightly from one without a break. The file also
    holds the settings of the training (JSON values, by name), and a training with other ones is refused.
    """

    def __init__(self, path: Path, settings: dict):
        self.path, self.settings, self._found = Path(path), dict(settings), None

    def agree(self, **settings):
        """Add settings that are known only after the loading of the file.

        Raises:
            ValueError: the file was saved with other settings.
        """
        self.settings |= settings
        if self._found is None:
            return
        for name in settings:
            found, now = self._found.get(name), settings[name]
            if found != now:
                self._refuse(f"with {name} = {found}, and here {name} = {now}")

    def _refuse(self, difference: str):
        raise ValueError(
            f"the checkpoint {self.path} was saved {difference}; give the same settings, delete it, or choose "
            "another folder"
        )

    def save(self, steps: int, model: nn.Module, optimizer: torch.optim.Optimizer, records: dict):
        """Write the file; `records` are the curves of the training so far."""
        moments = [
            {name: value.bfloat16() if value.dim() else value for name, value in optimizer.state.get(p, {}).items()}
            for p in model.parameters()
        ]
        weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
        content = {"settings": self.settings, "weights": weights, "moments": moments, "records": records}
        with atomic_file(self.path) as file:
            torch.save({"steps": steps} | content, file)

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, dict]:
        """Fill the model and the new optimizer from the file; returns the steps that have run and the records.

        Without a file nothing changes, and the result is (0, {}).

        Raises:
            ValueError: the file was saved with other settings, or holds another model.
        """
        if not self.path.exists():
            return 0, {}
        place = next(model.parameters()).device
        saved = torch.load(self.path, map_location=place, weights_only=True)
        self._found = saved.get("settings", {})
        self.agree(**self.settings)
        held, own = (
            {name: t.shape for name, t in weights.items()} for weights in (saved["weights"], model.state_dict())
        )
        if differ := [name for name in {**own, **held} if held.get(name) != own.get(name)]:
            self._refuse(f"with another {differ[0]}: {_shape(held, differ[0])}, and here {_shape(own, differ[0])}")
        model.load_state_dict(saved["weights"])
        for parameter, state in zip(model.parameters(), saved["moments"], strict=True):
            if state:
                optimizer.state[parameter] = {
                    name: value.to(parameter.dtype) if value.dim() else value for name, value in state.items()
                }
        return saved["steps"], saved["records"]

    def remove(self):
        """Delete the file, after the end of the training."""
        self.path.unlink(missing_ok=True)


def _shape(shapes: dict, name: str) -> str:
    return str(list(shapes[name])) if name in shapes else "none"
