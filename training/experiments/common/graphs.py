"""Runs a function of tensors as one CUDA graph, because launching the kernels of a small model takes longer than
running them.
"""

from collections.abc import Callable

import torch
from torch import Tensor

WARM_UP = 3  # calls before the capture: they compile the kernels and allocate the states of the optimizer


class GraphedFunction:
    """Calls `function(*tensors)` without a graph `WARM_UP` times, then captures it, and then replays the graph.

    The tensors of all calls must have the same shapes and dtypes. The function must not wait for the device, and the
    work that it starts must not depend on values that differ between calls. The tensors that a call returns are
    overwritten by the next call.
    """

    def __init__(self, function: Callable[..., Tensor]):
        self.function, self.calls, self.graph = function, 0, None
        self.stream = torch.cuda.Stream()

    def __call__(self, *tensors: Tensor) -> Tensor:
        if self.graph is None:
            self.calls += 1
            if self.calls <= WARM_UP:
                return self._call_without_graph(tensors)
            self.inputs = [t.clone() for t in tensors]
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.output = self.function(*self.inputs)
        for own, new in zip(self.inputs, tensors, strict=True):
            own.copy_(new)
        self.graph.replay()
        return self.output

    def _call_without_graph(self, tensors: tuple[Tensor, ...]) -> Tensor:
        """Call the function on a side stream, as PyTorch requires of the calls before a capture."""
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            output = self.function(*tensors)
        current.wait_stream(self.stream)
        return output
