"""Base class and registry of all memory mixers. Padding, packing and the cache are in its own base, `MixerForward`.

    y, states = scan(project(x), states);  out = readout(y, x)

A new mixer is one file: an options dataclass, a `MemoryMixer` subclass with the five methods marked below, and
`@register_mixer("name")`. Such a file contains nothing about mask patterns, caches or decoder families.

Shapes: B batch, T tokens, N sequences (B, or the number of packed ones).
"""

import dataclasses
import functools
import inspect
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..mixer_names import ATTENTION
from .forward import MixerForward
from .kept_bytes import KeptBytes
from .options import MixerOptions
from .pages import read_pages, start_anew, write_pages
from .rounding import WarnsOfRounding
from .tp_plan import TensorParallelPlan
from .weight_decay import SparedFromDecay

MIXERS: dict[str, type["MemoryMixer"]] = {}


def register_mixer(name: str):
    """Class decorator: make a `MemoryMixer` known to `mixer_types` under `name`.

    Raises:
        ValueError: the name is taken or is "attention", the class is not a `MemoryMixer` with a `MixerOptions` class,
            or a server cannot call its `readout`.
    """

    def register(cls):
        if name == ATTENTION or name in MIXERS:
            raise UserError(f"mixer name {name!r} is taken; registered: {[ATTENTION, *MIXERS]}. Choose another")
        if not (issubclass(cls, MemoryMixer) and issubclass(cls.options_class, MixerOptions)):
            raise UserError(f"{cls.__name__} must subclass MemoryMixer and set options_class to a MixerOptions class")
        if "__validators__" not in vars(cls.options_class):
            raise UserError(f"the options of {cls.__name__} are not checked: decorate them with @mixer_options")
        try:
            inspect.signature(cls.readout).bind("self", "y", "x", "tokens")
        except TypeError:
            raise UserError(
                f"{cls.__name__}.readout{inspect.signature(cls.readout)} cannot be called by servers, which also give"
                " the tokens of project; write readout(self, y, x, tokens=None)"
            ) from None
        if "state_indices" not in inspect.signature(cls.step).parameters:
            cls.step = _with_pages(cls.step)
        cls.name = name
        MIXERS[name] = cls
        return cls

    return register


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """Sizes of a backbone's attention. A mixer in its place has the same sizes."""

    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, config, unshare_kv_heads: bool = False) -> "AttentionShape":
        """The sizes in a configuration of transformers; without `num_key_value_heads` every head has keys of its own,
        and without `head_dim` the heads share out the hidden size.

        unshare_kv_heads: the option of a mixer, by which every query head has keys and values of its own.

        Raises:
            ValueError: the option is set, but no heads share keys.
        """
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        if unshare_kv_heads and kv_heads == heads:
            raise UserError(
                f"unshare_kv_heads=True, but each of the {heads} heads has keys and values of its own already; leave"
                " the option out"
            )
        return cls(
            hidden_size=config.hidden_size,
            heads=heads,
            kv_heads=heads if unshare_kv_heads else kv_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        )

    def check(self, mixer: "MemoryMixer", max_head_dim: int):
        """Raise ValueError if heads are too large for a mixer's kernels, or query heads do not divide into groups."""
        if self.head_dim > max_head_dim:
            raise UserError(
                f"head size {self.head_dim} of layer {mixer.layer_idx} is over the limit of {mixer.name},"
                f" {max_head_dim}; keep this layer as attention"
            )
        if self.heads % self.kv_heads:
            raise UserError(f"{self.heads} query heads are not a multiple of {self.kv_heads} key/value heads")


class MemoryMixer(MixerForward, WarnsOfRounding, SparedFromDecay):
    """Takes the place of a decoder layer's attention module.

    Args:
        config: a memmix configuration; `config.mixers[name]` holds the mixer's options.
        layer_idx: index of the layer, which is also the index of its cache layer.
    """

    name: ClassVar[str]
    summary: ClassVar[str] = ""  # what the memory is, with its paper: a line of the cards of converted models
    options_class: ClassVar[type[MixerOptions]] = MixerOptions
    fp32_parameters: ClassVar[tuple[str, ...]] = ()  # kept in fp32 when the model is loaded in fp16 or bf16
    no_weight_decay: ClassVar[tuple[str, ...]] = ()  # parameters that steer the memory: weight decay spares them
    lora_targets: ClassVar[tuple[str, ...]] = ("q_proj", "v_proj")  # where PEFT puts LoRA by default
    # linear layers whose outputs steer the memory (decay, write strength, step size): no quantiser and no LoRA changes
    # them, because an error of theirs is carried from token to token
    steering_layers: ClassVar[tuple[str, ...]] = ()
    input_layers: ClassVar[tuple[str, ...]] = ()  # linear layers of `project` that read the layer's input: `products`
    output_layers: ClassVar[tuple[str, ...]] = ()  # those of `readout`: `output_product`
    kept_bytes: ClassVar[KeptBytes | None] = None  # for the backward pass; None: `memmix plan` refuses the mixer
    # whether the memory after tokens is e^g S + W, with S before them, and g and W do not depend on S: `piece_writes`
    linear: ClassVar[bool] = False
    use_rope: bool = False  # whether q and k are rotated

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        # a server's module that computes `input_layers` and `output_layers` in one product: f(x) -> {name: output}
        self.joined_layers: nn.Module | None = None
        self.options = self.options_of(config, layer_idx)  # may change: set_mixer_options

    @classmethod
    def options_of(cls, config, layer_idx: int) -> MixerOptions:
        """The options of the mixer in one layer of a model."""
        return cls.options_class.from_dict(config.mixers.get(cls.name, {}))

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name == "options":
            self.plain = value.plain  # what a decode step reads, see `MixerOptions`

    # ---- every mixer implements these five methods

    def project(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> dict[str, Tensor]:
        """The inputs of `scan`, computed for each token independently: tensors [B, T, ...].

        `rotary`: cos and sin [B, T, d] of the layer, None in a backbone without rotary embeddings.
        """
        raise NotImplementedError

    def scan(
        self,
        tokens: dict[str, Tensor],
        states: dict[str, Tensor] | None,
        lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Outputs [B, T, ...] and the states after the tokens.

        `states`: None before the first token; the mixer then starts from zero or from a learned state.
        `lengths` [B]: row b ends after lengths[b] tokens (0 is possible); later tokens must not change the states.
        `cu_seqlens` [N + 1]: boundaries of packed sequences; B is 1 then, and states have N rows.
        """
        raise NotImplementedError

    def readout(self, y: Tensor, x: Tensor, tokens: dict[str, Tensor] | None = None) -> Tensor:
        """The layer's output [B, T, hidden] from the scan's outputs and the layer's input.

        `tokens`: of `project`, where a server has them: see `output_product`.
        """
        raise NotImplementedError

    def state_shapes(self, batch: int, dtype: torch.dtype = torch.float32) -> dict[str, tuple[tuple, torch.dtype]]:
        """Shape and dtype of each state of `batch` sequences, with activations of `dtype`."""
        raise NotImplementedError

    def init_weights(self):
        """Fill the parameters by `transformers.initialization`, which does not change loaded ones."""
        raise NotImplementedError

    # ---- a mixer may override these

    def step(
        self, tokens: dict[str, Tensor], states: dict[str, Tensor], state_indices: Tensor | None = None
    ) -> Tensor:
        """`scan` for one token per sequence, T = 1, with `states` updated in place; no autograd.

        `state_indices` [B], int32 or int64: the states are pools [pages, ...] (`pages.carve`), and row b reads and
        writes page state_indices[b]. Rows of one batch have different pages, but for one page of garbage, which any
        number of padding rows may share. A mixer may leave the argument out of its `step`: `register_mixer` then
        makes it copy the pages out and back.
        """
        rows = states if state_indices is None else read_pages(states, state_indices)
        y, new = self.scan(tokens, rows)
        if state_indices is not None:
            write_pages(states, state_indices, new)
            return y
        for name, state in states.items():
            state.copy_(new[name])
        return y

    def layer_step(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, states: dict[str, Tensor]) -> Tensor | None:
        """`project`, `step` and `readout` of one token in one call, where a mixer has such a call and it can run; else
        None, and the states have not changed."""
        return None

    def packed_outputs(self, tokens: dict[str, Tensor], cu_seqlens: Tensor) -> Tensor:
        """The outputs of `scan` for packed sequences that begin anew; a mixer can save the cost of their states."""
        return self.scan(tokens, None, cu_seqlens=cu_seqlens)[0]

    def initial_states(self, batch: int, device, dtype: torch.dtype) -> dict[str, Tensor]:
        """The states before the first token of `batch` sequences, with activations of `dtype`; zeros by default.

        `scan` from them equals `scan` from None. A mixer whose first state is not zero must write this method.
        """
        return self.allocate_states(batch, device, dtype)

    def convolved(self, tokens: dict[str, Tensor]) -> dict[str, tuple[Tensor, int]]:
        """By name of the state of each short convolution: its inputs [B, T, C], and how many of them the state holds.

        Only for a mixer that is `linear`; its tokens are at least as many.
        """
        raise NotImplementedError

    def piece_writes(self, tokens: dict[str, Tensor], states: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """W [B, H, K, V] and g [B, H] of the tokens, see `linear`; at a small part of the cost of `scan`.

        `states`: those of the short convolutions before the tokens.
        """
        raise NotImplementedError

    def memory_states(self, memory: Tensor) -> dict[str, Tensor]:
        """The states that are not those of short convolutions, from S [B, H, K, V] of `piece_writes`."""
        raise NotImplementedError

    def kept_for_backward(self) -> KeptBytes | None:
        """`kept_bytes`, with what the options of this layer add."""
        return self.kept_bytes

    def check_split(self):
        """Raise ValueError if the layer cannot compute a sequence that is split over several processes."""

    @classmethod
    def minimum_training_length(cls, options: MixerOptions) -> int:
        """The smallest number of tokens in a sequence from which the layer learns the next token.

        The last token has no label then. A loss that reads every output needs one token less.
        """
        return 2

    @classmethod
    def check_states(cls, options: MixerOptions, states: dict[str, Tensor]):
        """Raise ValueError if no layer with these options can produce such states; called on states from a file."""

    def check_weights(self):
        """Raise ValueError if the layer cannot use its parameters; called on a loaded checkpoint."""

    def tp_plan(self, ranks: int) -> TensorParallelPlan:
        """What each of `ranks` ranks of tensor parallelism holds of the layer; asked of a layer that is still whole.

        Raises:
            ValueError: the mixer has no plan, or its heads or channels cannot be divided equally among the ranks.
        """
        raise UserError(
            f"{self.name} of layer {self.layer_idx} has no tensor-parallel plan; run the model without tensor"
            f" parallelism (device_map, FSDP or data parallelism), or write {type(self).__name__}.tp_plan"
        )

    # ---- the same for all mixers

    def allocate_states(self, batch: int, device, dtype: torch.dtype) -> dict[str, Tensor]:
        """Zeros with the shapes and dtypes of the states of `batch` sequences."""
        return {
            name: torch.zeros(shape, dtype=state_dtype, device=device)
            for name, (shape, state_dtype) in self.state_shapes(batch, dtype).items()
        }

    def products(self, x: Tensor, without: tuple[str, ...] = ()) -> dict[str, Tensor]:
        """The outputs [B, T, features] of those `input_layers` that the layer has, by name; those `without` may be
        left out."""
        if self.joined_layers is not None:
            return self.joined_layers(x)
        # attributes of a module that are modules take longer to find, and missing ones much longer
        layers = self._modules
        return {name: layers[name](x) for name in self.input_layers if name in layers and name not in without}

    def joined_products(self, products: dict[str, Tensor]) -> dict[str, Tensor]:
        """Those of `output_layers`, if a server has joined them; `project` adds them to its tokens."""
        return {name: products[name] for name in self.output_layers if name in products}

    def output_product(self, name: str, x: Tensor, tokens: dict[str, Tensor] | None) -> Tensor:
        """The output [B, T, features] of one of `output_layers`: from the tokens, if it is there."""
        return tokens[name] if tokens and name in tokens else self._modules[name](x)

    def scan_sequences(
        self,
        tokens: dict[str, Tensor],
        states: dict[str, Tensor],
        cu_seqlens: Tensor | None = None,
        starts_anew: Tensor | bool | None = None,
        state_indices: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """`scan` for a server, whose batch mixes new sequences with continued ones.

        Args:
            tokens: from `project_rows`.
            states: the states before the tokens, one row per sequence. With `state_indices` pools [pages, ...].
            cu_seqlens: boundaries [N + 1] of packed sequences; None for one sequence per row, N = B.
            starts_anew: bool [N]; a true one starts from `initial_states`, whatever its row of `states` holds, NaN
                included. True: all do, and no state is read. None: all sequences continue.
            state_indices: int32 or int64 [N], the pages of the sequences. The new states are also written there.

        Returns:
            The outputs [B, T, ...] and the states [N, ...] after the tokens.
        """
        rows = None if starts_anew is True else states
        if rows is not None and state_indices is not None:
            rows = read_pages(states, state_indices)
        if isinstance(starts_anew, Tensor):
            some = next(iter(rows.values()))
            rows = start_anew(rows, starts_anew, self.initial_states(1, some.device, some.dtype))
        y, new = self.scan(tokens, rows, cu_seqlens=cu_seqlens)
        if state_indices is not None:
            write_pages(states, state_indices, new)
        return y, new


def _with_pages(step):
    """A mixer's `step(tokens, states)` with the argument `state_indices`: pages are copied out and back."""

    @functools.wraps(step)
    def paged(self, tokens, states, state_indices=None):
        if state_indices is None:
            return step(self, tokens, states)
        rows = read_pages(states, state_indices)
        y = step(self, tokens, rows)
        write_pages(states, state_indices, rows)
        return y

    return paged
