"""Rows of `benchmark.py`: SKA, Mamba-2's SSD by our `gla` and by FLA, and FLA's Gated DeltaNet.

D of a row is the size P of a value; the Koopman rank r is a field of its own. The rows of FLA need FLA to be
installed.
"""

import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor

import hf_memmix_kernels as K

CHUNK_SIZE = 64
SHAPES = [(8, 4096, 12, 64), (1, 32768, 12, 64)]
DECODE = [(1, 1, 12, 64), (8, 1, 12, 64), (64, 1, 12, 64)]


def draw(rank: int):
    def tokens(B: int, T: int, H: int, D: int) -> dict[str, Tensor]:
        sizes = {"q": rank, "k": rank, "v": D}
        return {name: torch.randn(B, T, H, size, device="cuda").bfloat16() for name, size in sizes.items()}

    return tokens


def state(rank: int):
    """The sequences are at different positions of their chunks, so some of the timed steps refresh the operator."""

    def drawn(B: int, H: int, D: int) -> tuple[Tensor, ...]:
        *tensors, position = (torch.zeros(shape, device="cuda") for shape in K.ska_state_shapes(B, H, rank, D))
        return *tensors, position + torch.randint(CHUNK_SIZE, (B, 1), device="cuda")

    return drawn


def ska(rank: int) -> dict:
    return {
        "op": "ska",
        "draw": draw(rank),
        "forward": lambda x: (lambda o, final: (o, *final))(*K.chunk_ska(**x, chunk_size=CHUNK_SIZE)),
        "state": state(rank),
        "step": lambda x, s: K.ska_step(**x, mask=None, gamma=None, eta=None, state=s, chunk_size=CHUNK_SIZE),
        "fields": {"rank": rank, "chunk_size": CHUNK_SIZE},
        "chunk_shapes": SHAPES,
        "decode_shapes": DECODE,
    }


def draw_ssd(B: int, T: int, H: int, D: int) -> dict[str, Tensor]:
    q, k = (F.normalize(torch.randn(B, T, H, D, device="cuda"), dim=-1).bfloat16() for _ in range(2))
    v = torch.randn(B, T, H, D, device="cuda").bfloat16()
    return {"q": q, "k": k, "v": v, "log_decay": -0.1 * torch.rand(B, T, H, device="cuda")}


SSD = {"op": "ssd", "draw": draw_ssd, "chunk_shapes": [(8, 4096, 12, 64), (4, 8192, 8, 128)]}


def fla_ssd(refuses: bool):
    """FLA's op with a decay per token.

    On Hopper, FLA 0.6 refuses its backward with Triton 3.4 to 3.7.1, because its gradients would be wrong there.
    `refuses=False` disables this check: the work and so the time are the same, and the gradients are not used.
    """

    def forward(x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        from fla.ops.common import chunk_o
        from fla.ops.simple_gla import chunk_simple_gla

        chunk_o.TRITON_ABOVE_3_7_1 = not refuses
        return chunk_simple_gla(x["q"], x["k"], x["v"], g=x["log_decay"], output_final_state=True)

    return forward


def draw_delta(channels: bool):
    """As for our op (`benchmark.py`): one decay per head, or per key channel."""

    def draw(B: int, T: int, H: int, D: int) -> dict[str, Tensor]:
        size = (B, T, H, D) if channels else (B, T, H)
        decays = {"log_decay": -0.02 * torch.rand(size, device="cuda")}
        return draw_ssd(B, T, H, D) | decays | {"beta": torch.rand(B, T, H, device="cuda").bfloat16()}

    return draw


def fla_delta(channels: bool, refuses: bool = True):
    """FLA's gated delta rule, or KDA; `refuses` as in `fla_ssd`."""

    def forward(x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        from fla.ops.common import chunk_o
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.kda import chunk_kda

        chunk_o.TRITON_ABOVE_3_7_1 = not refuses
        op = chunk_kda if channels else chunk_gated_delta_rule
        return op(x["q"], x["k"], x["v"], x["log_decay"], x["beta"], output_final_state=True)

    return forward


BENCHES = [
    *(ska(rank) for rank in (24, 32, 64)),
    {**SSD, "forward": lambda x: K.chunk_gla(**x), "fields": {"by": "gla"}},
]
if importlib.util.find_spec("fla"):
    refusal = "Triton >= 3.4.0 and < 3.7.1 on Hopper GPUs produces incorrect results"
    name = "fla chunk_simple_gla"
    BENCHES += [
        {**SSD, "forward": fla_ssd(True), "fields": {"by": name}, "refusal": refusal},
        {**SSD, "forward": fla_ssd(False), "fields": {"by": f"{name}, refusal lifted"}},
        *(
            {
                "op": "gdn",
                "draw": draw_delta(channels),
                "forward": fla_delta(channels, refuses),
                "chunk_shapes": [(4, 8192, 8, 128), (1, 131072, 8, 128)],
                "fields": {"by": by},
                **({"refusal": refusal} if refuses else {}),
            }
            for by, channels, refuses in (
                ("fla chunk_gated_delta_rule", False, True),
                ("fla chunk_gated_delta_rule, refusal lifted", False, False),
                ("fla chunk_kda", True, True),
            )
        ),
    ]
