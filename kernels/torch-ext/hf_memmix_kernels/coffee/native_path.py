"""The native path, for a CPU: sequences, their gradients, one token and a layer around it, by native.cpp.

Packed sequences take the torch path.
"""

import ctypes
import struct

import torch
from torch import Tensor

from .._groups import flat
from .._layer_step import NativeLayer
from .._native import INTEGER, POINTER, Library, address, changed, dense, empty, function, over_rows, pages_of
from .arguments import BACKWARD, FORWARD, Inputs, Kept, Pages, Parameters, Rule, Save, Start, Upstream, Wanted
from .torch_path import chunk_length

FEEDBACKS = ("sigmoid", "linear", "input", "token")  # phi, in the order of native.cpp
TOKENS, GRADIENTS = (*[POINTER] * 9, *[INTEGER] * 9), (*[POINTER] * 15, *[INTEGER] * 9)
BLOCK = 64  # features of a row of native.cpp
FORWARD_WORK, BACKWARD_WORK = 12.0, 30.0  # operations per token and state
STEP = (*[POINTER] * 7, INTEGER, POINTER, *[INTEGER] * 4)
FIELDS = struct.Struct("5Pq")


def _changeable(state: Tensor) -> Tensor:
    """A copy of states [B, D, n] as [n, B, D] in float32."""
    return state.permute(2, 0, 1).to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def _call(library, name, types, tensors, u, lam, gate, feedback, work):
    """Call a function of sequences for all rows."""
    (batch, tokens, features), states = u.shape, lam.shape[1]
    lanes = batch * features * states
    gate_width = 0 if gate is None else 1 if gate.dim() == 2 else features
    call, addresses = function(library, name, types), [address(t) for t in tensors]
    sizes = (batch, tokens, features, states, gate_width, chunk_length(lanes), FEEDBACKS.index(feedback))

    def part(first, last):
        call(*addresses, *sizes, first, last)

    over_rows(part, batch * -(-features // BLOCK), work * tokens * lanes)


@flat(Library, *FORWARD)
def coffee_fwd_native(
    native: Library, inputs: Inputs, start: Start, rule: Rule, save: Save
) -> tuple[Tensor, Tensor, Tensor]:
    """y [B, T, D], the final states [B, D, n] and the checkpoints [slots, n, B, D], as `coffee_fwd_torch`."""
    (u, lam, w, C, w_filter, gate), (save,), feedback = inputs, save, rule.feedback
    dtype, (batch, tokens, features), states = u.dtype, u.shape, lam.shape[1]
    u, lam, w, C, w_filter, gate = (dense(t) for t in (u, lam, w, C, w_filter, gate))
    state = _changeable(start.initial_state)
    y = torch.empty_like(u)
    slots = -(-tokens // chunk_length(state.numel())) if save else 0
    kept = empty(slots, states, batch, features)
    tensors = (u, lam, w, C, w_filter, gate, state, y, kept if save else None)
    _call(native.library, "coffee_tokens", TOKENS, tensors, u, lam, gate, feedback, FORWARD_WORK)
    return y.to(dtype), state.permute(1, 2, 0).clone(memory_format=torch.contiguous_format), kept


@flat(Library, *BACKWARD)
def coffee_bwd_native(
    native: Library, upstream: Upstream, inputs: Inputs, start: Start, kept: Kept, rule: Rule, wanted: Wanted
) -> tuple[Tensor, ...]:
    """Gradients as `coffee_bwd_torch`."""
    (dy, dfinal), (u, lam, w, C, w_filter, gate) = upstream, inputs
    (gate_grad,), feedback = wanted, rule.feedback
    (batch, _, features), states = u.shape, lam.shape[1]
    dy, u, lam, w, C, w_filter, gate, checkpoints = (dense(t) for t in (dy, u, lam, w, C, w_filter, gate, *kept))
    dstate = _changeable(dfinal)
    du, dgate = torch.empty_like(u), torch.empty_like(u) if gate_grad else None
    grads = [empty(batch, states, features) for _ in range(4)]
    tensors = (dy, dstate, u, lam, w, C, w_filter, gate, checkpoints, du, dgate, *grads)
    _call(native.library, "coffee_gradients", GRADIENTS, tensors, u, lam, gate, feedback, BACKWARD_WORK)
    return du, *(t.sum(0).t() for t in grads), dgate, dstate.permute(1, 2, 0).contiguous()


def coffee_step_native(library: ctypes.CDLL, inputs: Inputs, pages: Pages) -> Tensor:
    """One token [B, 1, D] without a gate; advances the state [B, D, n], or its pages, in place."""
    (u, lam, w, C, w_filter, _), (state, state_indices, feedback) = inputs, pages
    dtype, pages, (features, states) = u.dtype, pages_of(state_indices, len(state)), lam.shape
    u, lam, w, C, w_filter = (dense(t) for t in (u, lam, w, C, w_filter))
    y = torch.empty_like(u)
    function(library, "coffee_step", STEP)(
        u.data_ptr(), lam.data_ptr(), w.data_ptr(), C.data_ptr(), address(w_filter), state.data_ptr(), address(pages),
        state.stride(0), y.data_ptr(), u.shape[0], features, states, FEEDBACKS.index(feedback),
    )  # fmt: skip
    changed(state)
    return y.to(dtype)


def coffee_layer_native(layer: NativeLayer, parameters: Parameters, state: Tensor) -> Tensor:
    """See `layer.coffee_layer_step`."""
    parameters = [dense(t) for t in parameters]
    fields = FIELDS.pack(*[address(t) or 0 for t in (*parameters, state)], state.shape[-1])
    function(layer.library, "coffee_layer", (POINTER, POINTER, INTEGER))(layer.fields, fields, layer.in_bf16)
    changed(state)
    return layer.out
