"""A teacher in a folder, of which one decoder layer at a time has weights. The code of its family computes it.

The forward of the whole base model runs in each call. It prepares masks, position ids and rotary embeddings, and
reaches the one layer that has weights. Layers before it return their input unchanged, and the layer itself gets its
hidden states from the caller. So nothing here depends on the family.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers import initialization as init

from hf_memmix._transformers import load_under_other_names, stores_under_other_names
from hf_memmix.conversion.families import decoder_layers, family_of
from hf_memmix.conversion.loading import check_finite_tensor, check_weight_files, meta_teacher, read_config
from hf_memmix.conversion.model_files import check_transformer
from hf_memmix.conversion.streaming.checkpoint import Checkpoint
from hf_memmix.conversion.streaming.matching import NotStreamable, find_stored
from hf_memmix.errors import UserError
from hf_memmix.swap import layers_name


class _Reached(Exception):  # noqa: N818, not an error: it ends a forward pass
    """Ends the forward pass at the layer that has weights."""

    def __init__(self, hidden: Tensor):
        self.hidden = hidden


class StreamedTeacher:
    """The decoder layers of a teacher, one at a time.

    Args:
        folder: a transformer in safetensors.
        device: where its layers compute.
        dtype: dtype of the weights; None: the stored one.

    Raises:
        ValueError: the folder holds no such model, or its family cannot be converted, or its layers cannot run alone.
    """

    def __init__(self, folder: Path, device: torch.device | str, dtype: torch.dtype | None = None):
        config, self.name = read_config(folder), repr(str(folder))
        check_transformer(config.to_dict())
        family_of(config)
        if check_weight_files(folder):
            raise UserError(
                f"{self.name} holds pickled weights, which cannot be read by layer; save the model as safetensors"
            )
        if getattr(config, "quantization_config", None):
            raise UserError(f"{self.name} is quantized, so its layers cannot be read alone; align without --stream")
        self.device = torch.device(device)
        self.checkpoint = Checkpoint(folder)
        self.model = _without_weights(folder, self.device)
        if dtype is not None:
            self.model.to(dtype)
        self.model.requires_grad_(False)
        try:
            self._found = find_stored(self.model, self.checkpoint.tensors, self.name)
        except NotStreamable as reason:
            raise UserError(f"{self.name} cannot be read layer by layer: {reason}; align without --stream") from None
        self._converts = stores_under_other_names(self.model)
        base = self.model.base_model
        self._base_prefix = "" if base is self.model else self.model.base_model_prefix + "."
        self._layers_prefix = f"{self._base_prefix}{layers_name(base)}."
        self._empty = dict(self.model.named_parameters())  # on "meta"
        self._embeddings = [n for n, p in self._empty.items() if p is self.model.get_input_embeddings().weight]
        self._at: int | None = None
        self._hidden: Tensor | None = None
        self._records: list | None = None
        self._route()
        self._fill([name for name in self._found if self._is_beside(name)])
        self._check_inputs()

    # ---- weights

    @contextmanager
    def layer(self, index: int) -> Iterator[nn.Module]:
        """The decoder layer `index` with weights. They are freed at the end."""
        prefix = f"{self._layers_prefix}{index}."
        with self._filled([name for name in self._found if name.startswith(prefix)], (prefix,)):
            yield decoder_layers(self.model)[index]

    @contextmanager
    def embeddings(self) -> Iterator[None]:
        """The input embeddings have weights inside this context."""
        with self._filled([name for name in self._found if name in self._embeddings], tuple(self._embeddings)):
            yield

    def layer_bytes(self, index: int) -> int:
        """Bytes of the parameters of a decoder layer."""
        return sum(p.nbytes for p in decoder_layers(self.model)[index].parameters())

    def resident_parameters(self) -> int:
        """Number of parameters that have values now."""
        return sum(p.numel() for p in self.model.parameters() if p.device.type != "meta")

    @contextmanager
    def _filled(self, stored: list[str], prefixes: tuple[str, ...]) -> Iterator[None]:
        try:
            self._fill(stored)
            yield
        finally:
            for name, empty in self._empty.items():
                if name.startswith(prefixes):
                    parent, _, key = name.rpartition(".")
                    self.model.get_submodule(parent)._parameters[key] = empty

    def _fill(self, names: list[str]) -> None:
        """Read tensors, given by the names under which transformers saves them, into the model."""
        tensors = {}
        with self.checkpoint:
            for name in names:
                tensors[name] = self.checkpoint.read(self._found[name][0]).to(self.device)
                check_finite_tensor(tensors[name], name, self.name)
        if self._converts:
            load_under_other_names(self.model, tensors, self.device)
        else:
            for name, tensor in tensors.items():
                parent, _, key = name.rpartition(".")
                module = self.model.get_submodule(parent)
                if key in module._parameters:
                    values = tensor.to(module._parameters[key].dtype)
                    module._parameters[key] = nn.Parameter(values, requires_grad=False)
                else:
                    module._buffers[key] = tensor.to(module._buffers[key].dtype)
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)

    def _is_beside(self, name: str) -> bool:
        """Whether a tensor of the base model is outside its layers and its input embeddings, e.g. of a norm."""
        inside = name.startswith(self._layers_prefix) or name in self._embeddings
        return name.startswith(self._base_prefix) and not inside

    # ---- forward

    @torch.no_grad()
    def embed(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """The inputs [B, T, hidden] of the first layer, inside `embeddings()`."""
        return self._until(0, None, input_ids, position_ids)

    @torch.no_grad()
    def advance(self, index: int, hidden: Tensor, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """The outputs [B, T, hidden] of a layer for its inputs `hidden`, inside `layer(index)`."""
        return self._until(index, hidden, input_ids, position_ids)

    @contextmanager
    def entering(self, index: int, hidden: Tensor) -> Iterator[PreTrainedModel]:
        """The whole model; its layer `index` gets the inputs `hidden` [B, T, hidden size], whatever the tokens are."""
        self._at, self._hidden = index, hidden
        try:
            yield self.model
        finally:
            self._at = self._hidden = None

    def _until(self, index: int, hidden: Tensor | None, input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
        with self.entering(index, hidden) as model:
            try:
                model.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False)
            except _Reached as end:
                return end.hidden
        raise RuntimeError(f"the forward pass did not reach layer {index}")

    def _route(self) -> None:
        """Let every layer and the input embeddings ask this object what to compute."""
        for index, layer in enumerate(decoder_layers(self.model)):
            layer.forward = partial(self._visit, index, layer.forward)
        embeddings = self.model.get_input_embeddings()
        native = embeddings.forward
        embeddings.forward = lambda ids: native(ids) if self._hidden is None else self._hidden

    def _visit(self, index: int, native, *args, **kwargs):
        named = "hidden_states" in kwargs
        given = kwargs["hidden_states"] if named else args[0]
        if self._records is not None:
            rest = {name: value for name, value in kwargs.items() if name != "hidden_states"}
            self._records.append(
                [leaf for leaf in tree_leaves((args[0 if named else 1 :], rest)) if torch.is_tensor(leaf)]
            )
            return given
        if index < self._at:
            return given
        if self._hidden is None:
            raise _Reached(given)
        if named:
            kwargs["hidden_states"] = self._hidden
        else:
            args = (self._hidden, *args[1:])
        output = native(*args, **kwargs)
        raise _Reached(output[0] if isinstance(output, tuple) else output)

    @torch.no_grad()
    def _check_inputs(self) -> None:
        """Raise ValueError if layers get anything from the embeddings besides the hidden states.

        Then the inputs of a layer would be more than the hidden states that are stored, e.g. embeddings per layer.
        """
        ids, width = torch.zeros(1, 4, dtype=torch.long, device=self.device), self.model.config.hidden_size
        seen = []
        for seed in (1, 2):
            generator = torch.Generator().manual_seed(seed)
            self._hidden = torch.randn(1, 4, width, generator=generator).to(self.device, self.model.dtype)
            self._records = []
            try:
                self.model.base_model(input_ids=ids, use_cache=False)
                seen.append(self._records)
            finally:
                self._hidden = self._records = None
        for first, second in zip(*seen, strict=True):
            if not all(torch.equal(a, b) for a, b in zip(first, second, strict=True)):
                raise UserError(
                    f"the layers of the family {self.model.config.model_type!r} get more than hidden states from the"
                    " layers before them, so they cannot run alone; align without --stream"
                )


def _without_weights(folder: Path, device: torch.device) -> PreTrainedModel:
    """The model in a folder whose parameters are on "meta", and whose buffers, e.g. rotary angles, have values."""
    model = meta_teacher(folder)
    with init_empty_weights(include_buffers=False), init.no_init_weights():
        source = AutoModelForCausalLM.from_config(model.config, dtype=model.dtype)
    for module, own in zip(model.modules(), source.modules(), strict=True):
        for name, buffer in own._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
    return model
