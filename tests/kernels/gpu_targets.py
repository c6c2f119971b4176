"""The GPUs for which the kernels are compiled without having one."""

from hf_memmix_kernels._device import Device

# one GPU of each generation. Shared memory: CUDA C++ Programming Guide, "Technical Specifications per Compute
# Capability", the most per thread block; for AMD the local data share of a workgroup
TARGETS = {
    device.arch: device
    for device in (
        Device("sm_80", 163 * 1024, 108),  # A100
        Device("sm_86", 99 * 1024, 84),  # RTX 3090, A10
        Device("sm_89", 99 * 1024, 128),  # RTX 4090, L4
        Device("sm_90", 227 * 1024, 132),  # H100, H200
        Device("sm_100", 227 * 1024, 148),  # B200
        Device("sm_120", 99 * 1024, 170),  # RTX 5090
        Device("gfx942", 64 * 1024, 304),  # MI300X
    )
}
