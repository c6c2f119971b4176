"""What a recipe says is what the optimizer does: rates by pattern, slices of layers, teachers."""

import math

import pytest
import torch
from transformers import TrainerCallback

from hf_memmix.conversion import convert_model
from hf_memmix.conversion.families import attention_prefix
from hf_memmix.training.data import TokenBlocks
from hf_memmix.training.groups import freeze_by_rate, optimizer_groups, parameter_rates
from hf_memmix.training.recipe import Recipe, load_recipe
from hf_memmix.training.teachers import share_weights, unshare_weights
from hf_memmix.training.train import distill, train
from hf_memmix.training.trainer_arguments import training_arguments, uses_bf16
from tiny_teachers import tiny_teacher

GROUPS = [
    {"match": r"\.q_proj\.", "learning_rate": 2e-3, "weight_decay": 0.1},
    {"match": "embed_tokens", "learning_rate": 0.0},
    {"match": "norm", "weight_decay": 0.2},
]


@pytest.fixture
def student():
    return convert_model(tiny_teacher("llama", layers=2), keep=[1])


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


def test_groups_reach_the_weights(student, tmp_path):
    before = {name: tensor.clone() for name, tensor in student.state_dict().items()}
    data = TokenBlocks(torch.randint(3, 64, (320,)), 16)
    groups = [{"match": r"layers\.1\.mlp", "learning_rate": 1e-2}, {"match": ".", "learning_rate": 0.0}]
    teacher = tiny_teacher("llama", layers=2)
    distill(student, teacher, data, tmp_path, steps=2, batch_size=4, block_size=16, warmup_steps=1, groups=groups)
    changed = {name for name, tensor in student.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if "layers.1.mlp" in name}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"groups": [{"learning_rate": 1e-3}]}, "needs a regular expression"),
        ({"groups": [{"match": "(", "learning_rate": 1e-3}]}, "is not a regular expression"),
        ({"groups": [{"match": "x", "lr": 1e-3}]}, "it takes learning_rate and weight_decay"),
        ({"groups": [{"match": "x", "learning_rate": "1e-3"}]}, "in YAML write 1.0e-3"),
        ({"learning_rate": 1.5}, r"learning_rate is 1.5 in the recipe; it must lie in \[0, 1\)"),
        ({"learning_rate": None}, "learning_rate is null; give a value, or leave the line out for the default"),
        ({"learning_rate": float("nan")}, "learning_rate is nan in the recipe"),
        ({"learning_rate": 1.0}, r"learning_rate is 1.0 in the recipe; it must lie in \[0, 1\)"),
        ({"weight_decay": -0.1}, r"weight_decay is -0.1 in the recipe; it must lie in \[0, 1\)"),
        ({"weight_decay": float("inf")}, "weight_decay is inf in the recipe"),
        ({"min_lr_ratio": 1.5}, "min_lr_ratio is 1.5; it must be at most 1.0"),
        ({"min_lr_ratio": -0.5}, "min_lr_ratio is -0.5; it must be at least 0.0"),
        ({"min_lr_ratio": float("nan")}, "min_lr_ratio is nan; it must be"),
        ({"save_every": -1}, "save_every is -1; it must be at least 0"),
        ({"warmup_steps": -1}, "warmup_steps is -1; it must be at least 0"),
        (
            {"steps": 10, "warmup_steps": 11},
            "warmup_steps is 11, but the run has 10 steps and .*; give at most 10, or more steps",
        ),
        ({"warmup_steps": True}, "warmup_steps is True, not of type int"),
        ({"block_size": 1}, "block_size is 1; it must be at least 2"),
        ({"seed": -1}, "seed is -1; it must be at least 0"),
        ({"seed": 2**32}, "seed is 4294967296; it must be at most 4294967295"),
        ({"trainer": ["logging_steps"]}, "trainer is .* not of type dict"),
        ({"groups": [{"match": "x", "learning_rate": None}]}, "learning_rate of group 'x' is None, not a number"),
        ({"groups": [{"match": "x", "learning_rate": True}]}, "learning_rate of group 'x' is True, not a number"),
        ({"bf16": "yes"}, "bf16 is 'yes'"),
        ({"steps": True}, "steps is True, not of type int"),
        ({"stage": "distill", "teacher": "cache:"}, "copy, shared, lora or cache:DIR"),
        ({"stage": "align", "teacher": "lora"}, "align reads the teacher's attention"),
        ({"stage": "distill", "teacher": "shared"}, "set it to 0.0, or set teacher to lora or copy"),
        ({"stage": "distill", "layers": "0-1"}, "only align trains a part"),
    ],
)
def test_a_recipe_that_contradicts_itself_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Recipe(**fields)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"stage: align # caf\xe9", "'.*recipe.yaml' is not valid YAML: .*utf-8"),
        (b"steps: [", "is not valid YAML"),
        (b"- steps", "must be a YAML mapping"),
        (b"1: 2\nstep: 3", "unknown 1, step; known: batch_size"),
        (b"steps: 3\nseed: 1\nsteps: 5", "steps stands in line 1 and in line 3; remove one of them"),
        (b"trainer:\n  optim: x\n  'optim': y", "optim stands in line 2 and in line 3"),
        (b"trainer: {optim: x, optim: y}", "optim stands twice; remove one of them"),
    ],
)
def test_a_file_that_is_no_recipe(tmp_path, content, message):
    (tmp_path / "recipe.yaml").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_recipe(tmp_path / "recipe.yaml")


def test_a_run_shorter_than_the_warm_up_of_its_recipe(tmp_path):
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


def test_a_recipe_object_is_run_for_fewer_steps(student, tmp_path):
    data, recipe = TokenBlocks(torch.randint(3, 64, (320,)), 16), Recipe(steps=40, batch_size=4, block_size=16)
    assert train(student, tiny_teacher("llama", layers=2), data, tmp_path, recipe=recipe, steps=2)["steps"] == 2


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({"nosuch": 1}, "trainer names nosuch"),
        ({1: 1}, "trainer names 1"),
        ({"output_dir": "x"}, "trainer sets output_dir, which the output folder of the command decides"),
        ({"max_steps": 3}, "trainer sets max_steps, which steps decides"),
        ({"learning_rate": 0.1}, "trainer sets learning_rate, which learning_rate decides"),
        ({"save_steps": 3}, "trainer sets save_steps, which save_every decides"),
        (
            {"gradient_checkpointing_kwargs": {}},
            "sets gradient_checkpointing_kwargs, which gradient_checkpointing decides",
        ),
        ({"label_smoothing_factor": 0.1}, "sets label_smoothing_factor, which the loss of the stage decides"),
        ({"neftune_noise_alpha": 5.0}, "sets neftune_noise_alpha, which the loss of the stage decides"),
        ({"lr_scheduler_type": "nosuch"}, "lr_scheduler_type to 'nosuch' .* is not a valid SchedulerType"),
        ({"lr_scheduler_type": "warmup_stable_decay"}, "kwargs to None, with .* argument: 'num_decay_steps'"),
        ({"lr_scheduler_kwargs": {"power": 2}}, "kwargs to {'power': 2}, with .* keyword argument 'power'"),
        ({"fsdp": 2}, "trainer sets fsdp to 2, which is not of type"),
        ({"logging_steps": "often"}, "trainer sets logging_steps to 'often', which is not of type float"),
        ({"logging_steps": -1}, "trainer sets logging_steps to -1; it must be finite and at least 0"),
        ({"logging_steps": 0}, "trainer sets logging_steps to 0; it must be more than 0"),
        ({"max_grad_norm": math.nan}, "trainer sets max_grad_norm to nan; it must be finite and at least 0"),
        ({"adam_epsilon": -1}, "trainer sets adam_epsilon to -1; it must be finite and at least 0"),
        ({"adam_beta2": 1.0}, "trainer sets adam_beta2 to 1.0; it must be below 1"),
        ({"dataloader_num_workers": -1}, "trainer sets dataloader_num_workers to -1; it must be finite"),
        ({"remove_unused_columns": True}, "trainer sets remove_unused_columns, which the kind of the data decides"),
        ({"max_grad_norm": None}, "trainer sets max_grad_norm to None, which is not of type float"),
        ({"use_cpu": "yes"}, "trainer sets use_cpu to 'yes', which is not of type bool"),
        ({"optim": "nosuch"}, "trainer of the recipe: .*nosuch"),
        (
            {"report_to": "nosuch"},
            "report_to is 'nosuch', which is not a tracker of transformers; give one of .*wandb",
        ),
        ({"report_to": "clearml"}, "report_to is 'clearml', which is not installed; pip install clearml"),
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


@pytest.mark.parametrize("schedule", ["linear", "cosine", "polynomial", "cosine_with_min_lr"])
def test_schedules_of_the_learning_rate(schedule, student, tmp_path):
    """Only some schedules take `min_lr_ratio`; the others end where transformers ends them."""
    data = TokenBlocks(torch.randint(3, 64, (512,)), 16)
    options = {"steps": 4, "batch_size": 4, "block_size": 16, "warmup_steps": 0, "learning_rate": 1e-3}
    recipe = Recipe(stage="distill", min_lr_ratio=0.5, trainer={"lr_scheduler_type": schedule}, **options)
    log = train(student, tiny_teacher("llama", layers=2), data, tmp_path, recipe=recipe)["log"]
    assert (log[-1]["learning_rate"] > 4e-4) == (schedule == "cosine_with_min_lr")


class Tracker(TrainerCallback):
    """Stands in for a tracker's callback: what it is told."""

    told = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        Tracker.told.append((state.global_step, dict(logs)))


def test_a_tracker_gets_what_is_logged(student, tmp_path, monkeypatch):
    """`report_to` and `logging_steps` of the recipe; the last step is logged, at nearly `min_lr_ratio` of the peak."""
    from transformers.integrations import integration_utils

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "tensorboard", Tracker)
    monkeypatch.setattr(integration_utils, "is_tensorboard_available", lambda: True)
    Tracker.told.clear()
    data = TokenBlocks(torch.randint(3, 64, (320,)), 16)
    recipe = Recipe(
        steps=7,
        batch_size=4,
        block_size=16,
        learning_rate=2e-3,
        warmup_steps=1,
        min_lr_ratio=0.25,
        trainer={"logging_steps": 3, "report_to": "tensorboard"},
    )
    result = train(student, tiny_teacher("llama", layers=2), data, tmp_path, recipe=recipe)
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
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    data = TokenBlocks(torch.randint(3, 64, (640,)), 16)
    options = {"stage": "distill", "steps": 3, "batch_size": 4, "block_size": 16, "learning_rate": 1e-3}
    students = [convert_model(teacher, keep=[1]) for _ in range(2)]
    start = {name: tensor.clone() for name, tensor in students[0].state_dict().items()}
    rest = 0.0 if kind == "shared" else 1e-2
    losses = []
    for student, name, rate in zip(students, ("copy", kind), (0.0, rest), strict=True):
        recipe = Recipe(**options, teacher=name, rest_learning_rate=rate)
        losses.append(train(student, teacher, data, tmp_path / name, recipe=recipe)["log"])
    assert losses[0][0]["loss"] == losses[1][0]["loss"]
    after = teacher.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert not {id(p) for p in teacher.parameters()} & {id(p) for p in students[1].parameters()}
    trained = students[1].state_dict()
    assert trained.keys() == start.keys()
    changed = {name for name in start if not torch.equal(start[name], trained[name])}
    mixer = attention_prefix(students[1], 0)
    assert any(name.startswith(mixer) for name in changed)
    assert any(".mlp." in name for name in changed) == (kind == "lora")
    if kind == "shared":
        assert all(torch.equal(trained[name], tensor) for name, tensor in students[0].state_dict().items())


def test_shared_weights_are_one_copy_in_memory(tmp_path):
    teacher, student = tiny_teacher("llama", layers=2), convert_model(tiny_teacher("llama", layers=2), keep=[1])
    shared = share_weights(student, teacher)
    own = {name for name, p in teacher.named_parameters() if all(p is not q for q in student.parameters())}
    assert shared and own == {n for n, _ in teacher.named_parameters() if n.startswith("model.layers.0.self_attn")}
    trained = convert_model(tiny_teacher("llama", layers=2), keep=[1])
    trained.model.layers[0].mlp.up_proj.weight.data += 1
    with pytest.raises(ValueError, match="up_proj.weight differs between student and teacher"):
        share_weights(trained, tiny_teacher("llama", layers=2))


def test_tied_tensors_of_a_teacher_are_tied_again_after_sharing():
    teacher = tiny_teacher("llama", layers=2, tie_word_embeddings=True)
    student = convert_model(teacher, keep=[1])
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    share_weights(student, teacher)
    unshare_weights(student, teacher)
    assert teacher.lm_head.weight is teacher.model.embed_tokens.weight
    assert teacher.lm_head.weight is not student.lm_head.weight
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.state_dict().items())


@pytest.mark.parametrize(
    ("there", "has_bf16", "expected"), [(False, False, False), (True, False, False), (True, True, True)]
)
def test_bf16_is_chosen_where_the_gpu_has_it(monkeypatch, there, has_bf16, expected):
    """A T4 has not: the Trainer would refuse it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    assert uses_bf16(Recipe(stage="align")) is expected
    assert uses_bf16(Recipe(stage="align", bf16=True)) and not uses_bf16(Recipe(stage="align", bf16=False))
