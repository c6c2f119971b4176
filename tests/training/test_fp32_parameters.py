"""What a mixer keeps in fp32 comes out of training and saving without a rounding, whatever the model's dtype."""

import pytest
import torch
from safetensors.torch import load_file

from hf_memmix.conversion import convert_model, save_student
from hf_memmix.conversion.convert import cast_student
from hf_memmix.training.merge import merge_students
from hf_memmix.training.train import align, distill
from testing import MIXERS, mixers_of
from tiny_runs import SMALL_RUN, random_rows, weights
from tiny_teachers import CONVERTIBLE, tiny_teacher

# the memory of SKA says nothing before its first chunk is full, which must be shorter than a block to train
MIXER_OPTIONS = {"ska": MIXERS["ska"]}
OPTIONS = {"steps": 2, "learning_rate": 3e-3, **SMALL_RUN}


def bf16_student(mixer):
    """A student in bf16 whose fp32 parameters have values that bf16 cannot hold."""
    student = convert_model(tiny_teacher("llama", layers=2).bfloat16(), mixer, **MIXER_OPTIONS.get(mixer, {}))
    assert student.dtype == torch.bfloat16
    with torch.no_grad():
        for parameter in declared(student).values():
            assert parameter.dtype == torch.float32
            parameter.mul_(1 + 1e-3)
    return student


def declared(student):
    """The parameters that the mixers declare fp32, by full name."""
    return {
        name: parameter
        for name, parameter in student.named_parameters()
        for mixer in mixers_of(student).values()
        if any(parameter is own and key in mixer.fp32_parameters for key, own in mixer.named_parameters())
    }


@pytest.mark.product_rows(r"(?!.*gka)")  # one training per kind of mixer stays
@pytest.mark.product_rows(r".*align")  # align and distill share this code
@pytest.mark.parametrize("stage", [align, distill])
@pytest.mark.parametrize("mixer", CONVERTIBLE)
def test_a_save_after_training_keeps_fp32_parameters(tmp_path, mixer, stage):
    student = bf16_student(mixer)
    stage(student, tiny_teacher("llama", layers=2), random_rows(), tmp_path / "run", **OPTIONS)
    trained = weights(student)
    save_student(student, tmp_path / "student", dtype=torch.bfloat16)
    saved, names = load_file(tmp_path / "student" / "model.safetensors"), declared(student)
    assert names or not any(m.fp32_parameters for m in mixers_of(student).values())
    for name, tensor in saved.items():
        assert torch.equal(tensor, trained[name].to(torch.float32 if name in names else torch.bfloat16)), name


@pytest.mark.product_rows(r"(?!.*gka)")  # one training per kind of mixer stays
@pytest.mark.parametrize("mixer", CONVERTIBLE)
def test_two_align_runs_of_a_bf16_student_merge(tmp_path, mixer):
    save_student(bf16_student(mixer), tmp_path / "start")
    for layer in ("0", "1"):
        student, run = bf16_student(mixer), tmp_path / f"run{layer}"
        align(student, tiny_teacher("llama", layers=2), random_rows(), run, layers=layer, **OPTIONS)
        save_student(student, tmp_path / layer, dtype=torch.bfloat16)
    _, origin = merge_students(tmp_path / "start", [tmp_path / "0", tmp_path / "1"])
    assert origin == {0: str(tmp_path / "0"), 1: str(tmp_path / "1")}


@pytest.mark.parametrize("mixer", CONVERTIBLE)
def test_a_cast_leaves_what_no_checkpoint_holds(mixer):
    """A student of a bf16 teacher has the rotary angles of one that was loaded: fp32."""
    teacher = tiny_teacher("llama", layers=2)
    student = convert_model(tiny_teacher("llama", layers=2).to(torch.bfloat16), mixer)
    expected = dict(teacher.named_buffers())
    for name, buffer in student.named_buffers():
        if name in expected:
            assert torch.equal(buffer, expected[name]), name


def test_a_cast_keeps_what_the_backbone_names_fp32(monkeypatch):
    """Some families name parameters of their own in `_keep_in_fp32_modules_strict`."""
    student = convert_model(tiny_teacher("llama", layers=2), "gka")
    monkeypatch.setattr(type(student), "_keep_in_fp32_modules_strict", {r"input_layernorm\.weight$"})
    monkeypatch.delattr(student, "_keep_in_fp32_modules_strict", raising=False)
    cast_student(student, torch.bfloat16)
    names = set(declared(student)) | {f"model.layers.{i}.input_layernorm.weight" for i in range(2)}
    assert {name for name, p in student.named_parameters() if p.dtype == torch.float32} == names
