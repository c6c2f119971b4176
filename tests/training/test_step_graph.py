"""A step as one CUDA graph: its gradients and its refusals, on a CPU with a graph that runs its function again; on a
GPU it equals the eager step.
"""

import contextlib

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_memmix.conversion import convert_model
from hf_memmix.errors import UserError
from hf_memmix.training.recipe import Recipe
from hf_memmix.training.step_graph import EAGER_STEPS, StepGraph, obstacle
from hf_memmix.training.train import make_pair, record_steps

GPU = torch.device("cuda", 0)


class Recorded:
    """A graph that computes the gradients of y = sum (w x)^2 again, into the same memory."""

    def __init__(self):
        self.replays = 0

    def replay(self):
        self.replays += 1
        with torch.enable_grad():
            loss = (self.step._parameters[0] * self.step._inputs["x"]).square().sum()
        self.step.result.copy_(loss.detach())
        self.step.gradients[0].copy_(torch.autograd.grad(loss, self.step._parameters[0])[0])


@pytest.fixture
def step(monkeypatch):
    graph = Recorded()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda found: contextlib.nullcontext())
    weight, unused = torch.nn.Parameter(torch.tensor([2.0])), torch.nn.Parameter(torch.ones(3))
    graph.step = StepGraph(lambda x: (weight * x).square().sum(), [weight, unused])
    return graph.step


def test_a_replayed_step_has_the_gradients_of_its_own_inputs(step):
    """The gradient of loss / 2 is 4 x^2, as for accumulated steps; an unused parameter has none."""
    for count in range(EAGER_STEPS + 3):
        x = torch.tensor([1.0 + count])
        loss = step({"x": x})
        (loss / 2).backward()
        assert loss.item() == 4 * x.item() ** 2
        weight, unused = step._parameters
        assert weight.grad.item() == 2 * x.item() ** 2 and unused.grad is None
        weight.grad = None
    assert step._graph.replays == 3


def test_other_shapes_and_evaluation_run_without_the_graph(step, caplog):
    for _ in range(EAGER_STEPS + 1):
        step({"x": torch.ones(1)}).backward()
    step({"x": torch.ones(2)}).backward()
    assert step._graph.replays == 1 and "runs without the CUDA graph" in caplog.text
    with torch.no_grad():
        assert not step({"x": torch.ones(1)}).requires_grad
    assert step._graph.replays == 1


def test_gradients_that_the_next_step_overwrote_are_refused(step):
    losses = [step({"x": torch.ones(1)}) for _ in range(EAGER_STEPS + 2)]
    losses[-1].backward()
    with pytest.raises(RuntimeError, match="overwritten"):
        losses[-2].backward()


def test_a_step_that_cannot_be_recorded_runs_and_says_so(step, caplog, monkeypatch):
    def fails(graph):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "graph", fails)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for _ in range(EAGER_STEPS + 2):
        step({"x": torch.ones(1)}).backward()
    assert caplog.text.count("operation not permitted") == 1


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"pack": True}, "pack"),
        ({"gradient_checkpointing": True}, "gradient_checkpointing"),
        ({"stage": "distill", "teacher": "lora", "quantize": "4bit"}, "quantize"),
        ({}, None),
    ],
    ids=lambda value: str(value)[:20],
)
def test_runs_whose_steps_differ_are_not_recorded(fields, reason):
    found = obstacle(Recipe(**fields), GPU)
    assert found is None if reason is None else reason in found
    assert record_steps(Recipe(**fields), GPU) == (reason is None)
    assert not record_steps(Recipe(**fields, cuda_graph=False), GPU)
    with pytest.raises(UserError, match="cuda_graph is true"):
        record_steps(Recipe(**fields, cuda_graph=True), torch.device("cpu"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("stage", ["align", "distill"])
def test_a_recorded_step_equals_the_eager_one(stage):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
    teacher = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    student = convert_model(teacher.eval(), "gka").to(GPU)
    pair = make_pair(student.train(), teacher.to(GPU, torch.bfloat16), Recipe(stage=stage, bf16=True))
    trained = [parameter for parameter in pair.parameters() if parameter.requires_grad]
    tokens = torch.randint(3, 256, (EAGER_STEPS + 3, 2, 64), device=GPU)
    want = [torch.autograd.grad(pair(ids)["loss"], trained) for ids in tokens]
    pair.record_steps()
    for ids, gradients in zip(tokens, want, strict=True):
        loss = pair(ids)["loss"]
        for ours, theirs in zip(torch.autograd.grad(loss, trained), gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-5)
    assert pair._graph._graph is not None
