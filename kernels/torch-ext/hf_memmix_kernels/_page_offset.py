"""The address of the state of one program of a decode step: device code for the `kernels/step.py` of every op."""

import triton
import triton.language as tl


@triton.jit
def state_offset(i_s, heads, size, pages, stride):
    """Elements from the start of a state tensor to the part of program i_s = row * heads + head; `size` per head.

    Without `pages` the state is a contiguous [B, heads, ...]. With them, row b has page pages[b], and pages are
    `stride` elements apart. i_s is int64, and so is the offset: a pool may have more than 2^31 elements.
    """
    if pages is None:
        return i_s * size
    else:
        return tl.load(pages + i_s // heads).to(tl.int64) * stride + i_s % heads * size
