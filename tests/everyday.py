"""The long tests that only `make test-all` runs, besides the rows that `testing.over_tables` leaves out.

For each of them `make test` runs a shorter test: the same kernel at a smaller size, the same kill at another moment,
or the other path of the same op. A row is a regular expression over pytest's node ids.
"""

import re

# Triton's interpreter takes seconds for what a GPU does in microseconds: `make test` runs sizes of up to 17 tokens
_INTERPRETED = r"tests/kernels/test_contract\.py::test_"
LEFT_OUT = [
    _INTERPRETED + r"equals_naive\[triton-.*-(?!(1x17|2x1)x)\dx\d+x.*\]",
    _INTERPRETED + r"(packed|padding|split|steps|float64|gradient|low).*\[triton-.*(lattice|ska|gka|coffee_filtered)",
    _INTERPRETED + r"gka_gradients_of_few_iterations_do_not_depend_on_splits\[triton",
    # options of one kernel at its larger shape; test_lattice.py tests them at three tokens
    _INTERPRETED + r"equals_naive\[triton-.*-lattice_(enc|sim|free)",
    # iterative refinement of the same solver: `make test` runs the small shapes
    _INTERPRETED + r"equals_naive\[torch-.*-(?!(1x17|1x63|2x1)x)\dx\d+x.*gka_refined",
    _INTERPRETED + r"(float64|low_precision)\[torch-.*gka_refined",
    # `make test` runs each launch option batched or packed, and each solver with one gate
    r"tests/kernels/test_coffee\.py::test_every_choice_of_launch_o.*\[(packed-\(\((1|4), 1|batched-\(\((4, 4|2, 1))",
    r"tests/kernels/test_coffee\.py::test_(deer|shooting)_takes_every_gate\[triton-(?!token)",
    r"tests/kernels/test_coffee\.py::test_deer_without_convergence_runs_the_scan.*\[triton",
    r"tests/kernels/test_lattice\.py::test_(a_slot_that_decays|a_slot_whose_old_value|norms_stay).*",
    r"tests/kernels/test_coffee\.py::test_(deer_equals|shooting_equals|shooting_gives_up|stays_bounded).*",
    r"tests/kernels/test_memcheck\.py::test_every_access_is_inside\[(?!gla)",
    r"tests/kernels/test_registration\.py::test_compiles_to_one_graph\[triton",
    # `make test` runs each kernel of the rowwise functions in float32 at three shapes, each op's gradients in torch
    r"tests/kernels/test_rowwise\.py::test_gated_norm_equals_naive\[triton-.*(float16|bfloat16|float64|130\)|1000\))",
    r"tests/kernels/test_rowwise\.py::test_unit_heads_equals_naive\[triton-.*(float16|bfloat16|float64|67, 5)",
    r"tests/kernels/test_registration\.py::test_an_unused_output_counts.*\[triton-(ska|lattice|gka)",
    r"tests/kernels/test_sass\.py::test_one_kernel_compiles",
    r"tests/core/test_compile\.py::test_training_graph\[(?!padded-llama-gka)",
    r"tests/core/test_compile\.py::test_static_decode_is_one_graph\[(llama-all-(?!gka)|gpt_neox)",
    r"tests/core/test_compile\.py::test_padded_rows_are_sorted_once\[stablelm",
    r"tests/core/test_training\.py::test_loss_falls\[(gpt_neox|mixtral)-gka-all",
    r"tests/core/test_compile\.py::test_training_on_other_lengths",
    # whole trainings and kills during one: `make test` runs one moment of a kill and one program
    r"tests/training/test_crash\.py::test_a_kill_leaves.*\[(?!before the folder is renamed)",
    r"tests/training/test_crash\.py::test_out_of_room",
    r"tests/training/test_distributed\.py::test_two_processes",
    # `memmix run` with the program of another library: `make test` runs it with a small program of the tests
    r"tests/training/test_trl\.py::",
    r"tests/test_cli_run\.py::test_the_harness_scores_a_local_task",
    r"tests/training/bundled/test_(demo|make_tiny_gka)\.py::test_(demo_end|recipe_in)",
    r"tests/training/experiments/test_fit\.py::test_(resumes_and_survives|what_was_trained)",
    r"tests/training/experiments/test_(echo|conversion_table)\.py::test_(ablation|a_row_runs)",
    r"tests/conversion/test_saving\.py::test_the_next_command_removes.*\[(?!writing)",
    r"tests/conversion/test_saving\.py::test_a_kill_during_overwriting",
    # tests that start a new process, which imports everything again
    r"tests/test_cli_publish\.py::test_(what_the_hub_refuses|a_dry_run_names)",
    r"tests/test_cli_run\.py::test_(the_other_way|errors_of_the_program|importing_torch)",
]
_PATTERN = re.compile("|".join(f"(?:{row})" for row in LEFT_OUT))


def leaves_out(node_id: str) -> bool:
    """Whether `make test` leaves this test out."""
    return _PATTERN.match(node_id) is not None
