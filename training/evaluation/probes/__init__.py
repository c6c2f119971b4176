"""Probes of recall: offline, seeded, for any tokenizer. `run_probes` measures models over lengths and depths."""

from hf_memmix.training.evaluation.probes.grid import by_length, gain_text, run_probes
from hf_memmix.training.evaluation.probes.material import Material
from hf_memmix.training.evaluation.probes.plot import plot_probes
from hf_memmix.training.evaluation.probes.score import score
from hf_memmix.training.evaluation.probes.tasks import TASKS, draw

__all__ = ["TASKS", "Material", "by_length", "draw", "gain_text", "plot_probes", "run_probes", "score"]
