"""align and distill: they learn, only what should train does, and an interrupted run ends like a whole one."""

import copy

import pytest
import torch
from transformers import TrainerCallback

from hf_memmix.conversion import convert_model, load_model, report
from hf_memmix.conversion.families import attention_prefix
from hf_memmix.training.data import TokenBlocks
from hf_memmix.training.stage_time import time_text
from hf_memmix.training.student_teacher import AlignStudentTeacher
from hf_memmix.training.train import Recipe, align, distill, load_recipe
from tiny_teachers import tiny_teacher, tiny_text, tiny_tokenizer

SMALL = {"batch_size": 4, "block_size": 16, "warmup_steps": 1}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "train.txt"
    file.write_text(tiny_text())
    return TokenBlocks.from_files(file, tiny_tokenizer(), 16)


@pytest.fixture
def teacher():
    return tiny_teacher("llama", layers=2)


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_align_lowers_the_layer_error_and_trains_mixers_only(tmp_path, data, teacher):
    student, before = convert_model(teacher), weights(teacher)
    start = weights(student)
    tokens = data.blocks[:8].flatten()
    error = report(student, teacher, tokens, block_size=16)["layer_error"]
    result = align(student, teacher, data, tmp_path, steps=12, learning_rate=3e-3, **SMALL)
    assert result["stage"] == "align" and result["steps"] == 12 and result["tokens"] == 12 * 4 * 16
    assert result["last_loss"] < 0.8 * result["first_loss"]
    trained = report(student, teacher, tokens, block_size=16)["layer_error"]
    assert all(trained[layer] < 0.9 * error[layer] for layer in error)
    mixers = tuple(attention_prefix(student, i) for i in range(2))
    changed = {name for name, tensor in student.state_dict().items() if not torch.equal(tensor, start[name])}
    assert changed and all(name.startswith(mixers) for name in changed)
    assert same(before, weights(teacher))
    assert all(parameter.requires_grad for parameter in student.parameters()) and not student.training


def test_distill_lowers_the_kl_and_respects_both_learning_rates(tmp_path, data, teacher):
    student = convert_model(teacher, keep=[1])
    start = weights(student)
    result = distill(student, teacher, data, tmp_path, steps=12, learning_rate=3e-3, rest_learning_rate=1e-3, **SMALL)
    assert result["last_loss"] < 0.9 * result["first_loss"]
    assert not torch.equal(student.model.layers[1].mlp.up_proj.weight, start["model.layers.1.mlp.up_proj.weight"])

    frozen = convert_model(teacher, keep=[1])
    distill(frozen, teacher, data, tmp_path / "b", steps=2, learning_rate=3e-3, rest_learning_rate=0.0, **SMALL)
    mixer = attention_prefix(frozen, 0)
    changed = {name for name, tensor in frozen.state_dict().items() if not torch.equal(tensor, start[name])}
    assert changed and all(name.startswith(mixer) for name in changed)


@pytest.mark.product  # one of several examples stays
@pytest.mark.parametrize("stage", [align, distill])
def test_bf16_teacher_guides_an_fp32_student(tmp_path, data, teacher, stage):
    student = convert_model(teacher, keep=[1])
    result = stage(student, teacher.bfloat16(), data, tmp_path, steps=2, **SMALL)
    assert student.dtype == torch.float32 and teacher.dtype == torch.bfloat16
    assert torch.tensor(result["last_loss"]).isfinite()


@pytest.mark.product_rows(r"align")  # align and distill share this code
@pytest.mark.parametrize("stage", [align, distill])
def test_interrupted_run_ends_like_a_whole_one(tmp_path, data, teacher, stage):
    options = {"steps": 6, "save_every": 3, "learning_rate": 1e-3, **SMALL}
    first = convert_model(teacher, keep=[1])
    whole, broken = copy.deepcopy(first), copy.deepcopy(first)
    assert not stage(whole, teacher, data, tmp_path / "whole", **options)["resumed"]

    class Stop(Exception):
        pass

    from transformers import TrainerCallback

    class Interrupt(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 4:
                raise Stop

    with pytest.raises(Stop):
        stage(broken, teacher, data, tmp_path / "broken", callbacks=[Interrupt()], **options)
    resumed = copy.deepcopy(first)
    result = stage(resumed, teacher, data, tmp_path / "broken", **options)
    assert same(weights(whole), weights(resumed))
    assert result["resumed"] and time_text(result | {"seconds": 2.6}) == "3 s since it was resumed"


def test_a_complete_run_is_not_trained_further_when_it_is_asked_for_again(tmp_path, data, teacher):
    """As after a kill between the last checkpoint and the export."""
    options = {"steps": 4, "save_every": 2, "learning_rate": 1e-3, **SMALL}
    first, second = convert_model(teacher), convert_model(teacher)
    before = align(first, teacher, data, tmp_path, **options)
    again = align(second, teacher, data, tmp_path, **options)
    assert same(weights(first), weights(second))
    assert again["log"] == before["log"] and again["tokens"] == before["tokens"] == 4 * 4 * 16


def test_checkpoint_of_another_run_is_refused(tmp_path, data, teacher):
    options = {"steps": 2, "save_every": 1, **SMALL}
    align(convert_model(teacher), teacher, data, tmp_path, **options)
    with pytest.raises(ValueError, match=r"belongs to another run \(recipe.learning_rate was [0-9.e-]+, is 0.5\)"):
        align(convert_model(teacher), teacher, data, tmp_path, **(options | {"learning_rate": 0.5}))
    with pytest.raises(ValueError, match="belongs to another run .*mixer_types"):
        align(convert_model(teacher, keep=[0]), teacher, data, tmp_path, **options)
    other = TokenBlocks(data.blocks.flatten().flip(0), 16)
    with pytest.raises(ValueError, match="belongs to another run .*data"):
        align(convert_model(teacher), teacher, other, tmp_path, **options)
    (tmp_path / "checkpoint-2" / "memmix_run.json").unlink()
    with pytest.raises(ValueError, match="memmix_run.json' is not readable"):
        align(convert_model(teacher), teacher, data, tmp_path, **options)


def test_recipes_load_and_bad_ones_are_refused(tmp_path):
    assert load_recipe("align").stage == "align" and load_recipe("distill").stage == "distill"
    assert load_recipe("align", steps=7, batch_size=None).steps == 7
    with pytest.raises(ValueError, match="no recipe 'nosuch'; give a YAML file or one of align, distill"):
        load_recipe("nosuch")
    (tmp_path / "r.yaml").write_text("stage: align\nstepz: 3\n")
    with pytest.raises(ValueError, match="unknown stepz"):
        load_recipe(tmp_path / "r.yaml")
    (tmp_path / "r.yaml").write_text("- 1\n")
    with pytest.raises(ValueError, match="mapping"):
        load_recipe(tmp_path / "r.yaml")
    with pytest.raises(ValueError, match="steps is 0"):
        Recipe(steps=0)
    with pytest.raises(ValueError, match="stage is 'sft'"):
        Recipe(stage="sft")
    (tmp_path / "r.yaml").write_text("stage: align\nlearning_rate: 1e-3\n")
    with pytest.raises(ValueError, match="learning_rate is '1e-3', not of type float; in YAML write 1.0e-3"):
        load_recipe(tmp_path / "r.yaml")
    with pytest.raises(ValueError, match="steps is 2.5, not of type int"):
        Recipe(steps=2.5)


def test_unknown_trainer_argument_is_refused(tmp_path, data, teacher):
    with pytest.raises(ValueError, match="trainer names nosuch"):
        align(convert_model(teacher), teacher, data, tmp_path, trainer={"nosuch": 1}, **SMALL)


def test_plain_student_is_refused(tmp_path, data, teacher):
    with pytest.raises(ValueError, match="plain 'llama' model without memory layers; convert it first"):
        align(tiny_teacher("llama", layers=2), teacher, data, tmp_path, **SMALL)
    with pytest.raises(ValueError, match="convert it first"):
        report(tiny_teacher("llama", layers=2), teacher, data.blocks.flatten())


def test_no_resume_does_not_mix_two_runs(tmp_path, data, teacher):
    options = {"steps": 2, "save_every": 1, **SMALL}
    align(convert_model(teacher), teacher, data, tmp_path, **options)
    with pytest.raises(ValueError, match="checkpoint-2 belongs to an earlier run"):
        align(convert_model(teacher), teacher, data, tmp_path, resume=False, **options)


@pytest.mark.product_rows(r"align")  # align and distill share this code
@pytest.mark.parametrize("broken", ["loss", "gradient"])
@pytest.mark.parametrize("stage", [align, distill])
def test_divergence_stops_the_run_and_spares_the_last_checkpoint(tmp_path, data, teacher, stage, broken):
    """In step 3 the loss is NaN, or it is finite and its gradient is not."""
    student = convert_model(teacher)
    weight = student.model.layers[0].self_attn.o_proj.weight
    steps = iter(range(1, 10))

    def spoil(gradient):
        return gradient * float("nan") if next(steps) == 3 else gradient

    def poison(mixer, args):
        if mixer.training and next(steps) == 3:
            weight.data[0, 0] = float("nan")

    if broken == "gradient":
        weight.register_hook(spoil)
    else:
        student.model.layers[0].self_attn.register_forward_pre_hook(poison)
    with pytest.raises(ValueError, match=r"after \d steps: training diverged.*lower learning_rate \(now 0.01\)"):
        stage(student, teacher, data, tmp_path, steps=6, save_every=1, learning_rate=0.01, **SMALL)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-2"]
    saved = load_model(tmp_path / "checkpoint-2")
    assert all(torch.isfinite(tensor).all() for tensor in saved.state_dict().values())


def test_truncated_checkpoint_is_named(tmp_path, data, teacher):
    options = {"steps": 2, "save_every": 1, **SMALL}
    align(convert_model(teacher), teacher, data, tmp_path, **options)
    file = tmp_path / "checkpoint-2" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match="model.safetensors in .*checkpoint-2 is corrupt or truncated; remove"):
        align(convert_model(teacher), teacher, data, tmp_path, **options)


def test_data_that_does_not_fit_is_refused(tmp_path, data, teacher):
    with pytest.raises(ValueError, match="blocks of 16 tokens, but block_size of the recipe is 32"):
        align(convert_model(teacher), teacher, data, tmp_path, block_size=32)
    with pytest.raises(ValueError, match="outside the vocabulary of 64"):
        align(convert_model(teacher), teacher, TokenBlocks(torch.full((64,), 99), 16), tmp_path, **SMALL)
    few = TokenBlocks(torch.arange(64), 16)
    for options in ({"batch_size": 5}, {"batch_size": 3, "gradient_accumulation": 2}):
        with pytest.raises(ValueError, match="the data are 4 rows of 16 tokens, one step reads [56] "):
            align(convert_model(teacher), teacher, few, tmp_path, **{**SMALL, "steps": 1, **options})
    align(convert_model(teacher), teacher, few, tmp_path, **{**SMALL, "steps": 1, "batch_size": 4})


def test_teachers_that_do_not_fit_are_refused(tmp_path, data):
    student = convert_model(tiny_teacher("llama", layers=2))
    with pytest.raises(ValueError, match="the teacher was made for 8 tokens; give a smaller block"):
        align(student, tiny_teacher("llama", layers=2, max_position_embeddings=8), data, tmp_path, **SMALL)
    with pytest.raises(ValueError, match="the teacher's vocabulary has 80 tokens, the student's 64"):
        distill(student, tiny_teacher("llama", layers=2, vocab_size=80), data, tmp_path, **SMALL)


@pytest.mark.product  # align and distill share this code
@pytest.mark.parametrize("stage", [align, distill])
def test_recomputed_activations_change_nothing(tmp_path, data, teacher, stage):
    students = [convert_model(teacher, keep=[1]) for _ in range(2)]
    for student, on in zip(students, (False, True), strict=True):
        stage(student, teacher, data, tmp_path / str(on), steps=3, gradient_checkpointing=on, **SMALL)
    assert same(weights(students[0]), weights(students[1]))
    assert not students[1].is_gradient_checkpointing


@pytest.mark.product_rows(r"align")  # align and distill share this code
@pytest.mark.parametrize("stage", [align, distill])
def test_bf16_trains_fp32_weights(tmp_path, data, teacher, stage):
    plain, half = convert_model(teacher), convert_model(teacher)
    options = {"steps": 6, "learning_rate": 1e-3, **SMALL}
    wanted = stage(plain, teacher, data, tmp_path / "a", **options)["log"]
    found = stage(half, teacher, data, tmp_path / "b", bf16=True, **options)["log"]
    assert all(parameter.dtype == torch.float32 for parameter in half.parameters())
    losses = [torch.tensor([entry["loss"] for entry in log]) for log in (wanted, found)]
    assert not torch.equal(*losses)
    torch.testing.assert_close(losses[1], losses[0], rtol=0.05, atol=0)


def test_tokens_are_counted_in_log_and_state(tmp_path, data, teacher):
    import json

    options = {"steps": 4, "save_every": 2, "gradient_accumulation": 2, "trainer": {"logging_steps": 1}, **SMALL}
    log = align(convert_model(teacher), teacher, data, tmp_path, **options)["log"]
    assert [entry["tokens"] for entry in log] == [step * 2 * 4 * 16 for step in (1, 2, 3, 4)]
    for step in (2, 4):
        state = json.loads((tmp_path / f"checkpoint-{step}" / "trainer_state.json").read_text())
        assert state["num_input_tokens_seen"] == step * 2 * 4 * 16


def test_accumulation_reads_the_rows_of_a_step_also_at_the_end_of_an_epoch(tmp_path, data, teacher):
    """Ten rows: two steps of four an epoch, whether each is read at once or in halves."""
    ten, losses = TokenBlocks(data.blocks[:10].flatten(), 16), []
    for accumulation in (1, 2):
        options = {"steps": 5, "batch_size": 4 // accumulation, "gradient_accumulation": accumulation}
        options |= {"block_size": 16, "warmup_steps": 1, "trainer": {"logging_steps": 1}}
        result = distill(convert_model(teacher), teacher, ten, tmp_path / str(accumulation), **options)
        losses.append([entry["loss"] for entry in result["log"]])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_the_loss_that_is_shown_between_two_logs_is_that_of_a_row(tmp_path, data, teacher):
    """With one row again and again, all parts of a step have its loss, however many they are."""
    shown = []

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            shown[-1].append(state.newest_loss)

    same_rows = TokenBlocks(data.blocks[0].repeat(8), 16)
    for accumulation in (1, 4):
        shown.append([])
        options = {**SMALL, "steps": 2, "batch_size": 4 // accumulation, "gradient_accumulation": accumulation}
        distill(
            convert_model(teacher), teacher, same_rows, tmp_path / str(accumulation), callbacks=[Watch()], **options
        )
    assert len(shown[0]) == 2 and shown[0] == pytest.approx(shown[1], rel=1e-3)


def test_a_layer_of_the_teacher_without_output_has_a_finite_loss(data, teacher):
    """The error is relative to the size of its output, which is zero."""
    torch.nn.init.zeros_(teacher.model.layers[0].self_attn.o_proj.weight)
    student = convert_model(teacher)
    torch.nn.init.ones_(student.model.layers[0].self_attn.o_proj.weight)
    loss = AlignStudentTeacher(student, teacher)(data.blocks[:2])["loss"]
    loss.backward()
    assert loss.isfinite() and all(p.grad.isfinite().all() for p in student.parameters() if p.grad is not None)
