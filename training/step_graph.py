"""A training step as one CUDA graph: forward and backward pass of a `StudentTeacher` at the host time of one launch.

A small model has thousands of short kernels per step, and Python starts them more slowly than the GPU runs them. All
batches of a run have one shape, so the kernels of a step are the same each time, with other tokens. The loss is a
scalar: its gradients are known up to a factor at the end of the forward pass, so one graph holds both passes, and
autograd only multiplies the gradients by the factor.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hf_memmix import launch
from hf_memmix.training.capture import Recorder
from hf_memmix.training.recipe import Recipe

logger = logging.getLogger(__name__)

EAGER_STEPS = 3  # kernels are compiled and their launches are written down before the graph is recorded


def obstacle(recipe: Recipe, device: torch.device, sharded: bool = False, layerdrop: float = 0.0) -> str | None:
    """Why the steps of a run cannot be recorded; None if they can.

    `sharded` is true with FSDP2 and ZeRO-3, also of one process: they replace the parameters in every step.
    `layerdrop`: the probability with which the student leaves out a layer. A graph would always leave out the same.
    """
    if device.type != "cuda":
        return f"it trains on {device}"
    reasons = {
        "several processes share a step": launch.processes() > 1,
        "the launch file shards its weights (FSDP, DeepSpeed)": sharded,
        "the shape of packed documents differs from step to step (pack)": recipe.pack,
        "activations are computed again (gradient_checkpointing)": recipe.gradient_checkpointing,
        "the student leaves out layers at random (layerdrop)": bool(layerdrop) and recipe.stage == "distill",
        "quantised matrices are computed by another library (quantize)": recipe.quantize != "none",
    }
    return next((reason for reason, true in reasons.items() if true), None)


class StepGraph:
    """`loss(**inputs)`, a scalar, with gradients for the trained parameters of `module`, recorded once and then
    replayed.

    A call with other shapes than the first, or without gradients, runs `loss` itself, and so does every call if
    recording fails, and after a parameter has got other memory; the log says so. The gradients of a call must be taken
    before the next one.

    The first steps already compute both passes as the recording does: on its stream, and with parameters of their own
    on the same memory. Autograd ties a parameter to the stream on which it was used first, for as long as any loss is
    alive; a recording must not touch the stream of such a loss.

    Args:
        accumulation: number of calls for a step of the optimizer. The first such step comes before the recording: the
            optimizer's states then have their memory.
    """

    def __init__(self, loss: Callable[..., Tensor], module: nn.Module, recorder: Recorder, accumulation: int = 1):
        self._loss, self._module, self._recorder = loss, module, recorder
        self._accumulation, self._eager_steps = accumulation, max(EAGER_STEPS, accumulation)
        self.parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._aliases: dict[int, nn.Parameter] = {}
        self.steps, self._form, self._graph, self._failed, self._told = 0, None, None, False, set()

    @property
    def recorded(self) -> bool:
        return self._graph is not None

    def __call__(self, inputs: dict[str, Tensor]) -> Tensor:
        if not torch.is_grad_enabled() or self._failed:
            return self._loss(**inputs)
        form = {name: (tensor.shape, tensor.dtype, tensor.device) for name, tensor in inputs.items()}
        if self._form is None:
            self._form, self.inputs = form, {name: tensor.clone() for name, tensor in inputs.items()}
            # now, because a Trainer moves and loads parameters before the first step
            self._aliases = {id(parameter): nn.Parameter(parameter.detach()) for parameter in self.parameters}
        if form != self._form:
            self._tell(f"a step with {form} runs without the CUDA graph, which is for {self._form}")
            return self._loss(**inputs)
        if any(p.data_ptr() != self._aliases[id(p)].data_ptr() for p in self.parameters):
            self._give_up("a parameter has other memory than before, for example because the model was moved")
            return self._loss(**inputs)
        for name, tensor in inputs.items():
            self.inputs[name].copy_(tensor, non_blocking=True)
        self.steps += 1
        if self.steps <= self._eager_steps:
            self.gradients = self.result = None  # this step needs their memory
            self._recorder.run(self._both_passes)
        else:
            if self.steps == self._eager_steps + 1:
                self._record()
            if self._graph is None:
                return self._loss(**inputs)
            self._graph.replay()
        return _Computed.apply(self, *self.parameters)

    def _record(self) -> None:
        self.gradients = self.result = None  # their memory is needed
        try:
            self._graph = self._recorder.record(self._both_passes)
            # the graph keeps the memory of both passes; a parameter's gradient, and what is added to it, come on top
            room = [_copies(self.gradients, 1.0) for _ in range(min(self._accumulation, 2))]
            del room
        except Exception as error:  # no fault of the loss itself, which has run
            first = next(iter(str(error).strip().splitlines()), "")
            self._give_up(f"{type(error).__name__} {first}")
            logger.debug("recording a step", exc_info=error)
            return
        logger.info("forward and backward pass of a step run as one CUDA graph")

    def _give_up(self, reason: str) -> None:
        self._failed, self._aliases, self._graph = True, {}, None
        self.gradients = self.result = None
        self._tell(f"steps run without a CUDA graph: {reason}")

    def _both_passes(self) -> None:
        """Compute `result`, the loss, and `gradients`, None for a parameter that the loss does not use."""
        torch.clear_autocast_cache()  # it must not hold a cast that is no part of the recording, nor one that is
        device = self.parameters[0].device.type
        with torch.autocast(device, enabled=False), self._own_parameters():  # `loss` has its own; a backward pass none
            loss = self._loss(**self.inputs)
            self.gradients = torch.autograd.grad(loss, list(self._aliases.values()), allow_unused=True)
        self.result = loss.detach()
        torch.clear_autocast_cache()

    @contextmanager
    def _own_parameters(self) -> Iterator[None]:
        """Inside this context, the module has the aliases of its trained parameters."""
        changed = [
            (module._parameters, name, parameter)
            for module in self._module.modules()
            for name, parameter in module._parameters.items()
            if id(parameter) in self._aliases
        ]
        try:
            for parameters, name, parameter in changed:
                parameters[name] = self._aliases[id(parameter)]
            yield
        finally:
            for parameters, name, parameter in changed:
                parameters[name] = parameter

    def _tell(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            logger.warning(message)


class _Computed(torch.autograd.Function):
    """The loss of a step whose gradients are known."""

    @staticmethod
    def forward(ctx, step: StepGraph, *parameters: Tensor) -> Tensor:
        ctx.step, ctx.count = step, step.steps
        return step.result.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor):
        step = ctx.step
        if ctx.count != step.steps or step.gradients is None:
            raise RuntimeError("the gradients of this step were taken, or overwritten by the next one; take them once")
        gradients = list(_copies(step.gradients, upstream))
        if not step.recorded:
            step.gradients = None  # the optimizer needs the memory, as without a graph; a graph keeps its own
        return None, *gradients


def _copies(gradients: tuple[Tensor | None, ...], factor: Tensor | float) -> Iterator[Tensor | None]:
    """The gradients times a factor."""
    scaled = iter(torch._foreach_mul([gradient for gradient in gradients if gradient is not None], factor))
    return (None if gradient is None else next(scaled) for gradient in gradients)
