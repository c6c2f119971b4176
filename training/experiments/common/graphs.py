"""Runs a function of tensors as one CUDA graph, because launching the kernels of a small model takes longer than
running them.
"""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

WARM_UP = 3  # calls before the capture: they compile the kernels and allocate the states of the optimizer


class GraphedFunction:
    """Calls `function(*tensors)` without a graph `WARM_UP` times, then captures it, and then replays the graph.

    The tensors of all calls must have the same shapes and dtypes. The function must not wait for the device, and the
    work that it starts must not depend on values that differ between calls. The tensors that a call returns are
    overwritten by the next call. If the capture fails, a warning says why, and every call runs without a graph.
    """

    def __init__(self, function: Callable[..., Tensor]):
        self.function, self.calls, self.graph, self.captures = function, 0, None, True
        self.stream = torch.cuda.Stream()  # the capture needs a stream that is not the default one

    def __call__(self, *tensors: Tensor) -> Tensor:
        if self.graph is None:
            self.calls += 1
            if self.calls <= WARM_UP or not self.captures or not self._capture(tensors):
                return self._call_without_graph(tensors)
        for own, new in zip(self.inputs, tensors, strict=True):
            own.copy_(new)
        self.graph.replay()
        return self.output

    def _capture(self, tensors: tuple[Tensor, ...]) -> bool:
        """Capture the function; returns whether there is a graph now."""
        self.inputs, graph = [t.clone() for t in tensors], torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                self.output = self.function(*self.inputs)
        except Exception as error:
            self.captures = False
            torch.cuda.synchronize()  # raises if the device cannot be used any more
            warnings.warn(f"a step runs without a CUDA graph: {type(error).__name__}: {error}", stacklevel=3)
        else:
            self.graph = graph
        return self.captures

    def _call_without_graph(self, tensors: tuple[Tensor, ...]) -> Tensor:
        """Call the function on a side stream, as PyTorch requires of the calls before a capture."""
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            output = self.function(*tensors)
        current.wait_stream(self.stream)
        return output
