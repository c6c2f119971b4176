"""Runs each mixer on the input of the attention that it replaces, inside the *teacher*, and compares the outputs.

So an error of one layer does not change the input of the next one, and every layer can be trained and measured alone
(second stage of MOHAWK, arXiv:2408.10189). One forward pass of the teacher is enough for all layers.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_memmix.conversion.families import attention_module, decoder_layers
from hf_memmix.conversion.far_attention import Near, shares_from_outside
from hf_memmix.errors import UserError
from hf_memmix.layout_hooks import separate_documents
from hf_memmix.padding import packing_of
from hf_memmix.token_layout import TokenLayout


class _StopForward(Exception):
    """Ends the teacher's forward pass after the last of the requested layers."""


def run_teacher_forced(
    teacher: nn.Module,
    student: nn.Module,
    input_ids: Tensor,
    visit: Callable[..., None],
    *,
    position_ids: Tensor | None = None,
    layers: list[int] | None = None,
    checkpointing: bool = False,
    far_windows: dict[int, Near] | None = None,
) -> Tensor | None:
    """Run the teacher on `input_ids` [B, T] without gradients and call `visit(layer, mixer_output, attention_output)`.

    Both outputs are [B, T, hidden]. The mixer's output has a gradient if gradients are enabled where this function is
    called. A mixer is computed when the teacher reaches its layer, so only the tensors that `visit` stores stay in
    memory.

    Args:
        position_ids: [B, T], starting at 0 in every packed document. Then no layer mixes tokens of two documents.
        layers: a part of the memory layers. The teacher stops at the last of them.
        checkpointing: compute each mixer again in the backward pass, so that its activations are not stored.
        far_windows: a window by layer. `visit` then gets a fourth argument, the share [B, T] of the
            attention's output that comes from outside the window, see `far_attention`.

    Returns:
        the last hidden states [B, T, hidden], or None if the teacher was stopped.

    Raises:
        ValueError: the models do not fit together, the teacher would attend across packed documents, or its attention
            does not tell what `far_windows` asks for.
    """
    every = student.config.memory_layers
    check_same_shape(teacher, student)
    training = torch.is_grad_enabled()
    dtype = student.get_input_embeddings().weight.dtype  # a bf16 teacher may teach an fp32 student
    boundaries = packing_of(None, None, position_ids, *input_ids.shape)
    last = None if layers is None else max(layers)
    handles = []

    def hook_for(layer: int):
        mixer = attention_module(student, layer)

        def hook(module, args, kwargs, output):
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            inputs = {
                "hidden_states": hidden.to(dtype),
                "position_embeddings": kwargs.get("position_embeddings"),
                "memmix_layout": TokenLayout(cu_seqlens=boundaries),
            }
            shares = ()
            if far_windows is not None:
                shares = (shares_from_outside(module, args, kwargs, far_windows[layer], position_ids),)
            with torch.set_grad_enabled(training):
                run = functools.partial(checkpoint, mixer, use_reentrant=False) if checkpointing else mixer
                visit(layer, run(**inputs)[0], output[0], *shares)
            if layer == last:
                raise _StopForward

        return hook

    try:
        for layer in every if layers is None else layers:
            module = attention_module(teacher, layer)
            handles.append(module.register_forward_hook(hook_for(layer), with_kwargs=True))
        with torch.no_grad(), separate_documents(decoder_layers(teacher), boundaries):
            inputs = {"input_ids": input_ids, "position_ids": position_ids, "use_cache": False}
            return teacher.base_model(**inputs).last_hidden_state
    except _StopForward:
        return None
    finally:
        for handle in handles:
            handle.remove()


def check_same_shape(teacher: nn.Module, student: nn.Module) -> None:
    """Raise ValueError if the layers of a student cannot read the hidden states of the teacher."""
    ours, theirs = student.config, teacher.config
    if ours.hidden_size != theirs.hidden_size or len(decoder_layers(student)) != len(decoder_layers(teacher)):
        raise UserError(
            f"student ({len(decoder_layers(student))} layers of {ours.hidden_size}) and teacher "
            f"({len(decoder_layers(teacher))} of {theirs.hidden_size}) differ; give the teacher the student came from"
        )
