"""Measures the time of kernels by name, for the scripts that divide the time of an op among its kernels."""

from collections.abc import Callable

import torch

REPEATS = 3


def kernel_ms(call: Callable[[], object], prefix: str) -> dict[str, float]:
    """Milliseconds of each kernel of a call whose name begins with `prefix`; the mean of three calls after
    a warm-up.
    """
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(REPEATS):
            call()
        torch.cuda.synchronize()
    return {
        event.key: round(event.self_device_time_total / 1e3 / REPEATS, 4)
        for event in profiler.key_averages()
        if event.key.startswith(prefix)
    }
