"""Probes of recall: offline, seeded, for any tokenizer. `run_probes` measures models over lengths and depths."""

from hf_memmix.training.probes.grid import run_probes
from hf_memmix.training.probes.material import Material
from hf_memmix.training.probes.plot import plot_probes
from hf_memmix.training.probes.score import score
from hf_memmix.training.probes.tasks import TASKS, draw

__all__ = ["TASKS", "Material", "draw", "plot_probes", "run_probes", "score"]
