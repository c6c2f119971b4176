"""Slices of layers, aligned apart and merged, are the student that one run aligns."""

import shutil

import pytest
import torch

from hf_memmix.conversion import convert_model, load_model, save_student
from hf_memmix.conversion.families import attention_prefix
from hf_memmix.training.merge import merge_students
from hf_memmix.training.train import align, distill
from tiny_runs import SMALL_RUN, changed, random_rows, weights
from tiny_teachers import tiny_teacher

OPTIONS = {"steps": 3, "learning_rate": 3e-3, **SMALL_RUN}
# a clipped gradient norm is one over all layers that train together
UNCLIPPED = {"max_grad_norm": 0.0}


@pytest.fixture
def teacher():
    return tiny_teacher("llama", layers=4)


@pytest.fixture
def data():
    return random_rows(40)


def trained(teacher, data, folder, layers, **options):
    student = convert_model(teacher, "gka", keep=[2])
    align(student, teacher, data, folder / f"run-{layers}", layers=layers, trainer=UNCLIPPED, **(OPTIONS | options))
    save_student(student, folder / layers)
    return folder / layers


@pytest.mark.product  # its parts have tests
def test_merged_slices_equal_one_run(tmp_path, teacher, data):
    save_student(convert_model(teacher, "gka", keep=[2]), tmp_path / "start")
    whole = load_model(trained(teacher, data, tmp_path, "all"))
    # Adam does not care for the scale of a loss, here a mean over fewer layers, but for its epsilon
    parts = [trained(teacher, data, tmp_path, layers) for layers in ("0", "1-2", "3")]
    merged, origin = merge_students(tmp_path / "start", parts)
    assert origin == {0: str(parts[0]), 1: str(parts[1]), 3: str(parts[2])}
    for name, tensor in whole.state_dict().items():
        torch.testing.assert_close(merged.state_dict()[name], tensor, rtol=1e-3, atol=2e-5, msg=name)
    start = load_model(tmp_path / "start").state_dict()
    for layer in (0, 1, 3):
        name = attention_prefix(merged, layer) + ".o_proj.weight"
        assert not torch.allclose(merged.state_dict()[name], start[name], atol=1e-3)


def test_a_slice_trains_its_layers_alone(tmp_path, teacher, data):
    moved = changed(
        load_model(trained(teacher, data, tmp_path, "1-2")), weights(convert_model(teacher, "gka", keep=[2]))
    )
    assert moved and all(name.startswith("model.layers.1.self_attn.") for name in moved)


@pytest.mark.product  # its parts have tests
def test_students_that_cannot_be_merged_are_refused(tmp_path, teacher, data):
    save_student(convert_model(teacher, "gka", keep=[2]), tmp_path / "start")
    first = trained(teacher, data, tmp_path, "0-1", steps=2)
    second = trained(teacher, data, tmp_path, "1", steps=2)
    student = convert_model(teacher, "gka", keep=[2])
    distill(student, teacher, data, tmp_path / "run", **(OPTIONS | {"steps": 2}), rest_learning_rate=1e-3)
    save_student(student, tmp_path / "distilled")
    shutil.copytree(tmp_path / "start", tmp_path / "idle")
    save_student(convert_model(teacher, "gka", keep=[1]), tmp_path / "other")
    save_student(convert_model(teacher, "gka", keep=[2], ridge=0.3), tmp_path / "options")
    for parts, message in (
        ([first, second], "both trained layer 1"),
        ([tmp_path / "distilled"], "not part of a mixer, .*before distill"),
        ([tmp_path / "idle"], "idle' has trained no layer"),
        ([second, tmp_path / "idle"], "idle' has trained no layer"),
        ([tmp_path / "other"], "is another model than"),
        ([tmp_path / "options"], "options of layer 0 .gka.ridge is 0.05 and 0.3"),
    ):
        with pytest.raises(ValueError, match=message):
            merge_students(tmp_path / "start", parts)
