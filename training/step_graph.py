"""A training step as one CUDA graph: forward and backward pass of a `StudentTeacher` at the host time of one launch.

A small model has thousands of short kernels per step, and Python starts them more slowly than the GPU runs them. All
batches of a run have one shape, so the kernels of a step are the same each time, with other tokens. The loss is a
scalar: its gradients are known up to a factor at the end of the forward pass, so one graph holds both passes, and
autograd only multiplies the gradients by the factor.
"""

import logging
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_memmix import launch
from hf_memmix.training.recipe import Recipe

logger = logging.getLogger(__name__)

EAGER_STEPS = 3  # kernels are compiled and their launches are written down before the graph is recorded


def obstacle(recipe: Recipe, device: torch.device) -> str | None:
    """Why the steps of a run cannot be recorded; None if they can."""
    if device.type != "cuda":
        return f"it trains on {device}"
    reasons = {
        "several processes share a step": launch.processes() > 1,
        "the shape of packed documents differs from step to step (pack)": recipe.pack,
        "activations are computed again (gradient_checkpointing)": recipe.gradient_checkpointing,
        "quantised matrices are computed by another library (quantize)": recipe.quantize != "none",
    }
    return next((reason for reason, true in reasons.items() if true), None)


class StepGraph:
    """`loss(**inputs)`, a scalar, with gradients for `parameters`, recorded once and then replayed.

    A call with other shapes, or without gradients, runs `loss` itself, and so does every call if recording fails;
    the log says so. The gradients of a call must be taken before the next one.
    """

    def __init__(self, loss: Callable[..., Tensor], parameters: list[Tensor]):
        self._loss, self._parameters = loss, parameters
        self._steps, self._form, self._graph, self._told = 0, None, None, set()

    def __call__(self, inputs: dict[str, Tensor]) -> Tensor:
        if not torch.is_grad_enabled():
            return self._loss(**inputs)
        form = {name: (tensor.shape, tensor.dtype, tensor.device) for name, tensor in inputs.items()}
        self._steps += 1
        if self._steps == EAGER_STEPS + 1:
            self._record(inputs, form)
        if self._graph is None:
            return self._loss(**inputs)
        if form != self._form:
            self._tell(f"a step with {form} runs without the CUDA graph, which was recorded with {self._form}")
            return self._loss(**inputs)
        for name, tensor in inputs.items():
            self._inputs[name].copy_(tensor, non_blocking=True)
        return _Replay.apply(self, *self._parameters)

    def _record(self, inputs: dict[str, Tensor], form: dict) -> None:
        self._inputs = {name: tensor.clone() for name, tensor in inputs.items()}
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                loss = self._loss(**self._inputs)
                self.gradients = torch.autograd.grad(loss, self._parameters, allow_unused=True)
                self.result = loss.detach()
        except RuntimeError as error:  # an operation waits for the GPU, or there is not enough memory
            torch.cuda.synchronize()
            self._tell(f"steps run without a CUDA graph: {str(error).strip().splitlines()[0]}")
            return
        self._graph, self._form = graph, form
        logger.info("forward and backward pass of a step run as one CUDA graph")

    def replay(self) -> None:
        self._graph.replay()

    def _tell(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            logger.warning(message)


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, graph: StepGraph, *parameters: Tensor) -> Tensor:
        graph.replay()
        ctx.graph, ctx.step = graph, graph._steps
        return graph.result.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor):
        if ctx.step != ctx.graph._steps:
            raise RuntimeError("the gradients of this step were overwritten by the next one; take them before it")
        found = ctx.graph.gradients
        scaled = iter(torch._foreach_mul([gradient for gradient in found if gradient is not None], upstream))
        return None, *(None if gradient is None else next(scaled) for gradient in found)
