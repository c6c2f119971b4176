"""How much GPU memory a training stage needs: arithmetic on shapes.

    peak = weights + optimizer + teacher + max(forward, backward)
    forward  = bf16 copies of the trained weights + activations of all layers + logits
    backward = gradients + activations of one layer

A stage trains fp32 weights in autocast to bf16 (`training.student_teacher`). At the end of the forward pass all
activations are there and no gradient is; at the end of the backward pass all gradients are there and no activation.
With gradient checkpointing only the input of every layer is stored, and one layer at a time is computed again.

"Activations" are the tensors that autograd keeps for the backward pass, as the Triton kernels keep them on a GPU. A
linear layer keeps its input in bf16; the autocast of an fp32 input makes one such copy for each layer that reads it.
"""

from dataclasses import asdict, dataclass

from hf_memmix.errors import UserError
from hf_memmix.mixers import ATTENTION, MIXERS
from hf_memmix.mixers.kept_bytes import KeptBytes
from hf_memmix.training.planning.shapes import BESIDE, Part, Shapes
from hf_memmix.training.quantized import BYTES_PER_WEIGHT

BF16, FP32 = 2, 4
# bytes of optimizer states per trained parameter that are on the GPU; those in 8 bit have an fp32 scale for 256
# values. Paged states are in the memory of the CPU while the GPU has no room for them
OPTIMIZERS = {"adamw_torch_fused": 8.0, "adamw_bnb_8bit": 2 * (1 + 4 / 256), "paged_adamw_8bit": 0.0}
# tensors [tokens, vocabulary] that `chunked_forward_kl` holds at its largest, with Triton: the logits of both models
# in bf16; the student's become their gradient
LOGIT_BYTES = 2 * BF16
# and `chunked_top_k_kl`: the student's logits and their gradient in bf16, and in fp32 its log-probabilities, their
# copy without the top k, the exponentials of both and a gradient
TOP_K_BYTES = 2 * BF16 + 5 * FP32


# of attention, counted from what its kernel keeps. Mixers declare their own, `MemoryMixer.kept_bytes`: gka's is
# counted too, the others are measured: the peak memory of a training step of a 1B model beside that with gka
# (kernels/benchmarks/results/model_h200.json)
OF_ATTENTION = KeptBytes(3, queries=6, keys=4, heads=4)
# of a window beside a memory: both outputs in one tensor, and the memory's output before m
OF_BOTH = KeptBytes(0, hidden=2, queries=2)


@dataclass(frozen=True)
class Settings:
    """How a stage is run on one GPU.

    Args:
        stage: "align", "align --stream" or "distill".
        rows: sequences of one forward on this GPU.
        length: tokens per sequence.
        checkpointing: compute activations again in the backward pass.
        optimizer: a key of `OPTIMIZERS`.
        teacher: "copy", "lora" or "cache", as in a recipe.
        lora_mixers, quantize, lora_rank, chunk_tokens: as in a recipe.
        gpus: number of GPUs; `sharded`: FSDP2 divides weights, gradients and optimizer among them.
        logit_bytes: what the loss holds for one token and one word of the vocabulary.
    """

    stage: str
    rows: int = 1
    length: int = 2048
    checkpointing: bool = False
    optimizer: str = "adamw_torch_fused"
    teacher: str = "copy"
    lora_mixers: bool = False
    quantize: str = "none"
    lora_rank: int = 16
    chunk_tokens: int = 2048
    gpus: int = 1
    sharded: bool = False
    logit_bytes: int = LOGIT_BYTES

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def lora(self) -> bool:
        return self.teacher == "lora"


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU at the peak of a stage; `total` is their sum.

    Args:
        weights: parameters of the student that are on the GPU.
        optimizer: its states.
        teacher: parameters that only the teacher has.
        gradients, copies: gradients, and bf16 copies of trained weights, as far as they exist at the peak.
        activations: what is kept for the backward pass at the peak.
        logits: what the loss holds at the peak.
    """

    weights: float
    optimizer: float
    teacher: float
    gradients: float
    copies: float
    activations: float
    logits: float

    @property
    def total(self) -> float:
        return sum(asdict(self).values())


def memory_of(shapes: Shapes, settings: Settings) -> Memory:
    """The peak memory of a stage on one GPU, without what the CUDA context and the allocator take.

    Raises:
        ValueError: a mixer does not say what it keeps.
    """
    if unknown := sorted(name for name, part in shapes.parts.items() if part.kept is None):
        raise UserError(f"the memory of {unknown[0]} in training is not known; declare kept_bytes in its class")
    return (_distill if settings.stage == "distill" else _align)(shapes, settings)


def _distill(s: Shapes, run: Settings) -> Memory:
    trained, frozen = _parameters(s, run)
    share = run.gpus if run.sharded else 1
    weights = FP32 * trained / share + frozen
    optimizer = OPTIMIZERS[run.optimizer] * trained / share
    teacher = _teacher(s, run)
    matrices = trained - (0 if run.lora else s.embedding)
    forward = {
        "gradients": 0.0,
        "copies": BF16 * matrices,  # autocast keeps them until the forward pass ends
        "activations": _stored(s, run) + _stream(s, run),
        "logits": _logits(s, run),
    }
    backward = {
        "gradients": FP32 * trained / share,
        "copies": BF16 * matrices / s.layers if run.checkpointing else 0.0,
        "activations": layer_bytes(s, run) + BF16 * s.inner * 3 * run.tokens,  # and gradients within the layer
        "logits": 0.0,
    }
    if not run.lora:
        # the gradient of the output projection comes first, with that of a chunk of tokens in both dtypes
        forward["gradients"] = FP32 * s.head / share + (BF16 + FP32) * s.head
    worse = max(forward, backward, key=lambda part: sum(part.values()))
    return Memory(weights, optimizer, teacher, **worse)


def _align(s: Shapes, run: Settings) -> Memory:
    """Only mixers are trained. By streaming, one layer of the teacher and one mixer are on the GPU at a time."""
    streamed = run.stage == "align --stream"
    trained = s.mixer if streamed else s.mixers
    layers = 1 if streamed else s.layers - s.kept
    teacher = BF16 * (s.teacher_layer if streamed else s.teacher)
    # a mixer gets its input in fp32, and the loss keeps the difference of the outputs in fp32
    one = 2 * FP32 * s.hidden * run.tokens
    inside = max(_inside(s, kind, run) for kind in s.kinds) * run.tokens
    # what the teacher's last layer holds meanwhile: its residual stream, queries, keys, values and output of the
    # attention. The teacher stops there, before the MLP
    passing = BF16 * (4 * s.hidden + 2 * s.queries + 2 * s.keys) * run.tokens
    forward = {
        "gradients": FP32 * trained if streamed else 0.0,
        "copies": BF16 * trained,
        "activations": layers * one + inside * (1 if run.checkpointing else layers) + passing,
    }
    backward = {
        "gradients": FP32 * trained,
        "copies": BF16 * trained / layers if run.checkpointing else 0.0,
        "activations": one + inside,
    }
    worse = max(forward, backward, key=lambda part: sum(part.values()))
    return Memory(
        weights=FP32 * trained, optimizer=OPTIMIZERS[run.optimizer] * trained, teacher=teacher, logits=0.0, **worse
    )


def _parameters(s: Shapes, run: Settings) -> tuple[float, float]:
    """The number of trained parameters of `distill`, and the bytes of the frozen ones."""
    if not run.lora:
        return float(s.student), 0.0
    corrections = run.lora_rank * (s.lora + (s.mixer_lora if run.lora_mixers else 0))
    matrices = s.matrices + (s.mixer_matrices if run.lora_mixers else 0)
    whole = s.mixers - (s.mixer_matrices if run.lora_mixers else 0)
    other = s.student - s.mixers - s.matrices
    return float(corrections + whole), matrices * BYTES_PER_WEIGHT.get(run.quantize, BF16) + BF16 * other


def _teacher(s: Shapes, run: Settings) -> float:
    if run.teacher == "cache":
        return 0.0
    return s.attention * BYTES_PER_WEIGHT.get(run.quantize, BF16) if run.lora else BF16 * s.teacher


def _residual(run: Settings) -> int:
    """Bytes per channel of the residual stream: the dtype of the embeddings."""
    return BF16 if run.lora else FP32


def _inside(s: Shapes, kind: str, run: Settings) -> float:
    """Bytes per token that the mixers, or attention, of a layer keep, with the copies of their input."""
    parts = kind.split(BESIDE)
    joined = OF_BOTH.per_token(s.hidden, s.queries, s.keys, s.heads) if len(parts) > 1 else 0
    return joined + sum(_of_one(s, part, run) for part in parts)


def _of_one(s: Shapes, kind: str, run: Settings) -> float:
    part = Part(OF_ATTENTION, s.keys) if kind == ATTENTION else s.parts[kind]
    kept, copies = part.kept, part.kept.inputs
    if run.lora:
        # the input is bf16: layers without a correction share it, each correction makes a copy
        steering = len(MIXERS[kind].steering_layers) if kind in MIXERS else 0
        corrected = kept.inputs - steering if run.lora_mixers or kind == ATTENTION else 0
        copies = corrected + bool(kept.inputs - corrected)
    return BF16 * copies * s.hidden + kept.per_token(s.hidden, s.queries, part.keys, s.heads)


def layer_bytes(s: Shapes, run: Settings) -> float:
    """Bytes of the activations of one layer, the largest one: two norms, the MLP and the mixer."""
    around = 2 * _residual(run) * s.hidden + 2 * BF16 * s.hidden + 3 * BF16 * s.inner
    kinds = [*s.kinds, *([ATTENTION] if s.kept else [])]
    return (around + max(_inside(s, kind, run) for kind in kinds)) * run.tokens


def _stored(s: Shapes, run: Settings) -> float:
    """Bytes of the activations of all layers at the end of the forward pass."""
    if run.checkpointing:
        return s.layers * _residual(run) * s.hidden * run.tokens
    kinds = {**s.kinds, ATTENTION: s.kept}
    largest = max(_inside(s, kind, run) for kind, count in kinds.items() if count)
    mixed = sum(count * _inside(s, kind, run) for kind, count in kinds.items())
    return s.layers * layer_bytes(s, run) + (mixed - s.layers * largest) * run.tokens


def _stream(s: Shapes, run: Settings) -> float:
    """The last hidden states of both models, as the loss and the last norm keep them, and their gradient."""
    return (3 * _residual(run) + BF16) * s.hidden * run.tokens


def _logits(s: Shapes, run: Settings) -> float:
    """The largest the loss holds for one chunk of tokens."""
    per = TOP_K_BYTES if run.teacher == "cache" else run.logit_bytes
    return per * min(run.chunk_tokens, run.tokens) * s.vocabulary
