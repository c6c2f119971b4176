"""What a recipe says is what the optimizer does: rates by pattern, slices of layers, teachers."""

import math

import pytest
import torch
from transformers import TrainerCallback

from hf_memmix.conversion import convert_model
from hf_memmix.conversion.families import attention_prefix
from hf_memmix.training.groups import freeze_by_rate, optimizer_groups, parameter_rates
from hf_memmix.training.recipe import TRACKERS, Recipe, load_recipe
from hf_memmix.training.teachers import share_weights, unshare_weights
from hf_memmix.training.train import align, distill, train
from hf_memmix.training.trainer_arguments import training_arguments, uses_bf16
from tiny_runs import SMALL_RUN, changed, random_rows, weights
from tiny_teachers import tiny_teacher

GROUPS = [
    {"match": r"\.q_proj\.", "learning_rate": 2e-3, "weight_decay": 0.1},
    {"match": "embed_tokens", "learning_rate": 0.0},
    {"match": "norm", "weight_decay": 0.2},
]


@pytest.fixture
def student():
    return convert_model(tiny_teacher("llama", layers=2), "gka", keep=[1])


def test_first_matching_group_decides_and_zero_freezes(student):
    recipe = Recipe(stage="distill", learning_rate=1e-3, rest_learning_rate=1e-4, weight_decay=0.01, groups=GROUPS)
    by_name = freeze_by_rate(student, recipe)
    assert by_name["model.layers.0.self_attn.q_proj.weight"] == (2e-3, 0.1)
    assert by_name["model.layers.0.self_attn.o_proj.weight"] == (1e-3, 0.01)
    assert by_name["model.layers.0.mlp.up_proj.weight"] == (1e-4, 0.01)
    assert by_name["model.layers.1.input_layernorm.weight"] == (1e-4, 0.2)
    frozen = {name for name, parameter in student.named_parameters() if not parameter.requires_grad}
    assert frozen == {"model.embed_tokens.weight"}
    groups = optimizer_groups(student, list(student.parameters()), by_name)
    assert [group["lr"] for group in groups] == sorted((group["lr"] for group in groups), reverse=True)
    found = {id(p): (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
    for name, parameter in student.named_parameters():
        assert found.get(id(parameter)) == (None if name in frozen else by_name[name])


def test_windows_alone_have_a_factor_of_the_rate():
    teacher = tiny_teacher("llama", layers=3)
    mixers = {"window": {"window": 8}, "gka": {"local_window": 8}}
    layers = {"window": [0], "gka": [1], "attention": [2]}
    student = convert_model(teacher, layers=layers, mixers=mixers)
    recipe = Recipe(stage="distill", learning_rate=1e-3, rest_learning_rate=1e-4, window_rate=0.25)
    rates = {name: rate for name, (rate, _) in parameter_rates(student, recipe).items()}
    of_layers = [{rate for name, rate in rates.items() if f"layers.{i}.self_attn" in name} for i in range(3)]
    assert of_layers == [{2.5e-4}, {1e-3}, {1e-4}]


def test_groups_reach_the_weights(student, tmp_path):
    before = weights(student)
    groups = [{"match": r"layers\.1\.mlp", "learning_rate": 1e-2}, {"match": ".", "learning_rate": 0.0}]
    distill(student, tiny_teacher("llama", layers=2), random_rows(), tmp_path, steps=2, groups=groups, **SMALL_RUN)
    assert changed(student, before) == {name for name in before if "layers.1.mlp" in name}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"groups": [{"learning_rate": 1e-3}]}, "needs a regular expression"),
        ({"groups": [{"match": "(", "learning_rate": 1e-3}]}, "is not a regular expression"),
        ({"groups": [{"match": "x", "lr": 1e-3}]}, "learning_rate and weight_decay"),
        ({"groups": [{"match": "x", "learning_rate": "1e-3"}]}, "1.0e-3"),
        ({"groups": [{"match": "x", "learning_rate": None}]}, "learning_rate of group 'x' is None"),
        ({"groups": [{"match": "x", "learning_rate": True}]}, "learning_rate of group 'x' is True"),
        ({"learning_rate": None}, "learning_rate is null"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"learning_rate": 1.0}, r"learning_rate is 1.0 .* \[0, 1\)"),
        ({"weight_decay": -0.1}, r"weight_decay is -0.1 .* \[0, 1\)"),
        ({"weight_decay": float("inf")}, "weight_decay is inf"),
        ({"min_lr_ratio": 1.5}, "min_lr_ratio is 1.5; .* 1.0"),
        ({"min_lr_ratio": -0.5}, "min_lr_ratio is -0.5; .* 0.0"),
        ({"min_lr_ratio": float("nan")}, "min_lr_ratio is nan"),
        ({"save_every": -1}, "save_every is -1"),
        ({"warmup_steps": -1}, "warmup_steps is -1"),
        ({"steps": 10, "warmup_steps": 11}, "warmup_steps is 11, but the run has 10 steps"),
        ({"warmup_steps": True}, "warmup_steps is True, not of type int"),
        ({"steps": 2.5}, "steps is 2.5, not of type int"),
        ({"steps": True}, "steps is True, not of type int"),
        ({"steps": 0}, "steps is 0"),
        ({"block_size": 1}, "block_size is 1"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**32}, "seed is 4294967296; .* 4294967295"),
        ({"trainer": ["logging_steps"]}, "trainer is .* not of type dict"),
        ({"bf16": "yes"}, "bf16 is 'yes'"),
        ({"stage": "sft"}, "stage is 'sft'"),
        ({"stage": "distill", "teacher": "cache:"}, "copy, shared, lora or cache:DIR"),
        ({"stage": "align", "teacher": "lora"}, "align reads the teacher's attention"),
        ({"stage": "distill", "teacher": "shared"}, "set it to 0.0"),
        ({"stage": "distill", "layers": "0-1"}, "only align trains a part"),
        ({"stage": "distill", "far_weight": 1.0}, "far_weight is 1, but only align compares attentions"),
        ({"stage": "distill", "lora_rank": 8}, "lora_rank is 8, but only a run with LoRA has frozen matrices"),
        ({"far_window": 64}, "far_window is 64, but far_weight is 0"),
        ({"drills": 1.5}, "drills is 1.5; it must be at most 1"),
        ({"drills": 0.5, "stream": True}, "drills is 0.5, which does not work with stream: True"),
        ({"drills": 0.5, "loss": "answers"}, "drills is 0.5, which does not work with loss: answers"),
        ({"stage": "distill", "quantize": "3bit"}, "quantize is '3bit'; .* none, 4bit, 8bit"),
        ({"stage": "distill", "quantize": "4bit"}, "quantize is '4bit'.* teacher to lora"),
        ({"stage": "distill", "lora_mixers": True, "teacher": "copy"}, "lora_mixers is True.* LoRA"),
    ],
)
def test_a_recipe_that_contradicts_itself_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Recipe(**fields)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"stage: align # caf\xe9", "recipe.yaml' is not valid YAML: .*utf-8"),
        (b"- steps", "must be a YAML mapping"),
        (b"1: 2\nstep: 3", "unknown 1, step; known: batch_size"),
        (b"learning_rate: 1e-3", "'1e-3', not of type float; .* 1.0e-3"),
        (b"trainer:\n  optim: x\n  'optim': y", "optim stands in line 2 and in line 3"),
        (b"trainer: {optim: x, optim: y}", "optim stands twice"),
    ],
)
def test_a_file_that_is_no_recipe(tmp_path, content, message):
    """More of them are in tests/conversion/test_yaml_text.py."""
    (tmp_path / "recipe.yaml").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_recipe(tmp_path / "recipe.yaml")


def test_recipes_that_are_bundled(student, tmp_path):
    assert [load_recipe(stage).stage for stage in ("align", "distill")] == ["align", "distill"]
    assert load_recipe("align", steps=7, batch_size=None).steps == 7
    with pytest.raises(ValueError, match="no recipe 'nosuch'; .* align, distill"):
        load_recipe("nosuch")
    for stage, recipe, message in (
        (align, "distill", "recipe 'distill' is for distill, not for align"),
        (distill, "align", "recipe 'align' is for align, not for distill"),
        (align, Recipe(stage="distill"), "the recipe is for distill, not for align"),
    ):
        with pytest.raises(ValueError, match=message):
            stage(student, tiny_teacher("llama", layers=2), random_rows(), tmp_path, recipe=recipe)


def test_a_run_shorter_than_the_warm_up_of_its_recipe(tmp_path, student):
    """`--steps 3` warms up over all steps; numbers that contradict each other within a recipe are refused."""
    assert Recipe(steps=3).warmup_steps == 3 and Recipe().warmup_steps == 20
    file = tmp_path / "recipe.yaml"
    file.write_text("stage: align\nsteps: 40\nwarmup_steps: 10")
    assert [load_recipe(file, steps=steps).warmup_steps for steps in (3, 10, 40, None)] == [3, 10, 10, 10]
    with pytest.raises(ValueError, match="warmup_steps is 10, but the run has 3 steps"):
        load_recipe(file, steps=3, warmup_steps=10)
    file.write_text("stage: align\nsteps: 4\nwarmup_steps: 10")
    for steps in (None, 3):
        with pytest.raises(ValueError, match=f"warmup_steps is 10, but the run has {steps or 4} steps"):
            load_recipe(file, steps=steps)
    assert load_recipe(file, steps=12).warmup_steps == 10
    recipe = Recipe(steps=40, batch_size=4, block_size=16)
    result = train(student, tiny_teacher("llama", layers=2), random_rows(), tmp_path, recipe=recipe, steps=2)
    assert result["steps"] == 2


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({"nosuch": 1}, "trainer names nosuch"),
        ({1: 1}, "trainer names 1"),
        ({"output_dir": "x"}, "sets output_dir, which the output folder"),
        ({"max_steps": 3}, "sets max_steps, which steps decides"),
        ({"learning_rate": 0.1}, "sets learning_rate, which learning_rate decides"),
        ({"save_steps": 3}, "sets save_steps, which save_every decides"),
        ({"gradient_checkpointing_kwargs": {}}, "which gradient_checkpointing decides"),
        ({"label_smoothing_factor": 0.1}, "sets label_smoothing_factor, which the loss"),
        ({"neftune_noise_alpha": 5.0}, "sets neftune_noise_alpha, which the loss"),
        ({"remove_unused_columns": True}, "sets remove_unused_columns, which the kind of the data"),
        ({"lr_scheduler_type": "nosuch"}, "lr_scheduler_type to 'nosuch'"),
        ({"lr_scheduler_type": "warmup_stable_decay"}, "kwargs to None, .*'num_decay_steps'"),
        ({"lr_scheduler_kwargs": {"power": 2}}, "kwargs to {'power': 2}, .*'power'"),
        ({"fsdp": 2}, "fsdp to 2, which is not of type"),
        ({"logging_steps": "often"}, "logging_steps to 'often', .* float"),
        ({"max_grad_norm": None}, "max_grad_norm to None, .* float"),
        ({"use_cpu": "yes"}, "use_cpu to 'yes', .* bool"),
        ({"logging_steps": -1}, "logging_steps to -1; .* finite and at least 0"),
        ({"logging_steps": 0}, "logging_steps to 0; .* more than 0"),
        ({"max_grad_norm": math.nan}, "max_grad_norm to nan; .* finite"),
        ({"adam_epsilon": -1}, "adam_epsilon to -1; .* finite"),
        ({"adam_beta2": 1.0}, "adam_beta2 to 1.0; .* below 1"),
        ({"dataloader_num_workers": -1}, "dataloader_num_workers to -1; .* finite"),
        ({"optim": "nosuch"}, "trainer of the recipe: .*nosuch"),
        ({"report_to": "nosuch"}, "report_to is 'nosuch'.*wandb"),
        ({"report_to": "clearml"}, "report_to is 'clearml'.* pip install clearml"),
    ],
)
def test_a_trainer_argument_that_cannot_be_is_refused(tmp_path, trainer, message, monkeypatch):
    monkeypatch.setattr("transformers.integrations.integration_utils.is_clearml_available", lambda: False)
    with pytest.raises(ValueError, match=message):
        training_arguments(Recipe(trainer=trainer), tmp_path)


def test_trainer_arguments_reach_the_trainer(tmp_path):
    plain = training_arguments(Recipe(steps=500), tmp_path)
    assert plain.logging_steps == 10 and plain.report_to == []
    given = {"logging_steps": 3, "report_to": ["none"], "max_grad_norm": 0, "save_total_limit": 5}
    given |= {"label_smoothing_factor": 0, "lr_scheduler_type": "warmup_stable_decay"}
    given |= {"lr_scheduler_kwargs": {"num_decay_steps": 5}}
    arguments = training_arguments(Recipe(trainer=given), tmp_path)
    assert (arguments.logging_steps, arguments.max_grad_norm, arguments.save_total_limit) == (3, 0, 5)


def test_only_some_schedules_take_the_ratio_of_the_recipe(student, tmp_path):
    """The others end where transformers ends them."""
    for schedule in ("linear", "polynomial", "cosine_with_min_lr"):
        recipe = Recipe(stage="distill", steps=4, learning_rate=1e-3, min_lr_ratio=0.5,
                        trainer={"lr_scheduler_type": schedule}, **SMALL_RUN | {"warmup_steps": 0})  # fmt: skip
        teacher = tiny_teacher("llama", layers=2)
        log = train(student, teacher, random_rows(), tmp_path / schedule, recipe=recipe)["log"]
        assert (log[-1]["learning_rate"] > 4e-4) == (schedule == "cosine_with_min_lr")


class Tracker(TrainerCallback):
    """Stands in for a tracker's callback: what it is told."""

    told = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        Tracker.told.append((state.global_step, dict(logs)))


def test_all_trackers_of_the_library_are_known():
    from transformers.integrations import integration_utils

    assert set(integration_utils.INTEGRATION_TO_CALLBACK) <= set(TRACKERS)


def test_a_tracker_gets_what_is_logged(student, tmp_path, monkeypatch):
    """`report_to` and `logging_steps` of the recipe; the last step is logged, at nearly `min_lr_ratio` of the peak."""
    from transformers.integrations import integration_utils

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "tensorboard", Tracker)
    monkeypatch.setattr(integration_utils, "is_tensorboard_available", lambda: True)
    Tracker.told.clear()
    trainer = {"logging_steps": 3, "report_to": "tensorboard"}
    recipe = Recipe(steps=7, learning_rate=2e-3, min_lr_ratio=0.25, trainer=trainer, **SMALL_RUN)
    result = train(student, tiny_teacher("llama", layers=2), random_rows(), tmp_path, recipe=recipe)
    steps = [step for step, logs in Tracker.told if "loss" in logs]
    assert steps == [entry["step"] for entry in result["log"]] == [1, 3, 6, 7]
    # the rate of step n of 7 lies (n - 2) / 6 of the way from the peak to a quarter of it, after one step of warm-up
    rates = {n: 2e-3 * (0.25 + 0.75 * (1 + math.cos(math.pi * (n - 2) / 6)) / 2) for n in (3, 6, 7)}
    assert {entry["step"]: entry["learning_rate"] for entry in result["log"]} == pytest.approx({1: 0.0} | rates)


def test_a_pattern_without_a_parameter_is_refused(student):
    with pytest.raises(ValueError, match="group 'nosuch' matches no parameter"):
        parameter_rates(student, Recipe(groups=[{"match": "nosuch", "learning_rate": 1e-3}]))
    with pytest.raises(ValueError, match="every learning rate of the recipe is 0"):
        freeze_by_rate(student, Recipe(learning_rate=0.0, rest_learning_rate=0.0))


def test_slices_of_layers():
    def chosen(layers):
        return Recipe(layers=layers).layer_slice([0, 1, 2, 4, 5], 10)

    assert chosen("all") == chosen("") == [0, 1, 2, 4, 5]
    assert chosen("1-4") == [1, 2, 4] and chosen("0, 5") == [0, 5] and chosen("2-9") == [2, 4, 5]
    for layers in ("3", "x", "1-", "-1", "\u0663"):
        with pytest.raises(ValueError, match="layers is "):
            chosen(layers)
    for layers, message in (
        ("0-999999999999", "it names layers 0-999999999999, but there are layers 0 to 9"),
        ("0,10", "it names layers 10, but there are layers 0 to 9"),
        ("0, 4-2", "give layer indices and ranges"),
    ):
        with pytest.raises(ValueError, match=message):
            chosen(layers)


@pytest.mark.product  # one training per kind of mixer stays
@pytest.mark.parametrize("kind", ["shared", "lora"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_teacher_of_shared_weights_teaches_like_a_copy(tmp_path, kind, family):
    """The first loss is the copy's; the teacher ends as it began; mixers train, the rest stays or is corrected."""
    teacher = tiny_teacher(family, layers=2)
    before, data = weights(teacher), random_rows(40)
    options = {"stage": "distill", "steps": 3, "learning_rate": 1e-3, **SMALL_RUN}
    students = [convert_model(teacher, "gka", keep=[1]) for _ in range(2)]
    start, losses = weights(students[0]), []
    for student, name in zip(students, ("copy", kind), strict=True):
        recipe = Recipe(**options, teacher=name, rest_learning_rate=1e-2 if name == "lora" else 0.0)
        losses.append(train(student, teacher, data, tmp_path / name, recipe=recipe)["log"])
    assert losses[0][0]["loss"] == losses[1][0]["loss"] and not changed(teacher, before)
    assert not {id(p) for p in teacher.parameters()} & {id(p) for p in students[1].parameters()}
    moved = changed(students[1], start)
    assert any(name.startswith(attention_prefix(students[1], 0)) for name in moved)
    assert any(".mlp." in name for name in moved) == (kind == "lora")
    assert kind == "lora" or not changed(students[1], weights(students[0]))


def test_shared_weights_are_one_copy_in_memory(tmp_path):
    teacher, student = tiny_teacher("llama", layers=2), convert_model(tiny_teacher("llama", layers=2), "gka", keep=[1])
    shared = share_weights(student, teacher)
    own = {name for name, p in teacher.named_parameters() if all(p is not q for q in student.parameters())}
    assert shared and own == {n for n, _ in teacher.named_parameters() if n.startswith("model.layers.0.self_attn")}
    trained = convert_model(tiny_teacher("llama", layers=2), "gka", keep=[1])
    trained.model.layers[0].mlp.up_proj.weight.data += 1
    with pytest.raises(ValueError, match="up_proj.weight differs between student and teacher"):
        share_weights(trained, tiny_teacher("llama", layers=2))


def test_tied_tensors_of_a_teacher_are_tied_again_after_sharing():
    teacher = tiny_teacher("llama", layers=2, tie_word_embeddings=True)
    student, before = convert_model(teacher, "gka", keep=[1]), weights(teacher)
    share_weights(student, teacher)
    unshare_weights(student, teacher)
    assert teacher.lm_head.weight is teacher.model.embed_tokens.weight
    assert teacher.lm_head.weight is not student.lm_head.weight and not changed(teacher, before)


@pytest.mark.parametrize(
    ("there", "has_bf16", "expected"), [(False, False, False), (True, False, False), (True, True, True)]
)
def test_bf16_is_chosen_where_the_gpu_has_it(monkeypatch, there, has_bf16, expected):
    """A T4 has not: the Trainer would refuse it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    assert uses_bf16(Recipe(stage="align")) is expected
    assert uses_bf16(Recipe(stage="align", bf16=True)) and not uses_bf16(Recipe(stage="align", bf16=False))
