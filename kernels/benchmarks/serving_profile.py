"""Where the time of a decode step of vLLM goes: functions of the host, and kernels of the GPU."""

import functools
import statistics
import time

import torch

# of vLLM's two model runners; what a runner does not have is not timed
RUNNER = (
    "execute_model", "sample_tokens",  # everything but the scheduler
    "_update_states", "_prepare_inputs", "_build_attention_metadata", "_model_forward", "_sample",  # of the first
    "prepare_inputs", "prepare_attn", "sample",  # of the second
)  # fmt: skip
SCHEDULER = ("schedule", "update_from_output")
STEPS = 40  # of a measurement of the host
GPU_STEPS = 10  # of a measurement of the GPU, under PyTorch's profiler
KERNELS = 12  # the kernels that are told by name, those that take longest first


class Host:
    """Wall time of functions per step of the engine, with the functions that they call.

    A function that starts work on the GPU returns before the work is done, one that waits for it does not.

    Args:
        runner, scheduler: of the engine. The functions stay timed until `close`.
    """

    def __init__(self, runner, scheduler):
        from vllm.v1.attention.backend import AttentionMetadataBuilder

        self.now, self.steps, self.replaced = {}, [], []
        for name in RUNNER:
            self._time(type(runner), name, name)
        for name in SCHEDULER:
            self._time(type(scheduler), name, name)
        for builder in _subclasses(AttentionMetadataBuilder):
            if "build" in vars(builder):
                self._time(builder, "build", f"build of {builder.__name__}")

    def _time(self, owner: type, name: str, label: str):
        function = getattr(owner, name, None)
        if function is None:
            return

        @functools.wraps(function)
        def timed(*args, **kwargs):
            start = time.perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                spent, calls = self.now.get(label, (0, 0))
                self.now[label] = (spent + time.perf_counter_ns() - start, calls + 1)

        own = vars(owner).get(name)  # None if the function is inherited
        self.replaced.append((owner, name, own))
        setattr(owner, name, timed)

    def measure(self, step) -> dict:
        """Microseconds of a step, and of each function in a step: medians.

        Args:
            step: a function that runs one step of the engine.
        """
        whole, steps = [], []
        for _ in range(STEPS):
            self.now = {}
            start = time.perf_counter_ns()
            step()
            whole.append(time.perf_counter_ns() - start)
            steps.append(self.now)
        functions = {}
        for label in dict.fromkeys(label for found in steps for label in found):
            spent, calls = zip(*(found.get(label, (0, 0)) for found in steps), strict=True)
            functions[label] = {"us": round(statistics.median(spent) / 1e3, 1), "calls": statistics.median(calls)}
        return {"step_us": round(statistics.median(whole) / 1e3, 1), "functions": functions}

    def close(self):
        for owner, name, own in self.replaced:
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)


def measure_gpu(step) -> dict:
    """Microseconds per step in which the GPU is busy, kernels per step, and the kernels that take longest.

    Args:
        step: a function that runs one step of the engine.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(GPU_STEPS):
            step()
        torch.cuda.synchronize()
    found = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    return {
        "gpu_us": round(sum(event.self_device_time_total for event in found) / GPU_STEPS, 1),
        "gpu_kernels": sum(event.count for event in found if event.self_device_time_total) / GPU_STEPS,
        "kernels": {
            event.key[:100]: {
                "us": round(event.self_device_time_total / GPU_STEPS, 1), "calls": event.count / GPU_STEPS
            }
            for event in found[:KERNELS]
        },
    }  # fmt: skip


def _subclasses(owner: type):
    for child in owner.__subclasses__():
        yield child
        yield from _subclasses(child)
