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
from hf_memmix.training.trainer_arguments import training_arguments
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


@pytest.mark.product  # its parts have tests
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


def test_a_cpu_with_bf16_instructions_does_not_change_the_weights_that_teacher_and_student_share(monkeypatch):
    """There bitsandbytes replaces the weights of layers in eval mode by another format, for inference."""
    bnb = pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(bnb.nn.modules, "has_avx512bf16", lambda: True)
    layer = quantized.quantized_linear(torch.nn.Linear(64, 32), "4bit", torch.float32).eval()
    before, rows = layer.weight.data.clone(), torch.randn(2, 64)
    with torch.no_grad():
        expected = torch.nn.functional.linear(rows, quantized.plain_weight(layer), layer.bias)
        torch.testing.assert_close(layer(rows), expected)
    assert torch.equal(layer.weight.data, before) and layer.weight.quant_state.nested
    rows.requires_grad_()
    layer(rows).sum().backward()
    torch.testing.assert_close(rows.grad[0], quantized.plain_weight(layer).sum(0))


@pytest.mark.parametrize("quantize", PRECISIONS[1:])
def test_matrices_are_rounded_where_they_are_trained(tmp_path, quantize, monkeypatch):
    """With a GPU, on the GPU: a CPU takes minutes for the matrices of an 8B model."""
    from hf_memmix.training import teachers

    round_it, places = teachers.quantized_linear, []

    def watched(layer, kind, dtype, device):
        places.append(device)
        new = round_it(layer, kind, dtype, device)
        assert new.weight.device == device and (new.bias is None or new.bias.device == device)
        return new

    monkeypatch.setattr(teachers, "quantized_linear", watched)
    teacher, student = pair()
    recipe = Recipe(**OPTIONS, teacher="lora", lora_mixers=True, quantize=quantize, lora_rank=4)
    arguments = training_arguments(recipe, tmp_path)
    train(student, teacher, rows(), tmp_path, recipe=recipe)
    assert places and set(places) == {arguments.device}


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


# ---- optimizers with small states

OPTIMIZERS = ["adamw_torch_fused", "adafactor", "adamw_8bit", "paged_adamw_8bit", "lion_8bit", "adamw_torch_8bit"]


@pytest.mark.product_rows(r"adamw_torch_8bit")  # its parts have tests
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_by_name_keeps_the_rates_of_the_groups(tmp_path, name):
    """Each group has its own rate and decay, frozen parameters do not move, and mixers move most."""
    if "8bit" in name:
        pytest.importorskip("bitsandbytes")
    from transformers import TrainerCallback

    teacher, student = pair()
    start = {name: tensor.clone() for name, tensor in student.state_dict().items()}
    seen = {}

    class Look(TrainerCallback):
        def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
            seen["rates"] = [(group["initial_lr"], group["weight_decay"]) for group in optimizer.param_groups]

    groups = [{"match": "embed_tokens", "learning_rate": 0.0}, {"match": "norm", "weight_decay": 0.0}]
    recipe = Recipe(
        **OPTIONS, rest_learning_rate=1e-5, weight_decay=0.1, groups=groups, warmup_steps=0,
        trainer={"optim": name, "use_cpu": True},
    )  # fmt: skip
    result = train(student, teacher, rows(), tmp_path, recipe=recipe, callbacks=[Look()])
    assert torch.tensor(result["last_loss"]).isfinite()
    # what steers a memory has the rate of the mixers, and no decay
    assert seen["rates"][0] == (1e-3, 0.1) and sorted(seen["rates"][1:]) == [(1e-5, 0.0), (1e-5, 0.1), (1e-3, 0.0)]
    moved = {key: (student.state_dict()[key] - start[key]).abs().max().item() for key in start}
    assert moved["model.embed_tokens.weight"] == 0.0
    mixer, rest = moved["model.layers.0.self_attn.q_proj.weight"], moved["model.layers.1.mlp.up_proj.weight"]
    assert 0 < 20 * rest < mixer


@pytest.mark.parametrize("quantize", PRECISIONS)
def test_an_8bit_optimizer_with_lora_of_a_quantised_backbone_and_checkpointing(tmp_path, quantize):
    pytest.importorskip("bitsandbytes")
    teacher, student = pair()
    recipe = Recipe(
        **OPTIONS, teacher="lora", lora_mixers=True, quantize=quantize, lora_rank=4, gradient_checkpointing=True,
        chunk_tokens=8, trainer={"optim": "paged_adamw_8bit", "use_cpu": True},
    )  # fmt: skip
    result = train(student, teacher, rows(), tmp_path, recipe=recipe)
    assert torch.tensor(result["last_loss"]).isfinite()


def test_an_8bit_optimizer_with_a_cached_teacher(tmp_path):
    pytest.importorskip("bitsandbytes")
    from hf_memmix.training.teacher_cache import write_cache

    teacher, student = pair()
    write_cache(teacher, rows(), tmp_path / "cache", k=8)
    recipe = Recipe(
        **OPTIONS, teacher=f"cache:{tmp_path / 'cache'}", gradient_checkpointing=True,
        trainer={"optim": "adamw_8bit", "use_cpu": True},
    )  # fmt: skip
    result = train(student, teacher, rows(), tmp_path / "out", recipe=recipe)
    assert torch.tensor(result["last_loss"]).isfinite()


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ("galore_adamw", "optim to 'galore_adamw', which chooses its own parameters"),
        ("schedule_free_adamw", "which schedulefree computes, and it is missing; pip install schedulefree"),
    ],
)
def test_an_optimizer_that_cannot_be_used_is_refused_before_anything_is_loaded(
    tmp_path, monkeypatch, optimizer, message
):
    import hf_memmix.conversion.loading as loading
    from cli_runner import memmix
    from hf_memmix.assets import asset_path

    for name in ("load_model", "load_tokenizer"):
        monkeypatch.setattr(loading, name, None)  # a call would not be refused in one line
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"stage: distill\ntrainer: {{optim: {optimizer}}}\n")
    models = ("--student", asset_path("tiny_gka"), "--teacher", asset_path("tiny_teacher"))
    run = memmix("distill", *models, "--text", recipe, "--out", tmp_path / "out", "--recipe", recipe)
    assert run.exit_code == 1 and message in run.stderr
