"""Fills one mixer from an attention, and checks that the start tells the truth about every tensor."""

from collections import Counter

import torch
from transformers import PreTrainedModel

from hf_memmix.conversion.attention_weights import AttentionWeights
from hf_memmix.conversion.conversion_report import ConversionReport
from hf_memmix.conversion.families import attention_module, attention_prefix
from hf_memmix.conversion.from_attention import Start
from hf_memmix.conversion.from_attention.beside_window import start_beside_window
from hf_memmix.errors import UserError
from hf_memmix.mixers import BesideWindow


def initialise_mixer(
    student: PreTrainedModel, layer: int, start: Start, attention: AttentionWeights, report: ConversionReport
) -> None:
    """Fill the mixer of one layer, in place, and add the fate of every tensor of the attention to `report`.

    Raises:
        ValueError: a tensor has no fate or two, or it was not copied to where the start reports.
    """
    mixer, prefix = attention_module(student, layer), attention_prefix(student, layer)
    with torch.no_grad():
        beside = isinstance(mixer, BesideWindow)
        fates = start_beside_window(mixer, attention, start) if beside else start.fill(mixer, attention)
    parameters = dict(mixer.named_parameters())
    mixer_is_meta = next(iter(parameters.values())).is_meta  # shapes without values: see estimate.py
    reported, expected = Counter(fate.field for fate in fates), Counter(attention.tensors().keys())
    if reported != expected:
        wrong = sorted(expected - reported) or sorted(reported - expected)
        raise UserError(
            f"{prefix}: {type(mixer).__name__} must report exactly one fate for each tensor, but does not for"
            f" {', '.join(wrong)}. Keep this layer as attention, or use another mixer"
        )
    for fate in fates:
        if unknown := set(fate.targets) - parameters.keys():
            raise UserError(
                f"{type(mixer).__name__} reports that {fate.field} was copied to {sorted(unknown)}, but has no such"
                " parameter"
            )
        for name in fate.targets if fate.fate == "used" and not mixer_is_meta else ():
            tensor = attention.tensors()[fate.field]
            if not torch.equal(parameters[name], tensor.to(parameters[name])):
                raise UserError(
                    f"{type(mixer).__name__} reports that {fate.field} was copied to {name}, but their values differ"
                )
        row = {"layer": layer, "source": ", ".join(attention.sources[fate.field]), "fate": fate.fate}
        report.tensors.append(row | {"targets": list(fate.targets), "reason": fate.reason})
    filled = {target for fate in fates for target in fate.targets}
    report.fresh += [f"{prefix}.{name}" for name in parameters if name not in filled]
