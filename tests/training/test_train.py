"""align and distill: they learn, only what should train does, and an interrupted run ends like a whole one."""

import json
import math

import pytest
import torch
from transformers import TrainerCallback

from hf_memmix.conversion import convert_model, load_model, report
from hf_memmix.conversion.families import attention_prefix
from hf_memmix.training.data import TokenBlocks
from hf_memmix.training.stage_time import time_text
from hf_memmix.training.student_teacher import AlignStudentTeacher
from hf_memmix.training.train import align, distill
from tiny_runs import SMALL_RUN as SMALL
from tiny_runs import StopBefore, Stopped, changed, weights
from tiny_teachers import tiny_teacher, tiny_text, tiny_tokenizer


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "train.txt"
    file.write_text(tiny_text())
    return TokenBlocks.from_files(file, tiny_tokenizer(), 16)


@pytest.fixture
def teacher():
    return tiny_teacher("llama", layers=2)


def test_align_lowers_the_layer_error_and_trains_mixers_only(tmp_path, data, teacher):
    student, before = convert_model(teacher, "gka"), weights(teacher)
    start = weights(student)
    tokens = data.blocks[:8].flatten()
    error = report(student, teacher, tokens, block_size=16)["layer_error"]
    result = align(student, teacher, data, tmp_path, steps=12, learning_rate=3e-3, **SMALL)
    assert result["stage"] == "align" and result["steps"] == 12 and result["tokens"] == 12 * 4 * 16
    assert result["last_loss"] < 0.8 * result["first_loss"]
    trained = report(student, teacher, tokens, block_size=16)["layer_error"]
    assert all(trained[layer] < 0.9 * error[layer] for layer in error)
    mixers = tuple(attention_prefix(student, i) for i in range(2))
    moved = changed(student, start)
    assert moved and all(name.startswith(mixers) for name in moved) and not changed(teacher, before)
    assert all(parameter.requires_grad for parameter in student.parameters()) and not student.training


def test_distill_lowers_the_kl_and_respects_both_learning_rates(tmp_path, data, teacher):
    student = convert_model(teacher, "gka", keep=[1])
    start = weights(student)
    result = distill(student, teacher, data, tmp_path, steps=12, learning_rate=3e-3, rest_learning_rate=1e-3, **SMALL)
    assert result["last_loss"] < 0.9 * result["first_loss"]
    assert "model.layers.1.mlp.up_proj.weight" in changed(student, start)

    frozen = convert_model(teacher, "gka", keep=[1])
    distill(frozen, teacher, data, tmp_path / "b", steps=2, learning_rate=3e-3, rest_learning_rate=0.0, **SMALL)
    moved = changed(frozen, start)
    assert moved and all(name.startswith(attention_prefix(frozen, 0)) for name in moved)


@pytest.mark.product_rows(r"align")  # align and distill share this code
@pytest.mark.parametrize("stage", [align, distill])
def test_interrupted_run_ends_like_a_whole_one(tmp_path, data, teacher, stage):
    options = {"steps": 6, "save_every": 3, "learning_rate": 1e-3, **SMALL}
    whole, broken, resumed = (convert_model(teacher, "gka", keep=[1]) for _ in range(3))
    assert not stage(whole, teacher, data, tmp_path / "whole", **options)["resumed"]
    with pytest.raises(Stopped):
        stage(broken, teacher, data, tmp_path / "broken", callbacks=[StopBefore(4)], **options)
    result = stage(resumed, teacher, data, tmp_path / "broken", **options)
    assert not changed(resumed, weights(whole))
    assert result["resumed"] and time_text(result | {"seconds": 2.6}) == "3 s since it was resumed"


def test_a_complete_run_is_not_trained_further_when_it_is_asked_for_again(tmp_path, data, teacher):
    """As after a kill between the last checkpoint and the export. Tokens are counted in the log and in checkpoints."""
    options = {"steps": 4, "save_every": 2, "gradient_accumulation": 2, "trainer": {"logging_steps": 1}, **SMALL}
    first, second = convert_model(teacher, "gka"), convert_model(teacher, "gka")
    before = align(first, teacher, data, tmp_path, **options)
    again = align(second, teacher, data, tmp_path, **options)
    assert not changed(second, weights(first))
    assert again["log"] == before["log"] and again["tokens"] == before["tokens"] == 4 * 2 * 4 * 16
    assert [entry["tokens"] for entry in before["log"]] == [step * 2 * 4 * 16 for step in (1, 2, 3, 4)]
    for step in (2, 4):
        state = json.loads((tmp_path / f"checkpoint-{step}" / "trainer_state.json").read_text())
        assert state["num_input_tokens_seen"] == step * 2 * 4 * 16


@pytest.mark.product_rows(r"align")  # align and distill share this code
@pytest.mark.parametrize(
    "broken, size",
    [("loss", math.nan), ("adamw_torch", math.nan), ("adamw_torch_fused", math.nan), ("adamw_torch_fused", 1e30)],
)
@pytest.mark.parametrize("stage", [align, distill])
def test_divergence_stops_the_run_and_spares_the_last_checkpoint(
    tmp_path, data, teacher, stage, broken, size, monkeypatch
):
    """In step 3 the loss is NaN, or it is finite and the norm of its gradient is not: the optimizer changes no weight.

    The entries of the gradient of 1e30 are finite. The norm is computed once a step, also to clip the gradients.
    """
    norms, norm_of_tensors = [], torch._foreach_norm
    monkeypatch.setattr(torch, "_foreach_norm", lambda *args: norms.append(args) or norm_of_tensors(*args))
    student = convert_model(teacher, "gka")
    weight = student.model.layers[0].self_attn.o_proj.weight
    steps = iter(range(1, 10))

    def spoil(gradient):
        return gradient / gradient.abs().max() * size if next(steps) == 3 else gradient

    def poison(mixer, args):
        if mixer.training and next(steps) == 3:
            weight.data[0, 0] = size

    gradient = broken != "loss"
    if gradient:
        weight.register_hook(spoil)
    else:
        student.model.layers[0].self_attn.register_forward_pre_hook(poison)
    with pytest.raises(ValueError, match=r"after \d steps: training diverged.*lower learning_rate \(now 0.01\)"):
        optimizer = {"trainer": {"optim": broken}} if gradient else {}
        stage(student, teacher, data, tmp_path, steps=6, save_every=1, learning_rate=0.01, **optimizer, **SMALL)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-2"]
    saved = load_model(tmp_path / "checkpoint-2")
    assert all(torch.isfinite(tensor).all() for tensor in saved.state_dict().values())
    assert not gradient or (len(norms) == 3 and not changed(student, weights(saved)))


def test_data_that_does_not_fit_is_refused(tmp_path, data, teacher):
    few = TokenBlocks(torch.arange(64), 16)
    for rows, options, message in (
        (data, {"block_size": 32}, "blocks of 16 tokens, but block_size of the recipe is 32"),
        (TokenBlocks(torch.full((64,), 99), 16), {}, "outside the vocabulary of 64"),
        (few, {"batch_size": 5}, "4 rows of 16 tokens, one step reads 5 "),
        (few, {"batch_size": 3, "gradient_accumulation": 2}, "4 rows of 16 tokens, one step reads 6 "),
    ):
        with pytest.raises(ValueError, match=message):
            align(convert_model(teacher, "gka"), teacher, rows, tmp_path, **SMALL | {"steps": 1} | options)
    align(convert_model(teacher, "gka"), teacher, few, tmp_path, **SMALL | {"steps": 1})


def test_windows_that_read_whole_rows_are_told(tmp_path, data, teacher, caplog):
    for window, told in ((16, 1), (15, 0)):
        caplog.clear()
        student = convert_model(teacher, "window", window=window)
        align(student, teacher, data, tmp_path / str(window), **SMALL | {"steps": 1})
        assert len([line for line in caplog.records if line.name == "hf_memmix.training.train"]) == told


def test_models_that_do_not_fit_are_refused(tmp_path, data, teacher):
    student = convert_model(teacher, "gka")
    with pytest.raises(ValueError, match="the teacher was made for 8 tokens"):
        align(student, tiny_teacher("llama", layers=2, max_position_embeddings=8), data, tmp_path, **SMALL)
    with pytest.raises(ValueError, match="teacher's vocabulary has 80 tokens, the student's 64"):
        distill(student, tiny_teacher("llama", layers=2, vocab_size=80), data, tmp_path, **SMALL)
    with pytest.raises(ValueError, match="plain 'llama' model without memory layers"):
        align(tiny_teacher("llama", layers=2), teacher, data, tmp_path, **SMALL)


@pytest.mark.product  # align and distill share this code
@pytest.mark.parametrize("stage", [align, distill])
def test_recomputed_activations_change_nothing(tmp_path, data, teacher, stage):
    students = [convert_model(teacher, "gka", keep=[1]) for _ in range(2)]
    for student, on in zip(students, (False, True), strict=True):
        stage(student, teacher, data, tmp_path / str(on), steps=3, gradient_checkpointing=on, **SMALL)
    assert not changed(students[0], weights(students[1])) and not students[1].is_gradient_checkpointing


@pytest.mark.product  # one of several examples stays
@pytest.mark.parametrize("stage", [align, distill])
def test_a_teacher_in_bf16_guides_an_fp32_student(tmp_path, data, teacher, stage):
    student = convert_model(teacher, "gka", keep=[1])
    result = stage(student, teacher.bfloat16(), data, tmp_path, steps=2, **SMALL)
    assert student.dtype == torch.float32 and teacher.dtype == torch.bfloat16
    assert torch.tensor(result["last_loss"]).isfinite()


@pytest.mark.product_rows(r"align")  # align and distill share this code
@pytest.mark.parametrize("stage", [align, distill])
def test_bf16_trains_fp32_weights(tmp_path, data, teacher, stage):
    plain, half = convert_model(teacher, "gka"), convert_model(teacher, "gka")
    options = {"steps": 6, "learning_rate": 1e-3, **SMALL}
    wanted = stage(plain, teacher, data, tmp_path / "a", **options)["log"]
    found = stage(half, teacher, data, tmp_path / "b", bf16=True, **options)["log"]
    assert all(parameter.dtype == torch.float32 for parameter in half.parameters())
    losses = [torch.tensor([entry["loss"] for entry in log]) for log in (wanted, found)]
    assert not torch.equal(*losses)
    torch.testing.assert_close(losses[1], losses[0], rtol=0.05, atol=0)


def test_accumulation_reads_the_rows_of_a_step_also_at_the_end_of_an_epoch(tmp_path, data, teacher):
    """Ten rows: two steps of four an epoch, whether each is read at once or in halves."""
    ten, losses = TokenBlocks(data.blocks[:10].flatten(), 16), []
    for accumulation in (1, 2):
        options = SMALL | {"steps": 5, "batch_size": 4 // accumulation, "trainer": {"logging_steps": 1}}
        options["gradient_accumulation"] = accumulation
        result = distill(convert_model(teacher, "gka"), teacher, ten, tmp_path / str(accumulation), **options)
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
            convert_model(teacher, "gka"),
            teacher,
            same_rows,
            tmp_path / str(accumulation),
            callbacks=[Watch()],
            **options,
        )
    assert len(shown[0]) == 2 and shown[0] == pytest.approx(shown[1], rel=1e-3)


def test_a_layer_of_the_teacher_without_output_has_a_finite_loss(data, teacher):
    """The error is relative to the size of its output, which is zero."""
    torch.nn.init.zeros_(teacher.model.layers[0].self_attn.o_proj.weight)
    student = convert_model(teacher, "gka")
    torch.nn.init.ones_(student.model.layers[0].self_attn.o_proj.weight)
    loss = AlignStudentTeacher(student, teacher)(data.blocks[:2])["loss"]
    loss.backward()
    assert loss.isfinite() and all(p.grad.isfinite().all() for p in student.parameters() if p.grad is not None)
