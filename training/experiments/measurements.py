"""The files of the committed measurements. All documents, plots and tests read this table.

Paths are relative to the root of the checkout.
"""

import json
from pathlib import Path

from hf_memmix.conversion.records import CHECKOUT

EXPERIMENTS = "training/experiments"
KERNELS = "kernels/benchmarks/results"
BUNDLED = f"{EXPERIMENTS}/bundled/results"
CARDS = "model_cards"
BUNDLED_RUNS = ("muon", "adam", "mild", "low")  # candidates of the bundled transformer
# runs of the recall teacher; the last one is the teacher of the students
RECALL_RUNS = ("first", "second", "strict", "open", "even", "kept")
RAISED_RUNS = (  # students of the teacher "kept"
    "raised_gla",
    "raised_gla_seed1",
    "raised_gla_wide",
    "raised_mamba2",
    "raised_mamba2_seed1",
    "raised_lattice",
    "raised_lattice_seed1",
    "raised_plain",
    "raised",
    "raised_seed1",
    "raised_gla_long",
    "raised_long",
)
EVEN_RAISED_RUNS = ("even_raised", "even_raised_gla", "even_raised_gla_wide", "even_raised_long")
MEASUREMENTS = {
    "demo": f"{BUNDLED}/demo.json",
    "bundled_recall": f"{BUNDLED}/recall_bundled.json",
    "first_recall": f"{BUNDLED}/recall_first.json",
    "first_training": f"{BUNDLED}/first_training.json",
    "candidate_recall": f"{BUNDLED}/recall_candidate.json",
    "candidate_training": f"{BUNDLED}/recall_training.json",
    "candidate_context": f"{BUNDLED}/recall_context_use.json",
    **{f"bundled_run_{name}": f"{BUNDLED}/run_{name}.json" for name in BUNDLED_RUNS},
    "bundled_run_on": f"{CARDS}/tiny_teacher/metrics.json",
    **{f"bundled_run_{name}_recall": f"{BUNDLED}/run_{name}_recall.json" for name in ("muon", "adam", "low")},
    "recall": f"{EXPERIMENTS}/gka/results/recall.json",
    "recall_gdn": f"{EXPERIMENTS}/gka/results/recall_gdn.json",
    "gka_solvers": f"{EXPERIMENTS}/gka/results/gka_solvers.json",
    "gka_variants_sketches": f"{EXPERIMENTS}/gka/results/gka_variants_sketches.json",
    "gka_variants_text": f"{EXPERIMENTS}/gka/results/gka_variants_text.json",
    "gka_variants_recall": f"{EXPERIMENTS}/gka/results/gka_variants_recall.json",
    "gka_variants_ridge": f"{EXPERIMENTS}/gka/results/gka_variants_ridge.json",
    "gka_figure3a": f"{EXPERIMENTS}/gka/results/gka_figure3a.json",
    "gka_vision_digits": f"{EXPERIMENTS}/gka_vision/results/digits.json",
    "gka_vision_fashion": f"{EXPERIMENTS}/gka_vision/results/fashion.json",
    "gka_vision_batch_norm": f"{EXPERIMENTS}/gka_vision/results/batch_norm.json",
    "gka_vision_throughput": f"{EXPERIMENTS}/gka_vision/results/throughput.json",
    "lattice_ablation": f"{EXPERIMENTS}/lattice/results/lattice_ablation.json",
    "lattice_language": f"{EXPERIMENTS}/lattice/results/lattice_language.json",
    "enc_as_written": f"{EXPERIMENTS}/lattice/results/enc_as_written.json",
    **{f"coffee_table{i}": f"{EXPERIMENTS}/coffee/results/coffee_table{i}.json" for i in range(1, 7)},
    "baselines_language": f"{EXPERIMENTS}/baselines/results/baselines_language.json",
    **{
        f"baselines_repair_{way}": f"{EXPERIMENTS}/baselines/results/dec_vconv_repair_{way}.json"
        for way in ("cuda", "triton")
    },
    "coffee_digits": f"{EXPERIMENTS}/coffee/results/coffee_digits.json",
    "coffee_glyphs": f"{EXPERIMENTS}/coffee/results/coffee_glyphs.json",
    "coffee_mnist_5k": f"{EXPERIMENTS}/coffee/results/coffee_mnist_5k.json",
    "coffee_pixels": f"{EXPERIMENTS}/coffee/results/coffee_pixels.json",
    "coffee_fixed8": f"{EXPERIMENTS}/coffee/results/coffee_fixed8.json",
    "coffee_table2_seeds": f"{EXPERIMENTS}/coffee/results/coffee_table2_seeds.json",
    "coffee_ih0": f"{EXPERIMENTS}/coffee/results/coffee_ih0.json",
    "coffee_language": f"{EXPERIMENTS}/coffee/results/coffee_language.json",
    "echo_ablation": f"{EXPERIMENTS}/echo/results/echo_ablation.json",
    "echo_mqar": f"{EXPERIMENTS}/echo/results/echo_mqar.json",
    "echo_dose": f"{EXPERIMENTS}/echo/results/echo_dose.json",
    "echo_mqar_answers": f"{EXPERIMENTS}/echo/results/echo_mqar_answers.json",
    "echo_mqar_rate": f"{EXPERIMENTS}/echo/results/echo_mqar_rate.json",
    "echo_scratchpad_6000": f"{EXPERIMENTS}/echo/results/echo_scratchpad_6000.json",
    "echo_scratchpad": f"{EXPERIMENTS}/echo/results/echo_scratchpad.json",
    "echo_transfer": f"{EXPERIMENTS}/echo/results/echo_transfer.json",
    "conversion_table": f"{EXPERIMENTS}/conversion/results/conversion_table.json",
    "init_table": f"{EXPERIMENTS}/conversion/results/init_table.json",
    "compare_plans": f"{EXPERIMENTS}/conversion/results/compare_plans.json",
    "context_use": f"{EXPERIMENTS}/conversion/results/context_use.json",
    "context_use_first": f"{EXPERIMENTS}/conversion/results/context_use_first.json",
    "published_conversions": f"{EXPERIMENTS}/conversion/results/published_conversions.json",
    "mixtures": f"{EXPERIMENTS}/mixtures/results/mixtures.json",
    "mixtures_h200": f"{EXPERIMENTS}/mixtures/results/mixtures_h200.json",
    "recall_teacher": f"{EXPERIMENTS}/recall_teacher/results/teacher_{RECALL_RUNS[-1]}.json",
    **{
        f"recall_teacher_{run}": f"{EXPERIMENTS}/recall_teacher/results/teacher_{run}.json" for run in RECALL_RUNS[:-1]
    },
    "recall_grid": f"{EXPERIMENTS}/recall_teacher/results/grid.json",
    "recall_grid_second": f"{EXPERIMENTS}/recall_teacher/results/grid_second.json",
    **{f"recall_{run}": f"{EXPERIMENTS}/recall_teacher/results/{run}.json" for run in RAISED_RUNS},
    "recall_even_grid": f"{EXPERIMENTS}/recall_teacher/results/grid_even.json",
    **{f"recall_{run}": f"{EXPERIMENTS}/recall_teacher/results/{run}.json" for run in EVEN_RAISED_RUNS},
    "multi_gpu": f"{EXPERIMENTS}/several_gpus/results/multi_gpu.json",
    "budget": f"{EXPERIMENTS}/budget/results/training_h200.json",
    "streaming": "conversion/benchmarks/streaming.json",
    "streaming_align": f"{EXPERIMENTS}/benchmarks/results/streaming_align.json",
    "quantized": f"{EXPERIMENTS}/benchmarks/results/quantized_h200.json",
    "kernels": f"{KERNELS}/h200.json",
    "gka_sketch": f"{KERNELS}/gka_sketch_h200.json",
    "gpu_generations": f"{KERNELS}/gpu_generations.json",
    "models": f"{KERNELS}/model_h200.json",
    "long": f"{KERNELS}/long_h200.json",
    "context_parallel": f"{KERNELS}/context_parallel_h200.json",
    "cpu": f"{KERNELS}/cpu.json",
    "serving_speed": f"{KERNELS}/serving_h200.json",
    "serving_before": f"{KERNELS}/serving_before_h200.json",
    "serving_matrix": "hf_memmix/serving/results/matrix_cpu.json",
    "serving_matrix_gpu": "hf_memmix/serving/results/matrix_h200.json",
    "tensor_parallel": f"{KERNELS}/tensor_parallel_h200.json",
}


def path_of(name: str, root: Path = CHECKOUT) -> Path:
    """The file of a measurement.

    Raises:
        ValueError: there is no measurement of this name, or the file is missing, as in an installed wheel.
    """
    if name not in MEASUREMENTS:
        raise ValueError(f"there is no measurement {name!r}; choose from {', '.join(MEASUREMENTS)}")
    path = root / MEASUREMENTS[name]
    if not path.is_file():
        raise ValueError(f"{path} does not exist; run this in a checkout of the repository, which holds all results")
    return path


def read(name: str, root: Path = CHECKOUT):
    """The content of a measurement; errors as in `path_of`."""
    return json.loads(path_of(name, root).read_text(encoding="utf-8"))
