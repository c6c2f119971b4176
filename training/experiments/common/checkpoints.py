"""Saves a training that a time limit stops, so that the next command goes on with it."""

from pathlib import Path

import torch
from torch import nn


class Checkpoint:
    """The file of one row's training: the steps that have run, the weights, and the moments of AdamW in bfloat16.

    The rounding of the moments makes a training in two parts differ slightly from one without a break.
    """

    def __init__(self, path: Path):
        self.path = Path(path)

    def save(self, steps: int, model: nn.Module, optimizer: torch.optim.Optimizer, records: dict):
        """Write the file; `records` are the curves of the training so far."""
        moments = [
            {name: value.bfloat16() if value.dim() else value for name, value in optimizer.state.get(p, {}).items()}
            for p in model.parameters()
        ]
        weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        torch.save({"steps": steps, "weights": weights, "moments": moments, "records": records}, partial)
        partial.replace(self.path)

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, dict]:
        """Fill the model and the new optimizer from the file; returns the steps that have run and the records.

        Without a file nothing changes, and the result is (0, {}).
        """
        if not self.path.exists():
            return 0, {}
        place = next(model.parameters()).device
        saved = torch.load(self.path, map_location=place, weights_only=True)
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
