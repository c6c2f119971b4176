"""Student and teacher as one module for the Hugging Face Trainer: the loss is computed inside `forward`.

So every parallel wrapper (DDP, FSDP2, ZeRO-3) sees one module with one forward and one backward pass. Only modules
that are trained, or that these need, are registered as children. The teacher is not registered: it is in no state
dict, checkpoint or optimizer, and is not sharded.
"""

import copy
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from hf_memmix._transformers import masks_without_looking
from hf_memmix.conversion.families import attention_module, attention_prefix, decoder_layers
from hf_memmix.conversion.far_attention import Near
from hf_memmix.conversion.logits import logits_head
from hf_memmix.conversion.teacher_forcing import run_teacher_forced
from hf_memmix.errors import UserError
from hf_memmix.layout_hooks import separate_documents
from hf_memmix.padding import packing_of
from hf_memmix.training._trainer_hooks import WrappedByUnits
from hf_memmix.training.capture import Recorder
from hf_memmix.training.losses import Squares, chunked_forward_kl, chunked_top_k_kl, mean_over_processes
from hf_memmix.training.step_graph import StepGraph


class StudentTeacher(WrappedByUnits, nn.Module):
    """A student that is trained and a frozen teacher (or None). `forward` returns `{"loss": mean over tokens}`.

    All rows have the same number of tokens, or the processes divide by the same number of those that count: the mean
    over processes is that over all tokens.
    """

    main_input_name = "input_ids"

    def __init__(self, student: nn.Module, teacher: nn.Module | None, bf16: bool = False):
        super().__init__()
        self.config = copy.deepcopy(student.config)  # the Trainer writes into it (`use_cache`)
        self.bf16 = bf16
        if teacher is not None:
            teacher.eval().requires_grad_(False)
        self._unregistered = (student, teacher)  # nn.Module does not register modules in a tuple
        self._graph: StepGraph | None = None

    @property
    def plain_student(self) -> nn.Module:
        return self._unregistered[0]

    @property
    def teacher(self) -> nn.Module | None:
        return self._unregistered[1]

    def place_teacher(self, device: torch.device) -> None:
        """Move the teacher, because no wrapper does."""
        if self.teacher is not None:
            self.teacher.to(device)

    def autocast(self, device: torch.device) -> torch.autocast:
        """The context in which the models run on a device."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self.bf16)

    def student_names(self) -> dict[str, str]:
        """The student's name of each tensor, by its name in this module."""
        raise NotImplementedError

    def modules_to_compile(self) -> Iterator[nn.Module]:
        """The modules, none inside another, that compute most of a step."""
        raise NotImplementedError

    def record_steps(self, accumulation: int = 1) -> None:
        """From now on, run the steps as one CUDA graph, see `StepGraph`. No parameter may be frozen afterwards."""
        device = next(self.parameters()).device
        self._graph = StepGraph(self._step, self, Recorder(device), accumulation)

    def forget_steps(self) -> None:
        """Run without a graph again, and free its memory."""
        self._graph = None

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        loss_weight: Tensor | float = 1.0,
        **targets: Tensor,
    ) -> dict[str, Tensor]:
        """`input_ids` [B, T]; `position_ids` [B, T] start again at every packed document. The loss is multiplied by
        `loss_weight`, a scalar. Among `targets`, `loss_mask` [B, T] is true at the tokens that count.
        """
        if self._graph is None or position_ids is not None:  # the shape of what is packed differs from step to step
            loss = self._step(input_ids, position_ids, **targets)
        else:
            loss = self._graph({"input_ids": input_ids, **targets})
        return {"loss": loss * loss_weight}

    def _step(self, input_ids: Tensor, position_ids: Tensor | None = None, **targets: Tensor) -> Tensor:
        masks = nullcontext() if position_ids is not None else masks_without_looking()
        with self.autocast(input_ids.device), masks:
            return self.loss(input_ids, position_ids, **targets).float()


class AlignStudentTeacher(StudentTeacher):
    """The loss of `align`: mean over layers of the relative error of each mixer on the inputs of the teacher's layers.

    With `far_weight`, plus this factor times the same error with each token weighted by the share of the attention's
    output that comes from outside a window of `far_window` tokens (0: of the window beside the memory), see
    `conversion.far_attention`.

    Only the mixers of `layers` (default: all memory layers) are children and are trained; the rest of the student
    is not moved to another device. The teacher stops after the last of these layers.
    """

    def __init__(
        self,
        student,
        teacher,
        layers: list[int] | None = None,
        bf16: bool = False,
        checkpointing: bool = False,
        far_weight: float = 0.0,
        far_window: int = 0,
    ):
        super().__init__(student, teacher, bf16)
        self.layers = student.config.memory_layers if layers is None else layers
        student.requires_grad_(False)
        self.mixers = nn.ModuleDict({str(i): attention_module(student, i) for i in self.layers})
        self.mixers.requires_grad_(True)
        self.squares = Squares()
        self.checkpointing, self.far_weight = checkpointing, far_weight
        self.far_windows = far_windows(student, self.layers, far_window) if far_weight else None

    def student_names(self) -> dict[str, str]:
        prefixes = {str(i): attention_prefix(self.plain_student, i) for i in self.layers}
        return {
            f"mixers.{i}.{name}": f"{prefixes[i]}.{name}"
            for i, mixer in self.mixers.items()
            for name in mixer.state_dict()
        }

    def units(self):
        return iter(self.mixers.values())

    def modules_to_compile(self) -> Iterator[nn.Module]:
        yield from self.mixers.values()
        yield self.squares
        for index, layer in enumerate(decoder_layers(self.teacher)):
            if index not in self.layers:
                yield layer
                continue
            attention = attention_module(self.teacher, index)  # its hook runs the mixer
            for part in layer.children():
                # `far_weight` computes the same attention in another way
                if next(part.parameters(), None) is not None and (part is not attention or not self.far_weight):
                    yield part

    def loss(self, input_ids: Tensor, position_ids: Tensor | None, loss_mask: Tensor | None = None) -> Tensor:
        near: list[tuple[Tensor, Tensor]] = []
        far: list[tuple[Tensor, Tensor]] = []

        def visit(layer: int, ours: Tensor, theirs: Tensor, share: Tensor | None = None) -> None:
            near.append(self.squares(ours, theirs, loss_mask))
            if share is not None:
                far.append(self.squares(ours, theirs, share if loss_mask is None else share * loss_mask))

        run_teacher_forced(
            self.teacher,
            self.plain_student,
            input_ids,
            visit,
            position_ids=position_ids,
            layers=self.layers,
            checkpointing=self.checkpointing,
            far_windows=self.far_windows,
        )
        return _mean_error(near) + (self.far_weight * _mean_error(far) if far else 0)


def _mean_error(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The mean over layers of errors divided by sizes, see `Squares`."""
    errors, sizes = (torch.stack(column) for column in zip(*pairs, strict=True))
    # the same denominator in all processes: then the mean of their losses is the relative error over all tokens
    return (errors / mean_over_processes(sizes).clamp_min(1e-12)).mean()


def far_windows(student: nn.Module, layers: list[int], window: int) -> dict[int, Near]:
    """By layer, the window outside which `far_weight` looks: the one beside the memory, or for a `window` above 0 of
    so many tokens. It reads the same first tokens as the student's.

    Raises:
        UserError: `window` is 0, and a layer has no window beside its memory.
    """
    mixers = {layer: attention_module(student, layer) for layer in layers}
    if without := [layer for layer, mixer in mixers.items() if not (window or mixer.options.local_window)]:
        raise UserError(f"far_window is 0, but layers {without} have no window beside their memory; set far_window")
    windows = {layer: getattr(mixer, "window", mixer) for layer, mixer in mixers.items()}
    return {
        layer: Near(window or mixer.options.local_window, windows[layer].plain.get("sinks", 0))
        for layer, mixer in mixers.items()
    }


class DistillStudentTeacher(StudentTeacher):
    """The loss of `distill`: forward KL divergence of the next-token distributions. The whole student is a child.

    If `teacher` is None, `forward` takes the teacher's top-k probabilities, see `chunked_top_k_kl`.
    """

    def __init__(self, student, teacher, chunk_tokens: int = 2048, bf16: bool = False):
        super().__init__(student, teacher, bf16)
        self.student = student
        self.chunk_tokens = chunk_tokens
        with self.autocast(student.get_input_embeddings().weight.device):  # frozen bf16 and trained fp32 weights
            self.student_head = logits_head(student)
            self.teacher_head = None if teacher is None else logits_head(teacher)

    def student_names(self) -> dict[str, str]:
        return {f"student.{name}": name for name in self.student.state_dict()}

    def units(self):
        return iter(decoder_layers(self.student))

    def modules_to_compile(self) -> Iterator[nn.Module]:
        yield from decoder_layers(self.student)
        if self.teacher is not None:
            yield from decoder_layers(self.teacher)

    def loss(
        self, input_ids: Tensor, position_ids: Tensor | None, loss_mask: Tensor | None = None, **targets: Tensor
    ) -> Tensor:
        inputs = {"input_ids": input_ids, "position_ids": position_ids, "use_cache": False}
        counted = {"mask": loss_mask, "chunk_tokens": self.chunk_tokens}
        ours = self.student.base_model(**inputs).last_hidden_state
        if self.teacher is None:
            return chunked_top_k_kl(ours, self.student_head, **targets, **counted)
        boundaries = packing_of(None, None, position_ids, *input_ids.shape)
        with torch.no_grad(), separate_documents(decoder_layers(self.teacher), boundaries):
            theirs = self.teacher.base_model(**inputs).last_hidden_state
        return chunked_forward_kl(ours, theirs, self.student_head, self.teacher_head, **counted)
