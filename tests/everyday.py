"""What `make test` leaves out, and only `make test-all` runs: long tests, and rows of tests with many rows.

`LEFT_OUT` gives per reason regular expressions over pytest's node ids. Where it names rows of a test, other rows stay:
the same property at a smaller size, for another mixer, or on the other path of the same op. Tests that run for all
families, mixers or starts choose their rows by `over_tables`, `in_turn` and `every_third` of testing.py.
"""

import re

_CONTRACT = r"tests/kernels/test_contract\.py::test_"
_REGISTRATION = r"tests/kernels/test_registration\.py::test_"
_HARD = r"tests/kernels/test_hard_inputs\.py::test_"
_COFFEE = r"tests/kernels/test_coffee\.py::test_"
_SKA = r"tests/kernels/test_ska\.py::test_"
_COMPILE = r"tests/core/test_compile\.py::test_"
_STREAM = r"tests/training/test_streaming_align\.py::test_"

LEFT_OUT = {
    "Triton's interpreter takes seconds for what a GPU does in microseconds: sizes above 17 tokens": [
        _CONTRACT + r"equals_naive\[triton-.*-(?!(1x17|2x1)x)\dx\d+x.*\]",
        _CONTRACT + r"equals_naive\[triton-carried-1x17x.*-gla_shared",  # the kernels of gla
        _CONTRACT + r"equals_naive\[triton-fresh-2x1x.*-(?!gla\])",  # one token; 17 tokens stay for every op
        _CONTRACT
        + r"(packed|padding|split|steps|float64|gradient|low|is_causal).*\[triton-.*(lattice|ska|gka|coffee_f|gla_)",
        _CONTRACT + r"(packed|split).*\[triton-coffee",  # test_coffee.py packs on the same kernels
        _CONTRACT + r"(packed|split).*\[triton-short_conv",
        _CONTRACT + r"equals_naive\[triton-.*-gka_sketched",  # test_gka.py has keys narrower than values
        _CONTRACT + r"steps_on_pages\[triton-(24-torch.int32|64-torch.int64)",  # each gap and each dtype stays
        _CONTRACT + r"gka_gradients_of_few_iterations_do_not_depend_on_splits\[triton",
    ],
    "the same in the interpreter: one row per kernel stays, the torch path runs all rows": [
        _CONTRACT + r"extreme_decay\[triton-(none|total-(gka|gla_))",
        # options of one kernel at its larger shape; test_lattice.py tests them at three tokens
        _CONTRACT + r"equals_naive\[triton-.*-lattice_(enc|sim|free)",
        r"tests/kernels/test_gka\.py::test_keys_narrower_than_values\[triton-(?!3\])",
        _COFFEE + r"every_choice_of_launch_o.*\[(packed-\(\([14]|batched)",
        _COFFEE + r"shooting_takes_every_gate\[triton-(?!token)",
        _SKA + r"(action_mask|step_at_every_token|padding_by_lengths|nu_cancels|sequence_max_ignores_pads)\[triton",
        _SKA + r"every_power\[triton",
        _SKA + r"extreme_inputs_stay_finite\[triton",
        _COFFEE + r"every_number_of_states\[triton-(33|64)",
        r"tests/kernels/test_guards_short_conv\.py::test_inputs_are_clamped\w*\[triton-packed",
        r"tests/kernels/test_memcheck\.py::test_every_access_is_inside\[(?!gla-packed)",
        r"tests/kernels/test_rowwise\.py::test_gated_norm_equals_naive\[triton-.*(float16|bfloat16|float64|130\)|1000\)|48\))",
        r"tests/kernels/test_rowwise\.py::test_unit_heads_equals_naive\[triton-.*(float16|bfloat16|float64|67, 5)",
        _REGISTRATION + r"what_forward_keeps.*\[triton-(lattice|gka)",
        _REGISTRATION + r"an_unused_output_counts.*\[triton-(?!gla\])",
        _REGISTRATION + r"(compiles_to_one|step_on_pages_c|step_c).*\[triton-(?!gla)",
        _REGISTRATION + r"(step_on_pages_compiles|short_conv_pads_by_lengths)\[triton",
        _CONTRACT + r"(float64|low_precision)\[triton-.*short_conv",
        r"tests/kernels/test_rowwise\.py::test_gated_norm_equals_naive\[triton-(silu-False|.*, 32\), 1\))",
    ],
    "a block of GPU threads on a CPU: one token, and the case of special slots, stay": [
        r"tests/kernels/test_lattice_cuda\.py::test_the_walk_back_in_the_emulator\[(?!one token|sharp|small values\])",
    ],
    "inputs near zero, equal, saturated and large: per op, the torch and native paths at two chunks stay": [
        _HARD + r"float32\[torch-(?!chunks-(?!gka|lattice_|coffee_f))",
        _HARD + r"float32\[native-(?!chunks-(?!gka))",
        _HARD + r"float32\[triton-(?!short-(gla|lattice|coffee|ska)-(small values, common|equal tokens|no values))",
        _HARD + r"bfloat16\[(?!chunks-lattice-)",
        _HARD + r"other_forms",
        _HARD + r"steps\[(triton|torch-(lattice|coffee|gka)|native-(.*_))",
        r"tests/kernels/test_hard_rows\.py::test_(scales|heads)\w*\[triton",
    ],
    "variants of an op, in tests that every op has: its main form stays": [
        _CONTRACT + r"(extreme_decay|is_causal|packed_equals_separate)\[.*-(lattice_|gka_[rs]|coffee_filtered)",
        _CONTRACT + r"(split_with|gradient_of_log_decay)\w*\[.*-(lattice_|gka_[rs]|coffee_filtered)",
        _CONTRACT + r"low_precision\[torch-torch.float16-(?!gla)",
        _CONTRACT + r"gradcheck_of_naive\[(lattice_|gka_sketched)",
        _CONTRACT + r"equals_naive\[(torch|native)-(?!carried-1x(17|130)x).*-lattice_",
        _REGISTRATION + r"compiles_to_one_graph\[torch-packed-(?!gka)",
        _REGISTRATION + r"(compiles_to_one|step_compiles|step_on_pages_c)\w*\[.*-(gka_[rs]|lattice_|gla_s|coffee_f)",
        _REGISTRATION + r"compiles_to_one_graph\[(torch-batched|native-packed)-(?!gka)",
        _REGISTRATION + r"step_compiles\w*\[torch-(?!gka|gla)",
        _REGISTRATION + r"a_compiled_step_copies_no_state\[(?!(gka|lattice)\])",
        _REGISTRATION + r"opcheck(_of_a_step_on_pages)?\[(?!gla\])",
        _REGISTRATION + r"step_on_pages_compiles\[torch-(?!gla|gka\])",
        _COFFEE + r"every_gate\[triton-(row|filter)",
        _SKA + r"every_power\[torch-raw",
        _SKA + r"extreme_inputs_stay_finite\[torch-(constant|huge|tiny)",
        r"tests/kernels/test_guards_ska\.py::test_pivots_lost_by_rounding\[(.*-2\]|[23] equal)",
        r"tests/kernels/test_guards_ska\.py::test_ties_share\w*\[triton",
        r"tests/kernels/test_lattice\.py::test_every_rule_in_float64\[triton-.*-0\.0\]",
    ],
    "the reference of GKA solves per token: large heads and more than 63 tokens": [
        _CONTRACT + r"equals_naive\[(torch|native)-.*-(?!(1x17|1x63|2x1)x)\dx\d+x.*gka",
        _CONTRACT + r"(float64|low_precision|gradient_of_log_decay.*)\[(torch|native)-.*gka_[rs]",
        _CONTRACT + r"equals_naive\[(torch|native)-(fresh-.*gka|carried-1x63x.*gka_)",
        _CONTRACT + r"float64\[native-gka",
        _CONTRACT + r"equals_naive\[native-carried-1x63x.*gka\]",
        _CONTRACT + r"low_precision\[native-torch.float16-gka\]",
        # strong and total decay stay, on one path each
        _CONTRACT + r"extreme_decay\[(torch-(none|total)|native-(none|strong))-gka\]",
        _CONTRACT + r"low_precision\[native-torch.bfloat16-gka\]",
        r"tests/kernels/test_gka\.py::test_keys_narrower_than_values\[(torch-(1|3|24)|native-(1|16|24))\]",
        _CONTRACT
        + r"gradient_of_log_decay.*\[(torch|native)-gka\]",  # 320 tokens; test_float64 has this gradient at 70
    ],
    "many tokens or iterations": [
        _CONTRACT + r"equals_naive\[(torch|native)-fresh-(1x(20|63|65|66|130)|2x64)x",  # carried ones stay
        r"tests/kernels/test_lattice\.py::test_(a_slot_that_decays|a_slot_whose_old_value|norms_stay).*",
        r"tests/kernels/test_guards_lattice\.py::test_norms_after_many_steps\[dec",
        _COFFEE + r"(shooting_equals|shooting_gives_up|stays_bounded).*",
        r"tests/kernels/test_sass\.py::test_one_kernel_compiles",
    ],
    "torch.compile traces a whole model: one mixer per property stays": [
        _COMPILE + r"training_graph",  # test_registration.py compiles the gradients of every op
        _COMPILE + r"static_decode_is_one_graph\[(?!llama-mixed-gka)",
        _COMPILE + r"a_prompt_is_one_graph\[all-(?!gka)",
        _COMPILE + r"padded_rows_are_sorted_once",  # test_padding.py has this without a graph
        _COMPILE + r"training_on_other_lengths",
        _COMPILE + r"finished_rows_of_a_compiled",  # test_finished_rows.py has this without a graph
        _COMPILE + r"gates_of_gka_are_one_op",  # test_gka_gates.py compiles the call alone
        _COMPILE + r"a_layer_that_checkpoints",  # test_families.py has this without a graph
        r"tests/core/test_new_mixer\.py::test_static_decode_is_one_graph",
        r"tests/core/test_context_parallel\.py::test_hooks_of_accelerate_under_compile",  # without a graph it stays
    ],
    "trainings: one layout, and one model per kind of mixer, stay": [
        r"tests/core/test_training\.py::test_loss_falls\[(.*-all|mixtral|gpt_neox)",
        r"tests/core/test_training\.py::test_trainer_resumes\[(?!llama-(gka|ska))",
        r"tests/core/test_offload\.py::test_weights_on_disk\[(?!gka)",
        # test_loss_falls of test_training.py trains every mixer
        r"tests/core/test_gka_vision\.py::test_trainer",  # test_every_mixer_trains stays
        r"tests/training/evaluation/test_probes\.py::test_the_bundled_teacher_recalls",
        r"tests/training/test_(fp32_parameters|recipe)\.py::test_(two_align_runs|a_save_after|a_teacher_of_shared).*\[(?!.*gka)",
    ],
    "align and distill train, write and read checkpoints by the same code: one of both stays": [
        r"tests/training/test_runs\.py::test_every_file_of_a_checkpoint_is_checked\[align",
        r"tests/training/test_train\.py::test_(interrupted_run|recomputed_act|divergence_stops|bf16_trains)\w*\[align",
        r"tests/training/test_run_outputs\.py::test_a_trained_student_has_the_dtypes_of_the_first\[align",
        r"tests/training/test_fp32_parameters\.py::test_a_save_after_training\w*\[.*align",
        r"tests/test_cli_progress\.py::test_a_training_in_a_log_file\w*\[align",
    ],
    "trainings in processes of their own; kills while a folder is written stay (test_saving.py)": [
        r"tests/training/test_crash\.py::test_(a_kill_leaves|out_of_room)",
        r"tests/training/test_distributed\.py::test_two_processes",
        r"tests/core/test_context_parallel\.py::test_two_processes",
    ],
    "all families: some stay, and test_families.py has every family with one mixer": [
        r"tests/core/test_context_parallel\.py::test_hooks_of_accelerate_change\w*\[odd-(?!gpt2|granite|llama|mixtral)",
        r"tests/conversion/test_streaming\.py::test_every_family_in_bf16\[(?!gpt2|gemma|phi3|qwen2_moe|stablelm)",
        r"tests/conversion/test_convert\.py::test_student_of_every_family\w*\[(?!gpt2|gemma|phi3|qwen2_moe|stablelm)",
        r"tests/core/test_training\.py::test_lora\[(gpt2|gpt_neox)",
    ],
    "two values of an option, or two examples: one stays; for GKA, both values of its options": [
        r"tests/core/test_families\.py::test_checkpointing_refuses_a_cache\[(?!gka-llama).*-all",
        r"tests/core/test_cache\.py::test_model_of_another_dtype\[(?!gka).*-24-",
        r"tests/core/test_cache\.py::test_model_of_another_dtype\[(?!gka).*-wide to narrow",
        r"tests/core/test_controls\.py::test_\w*\[gemma3_text",
        r"tests/conversion/test_mixtures\.py::test_a_student_of_several_mixers\[gemma3_text",
        r"tests/test_cli_models\.py::test_files_of_codecarbon_outlive\w*\[wandb",
        r"tests/training/test_packing\.py::test_packed_documents_from_which",  # that rows are packed stays
        r"tests/training/test_train\.py::test_(recomputed_act|bf16_teacher_guides)",
        r"tests/core/test_models\.py::test_check\[.*-hybrid",
        r"tests/core/test_cache\.py::test_crop_does_not_go_back_before_a_change\w*\[(?!gka).*-all-",
        r"tests/core/test_generation\.py::test_(\w*(beam|_turn)|assistant_of|streamer)\w*\[first",
        r"tests/core/test_quantization\.py::test_a_quantized_student_is_saved\w*\[(4|8)bit",
        r"tests/core/test_quantization\.py::test_perplexity_stays\w*\[(int8|8bit)",
        r"tests/test_cli_models\.py::test_tensorboards_files\w*\[None",
        r"tests/core/test_saving\.py::test_half_precision\[(llama-all|gpt_neox-odd)",
        r"tests/core/test_finished_rows\.py::test_rows_keep_their_record\[all-",
        r"tests/core/test_finished_rows\.py::test_(rows_that_end|several_end|other_stop|generation_that)\w*\[odd",
        r"tests/core/test_finished_rows\.py::test_files_and_copies_keep_the_record\[(all-True|odd-False)",
        r"tests/core/test_finished_rows\.py::test_caches_of\w*\[StaticCache-(gka|coffee|mamba2)",
        r"tests/core/test_finished_rows\.py::test_caches_of\w*\[DynamicCache-(lattice|ska)",
        _STREAM + r"layers_one_by_one\w*\[bf16-(?!.*(llama|gemma|gpt|moe))",
        # each two values of dtype, cache and padding stay together once
        r"tests/core/test_native_code\.py::test_decoding\[full-(dynamic-torch.bfloat16|static-torch.float32)",
        r"tests/core/test_native_code\.py::test_decoding\[left-padded-(dynamic-torch.float32|static-torch.bfloat16)",
        r"tests/core/test_generation\.py::test_padded_prompt_token_by_token\[(?!gka).*-static",
        r"tests/core/test_ska_mixer\.py::test_options_hold_in_every_check\[(?!.*refresh)",
    ],
    "whole commands and trainings; their parts have tests of their own": [
        r"tests/training/test_planning\.py::test_activations_of_a_layer",
        _STREAM + r"(packed_rows|clipping|data_that|only_rows|distill_cont|no_resume|another_run|a_spool_disk)",
        _STREAM + r"(a_run_never|the_command_leaves|a_plan_is|workers_that_read)",
        r"tests/core/test_quantization\.py::test_what_steers_a_memory.*\[(8bit|int8)",
        r"tests/core/test_quantization\.py::test_qlora_trains",  # test_recipe.py trains with LoRA
        r"tests/test_cli\.py::test_slices_are_merged",
        r"tests/test_cli_measure\.py::test_teacher_beside_student",
        r"tests/test_packaging\.py::test_wheel_holds",
        r"tests/conversion/test_mixtures\.py::test_(commands_with_a_mixture|a_mixture_is_aligned)",
        r"tests/conversion/test_compare_in_turn\.py::test_(commands_with_a_device_map|fewer_probabilities)",
        r"tests/training/evaluation/test_mixer_search\.py::test_(a_mixture_is_selected|an_interrupted|candidates_that)",
        r"tests/conversion/test_compare_in_turn\.py::test_(a_mixture_of_aligned|select_with_a_device_map)",
        r"tests/test_cards\.py::test_cards_of_students_are_their_measurements",
        r"tests/test_readme\.py::test_python_blocks_run_in_order",
    ],
    "trainings, reading and writing of whole folders, whose parts have tests of their own": [
        _STREAM + r"(losses_and_student|folders_that_cannot_be_read|a_dry_run_measures)",
        r"tests/training/test_merge\.py::test_(merged_slices|students_that_cannot)",
        r"tests/training/test_packing\.py::test_a_stream_trains",
        r"tests/training/test_budget\.py::test_an_interrupted_run_with_lora",
        r"tests/training/test_budget\.py::test_an_optimizer_by_name\w*\[adamw_torch_8bit",
        r"tests/training/evaluation/test_mixer_search\.py::test_a_candidate_is_the_aligned",
        r"tests/kernels/test_device\.py::test_a_row_of_the_json",
        r"tests/kernels/test_native\.py::test_code_of_others",
    ],
    "programs of other libraries": [
        r"tests/training/test_trl\.py::",
        r"tests/test_cli_run\.py::test_the_harness_scores_a_local_task",
    ],
    "all commands of the README, one after the other; each of them has its own tests": [
        r"tests/test_readme\.py::test_memmix_commands_run_in_order",
    ],
    "tests that start a new process, which imports torch and transformers again for seconds": [
        r"tests/test_cli_publish\.py::test_push_reads_its_settings_from_the_environment",
        r"tests/test_cli_run\.py::test_(the_other_way|errors_of_the_program|importing_torch|a_saved_model|a_program)",
        r"tests/test_cli_start\.py::test_a_command_registers_the_models",
        r"tests/test_packaging\.py::test_transformers_imports_from_the_repository_root",
        r"tests/core/test_config\.py::test_importing_does_not_load_modelling_code",
        r"tests/core/test_saving\.py::test_load_without_the_import",
        r"tests/conversion/test_streaming\.py::test_(memory_is_one_layer|a_killed_conversion)",
        _STREAM + r"(a_killed_run|a_damaged_spool|two_processes_share|a_process_that_ends)",
        r"tests/test_cli_models\.py::test_the_device_is_chosen_before",
        r"tests/kernels/test_native\.py::test_(a_fork_while|two_processes_at|a_file_that_was_cut|a_cache_folder)",
        r"tests/test_imports\.py::test_everything_imports_without_triton",
        r"tests/conversion/test_conversion_readme\.py::test_the_snippets_run",
    ],
}
_PATTERN = re.compile("|".join(f"(?:{row})" for rows in LEFT_OUT.values() for row in rows))


def leaves_out(node_id: str) -> bool:
    """Whether `make test` leaves this test out."""
    return _PATTERN.match(node_id) is not None
