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


@triton.jit
def same_for_all(p, pages):
    """The number at p of a state, the same in all threads of a program, which branch on it, even while another program
    with the same page writes it: rows that only pad a batch share a page.

    One thread reads it, by adding 0, and tells the others. If each thread loaded it, threads of one warp could take
    different branches, which the compiler rules out: they share the warp's uniform registers, so addresses go wrong.
    Without pages no other program writes it.
    """
    if pages is None:
        return tl.load(p)
    else:
        return tl.atomic_add(p, 0, sem="relaxed")
