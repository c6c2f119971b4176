"""Weights that vLLM packs for a CPU, all with the same number of threads.

oneDNN chooses the layout of a packed weight by the number of threads at that moment. vLLM keeps oneDNN's products for
the whole process, by the sizes of weight and input, whatever the layout (`ClassMatmulCacheKey` in its
csrc/cpu/dnnl_helper.cpp). So a weight that is packed with another number of threads is read in a wrong layout. Draft
tokens of the method ngram change the number: numba sets it for all of OpenMP. Without this file, another engine of the
process then answers wrongly, and so does the same engine after a reload of its weights.
"""

import functools

import torch

# imported as the plugin is registered: before the first engine of a process, of any model, packs weights
THREADS = torch.get_num_threads()


def pack_alike(ops):
    """Have `create_onednn_mm` of vLLM's `_custom_ops` (`ops`) pack with `THREADS`; nothing else computes with them."""
    pack = ops.create_onednn_mm
    if hasattr(pack, "threads"):
        return

    @functools.wraps(pack)
    def with_threads(*args, **kwargs):
        now = torch.get_num_threads()
        torch._C.set_num_threads(THREADS)  # on a CPU vLLM replaces torch.set_num_threads by a warning
        try:
            return pack(*args, **kwargs)
        finally:
            torch._C.set_num_threads(now)

    with_threads.threads = THREADS
    ops.create_onednn_mm = with_threads
