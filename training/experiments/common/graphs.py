"""Runs a function of tensors as one CUDA graph, because launching the kernels of a small model takes longer than
running them. Several threads of a process can train a model each; their graphs run at the same time.
"""

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

WARM_UP = 3  # calls before the capture: they compile the kernels and allocate the states of the optimizer


class Turn:
    """Lets one thread of a process work at a time, except where a thread allows the others to work (`given_up`).

    Building a model, compiling kernels and capturing a graph change the state of the whole process (random numbers,
    default dtype, caches of compiled kernels), so threads take turns there. Replaying a graph does not.
    """

    def __init__(self):
        self._lock, self._thread = threading.Lock(), threading.local()

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Wait for the turn and keep it inside the context."""
        with self._lock:
            self._thread.has_turn = True
            try:
                yield
            finally:
                self._thread.has_turn = False

    @contextlib.contextmanager
    def given_up(self) -> Iterator[None]:
        """Let other threads work inside the context, and wait for the turn at its end.

        Nothing happens in a thread that does not have the turn.
        """
        if not getattr(self._thread, "has_turn", False):
            yield
            return
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()


TURN = Turn()


class GraphedFunction:
    """Calls `function(*tensors)` without a graph `WARM_UP` times, then captures it, and then replays the graph.

    The tensors of all calls must have the same shapes and dtypes. The function must not wait for the device, and the
    work that it starts must not depend on values that differ between calls. The tensors that a call returns are
    overwritten by the next call. If the capture fails, a warning says why, and every call runs without a graph.
    """

    def __init__(self, function: Callable[..., Tensor]):
        self.function, self.calls, self.graph, self.captures = function, 0, None, True
        # The capture needs a stream that is not the default one. A thread's own stream keeps the workspaces of cuBLAS,
        # which are kept per stream, apart from those of graphs that run at the same time.
        current = torch.cuda.current_stream()
        self.stream = torch.cuda.Stream() if current == torch.cuda.default_stream() else current

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
