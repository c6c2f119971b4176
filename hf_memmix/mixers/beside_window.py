"""A memory with attention over the last tokens beside it, in one layer: the option `local_window` of every memory.

    out = window(x) + m * memory(x)        m [hidden], learned

The window has its own projections. It reads the near past exactly, so the memory needs to hold only what lies further
back; it reads all tokens nevertheless. Shared projections, and a memory of what has left the window, are no options:
training/experiments/smollm2 compares them. B'MOJO (Zancato et al., arXiv:2407.06324) has the same layout.

Shapes: B batch, T tokens, H query heads, D head size.
"""

from functools import partial

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .base import MIXERS, MemoryMixer
from .layers import has_hooks
from .tp_plan import TensorParallelPlan
from .window import WindowMixer

PARTS = ("memory", "window")


def new_layer(kind: str, config, layer_idx: int) -> MemoryMixer:
    """The mixer of a layer: that of the name `kind`, with a window beside it if its options say so."""
    memory = MIXERS[kind](config, layer_idx)
    return BesideWindow(config, memory) if memory.options.local_window else memory


class BesideWindow(MemoryMixer):
    """A memory and a window on the same input. Its options are those of the memory; those of the window stand under
    `mixers["window"]`, except for its size, `local_window`. So a window beside a memory has the defaults of
    one alone, also that of its first tokens (`WindowOptions`).

    The states of the window begin with "window_".
    """

    no_weight_decay = ("m",)

    def __init__(self, config, memory: MemoryMixer):
        nn.Module.__init__(self)
        self.layer_idx, self.joined_layers = memory.layer_idx, None
        self.memory = memory
        self.window = WindowMixer(config, memory.layer_idx, memory.options.local_window)
        self.m = nn.Parameter(torch.empty(self.window.hidden))

    # ---- what the classes of other mixers declare

    @property
    def name(self) -> str:
        return self.memory.name

    @property
    def summary(self) -> str:
        return self.memory.summary

    @property
    def options(self):
        return self.memory.options

    @options.setter
    def options(self, value):
        self.memory.options = value

    @property
    def options_class(self):
        return self.memory.options_class

    @property
    def fp32_parameters(self) -> tuple[str, ...]:
        return tuple(f"memory.{name}" for name in self.memory.fp32_parameters)

    @property
    def steering_layers(self) -> tuple[str, ...]:
        return tuple(f"memory.{name}" for name in self.memory.steering_layers)

    @property
    def token_arguments(self) -> tuple[str, ...]:
        return self.memory.token_arguments

    def forward(self, *args, **kwargs):
        """See `MemoryMixer.forward`."""
        run = partial(super().forward, *args, **kwargs)
        if has_hooks(self.memory) or has_hooks(self.window):  # they load the parameters of a part for its forward
            return self.memory.computed_inside(lambda: self.window.computed_inside(run))
        return run()

    # ---- the five methods of a mixer, and what others override

    def project(self, x, rotary):
        return self.memory.project(x, rotary) | _prefixed(self.window.project(x, rotary))

    def scan(self, tokens, states, lengths=None, cu_seqlens=None):
        where = {"lengths": lengths, "cu_seqlens": cu_seqlens}
        (memory, window), past = _parts(tokens), (None, None) if states is None else _parts(states)
        y, after = self.memory.scan(memory, past[0], **where)
        local, window_after = self.window.scan(window, past[1], **where)
        return _joined(y, local), after | _prefixed(window_after)

    def packed_outputs(self, tokens, cu_seqlens):
        memory, window = _parts(tokens)
        return _joined(self.memory.packed_outputs(memory, cu_seqlens), self.window.packed_outputs(window, cu_seqlens))

    def step(self, tokens, states, state_indices=None):
        (memory, window), (of_memory, of_window) = _parts(tokens), _parts(states)
        y = self.memory.step(memory, of_memory, state_indices=state_indices)
        return _joined(y, self.window.step(window, of_window, state_indices=state_indices))

    def readout(self, y, x, tokens=None):
        width = self.window.head_dim if y.dim() == 4 else self.window.heads * self.window.head_dim
        y, local = y.split([y.shape[-1] - width, width], -1)
        memory, window = (None, None) if tokens is None else _parts(tokens)
        return self.window.readout(local, x, window) + self.m * self.memory.readout(y, x, memory)

    def state_shapes(self, batch, dtype=torch.float32):
        return self.memory.state_shapes(batch, dtype) | _prefixed(self.window.state_shapes(batch, dtype))

    def initial_states(self, batch, device, dtype):
        window = self.window.initial_states(batch, device, dtype)
        return self.memory.initial_states(batch, device, dtype) | _prefixed(window)

    def init_weights(self):
        """Those of both parts, and m = 1."""
        self.memory.init_weights()
        self.window.init_weights()
        init.ones_(self.m)

    def check_split(self):
        self.memory.check_split()

    def check_weights(self):
        self.memory.check_weights()

    def tp_plan(self, ranks):
        plans = {name: getattr(self, name).tp_plan(ranks) for name in PARTS}

        def of(field: str) -> tuple[str, ...]:
            return tuple(f"{name}.{path}" for name, plan in plans.items() for path in getattr(plan, field))

        def by_path(field: str) -> dict:
            return {f"{n}.{path}": v for n, plan in plans.items() for path, v in getattr(plan, field).items()}

        return TensorParallelPlan(
            ranks, of("columns"), of("rows"), by_path("parameters"), by_path("sizes"), of("wide_norms"), ("m",)
        )


def _prefixed(named: dict) -> dict:
    return {f"window_{name}": value for name, value in named.items()}


def _parts(named: dict) -> tuple[dict, dict]:
    """What belongs to the memory and to the window, under the names that these know."""
    window = {name.removeprefix("window_"): t for name, t in named.items() if name.startswith("window_")}
    return {name: t for name, t in named.items() if not name.startswith("window_")}, window


def _joined(memory: Tensor, window: Tensor) -> Tensor:
    """The outputs of both parts in one tensor: by heads [B, T, H, ...], or [B, T, ...] if the memory has no heads."""
    if memory.dim() == 3:
        window = window.flatten(2)
    return torch.cat([memory, window.to(memory.dtype)], -1)
