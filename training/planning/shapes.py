"""The sizes of a conversion that memory and time depend on, counted on models without values (meta device)."""

from dataclasses import dataclass

from torch import nn

from hf_memmix.conversion.families import attention_module, decoder_layers
from hf_memmix.mixers import BesideWindow
from hf_memmix.mixers.kept_bytes import KeptBytes
from hf_memmix.swap import memory_mixers
from hf_memmix.training.teachers import lora_names

BESIDE = " + "  # in the kind of a layer that holds two mixers


@dataclass(frozen=True)
class Part:
    """A mixer of the student: what it keeps for the backward pass, and the channels of its key/value heads."""

    kept: KeptBytes | None
    keys: int


@dataclass(frozen=True)
class Shapes:
    """Counts of parameters, and widths in channels.

    Args:
        student, teacher: all parameters.
        active: parameters of the teacher with which one token computes: all, without the experts that it does not use.
        mixers: of the student's mixers.
        attention: of the teacher's attention that the mixers replace.
        embedding, head: of the input embeddings and of the output projection; tied ones are counted as `head` only.
        matrices: of the frozen layers outside the mixers that LoRA corrects.
        mixer_matrices: of those in the mixers.
        lora, mixer_lora: of corrections of rank 1 for these matrices.
        teacher_layer, mixer: of one decoder layer of the teacher and of one mixer, the largest ones.
        layers, kept: number of layers, and of those that stay attention.
        hidden, inner, vocabulary: widths of the residual stream, of the MLP and of the logits. The MLP of a mixture of
            experts is as wide as all experts of one token together.
        queries, keys: channels of all query heads and of all key/value heads.
        heads: number of query heads.
        kinds: number of layers by mixer; by two names where a window stands beside a memory.
        parts: the mixers by name.
    """

    student: int
    teacher: int
    active: int
    mixers: int
    attention: int
    embedding: int
    head: int
    matrices: int
    mixer_matrices: int
    lora: int
    mixer_lora: int
    teacher_layer: int
    mixer: int
    layers: int
    kept: int
    hidden: int
    inner: int
    vocabulary: int
    queries: int
    keys: int
    heads: int
    kinds: dict[str, int]
    parts: dict[str, Part]

    @classmethod
    def of(cls, teacher: nn.Module, student: nn.Module) -> "Shapes":
        """The shapes of a teacher and of the student that was made of it; both may be on the meta device."""
        config, converted = student.config, student.config.memory_layers
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        groups = getattr(config, "num_key_value_heads", None) or heads

        def key_width(mixer) -> int:
            return (heads if getattr(mixer.options, "unshare_kv_heads", False) else groups) * head_dim

        inputs, outputs = student.get_input_embeddings().weight, student.get_output_embeddings().weight
        tied = inputs is outputs or getattr(config, "tie_word_embeddings", False)
        outside, every = (
            [student.get_submodule(name) for name in lora_names(student, mixers)] for mixers in (False, True)
        )
        inside = [layer for layer in every if all(layer is not other for other in outside)]
        mixers = list(memory_mixers(student).values())
        parts = [part for m in mixers for part in ((m.memory, m.window) if isinstance(m, BesideWindow) else (m,))]
        kinds = [mixer.name + (BESIDE + "window" if mixer.options.local_window else "") for mixer in mixers]
        chosen = getattr(config, "num_experts_per_tok", None) or getattr(config, "moe_k", None)
        idle = [_idle(layer, chosen) for layer in decoder_layers(teacher)]
        inner = getattr(config, "intermediate_size", None)
        if inner is None or any(idle):  # from the parameters, for three matrices
            rest = (
                _size(decoder_layers(teacher)[i]) - _size(attention_module(teacher, i)) - idle[i] for i in converted
            )
            inner = max(rest) // (3 * config.hidden_size)
        return cls(
            student=_size(student),
            teacher=_size(teacher),
            active=_size(teacher) - sum(idle),
            mixers=sum(map(_size, mixers)),
            attention=sum(_size(attention_module(teacher, i)) for i in converted),
            embedding=0 if tied else inputs.numel(),
            head=outputs.numel(),
            matrices=sum(map(_size, outside)),
            mixer_matrices=sum(map(_size, inside)),
            lora=sum(sum(layer.weight.shape) for layer in outside),
            mixer_lora=sum(sum(layer.weight.shape) for layer in inside),
            teacher_layer=max(_size(row) for row in decoder_layers(teacher)),
            mixer=max(map(_size, mixers)),
            layers=len(config.mixer_types),
            kept=len(config.mixer_types) - len(converted),
            hidden=config.hidden_size,
            inner=inner,
            vocabulary=config.vocab_size,
            queries=heads * head_dim,
            keys=groups * head_dim,
            heads=heads,
            kinds={kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
            parts={part.name: Part(part.kept_for_backward(), key_width(part)) for part in parts},
        )


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _idle(layer: nn.Module, chosen: int | None) -> int:
    """Parameters of the experts of a layer that a token does not use, if it uses `chosen` of them.

    The experts of a layer are tensors [experts, ...] of three dimensions. Layers without experts have no such tensors.
    """
    if chosen is None:
        return 0
    experts = [p for p in layer.parameters() if p.ndim == 3 and len(p) > chosen]
    return sum(p.numel() - p.numel() * chosen // len(p) for p in experts)
