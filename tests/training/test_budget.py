"""Training within a budget: LoRA over frozen bf16, 4-bit and 8-bit matrices, optimizers of small states."""

import importlib.util

import pytest
import torch
from transformers import TrainerCallback

from hf_memmix.conversion import convert_model
from hf_memmix.conversion.families import attention_module
from hf_memmix.training import quantized
from hf_memmix.training.recipe import Recipe
from hf_memmix.training.teachers import add_lora, lora_layers, quantize_frozen, share_weights
from hf_memmix.training.train import train
from hf_memmix.training.trainer_arguments import training_arguments
from tiny_runs import StopBefore, Stopped, changed, random_rows, weights
from tiny_teachers import tiny_teacher

OPTIONS = {"stage": "distill", "steps": 3, "batch_size": 4, "block_size": 16, "learning_rate": 1e-3}
LORA = {**OPTIONS, "teacher": "lora", "lora_mixers": True, "lora_rank": 4}
MISSING = {name for name, package in quantized.PACKAGES.items() if importlib.util.find_spec(package) is None}
# the packages are optional
PRECISIONS = [
    pytest.param(name, marks=pytest.mark.skipif(name in MISSING, reason="its package is not installed"))
    for name in ("none", "8bit", "4bit")
]


def pair(kind="gka", **fields):
    teacher = tiny_teacher("llama", layers=2, hidden_size=64, **fields)
    return teacher, convert_model(teacher, kind, keep=[1])


class Look(TrainerCallback):
    """Calls a function at an event of the training."""

    def __init__(self, event, see):
        setattr(self, event, lambda args, state, control, **kwargs: see(kwargs))


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("quantize", PRECISIONS)
def test_a_student_with_lora_trains_merges_and_predicts_as_before_the_merge(tmp_path, quantize, bf16):
    """Also with recomputed activations and an optimizer of small states."""
    teacher, student = pair()
    if bf16:
        teacher, student = teacher.bfloat16(), convert_model(teacher.bfloat16(), "gka", keep=[1])
    more = {"gradient_checkpointing": True, "chunk_tokens": 8}
    if "4bit" not in MISSING:
        more["trainer"] = {"optim": "paged_adamw_8bit", "use_cpu": True}
    before, seen = {name: tensor.float() for name, tensor in weights(student).items()}, {}

    def look(kwargs):
        layers = lora_layers(student)
        seen["layers"], seen["dtypes"] = set(layers), {str(m.base_layer.weight.dtype) for m in layers.values()}
        seen["logits"] = None if bf16 else student.eval()(torch.arange(3, 19)[None]).logits.float()

    recipe = Recipe(**LORA, quantize=quantize, bf16=bf16, **more)
    result = train(student, teacher, random_rows(40), tmp_path, recipe=recipe, callbacks=[Look("on_train_end", look)])
    assert torch.tensor(result["last_loss"]).isfinite()
    expected = {f"model.layers.{i}.mlp.{name}_proj" for i in (0, 1) for name in ("gate", "up", "down")}
    expected |= {f"model.layers.{i}.self_attn.{name}_proj" for i in (0, 1) for name in "qkvo"}
    assert seen["layers"] == expected | {"model.layers.0.self_attn.g_proj"}
    stored = "torch.bfloat16" if bf16 else "torch.float32"
    assert seen["dtypes"] == {"torch.uint8" if quantize == "4bit" else stored}
    assert all(type(p) is torch.nn.Parameter and p.is_floating_point() for p in student.parameters())
    merged = None if bf16 else student(torch.arange(3, 19)[None]).logits
    moved = changed(student.float(), before)
    assert "model.layers.0.self_attn.a_proj.weight" in moved and "model.embed_tokens.weight" not in moved
    assert bf16 or torch.allclose(merged, seen["logits"], rtol=1e-4, atol=1e-4)


@pytest.mark.product  # its parts have tests
@pytest.mark.parametrize("quantize", PRECISIONS)
def test_an_interrupted_run_with_lora_ends_like_a_whole_one(tmp_path, quantize):
    students, recipe = [], Recipe(**LORA, quantize=quantize, save_every=1)
    for folder, callbacks in (("whole", []), ("run", [StopBefore(2)]), ("run", [])):
        teacher, student = pair()
        students.append(student)
        try:
            train(student, teacher, random_rows(40), tmp_path / folder, recipe=recipe, callbacks=callbacks)
        except Stopped:
            assert callbacks
    assert not changed(students[2], weights(students[0]))
    if quantize != "none":
        teacher, student = pair()
        with pytest.raises(ValueError, match="belongs to another run .*recipe.quantize was .*, is none"):
            train(student, teacher, random_rows(40), tmp_path / "run", recipe=Recipe(**LORA, save_every=1))


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
    recipe = Recipe(**LORA, quantize=quantize)
    train(student, teacher, random_rows(40), tmp_path, recipe=recipe)
    assert places and set(places) == {training_arguments(recipe, tmp_path).device}


def test_a_family_without_linear_layers_is_not_quantized():
    teacher = tiny_teacher("gpt2", layers=2)
    student = convert_model(teacher, "gka", keep=[1])
    share_weights(student, teacher)
    with pytest.raises(ValueError, match="quantize is '8bit', but gpt2 has no nn.Linear layers"):
        quantize_frozen(student, teacher, "8bit", torch.float32)


def test_a_missing_package_is_named_before_anything_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setitem(quantized.PACKAGES, "4bit", "no_such_package")
    teacher, student = pair()
    with pytest.raises(ValueError, match="'4bit', which no_such_package computes.*pip install"):
        train(student, teacher, random_rows(), tmp_path, recipe=Recipe(**LORA, quantize="4bit"))


# ---- optimizers with small states

# without torchao's, which the Trainer makes in the same way and which compiles for half a minute
OPTIMIZERS = ["adamw_torch_fused", "adafactor", "adamw_8bit", "paged_adamw_8bit", "lion_8bit"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_by_name_keeps_the_rates_of_the_groups(tmp_path, name):
    """Each group has its own rate and decay, frozen parameters do not move, and mixers move most."""
    if "8bit" in name:
        pytest.importorskip("bitsandbytes")
    teacher, student = pair()
    start, rates = weights(student), []

    def look(kwargs):
        rates.extend((group["initial_lr"], group["weight_decay"]) for group in kwargs["optimizer"].param_groups)

    groups = [{"match": "embed_tokens", "learning_rate": 0.0}, {"match": "norm", "weight_decay": 0.0}]
    recipe = Recipe(
        **OPTIONS, rest_learning_rate=1e-5, weight_decay=0.1, groups=groups, warmup_steps=0,
        trainer={"optim": name, "use_cpu": True},
    )  # fmt: skip
    look = Look("on_train_begin", look)
    result = train(student, teacher, random_rows(40), tmp_path, recipe=recipe, callbacks=[look])
    assert torch.tensor(result["last_loss"]).isfinite()
    # what steers a memory has the rate of the mixers, and no decay
    assert rates[0] == (1e-3, 0.1) and sorted(rates[1:]) == [(1e-5, 0.0), (1e-5, 0.1), (1e-3, 0.0)]
    moved = {key: (student.state_dict()[key] - start[key]).abs().max().item() for key in start}
    assert moved["model.embed_tokens.weight"] == 0.0
    assert 0 < 20 * moved["model.layers.1.mlp.up_proj.weight"] < moved["model.layers.0.self_attn.q_proj.weight"]


def test_an_8bit_optimizer_with_a_cached_teacher(tmp_path):
    pytest.importorskip("bitsandbytes")
    from hf_memmix.training.teacher_cache import write_cache

    teacher, student = pair()
    write_cache(teacher, random_rows(), tmp_path / "cache", k=8)
    recipe = Recipe(
        **OPTIONS, teacher=f"cache:{tmp_path / 'cache'}", gradient_checkpointing=True,
        trainer={"optim": "adamw_8bit", "use_cpu": True},
    )  # fmt: skip
    result = train(student, teacher, random_rows(), tmp_path / "out", recipe=recipe)
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
