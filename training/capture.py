"""Records what a function does on a GPU as a CUDA graph, and cleans up after a recording that fails.

After one, PyTorch (2.11 to 2.13) is left in a state in which later work fails: the generator of random numbers still
counts for the graph, and the allocator still gives it memory. `Recorder.record` ends both.
"""

import contextlib
import gc
from collections.abc import Callable

import torch

_failed: list[torch.cuda.CUDAGraph] = []  # the allocator of pinned memory still asks them which streams are recorded


class Recorder:
    """Runs functions on a stream of its own, and records them there.

    What a function computes is for the caller's stream afterwards, and must be kept until the next call.
    """

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device)

    def run(self, function: Callable[[], None]) -> None:
        """Run a function, after the work of the caller's stream and before its later work.

        The libraries get their memory on this stream here, and autograd its nodes: a recording must find both there.
        """
        caller = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            function()
        caller.wait_stream(self._stream)

    def record(self, function: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """The graph of a function, which has not run yet.

        Raises:
            RuntimeError: an operation waits for the GPU or for another stream, or there is not enough memory. It is
                the first error, and not that of the recording, which follows from it.
        """
        gc.collect()  # what is freed during the recording could wait for the GPU
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        graph, pool, first = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle(), None
        with torch.cuda.stream(self._stream):
            # other threads, such as one that pins the next batch, may do what they like
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                function()
            except Exception as error:
                first = error
            try:
                graph.capture_end()
            except RuntimeError as error:
                first = first or error
                self._clean_up(graph, pool)
        try:
            if first is not None:
                raise first
        finally:
            first = None  # its traceback holds this frame, and tensors of the function
        return graph

    def _clean_up(self, graph: torch.cuda.CUDAGraph, pool) -> None:
        _failed.append(graph)
        for end in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
            with contextlib.suppress(RuntimeError):
                end(self._stream.device.index, pool)
        with contextlib.suppress(RuntimeError):
            graph.reset()
        torch.cuda.synchronize()
        # the generator counts on its own again after a recording that succeeds
        mark, other = torch.zeros(1, device=self._stream.device), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        other.capture_begin(capture_error_mode="thread_local")
        mark.zero_()
        other.capture_end()
