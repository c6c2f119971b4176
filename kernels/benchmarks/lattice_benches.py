"""Rows of `benchmark.py` for Lattice: every variant.

D of a row is both the number of slots and the size of a slot.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

import hf_memmix_kernels as K

SHAPES = [(8, 4096, 12, 64)]
LONG = (1, 131072, 12, 64)
DECODE = [(1, 1, 12, 64), (8, 1, 12, 64), (64, 1, 12, 64)]


def draw(B: int, T: int, H: int, D: int) -> dict[str, Tensor]:
    q, k, v = (F.normalize(torch.randn(B, T, H, D, device="cuda"), dim=-1).bfloat16() for _ in range(3))
    return {"q": q, "k": k, "v": v, "gamma": torch.rand(B, T, H, device="cuda")}


def state(B: int, H: int, D: int) -> tuple[Tensor, ...]:
    return (torch.linalg.qr(torch.randn(B, H, D, D, device="cuda"))[0].contiguous(),)


def lattice(variant: str) -> dict:
    return {
        "op": "lattice",
        "draw": draw,
        "forward": lambda x: K.chunk_lattice(**x, variant=variant),
        "state": state,
        "step": lambda x, s: K.lattice_step(**x, state=s[0], variant=variant),
        "fields": {"variant": variant},
        "chunk_shapes": [*SHAPES, LONG] if variant == "dec" else SHAPES,
        "decode_shapes": DECODE,
    }


BENCHES = [lattice(variant) for variant in ("dec", "enc", "sim")]
