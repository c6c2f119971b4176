"""The ops of the mixers as functions, for use in other models.

q, k, v are [B, T, H, D]; log-decays [B, T, H] are <= 0; ops return `(o, final_state)` and take `initial_state`,
`cu_seqlens` (packed sequences). Each runs on Triton on an NVIDIA GPU and on plain torch elsewhere
(`HF_MEMMIX_BACKEND=torch|triton` overrides this choice). The `naive_` functions compute the paper's recurrences in a
loop.
"""

from hf_memmix_kernels import *  # noqa: F403
from hf_memmix_kernels import __all__  # noqa: F401
