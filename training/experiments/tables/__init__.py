"""The tables of all pages, from committed results: `ALL` has their functions by name, `figures.py` writes them."""

from hf_memmix.training.experiments.common.report import rows_table
from hf_memmix.training.experiments.report import TABLES, shown
from hf_memmix.training.experiments.results import read
from hf_memmix.training.experiments.tables import bundled, costs, kernels, papers, quality, serving


def results(*names: str) -> str:
    """The report of an experiment from the files of these names."""
    files = [read(name) for name in names]
    return shown(TABLES, files)(files)


def rows(name: str, by: str, *figures: str) -> str:
    """`rows_table` of a file of results."""
    return rows_table(read(name), by, *figures)


ALL = {
    "results": results,
    "rows": rows,
    "demo": bundled.demo,
    "bundled_recall": bundled.bundled_recall,
    "front": quality.front,
    "mixers": quality.mixers,
    "induction": papers.induction,
    "images": papers.images,
    "from_scratch": papers.from_scratch,
    "echo_mask": papers.echo_mask,
    "gka_sketch": papers.gka_sketch,
    "gka_grid": papers.gka_grid,
    "recall_mixtures": papers.recall_mixtures,
    "recall_raised_runs": papers.recall_raised,
    "teachers": costs.teachers,
    "refusals": costs.refusals,
    "streaming": costs.streaming,
    "conversion_costs": costs.conversion_costs,
    "conversion_memory": costs.conversion_memory,
    "published_conversions": costs.published_conversions,
    "one_gpu_distil": costs.one_gpu_distil,
    "quantized": costs.quantized,
    "long_prompts": costs.long_prompts,
    "gpus": costs.gpus,
    "gpu_generations": kernels.gpu_generations,
    "model_goals": kernels.model_goals,
    "op_goals": kernels.op_goals,
    "windows": kernels.windows,
    "cpu_goals": kernels.cpu_goals,
    "serving_families": serving.families,
    "serving_costs": serving.costs,
    "serving_matrix": serving.matrix,
    "serving_refusals": serving.refusals,
    "serving_prefix": serving.prefix,
    "serving_speed": serving.speed,
    "serving_fit": serving.fit,
    "tensor_parallel": serving.tensor_parallel,
}
