"""`convert_model`: replace the attention of chosen layers of a pretrained decoder by recurrent mixers.

`student.conversion_report` lists every tensor of the teacher. All tensors outside the converted attention modules are
bit-equal in the student. The teacher is not modified.
"""

import json
from collections import Counter
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_memmix
from hf_memmix._transformers import tensor_parallel_size
from hf_memmix.conversion.attention_weights import AttentionWeights
from hf_memmix.conversion.conversion_report import ConversionReport
from hf_memmix.conversion.families import attention_module, attention_prefix, extract_attention, family_of
from hf_memmix.conversion.from_attention import Start, start_of
from hf_memmix.conversion.layer_choice import layers_to_keep
from hf_memmix.conversion.loading import check_finite_weights, check_ties, load_model
from hf_memmix.conversion.mixer_layout import Layers, mixer_types_of
from hf_memmix.conversion.saving import atomic_folder, explain_write_errors
from hf_memmix.mixers import ATTENTION
from hf_memmix.swap import fp32_parameter_names

REPORT_FILE = "conversion.json"


def convert_model(
    teacher: PreTrainedModel | str | Path,
    mixer: str | None = None,
    keep=None,
    *,
    layers: Layers | None = None,
    mixers: dict[str, dict] | None = None,
    seed: int = 0,
    **mixer_options,
) -> PreTrainedModel:
    """A student with mixers in place of attention, initialised from the teacher's attention.

        convert_model(teacher, mixer="gka", keep=[0])
        convert_model(teacher, layers={"ska": [3, 7], "attention": [0], "mamba2": "rest"})

    Args:
        teacher: a causal LM of a family in `conversion.families.FAMILIES`, or a folder that holds one.
        mixer: name of a registered mixer that can be initialised from attention, "gka" by default. It replaces the
            attention of all layers outside `keep`.
        keep: layers that stay attention, see `layers_to_keep`; none by default.
        layers: in place of `mixer` and `keep`, the layers of several mixers, see `mixer_types_of`.
        mixers: options by the name of the mixer, e.g. `{"gka": {"solver_phases": [30]}}`.
        seed: seed of the parameters that have no counterpart in the teacher. The global random generator does not
            change.
        mixer_options: options of the mixer, e.g. `solver_phases=[30]`, if all layers have the same mixer.

    Returns:
        the student in the teacher's dtype and on its device, in eval mode, with `conversion_report`.

    Raises:
        ValueError: the family is not supported, `keep`, `layers` or an option is invalid, a weight is not finite, or a
            tensor would be lost.
    """
    checked = not isinstance(teacher, PreTrainedModel)
    if checked:
        teacher = load_model(teacher)
    config = teacher.config
    family_of(config)
    if config.model_type == "memmix":
        raise ValueError("the teacher is a converted model already; give the transformer it came from")
    if not checked:  # `load_model` reads all weights for the same two checks
        check_ties(teacher, "the teacher")
        check_finite_weights(teacher, "the teacher")
    types = _types(mixer, keep, layers, config.num_hidden_layers)
    kept, converted = ([i for i, kind in enumerate(types) if (kind == ATTENTION) is stays] for stays in (True, False))
    used = list(dict.fromkeys(types[i] for i in converted))
    report = ConversionReport(used[0] if len(used) == 1 else None, converted, kept, types)

    starts = {kind: start_of(kind) for kind in used}
    options = _options(used, mixers, mixer_options)
    attentions = {i: extract_attention(teacher, i) for i in converted}
    for kind in used:  # options that the attention needs (biases, norms); the user's options replace them
        options[kind] = starts[kind].options(attentions[types.index(kind)]) | options[kind]
    student_config = hf_memmix.memmix_config(config, mixer_types=types, mixers=options)
    place = "meta" if teacher.device.type == "meta" else "cpu"
    with torch.random.fork_rng(devices=[]), torch.device(place):
        torch.manual_seed(seed)
        student = AutoModelForCausalLM.from_config(student_config, dtype=torch.float32)
    cast_student(student, teacher.dtype)
    _copy_rest(teacher, student, [attention_prefix(teacher, i) + "." for i in converted], report)
    for layer in converted:
        _initialise(student, layer, starts[types[layer]], attentions[layer], report)
    student.generation_config = type(teacher.generation_config).from_dict(teacher.generation_config.to_dict())
    student.conversion_report = report
    return student.to(teacher.device).eval()


def _types(mixer: str | None, keep, layers: Layers | None, num_layers: int) -> list[str]:
    """The mixer of every layer, or "attention", from the arguments of `convert_model`."""
    if layers is not None:
        if mixer is not None or keep is not None:
            raise ValueError(
                "layers says which layer gets which mixer, so it replaces mixer and keep; write the kept layers as"
                ' {"attention": [...]}'
            )
        return mixer_types_of(layers, num_layers)
    mixer = "gka" if mixer is None else mixer
    start_of(mixer)  # an unknown mixer is refused before anything else
    kept = layers_to_keep("none" if keep is None else keep, num_layers)
    return [ATTENTION if i in kept else mixer for i in range(num_layers)]


def _options(used: list[str], mixers: dict[str, dict] | None, plain: dict) -> dict[str, dict]:
    """The user's options of every mixer in `used`. Raises ValueError for options that no layer would read."""
    mixers = {} if mixers is None else mixers
    wrong = not isinstance(mixers, dict) or any(not isinstance(own, dict) for own in mixers.values())
    if wrong:
        raise ValueError(f'mixers is {mixers!r}; give options by mixer, e.g. {{"gka": {{"solver_phases": [30]}}}}')
    if unused := [name for name in mixers if name not in used]:
        raise ValueError(f"mixers has options of {unused[0]!r}, but no layer uses it; used here: {', '.join(used)}")
    if plain and len(used) > 1:
        raise ValueError(
            f"{next(iter(plain))} is an option of one mixer, but the layers use {', '.join(used)}; name the mixer:"
            f' mixers={{"{used[0]}": {{...}}}}'
        )
    return {kind: dict(mixers.get(kind, {})) | plain for kind in used}


def save_student(
    student: PreTrainedModel,
    path: str | Path,
    tokenizer=None,
    *,
    overwrite: bool = False,
    dtype=None,
    files: dict[str, str | bytes] | None = None,
) -> None:
    """Write a model folder. If writing fails, no incomplete folder is left.

    The conversion report is written to conversion.json. If the student was loaded from a folder, the report of that
    folder is used.

    Args:
        overwrite: replace an existing folder.
        dtype: cast the student to it first, in place.
        files: contents of further files by name.

    Raises:
        ValueError: the folder is not empty and `overwrite` is not set, a file cannot be written,
            or the student is divided among several processes (tensor parallelism).
    """
    if (ranks := tensor_parallel_size(student.config)) > 1:
        raise ValueError(
            f"save_student writes from one process, and this model is divided among {ranks}: call"
            " save_pretrained on all of them, which gathers the weights"
        )
    remedy = "Nothing was left there, an earlier folder is untouched; make room and save again"
    with explain_write_errors(path, remedy), atomic_folder(path, overwrite) as folder:
        if dtype is not None:
            cast_student(student, dtype)
        student.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        if (report := _report_of(student)) is not None:
            files = {REPORT_FILE: report} | (files or {})
        for name, content in (files or {}).items():
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def _report_of(student: PreTrainedModel) -> str | None:
    """The conversion report of a student as JSON, or that of the folder from which it was loaded; None without one."""
    if (report := getattr(student, "conversion_report", None)) is not None:
        return json.dumps(report.record(), indent=1) + "\n"
    stored = Path(student.name_or_path) / REPORT_FILE
    return stored.read_text() if student.name_or_path and stored.is_file() else None


def cast_student(student: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Cast the student in place, except parameters that mixers and backbone keep in fp32, e.g. decays.

    Buffers that are not saved (tables of rotary angles) keep their dtype, as in a loaded model.
    """
    exempt = fp32_parameter_names(student)
    saved = set(student.state_dict())
    tensors = [*student.named_parameters(), *((n, b) for n, b in student.named_buffers() if n in saved)]
    for name, tensor in tensors:
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32 if name in exempt else dtype)
    return student


def _copy_rest(teacher: PreTrainedModel, student: PreTrainedModel, prefixes: list[str], report) -> None:
    """Copy all tensors outside the converted attention modules, by name. Raises ValueError if the names differ."""

    def rest(model):
        return {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(tuple(prefixes))}

    source, target = rest(teacher), rest(student)
    if different := sorted(source.keys() ^ target.keys()):
        raise ValueError(
            f"tensors {', '.join(different[:5])}{' ...' if len(different) > 5 else ''} exist in only one of teacher "
            "and student; they would be lost. Is the teacher an unmodified transformers model?"
        )
    with torch.no_grad():
        for name, tensor in source.items():
            if target[name].dtype != tensor.dtype:  # some families keep a few parameters in fp32
                student.get_parameter(name).data = tensor.clone()
            else:
                target[name].copy_(tensor)
    report.copied = sorted(source)


def _initialise(student: PreTrainedModel, layer: int, start: Start, attention: AttentionWeights, report) -> None:
    """Fill one mixer from an attention and check the reported fate of every tensor."""
    mixer, prefix = attention_module(student, layer), attention_prefix(student, layer)
    with torch.no_grad():
        fates = start.take_over(mixer, attention)
    parameters = dict(mixer.named_parameters())
    mixer_is_meta = next(iter(parameters.values())).is_meta  # shapes without values: see estimate.py
    reported, expected = Counter(fate.field for fate in fates), Counter(attention.tensors().keys())
    if reported != expected:
        wrong = sorted(expected - reported) or sorted(reported - expected)
        raise ValueError(
            f"{prefix}: {type(mixer).__name__} must report exactly one fate for each tensor, but does not for"
            f" {', '.join(wrong)}. Keep this layer as attention, or use another mixer"
        )
    for fate in fates:
        if unknown := set(fate.targets) - parameters.keys():
            raise ValueError(
                f"{type(mixer).__name__} reports that {fate.field} was copied to {sorted(unknown)}, but has no such"
                " parameter"
            )
        for name in fate.targets if fate.fate == "used" and not mixer_is_meta else ():
            tensor = attention.tensors()[fate.field]
            if not torch.equal(parameters[name], tensor.to(parameters[name])):
                raise ValueError(
                    f"{type(mixer).__name__} reports that {fate.field} was copied to {name}, but their values differ"
                )
        row = {"layer": layer, "source": ", ".join(attention.sources[fate.field]), "fate": fate.fate}
        report.tensors.append(row | {"targets": list(fate.targets), "reason": fate.reason})
    filled = {target for fate in fates for target in fate.targets}
    report.fresh += [f"{prefix}.{name}" for name in parameters if name not in filled]
