"""Lets `lm_eval --model hf --model_args pretrained=DIR` and `trl sft` read converted models without further options.

Neither has a hook that runs before it loads a model, but both import torch, which calls the entry points of the group
`torch.backends` (TORCH_DEVICE_BACKEND_AUTOLOAD=0 forbids it). `register` is ours: it waits for the Auto classes of
transformers to be imported, and imports hf_memmix behind them if the harness or TRL is what runs. In any other program
it does nothing.
"""

import importlib.util
import sys

HOSTS = {"lm_eval", "trl"}
AUTO_CLASSES = "transformers.models.auto.modeling_auto"
HARNESS = "lm_eval.models.huggingface"


class _Waiting:
    """A finder that finds nothing itself; it is in `sys.meta_path` until hf_memmix has been imported."""

    def find_spec(self, name, path=None, target=None):
        if name != HARNESS and (name != AUTO_CLASSES or not HOSTS & sys.modules.keys()):
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            importlib.import_module("hf_memmix")

        spec.loader.exec_module = exec_module
        return spec


def register() -> None:
    """Wait for the Auto classes; they register what hf_memmix brings when it is imported."""
    if "hf_memmix" not in sys.modules and not any(isinstance(finder, _Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting())
