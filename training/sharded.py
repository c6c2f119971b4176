"""Gathers the weights of a `StudentTeacher` into a plain state dict of the student, and loads one, for every launcher.

One process and DDP: the parameters themselves. FSDP2: every tensor is a DTensor. ZeRO-3: a parameter is empty, and
DeepSpeed gives it its entries for a while (those of few entries are always whole). Both are gathered one at a time on
all processes.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import initialization as init

from hf_memmix.errors import UserError
from hf_memmix.training._trainer_hooks import replace_contents
from hf_memmix.training.student_teacher import StudentTeacher
from hf_memmix.training.teachers import without_lora


def local(tensor: Tensor) -> Tensor:
    """This process's part of a sharded tensor; any other tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a sharded one (all processes must call this); any other tensor itself."""
    if hasattr(tensor, "ds_id"):  # a parameter of ZeRO-3
        from deepspeed import zero

        with zero.GatheredParameters([tensor]):
            return tensor.detach().clone()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def is_sharded(pair: StudentTeacher) -> bool:
    """Whether the parameters are spread over several processes (FSDP2)."""
    return any(hasattr(parameter, "full_tensor") for parameter in pair.parameters())


def gather(pair: StudentTeacher, keep: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Names and full tensors of the pair, on the CPU. Every process must iterate; without `keep` it yields nothing."""
    for name, tensor in pair.state_dict(keep_vars=True).items():
        full = whole(tensor)
        if keep:
            yield name, full.detach().cpu()


def student_state(pair: StudentTeacher, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The student's state dict: tensors of the pair's `state`; those that are not in `state` come from the student."""
    names = pair.student_names()
    ours = {names[name]: tensor for name, tensor in state.items()}
    own = {name: ours.get(name, tensor) for name, tensor in pair.plain_student.state_dict().items()}
    plain = without_lora(pair.plain_student, own)
    tied = getattr(pair.plain_student, "all_tied_weights_keys", None) or {}
    return {name: tensor for name, tensor in plain.items() if name not in tied}


@torch.no_grad()
def load(pair: StudentTeacher, state: dict[str, Tensor]) -> None:
    """Copy the student's tensors `state` into the pair. Raises ValueError if one of them is missing."""
    names = pair.student_names()
    tied = getattr(pair.plain_student, "all_tied_weights_keys", None) or {}
    for name, tensor in pair.state_dict().items():
        source = names[name] if names[name] in state else tied.get(names[name])
        if source not in state:
            raise UserError(
                f"the checkpoint has no {names[name]}, so it belongs to another student; give another output folder"
            )
        value = state[source].to(local(tensor).device, tensor.dtype)
        if hasattr(tensor, "full_tensor"):
            from torch.distributed.tensor import distribute_tensor

            value = distribute_tensor(value, tensor.device_mesh, tensor.placements)
        tensor.copy_(value)


def unshard_student(pair: StudentTeacher) -> None:
    """Turn `pair.plain_student` back into a model that is not sharded, on the CPU, in every process, in place."""
    student = pair.plain_student
    with init.no_init_weights():
        fresh = type(student)(student.config).float()
    fresh.load_state_dict(student_state(pair, dict(gather(pair))), strict=False)  # only tied names are missing
    fresh.tie_weights()
    replace_contents(student, fresh)
