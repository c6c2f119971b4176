"""`merge_students`: joins students of which each has trained some of the layers with `align --layers`.

In `align`, the inputs of a mixer come from the teacher, so the layers do not depend on each other and can be trained
on separate machines. A layer is taken from the student in which it differs from the common start. The result equals
that of one run, except for gradient clipping: the clipped norm is over the layers that are trained together.
"""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from hf_memmix.conversion.convert import load_model
from hf_memmix.conversion.families import attention_module, attention_prefix
from hf_memmix.conversion.model_files import check_converted
from hf_memmix.conversion.taken_mixers import different_options, layer_options
from hf_memmix.errors import UserError


@torch.no_grad()
def merge_students(start: str | Path, folders: list[str | Path]) -> tuple[PreTrainedModel, dict[int, str]]:
    """The student of the folder `start` with the trained layers of `folders`, and the folder of each of these layers.

    Raises:
        ValueError: a folder holds another model or one with other options, or has trained nothing, two of them have
            trained the same layer, or one has changed parameters outside the mixers.
    """
    merged = load_model(start)
    check_converted(merged.config.to_dict())
    state = merged.state_dict()
    prefixes = {layer: attention_prefix(merged, layer) + "." for layer in merged.config.memory_layers}
    origin: dict[int, str] = {}
    first = {name: tensor.clone() for name, tensor in state.items()}
    for folder in folders:
        part = load_model(folder)
        tensors = part.state_dict()
        if getattr(part.config, "mixer_types", None) != merged.config.mixer_types or tensors.keys() != first.keys():
            raise UserError(f"{str(folder)!r} is another model than {str(start)!r}; give the outputs of align on it")
        for layer in prefixes:
            if different := different_options(*(layer_options(attention_module(m, layer)) for m in (merged, part))):
                raise UserError(
                    f"{str(start)!r} and {str(folder)!r} differ in options of layer {layer} ({different}); give the"
                    " outputs of align on one student"
                )
        changed = {name for name, tensor in tensors.items() if not torch.equal(tensor, first[name])}
        for layer, prefix in prefixes.items():
            names = {name for name in changed if name.startswith(prefix)}
            if names and layer in origin:
                raise UserError(
                    f"{origin[layer]!r} and {str(folder)!r} both trained layer {layer}; give every layer to one run"
                )
            if names:
                origin[layer] = str(folder)
                for name in names:
                    state[name].copy_(tensors[name])
            changed -= names
        if not changed and str(folder) not in origin.values():
            raise UserError(
                f"{str(folder)!r} has trained no layer: all its mixers are those of {str(start)!r}; leave it out, and"
                " give the outputs of align"
            )
        if changed:
            raise UserError(
                f"{str(folder)!r} has changed {sorted(changed)[0]}, which is not part of a mixer, so it cannot be"
                " merged; merge after align and before distill"
            )
    return merged, origin
