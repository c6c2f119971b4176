"""Training within a budget: LoRA over frozen bf16, 4-bit and 8-bit matrices, optimizers of small states."""

import copy
import importlib.util

import pytest
import torch

from hf_memmix.conversion import convert_model
from hf_memmix.conversion.families import attention_module
from hf_memmix.training import quantized
from hf_memmix.training.data import TokenBlocks
from hf_memmix.training.recipe import Recipe
from hf_memmix.training.teachers import add_lora, lora_layers, quantize_frozen, share_weights
from hf_memmix.training.train import train
from tiny_teachers import tiny_teacher

OPTIONS = {"stage": "distill", "steps": 3, "batch_size": 4, "block_size": 16, "learning_rate": 1e-3}
MISSING = {name for name, package in quantized.PACKAGES.items() if importlib.util.find_spec(package) is None}
# the packages are optional
PRECISIONS = [
    pytest.param(name, marks=pytest.mark.skipif(name in MISSING, reason="its package is not installed"))
    for name in ("none", "8bit", "4bit")
]


def rows():
    return TokenBlocks(torch.randint(3, 64, (640,), generator=torch.Generator().manual_seed(0)), 16)


def pair(kind="gka", **fields):
    teacher = tiny_teacher("llama", layers=2, hidden_size=64, **fields)
    return teacher, convert_model(teacher, kind, keep=[1])


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("quantize", PRECISIONS)
def test_a_student_with_lora_trains_merges_and_predicts_as_before_the_merge(tmp_path, quantize, bf16):
    teacher, student = pair()
    if bf16:
        teacher, student = teacher.bfloat16(), convert_model(teacher.bfloat16(), "gka", keep=[1])
    recipe = Recipe(**OPTIONS, teacher="lora", lora_mixers=True, quantize=quantize, lora_rank=4, bf16=bf16)
    before = {name: tensor.clone() for name, tensor in student.state_dict().items()}
    seen = {}

    from transformers import TrainerCallback

    class Look(TrainerCallback):
        def on_train_end(self, args, state, control, **kwargs):
            layers = lora_layers(student)
            seen["layers"], seen["dtypes"] = set(layers), {str(m.base_layer.weight.dtype) for m in layers.values()}
            seen["logits"] = student.eval()(torch.arange(3, 19)[None]).logits.float() if not bf16 else None

    result = train(student, teacher, rows(), tmp_path, recipe=recipe, callbacks=[Look()])
    assert torch.tensor(result["last_loss"]).isfinite()
    expected = {f"model.layers.{i}.mlp.{name}_proj" for i in (0, 1) for name in ("gate", "up", "down")}
    expected |= {f"model.layers.{i}.self_attn.{name}_proj" for i in (0, 1) for name in "qkvo"}
    assert seen["layers"] == expected | {"model.layers.0.self_attn.g_proj"}
    stored = "torch.bfloat16" if bf16 else "torch.float32"
    assert seen["dtypes"] == {"torch.uint8" if quantize == "4bit" else stored}
    trained = student.state_dict()
    assert trained.keys() == before.keys()
    assert all(type(p) is torch.nn.Parameter and p.is_floating_point() for p in student.parameters())
    changed = {name for name in before if not torch.equal(before[name].float(), trained[name].float())}
    assert "model.layers.0.self_attn.a_proj.weight" in changed and "model.embed_tokens.weight" not in changed
    if not bf16:
        merged = student(torch.arange(3, 19)[None]).logits
        assert torch.allclose(merged, seen["logits"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("quantize", PRECISIONS)
def test_an_interrupted_run_with_lora_ends_like_a_whole_one(tmp_path, quantize):
    from transformers import TrainerCallback

    class Stop(Exception):
        pass

    class Interrupt(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 2:
                raise Stop

    teacher, whole = pair()
    broken, resumed = copy.deepcopy(whole), copy.deepcopy(whole)
    recipe = Recipe(**OPTIONS, teacher="lora", lora_mixers=True, quantize=quantize, lora_rank=4, save_every=1)
    train(whole, copy.deepcopy(teacher), rows(), tmp_path / "whole", recipe=recipe)
    with pytest.raises(Stop):
        train(broken, copy.deepcopy(teacher), rows(), tmp_path / "run", recipe=recipe, callbacks=[Interrupt()])
    train(resumed, copy.deepcopy(teacher), rows(), tmp_path / "run", recipe=recipe)
    ours, theirs = whole.state_dict(), resumed.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    if quantize != "none":
        with pytest.raises(ValueError, match="belongs to another run .*recipe.quantize was .*, is none"):
            train(copy.deepcopy(whole), teacher, rows(), tmp_path / "run", recipe=Recipe(**OPTIONS, teacher="lora",
                  lora_mixers=True, lora_rank=4, save_every=1))  # fmt: skip


@pytest.mark.parametrize("quantize", PRECISIONS[1:])
def test_student_and_teacher_share_the_quantized_matrices(quantize):
    teacher, student = pair()
    share_weights(student, teacher)
    count = quantize_frozen(student, teacher, quantize, torch.float32, mixers=True)
    assert count == 2 * 3 + 4 + 4 + 5  # two MLPs, kept attention, the teacher's own attention, the mixer's matrices
    add_lora(student, 4, mixers=True)
    for name, layer in lora_layers(student).items():
        assert quantized.is_quantized(layer.base_layer)
        if ".0.self_attn" not in name:
            assert teacher.get_submodule(name) is layer.base_layer
    mixer = attention_module(student, 0)
    assert all(type(getattr(mixer, name)) is torch.nn.Linear for name in mixer.steering_layers)
    trained = {name for name, p in student.named_parameters() if p.requires_grad}
    assert all(".lora_" in name or name.startswith("model.layers.0.self_attn") for name in trained)
    assert "model.layers.0.self_attn.A_log" in trained and "model.layers.0.self_attn.a_proj.weight" in trained


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quantize": "3bit"}, "quantize is '3bit'; it must be one of none, 4bit, 8bit"),
        (
            {"quantize": "4bit"},
            "quantize is '4bit', but only a run with LoRA has frozen matrices; set teacher to lora",
        ),
        ({"lora_mixers": True, "teacher": "copy"}, "lora_mixers is True, but only a run with LoRA"),
    ],
)
def test_fields_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Recipe(stage="distill", **fields)


def test_a_family_without_linear_layers_is_not_quantized():
    teacher = tiny_teacher("gpt2", layers=2)
    student = convert_model(teacher, "gka", keep=[1])
    share_weights(student, teacher)
    with pytest.raises(ValueError, match="quantize is '8bit', but gpt2 has no nn.Linear layers"):
        quantize_frozen(student, teacher, "8bit", torch.float32)


def test_a_missing_package_is_named_before_anything_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setitem(quantized.PACKAGES, "4bit", "no_such_package")
    teacher, student = pair()
    recipe = Recipe(**OPTIONS, teacher="lora", quantize="4bit")
    with pytest.raises(ValueError, match="quantize is '4bit', which no_such_package computes.*pip install"):
        train(student, teacher, rows(), tmp_path, recipe=recipe)
