"""Runs with `compile: true` on a CPU: what is compiled, what is refused, and that a resumed run compiles, too."""

from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import TrainerCallback

from hf_memmix.conversion import convert_model
from hf_memmix.errors import UserError
from hf_memmix.training import compiled_layers
from hf_memmix.training.compiled_layers import check_compile, compiled
from hf_memmix.training.losses import Squares
from hf_memmix.training.recipe import Recipe
from hf_memmix.training.streaming import align_by_streaming
from hf_memmix.training.train import make_pair, train
from hf_memmix.training.trainer_arguments import training_arguments
from tiny_runs import SMALL_RUN, StopBefore, Stopped, changed, random_rows, weights
from tiny_teachers import tiny_teacher

pytestmark = pytest.mark.compiles

LAYERS = 4
CPU = torch.device("cpu")


@pytest.fixture
def programs(monkeypatch):
    """Counts the compiled programs, which here run PyTorch's own operators, so that results are equal bit for bit."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(compiled_layers, "BACKEND", counter)
    yield counter
    torch._dynamo.reset()


@pytest.fixture
def teacher():
    return tiny_teacher("llama", layers=LAYERS)


def run(teacher, folder, recipe, keep=None, callback=None):
    student = convert_model(teacher, "gka", keep=keep)
    result = train(student, teacher, random_rows(), folder, recipe=recipe, callbacks=[callback or TrainerCallback()])
    return student, result


@pytest.mark.parametrize(
    ("fields", "keep", "count"),
    [
        # mixer, squares, the teacher's norms, attention and feed-forward layer
        pytest.param({}, None, 5, marks=pytest.mark.product),
        ({"gradient_checkpointing": True, "far_weight": 1.0, "far_window": 4}, [1], 6),
        pytest.param({"stage": "distill"}, None, 2, marks=pytest.mark.product),
        ({"stage": "distill", "gradient_checkpointing": True}, [1], 3),
        (
            {"stage": "distill", "teacher": "lora", "lora_mixers": True},
            [1],
            4,
        ),  # the first layer's inputs need no gradient
        ({"stage": "distill", "teacher": "shared", "rest_learning_rate": 0.0}, [1], 4),
    ],
    ids=str,
)
def test_compiled_layers_train_the_same_weights(tmp_path, teacher, programs, fields, keep, count):
    """All layers of a kind share a program. Afterwards the models are not compiled."""
    recipe = Recipe(steps=2, **SMALL_RUN, **fields)
    plain, before = run(teacher, tmp_path / "plain", recipe, keep)
    assert not programs.frame_count
    student, result = run(teacher, tmp_path / "compiled", replace(recipe, compile=True), keep)
    assert programs.frame_count == count + 1  # and a probe
    if "teacher" in fields:  # without torch.compile, layers that are not trained use kernels of `fused_layers`
        for ours, theirs in zip(student.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    else:
        assert not changed(student, weights(plain)) and result["log"] == before["log"]
    assert not any("forward" in module.__dict__ for model in (student, teacher) for module in model.modules())


@pytest.mark.parametrize("stage", [pytest.param("align", marks=pytest.mark.product), "distill"])
def test_a_resumed_run_compiles_as_it_did(tmp_path, teacher, programs, stage):
    recipe = Recipe(stage=stage, steps=4, save_every=2, compile=True, **SMALL_RUN)
    whole, _ = run(teacher, tmp_path / "whole", recipe)
    with pytest.raises(Stopped):
        run(teacher, tmp_path / "broken", recipe, callback=StopBefore(3))
    with pytest.raises(UserError, match=r"recipe.compile was True, is False"):
        run(teacher, tmp_path / "broken", replace(recipe, compile=False))
    torch._dynamo.reset()
    programs.frame_count = 0
    student, result = run(teacher, tmp_path / "broken", recipe)
    assert result["resumed"] and programs.frame_count and not changed(student, weights(whole))


def test_every_large_module_of_a_step_is_compiled_once(teacher):
    for stage in ("align", "distill"):
        pair = make_pair(convert_model(teacher, "gka", keep=[1]), teacher, Recipe(stage=stage))
        modules = list(pair.modules_to_compile())
        inside = [inner for module in modules for inner in module.modules()]
        assert len({id(module) for module in inside}) == len(inside)
        if stage == "align":
            assert {*map(id, pair.mixers.values())} < {*map(id, modules)}


def test_layers_that_differ_in_a_number_are_all_compiled(programs):
    """More layers than the default limit of torch.compile, which runs further layers without compiling them."""

    class Scaled(torch.nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.factor = factor

        def forward(self, x):
            return self.factor * x

    layers = [Scaled(factor) for factor in range(torch._dynamo.config.recompile_limit + 4)]
    limit = torch._dynamo.config.recompile_limit
    with compiled(layers):
        for layer in layers:
            assert layer(torch.ones(2)).sum() == 2 * layer.factor
    assert programs.frame_count == len(layers) and torch._dynamo.config.recompile_limit == limit


# ---- refusals


def broken_backend(*args):
    raise RuntimeError("no C++ compiler was found")


def test_what_cannot_be_compiled_is_refused(tmp_path, monkeypatch, teacher):
    recipe = Recipe(compile=True)
    with pytest.raises(UserError, match="compile.*FSDP"):
        check_compile(recipe, CPU, sharded=True)
    monkeypatch.setattr(compiled_layers, "BACKEND", broken_backend)
    torch._dynamo.reset()
    with pytest.raises(UserError, match="torch.compile does not work on cpu.*no C"):
        run(teacher, tmp_path, Recipe(steps=1, compile=True, **SMALL_RUN))
    check_compile(Recipe(), CPU, sharded=True)
    for fields in ({"pack": True}, {"stage": "distill", "teacher": "lora", "quantize": "4bit"}):
        with pytest.raises(UserError, match="compile is true.*" + [*fields][-1]):
            Recipe(compile=True, **fields)
    for name in ("compile", "cuda_graph"):
        with pytest.raises(UserError, match=f"{name} is true.*--stream"):
            align_by_streaming("student", "teacher", None, tmp_path / "out", recipe=Recipe(**{name: True}))


def test_the_library_does_not_compile_the_pair(tmp_path, monkeypatch):
    """Its own arguments, or those of a launch file, would compile student, teacher and hooks as one module."""
    for given in ({"torch_compile": True}, {"torch_compile_backend": "eager"}, {"torch_compile_mode": "default"}):
        with pytest.raises(UserError, match="which compile decides"):
            training_arguments(Recipe(trainer=given), tmp_path)
    for backend in ("no", "NO"):
        monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", backend)
        training_arguments(Recipe(), tmp_path)
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "inductor")
    with pytest.raises(UserError, match="ACCELERATE_DYNAMO_BACKEND is 'inductor'"):
        training_arguments(Recipe(), tmp_path)


@pytest.mark.slow  # the first C++ compilation takes up to two minutes
def test_squares_of_a_compiler_are_those_of_eager_code():
    """The one program that Inductor compiles here: the probe and the sums of `align`."""
    check_compile(Recipe(compile=True), CPU)
    squares, tensors = Squares(), [torch.randn(2, 5, 8), torch.randn(2, 5, 8), torch.rand(2, 5)]
    want = squares(*tensors)
    with compiled([squares]):
        torch.testing.assert_close(squares(*tensors), want)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("stage", ["align", "distill"])
def test_compiled_layers_train_alike_on_a_gpu(tmp_path, teacher, stage):
    """Recorded, and with checkpointing, which is not recorded. Inductor rounds otherwise."""
    recipe = Recipe(stage=stage, steps=8, trainer={"logging_steps": 1}, **SMALL_RUN)
    logs = [
        [entry["loss"] for entry in run(teacher, tmp_path / name, replace(recipe, **fields), [1])[1]["log"]]
        for name, fields in {
            "plain": {},
            "compiled": {"compile": True, "cuda_graph": True},
            "again": {"compile": True, "gradient_checkpointing": True},
        }.items()
    ]
    for log in logs[1:]:
        assert log == pytest.approx(logs[0], rel=0.02)
