"""`convert_model`: replace the attention of chosen layers of a pretrained decoder by a recurrent mixer.

Every tensor of the teacher is accounted for in `student.conversion_report`; whatever is not attention of a converted
layer is bit-equal in the student, and the teacher is never modified.
"""

import json
from collections import Counter
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

import hf_memmix
from hf_memmix.conversion.families import attention_module, attention_prefix, extract_attention, family_of
from hf_memmix.conversion.layer_choice import layers_to_keep
from hf_memmix.conversion.report import ConversionReport
from hf_memmix.conversion.saving import atomic_folder, clear_write_errors
from hf_memmix.conversion.teacher_forcing import converted_layers
from hf_memmix.mixers import MIXERS, AttentionWeights


def convert_model(
    teacher: PreTrainedModel | str | Path, mixer: str = "gka", keep="none", *, seed: int = 0, **mixer_options
) -> PreTrainedModel:
    """A student whose layers outside `keep` use `mixer`, initialised from the teacher's attention.

    Args:
        teacher: a causal LM of a family in `conversion.families.FAMILIES`, or a folder that holds one.
        keep: layers that stay attention, see `layers_to_keep`.
        seed: of the parameters that have no counterpart in the teacher; the global generator is left alone.
        mixer_options: fields of the mixer's config, e.g. `num_iterations=30`.

    Returns the student in the teacher's dtype and on its device, in eval mode, with `conversion_report`.
    Raises ValueError for an unsupported family, a bad `keep` or option, or a tensor that would be lost.
    """
    if not isinstance(teacher, PreTrainedModel):
        teacher = load_model(teacher)
    config = teacher.config
    family_of(config)
    if config.model_type == "memmix":
        raise ValueError("the teacher is a converted model already; give the transformer it came from")
    keep = layers_to_keep(keep, config.num_hidden_layers)
    types = ["attention" if i in keep else mixer for i in range(config.num_hidden_layers)]
    converted = [i for i in range(config.num_hidden_layers) if i not in keep]
    report = ConversionReport(mixer=mixer, converted=converted, kept=keep)

    attentions = {i: extract_attention(teacher, i) for i in converted}
    if mixer not in MIXERS:
        raise ValueError(f"mixer {mixer!r} is unknown; registered: {', '.join(MIXERS)}")
    # what the attention needs (biases, norms) first, the user's word last
    options = MIXERS[mixer].options_for(attentions[converted[0]]) | mixer_options
    student_config = hf_memmix.memmix_config(config, mixer_types=types, mixers={mixer: options})
    place = "meta" if teacher.device.type == "meta" else "cpu"
    with torch.random.fork_rng(devices=[]), torch.device(place):
        torch.manual_seed(seed)
        student = AutoModelForCausalLM.from_config(student_config, dtype=torch.float32)
    cast_student(student, teacher.dtype)
    _copy_rest(teacher, student, [attention_prefix(teacher, i) + "." for i in converted], report)
    for layer in converted:
        _initialise(student, layer, attentions[layer], report)
    student.generation_config = type(teacher.generation_config).from_dict(teacher.generation_config.to_dict())
    student.conversion_report = report
    return student.to(teacher.device).eval()


def read_config(folder: str | Path) -> PreTrainedConfig:
    """The configuration of a causal LM in a local folder. Raises ValueError if there is none, or another model's."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{str(folder)!r} is not a model folder: it has no config.json")
    try:
        config = AutoConfig.from_pretrained(folder)
    except StrictDataclassError as error:
        raise ValueError(f"{str(folder)!r} has a config.json with impossible values: {error}") from None
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(
            f"{str(folder)!r} holds a {config.model_type!r} model, which is no causal language model; give a decoder"
        )
    return config


def load_model(folder: str | Path, dtype="auto") -> PreTrainedModel:
    """A causal LM from a local folder, native or converted.

    Raises:
        ValueError: there is none, its weights are corrupt or truncated, or it lacks some of the model's tensors.
    """
    read_config(folder)
    folder = Path(folder)
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    except SafetensorError as error:
        raise ValueError(f"{str(folder)!r} has corrupt or truncated weights ({error}); copy it anew") from error
    if missing := sorted(loading["missing_keys"]):
        some = ", ".join(missing[:3]) + (" ..." if len(missing) > 3 else "")
        raise ValueError(f"{str(folder)!r} lacks {len(missing)} tensors, which would be random: {some}. Copy it anew")
    return model.eval()


def save_student(
    student: PreTrainedModel,
    path: str | Path,
    tokenizer=None,
    *,
    overwrite: bool = False,
    dtype=None,
    files: dict[str, str | bytes] | None = None,
) -> None:
    """Write a model folder, whole or not at all; an existing one is replaced only with `overwrite`.

    A converted model's report goes along as conversion.json.

    `dtype`: cast the student to it first, in place. `files`: contents of further files by name.
    """
    remedy = "Nothing was left there, an earlier folder is untouched; make room and save again"
    with clear_write_errors(path, remedy), atomic_folder(path, overwrite) as folder:
        if dtype is not None:
            cast_student(student, dtype)
        student.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        if (report := getattr(student, "conversion_report", None)) is not None:
            files = {"conversion.json": json.dumps(report.record(), indent=1) + "\n"} | (files or {})
        for name, content in (files or {}).items():
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def cast_student(student: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Cast in place, except the parameters that a mixer declares fp32 (decays lose their meaning in bf16)."""
    student.to(dtype)
    for layer in converted_layers(student):
        mixer = attention_module(student, layer)
        for name, parameter in mixer.named_parameters():
            if name in mixer.fp32_parameters:
                parameter.data = parameter.data.float()
    return student


def _copy_rest(teacher: PreTrainedModel, student: PreTrainedModel, prefixes: list[str], report) -> None:
    """Everything outside the converted attention modules, by name; a tensor without a partner is an error."""

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


def _initialise(student: PreTrainedModel, layer: int, attention: AttentionWeights, report) -> None:
    """Fill one mixer from its attention and check that every tensor has met a stated fate."""
    mixer, prefix = attention_module(student, layer), attention_prefix(student, layer)
    with torch.no_grad():
        fates = mixer.init_from_attention(attention)
    parameters = dict(mixer.named_parameters())
    mixer_is_meta = next(iter(parameters.values())).is_meta  # shapes without values: see estimate.py
    told = Counter(fate.field for fate in fates)
    if told != Counter(attention.tensors().keys()):
        silent = sorted(attention.tensors().keys() - told.keys()) or sorted(told - Counter(attention.tensors().keys()))
        raise ValueError(
            f"{prefix}: {type(mixer).__name__} does not say once what becomes of {', '.join(silent)}; refusing to "
            "convert rather than lose it silently. Keep this layer as attention, or use another mixer"
        )
    for fate in fates:
        if unknown := set(fate.targets) - parameters.keys():
            raise ValueError(f"{type(mixer).__name__} says {fate.field} went to {sorted(unknown)}, which it lacks")
        for name in fate.targets if fate.fate == "used" and not mixer_is_meta else ():
            tensor = attention.tensors()[fate.field]
            if not torch.equal(parameters[name], tensor.to(parameters[name])):
                raise ValueError(f"{type(mixer).__name__} says {fate.field} is used in {name}, which differs from it")
        row = {"layer": layer, "source": ", ".join(attention.sources[fate.field]), "fate": fate.fate}
        report.tensors.append(row | {"targets": list(fate.targets), "reason": fate.reason})
    filled = {target for fate in fates for target in fate.targets}
    report.fresh += [f"{prefix}.{name}" for name in parameters if name not in filled]
