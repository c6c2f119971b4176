"""Probes of recall: offline, seeded, for any tokenizer. `run_probes` measures models over lengths and depths.

The names below are imported on first use, because a command checks the names of tasks before it imports torch.
"""

import importlib

_HOMES = {
    "TASKS": "tasks",
    "Material": "material",
    "by_length": "grid",
    "counted_rows": "counted",
    "draw": "tasks",
    "gain_text": "gains",
    "plot_probes": "plot",
    "run_probes": "grid",
}

__all__ = ["TASKS", "Material", "by_length", "counted_rows", "draw", "gain_text", "plot_probes", "run_probes"]  # noqa: F822


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
