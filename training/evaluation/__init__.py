"""Measurements of a model: recall by probes, memory and time by context length, which layers should stay attention."""
