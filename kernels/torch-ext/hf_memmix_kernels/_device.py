"""What the launches need to know about a GPU: the only module that asks torch for it. It does not import Triton.

A launch that depends on the GPU asks here for a fact (how much shared memory, which vendor), never for a model name or
a compute capability. Kernels in Triton's interpreter are launched as on an H200.
"""

import functools
from typing import NamedTuple

import torch

from . import _environment


class Device(NamedTuple):
    """Facts about a GPU.

    Attributes:
        arch: as compilers name it: "sm_90" for an H200, "gfx942" for an MI300X.
        shared: bytes of shared memory that one program may have.
        processors: multiprocessors; on AMD, compute units.
    """

    arch: str
    shared: int
    processors: int

    @property
    def nvidia(self) -> bool:
        return self.arch.startswith("sm_")

    @property
    def capability(self) -> int:
        """10 times the compute capability of an NVIDIA GPU: 90 for an H200."""
        return int(self.arch.removeprefix("sm_"))


H200 = Device("sm_90", 227 * 1024, 132)

OLDEST = 80  # capability; older tensor cores know neither bfloat16 nor TF32
# major capability, or AMD: {op: {size above which: version of Triton from which on all its kernels compile}}; tried
# were 3.6 and 3.9
TRITON_FROM = {10: {"gka": {0: (3, 9)}, "ska": {32: (3, 9)}}, "AMD": {"ska": {0: (3, 9)}}}
# on NVIDIA's GPUs: {op: {size above which: bytes of shared memory that its largest kernel needs}}
SHARED = {"gka": {128: 213_248}, "window": {128: 141_312}}
# on AMD's GPUs {op: sizes above the first number and up to the second do not run}: gka's forward scan and the adjoint
# of lattice's walk do not compile, a tile of window's forward pass does not fit
NOT_FOR_AMD = {"gka": (-1, 256), "lattice": (-1, 128), "window": (64, 128)}


@functools.cache
def of_index(index: int) -> Device:
    """The GPU with this index."""
    facts = torch.cuda.get_device_properties(index)
    if torch.version.hip is None:
        arch, shared = f"sm_{facts.major}{facts.minor}", facts.shared_memory_per_block_optin
    else:
        # the rest of the name are features, as in gfx942:sramecc+:xnack-
        arch, shared = facts.gcnArchName.split(":")[0], facts.shared_memory_per_block
    return Device(arch, shared, facts.multi_processor_count)


def obstacle(op: str, device: Device, triton: tuple[int, int], size: int = 0) -> str | None:
    """Why the kernels of `op` cannot run on a GPU with this (major, minor) version of Triton; None if they can.

    `size` is the largest head size, or the rank, where the tables of this module have sizes.
    tests/kernels/test_device.py compares the result with what kernels/benchmarks/gpu_generations.py found.
    """
    above, largest = NOT_FOR_AMD.get(op, (0, 0))
    if not device.nvidia and above < size <= largest:
        return f"its kernels do not compile for AMD GPUs, or do not fit into them ({device.arch})"
    if device.nvidia and device.capability < OLDEST:
        return f"its kernels need an NVIDIA GPU from sm_{OLDEST} (Ampere) on, this is {device.arch}"
    versions = TRITON_FROM.get(device.capability // 10 if device.nvidia else "AMD", {}).get(op, {})
    needed = max((version for above, version in versions.items() if size > above), default=triton)
    if triton < needed:
        needed, got = (".".join(map(str, version)) for version in (needed, triton))
        return f"its kernels for {device.arch} need Triton >= {needed}, {got} is installed; update torch"
    bytes_needed = max((needed for above, needed in SHARED.get(op, {}).items() if size > above), default=0)
    if device.nvidia and bytes_needed > device.shared:
        return (
            f"its kernels for heads of {size} need {bytes_needed // 1024} KiB of shared memory, {device.arch} has"
            f" {device.shared // 1024} KiB; take smaller heads"
        )
    return None


def device_of(x: torch.Tensor) -> Device:
    """The GPU on which a kernel for `x` runs."""
    return of_index(x.get_device()) if x.is_cuda else H200


def compiled(x: torch.Tensor) -> bool:
    """Whether kernels for `x` are compiled. The interpreter cannot multiply bfloat16 and has no inline assembly."""
    return x.is_cuda and not _environment.interprets()


def has_ptx(x: torch.Tensor) -> bool:
    """Whether kernels for `x` may contain PTX, the assembly of NVIDIA's GPUs."""
    return compiled(x) and device_of(x).nvidia


def dot_precision(precision: str) -> str:
    """The `input_precision` of `tl.dot` for float32 operands: "tf32" and "tf32x3" exist on NVIDIA's tensor cores.

    AMD's matrix cores multiply float32 exactly.
    """
    return precision if torch.version.hip is None else "ieee"
