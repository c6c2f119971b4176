"""Finds for every tensor of the student the stored tensor of the teacher from which it comes."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from hf_memmix._transformers import ignored_when_loading, saved_tensors, stores_under_other_names
from hf_memmix.conversion.families import attention_prefix
from hf_memmix.conversion.loading import check_loading
from hf_memmix.conversion.streaming.checkpoint import StoredTensor


class NotStreamable(Exception):  # noqa: N818, not an error: the model is converted in memory instead
    """The reason why a folder cannot be converted by streaming."""


@dataclass(frozen=True)
class Matches:
    """Which stored tensors a conversion reads. All names of stored tensors are keys of `Checkpoint.tensors`.

    `written`: all tensors of the student on "meta", by the names and in the order of `save_pretrained`.
    `copied`: the stored tensor by the name of the written one, for all tensors outside the mixers.
    `attention`: by layer, the stored tensor by the name of the attention's parameter, e.g. `q_proj.weight`.
    `ties`: pairs (one, other) of stored tensors that the model ties, so they must be equal.
    """

    written: dict[str, torch.Tensor]
    copied: dict[str, str]
    attention: dict[int, dict[str, str]]
    ties: list[tuple[str, str]]


def match(
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    stored: dict[str, StoredTensor],
    converted: list[int],
    folder: str,
) -> Matches:
    """Match two models on "meta" with a checkpoint.

    Args:
        folder: the name of the teacher in messages.

    Raises:
        NotStreamable: transformers changes names or shapes of tensors when it loads this checkpoint.
        ValueError: tensors are missing, unknown, or have another shape than the model's.
    """
    written = as_saved(student)
    prefixes = {layer: attention_prefix(teacher, layer) + "." for layer in converted}
    of_mixers = tuple(prefixes.values())
    if {n for n in written if n.startswith(of_mixers)} != {n for n in student.state_dict() if n.startswith(of_mixers)}:
        raise NotStreamable("transformers stores the attention of this family under other names than the model's")
    found = find_stored(teacher, stored, folder)
    return Matches(
        written=written,
        copied={name: found[name][0] for name in written if not name.startswith(of_mixers)},
        attention={
            layer: {
                name.removeprefix(prefix): found[name][0] for name in teacher.state_dict() if name.startswith(prefix)
            }
            for layer, prefix in prefixes.items()
        },
        ties=[(present[0], other) for present in found.values() for other in present[1:]],
    )


def find_stored(model: PreTrainedModel, stored: dict[str, StoredTensor], folder: str) -> dict[str, list[str]]:
    """The stored tensors of a model, by the names under which transformers saves them; several if they are tied.

    Args:
        model: on "meta".
        folder: the name of the model in messages.

    Raises:
        NotStreamable, ValueError: as in `match`.
    """
    expected, aliases = as_saved(model), _aliases(model)
    found, missing = {}, []
    for name in expected:
        candidates = _spellings([name, *aliases.get(name, ())], model.base_model_prefix)
        present = [candidate for candidate in candidates if candidate in stored]
        if present:
            found[name] = present
        else:
            missing.append(name)
    used = {candidate for present in found.values() for candidate in present}
    ignored = [re.compile(pattern) for pattern in ignored_when_loading(model)]
    unexpected = [name for name in stored if name not in used and not any(p.search(name) for p in ignored)]
    wrong = [(name, list(stored[present[0]].shape), list(expected[name].shape)) for name, present in found.items()]
    wrong = [row for row in wrong if row[1] != row[2]]
    if (missing or unexpected or wrong) and stores_under_other_names(model):
        raise NotStreamable("its tensors do not have the names and shapes under which transformers saves this family")
    check_loading(folder, {"mismatched_keys": wrong, "missing_keys": missing, "unexpected_keys": unexpected})
    return found


def as_saved(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The tensors that `save_pretrained` writes for a model, without second names of tied parameters."""
    tied = {name for names in _aliases(model).values() for name in names}
    return saved_tensors(model, {name: t for name, t in model.state_dict().items() if name not in tied})


def _aliases(model: PreTrainedModel) -> dict[str, list[str]]:
    """The further names of tied parameters, by their first name."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    names: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name != first[id(parameter)]:
            names.setdefault(first[id(parameter)], []).append(name)
    return names


def _spellings(names: Iterable[str], prefix: str) -> list[str]:
    """Names with and without the prefix of the base model: checkpoints of a base model do not have it."""
    return [spelling for name in names for spelling in dict.fromkeys((name, name.removeprefix(f"{prefix}.")))]
