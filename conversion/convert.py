"""`convert_model`: replace the attention of chosen layers of a pretrained decoder by recurrent mixers.

`student.conversion_report` lists every tensor of the teacher. All tensors outside the converted attention modules are
bit-equal in the student. The teacher is not modified.
"""

import copy
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedModel

import hf_memmix
from hf_memmix._transformers import tensor_parallel_size
from hf_memmix.conversion.conversion_report import ConversionReport
from hf_memmix.conversion.families import attention_prefix, extract_attention, family_of
from hf_memmix.conversion.fresh import new_student
from hf_memmix.conversion.from_attention import start_of
from hf_memmix.conversion.initialise import initialise_mixer
from hf_memmix.conversion.layer_choice import layers_to_keep, layers_without_rope
from hf_memmix.conversion.limits import RESIZE, tokens_without_embedding
from hf_memmix.conversion.loading import (
    check_finite_weights,
    check_ties,
    load_model,
    load_tokenizer,
    read_config,
)
from hf_memmix.conversion.mixer_layout import Layers, mixer_types_of, options_by_mixer, told_before
from hf_memmix.conversion.model_files import check_model_folder, first_names
from hf_memmix.conversion.saving import SHARD_SIZE, atomic_folder, check_not_read, check_target, explain_write_errors
from hf_memmix.conversion.streaming import ConversionStream, NotStreamable, TrainedMixers
from hf_memmix.conversion.taken_mixers import take_mixers
from hf_memmix.errors import UserError
from hf_memmix.hub import model_folder
from hf_memmix.mixer_names import DEFAULT_MIXER
from hf_memmix.mixers import ATTENTION, MemoryMixer
from hf_memmix.quantization import refuse_quantized
from hf_memmix.swap import fp32_parameter_names, memory_mixers

REPORT_FILE = "conversion.json"
WRITE_AGAIN = "Nothing was left there, an earlier folder is untouched; make room and save again"


def _check_teacher(teacher) -> None:
    """Raise ValueError unless the teacher is a causal language model, or names one."""
    named = isinstance(teacher, (str, os.PathLike))
    if not named and not (isinstance(teacher, PreTrainedModel) and teacher.can_generate()):
        raise UserError(
            f"the teacher is a {type(teacher).__name__}; give a causal language model (AutoModelForCausalLM), its"
            " folder or its Hub id"
        )


def refuse_adapters(teacher) -> None:
    """Raise ValueError if a model has adapters of PEFT: its weights are not those that it computes with."""
    if isinstance(teacher, torch.nn.Module) and (names := list(getattr(teacher, "peft_config", None) or ())):
        raise UserError(
            f"the teacher has adapters of PEFT ({', '.join(names)}), which a student would lose;"
            " convert the model that merge_and_unload() returns"
        )


def convert_model(
    teacher: PreTrainedModel | str | Path,
    mixer: str | None = None,
    keep=None,
    *,
    layers: Layers | None = None,
    mixers: dict[str, dict] | None = None,
    keep_without_rope=None,
    seed: int = 0,
    out: str | Path | None = None,
    **mixer_options,
) -> PreTrainedModel:
    """A student with mixers in place of attention, initialised from the teacher's attention.

        convert_model(teacher, mixer="gka", keep=[0])
        convert_model(teacher, layers={"ska": [3, 7], "attention": [0], "mamba2": "rest"})

    With `out`, the student is also written to a folder. If `teacher` is a folder too, one decoder layer at a time is
    in memory (`conversion.streaming`), and the returned student is on the meta device: it has shapes and
    `conversion_report`, but no values. `load_model(out)` loads it.

    Args:
        teacher: a causal LM of a family in `conversion.families.FAMILIES`, or a folder or Hub id of one.
        mixer: name of a registered mixer that can be initialised from attention, `DEFAULT_MIXER` by default. It
            replaces the attention of all layers outside `keep`.
        keep: layers that stay attention, see `layers_to_keep`; none by default.
        layers: in place of `mixer` and `keep`, the layers of several mixers, see `mixer_types_of`.
        mixers: options by the name of the mixer, e.g. `{"gka": {"solver_phases": [30]}}`.
        keep_without_rope: those of the kept layers whose queries and keys are not rotated any more: "all", or layers
            as in `keep`. None: as in the teacher. The student then has to be trained.
        seed: seed of the parameters that have no counterpart in the teacher. The global random generator does not
            change.
        out: folder to write the student to, with the tokenizer of the teacher's folder.
        mixer_options: options of the mixer, e.g. `solver_phases=[30]`, if all layers have the same mixer.

    Returns:
        the student in the teacher's dtype and on its device, in eval mode, with `conversion_report`.

    Raises:
        ValueError: the teacher is no causal LM or its family is not supported, `keep`, `layers` or an option is
            invalid, a weight is not finite, a tensor would be lost, the teacher has adapters, its generation settings
            cannot be saved, or `out` is not empty or cannot be written.
    """
    refuse_adapters(teacher)
    _check_teacher(teacher)
    arguments = {"mixer": mixer, "keep": keep, "layers": layers, "mixers": mixers, "seed": seed}
    arguments["keep_without_rope"] = keep_without_rope
    convert = partial(_student_of, **arguments, mixer_options=mixer_options)
    return convert(teacher) if out is None else convert_to_folder(teacher, out, convert, seed=seed)


@torch.inference_mode(False)  # tensors that are made in it could never be trained
def _student_of(
    teacher: PreTrainedModel | str | Path,
    *,
    mixer,
    keep,
    layers,
    mixers,
    keep_without_rope,
    seed: int,
    mixer_options: dict,
) -> PreTrainedModel:
    """The student of a teacher, in memory; arguments as in `convert_model`."""
    checked = not isinstance(teacher, PreTrainedModel)
    if checked:
        teacher = load_model(model_folder(Path(teacher)))
    config = teacher.config
    refuse_quantized(teacher, "the teacher", "give the original weights in bf16, fp16 or fp32")
    family_of(config)
    if config.model_type == "memmix":
        raise UserError("the teacher is a converted model already; give the transformer it came from")
    if not checked:  # `load_model` reads all weights for the same two checks
        check_ties(teacher, "the teacher")
        check_finite_weights(teacher, "the teacher")
    types = _types(mixer, keep, layers, config.num_hidden_layers)
    kept, converted = ([i for i, kind in enumerate(types) if (kind == ATTENTION) is stays] for stays in (True, False))
    used = list(dict.fromkeys(types[i] for i in converted))
    report = ConversionReport(used[0] if len(used) == 1 else None, converted, kept, types)

    # a deep copy: transformers 5.23 saves settings that contradict each other if they are unchanged since loading
    generation = copy.deepcopy(teacher.generation_config)
    _check_generation_settings(generation)
    starts = {kind: start_of(kind) for kind in used}
    options = options_by_mixer(used, mixers, mixer_options)
    for line in told_before(options, config):
        warnings.warn(line, stacklevel=4)
    attentions = {i: extract_attention(teacher, i) for i in converted}
    for kind in options:  # options that the attention needs (biases, norms); the user's options replace them
        some = attentions[types.index(kind) if kind in used else converted[0]]
        options[kind] = start_of(kind).options(some) | options[kind]
    still = None if keep_without_rope is None else layers_without_rope(keep_without_rope, kept, len(types))
    student_config = hf_memmix.memmix_config(config, types, options, attention_without_rope=still or None)
    place = "meta" if teacher.device.type == "meta" else "cpu"
    student = new_student(student_config, seed, place)
    cast_student(student, teacher.dtype)
    _copy_rest(teacher, student, [attention_prefix(teacher, i) + "." for i in converted], report)
    for layer in converted:
        initialise_mixer(student, layer, starts[types[layer]], attentions[layer], report)
    student.generation_config = generation
    student.conversion_report = report
    return student.to(teacher.device).eval()


def _check_generation_settings(settings: GenerationConfig) -> None:
    """Raise ValueError if the library would refuse to save these settings, which it finds out only after the work."""
    with tempfile.TemporaryDirectory(prefix="memmix-settings-") as folder:
        try:
            settings.save_pretrained(folder)
        except ValueError as error:
            lines = [line.strip("- ") for line in str(error).splitlines()]
            raise UserError(
                "the generation settings of the teacher contradict each other, so transformers would not save the"
                f" student: {next((line for line in lines if line.startswith('`')), lines[0])} Correct"
                " generation_config.json, or teacher.generation_config in Python"
            ) from None


def _types(mixer: str | None, keep, layers: Layers | None, num_layers: int) -> list[str]:
    """The mixer of every layer, or "attention", from the arguments of `convert_model`."""
    if layers is not None:
        if mixer is not None or keep is not None:
            raise UserError(
                "layers says which layer gets which mixer, so it replaces mixer and keep; write the kept layers as"
                ' {"attention": [...]}'
            )
        return mixer_types_of(layers, num_layers)
    mixer = DEFAULT_MIXER if mixer is None else mixer
    start_of(mixer)  # an unknown mixer is refused before anything else
    kept = layers_to_keep("none" if keep is None else keep, num_layers)
    return [ATTENTION if i in kept else mixer for i in range(num_layers)]


def convert_to_folder(
    teacher: PreTrainedModel | str | Path,
    out: str | Path,
    convert: Callable[..., PreTrainedModel],
    *,
    seed: int = 0,
    overwrite: bool = False,
    trained: Sequence[str | Path] = (),
    fill: Callable[[MemoryMixer], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
    notify: Callable[[str], None] = warnings.warn,
) -> PreTrainedModel:
    """Convert a teacher and write the student, with the teacher's tokenizer, to a folder, which is complete or not
    there. One decoder layer at a time is in memory if `teacher` is a folder of safetensors.

    Args:
        convert: makes the student of a teacher: `convert_model` with its arguments, e.g. by `functools.partial`.
        seed: the seed in these arguments.
        overwrite: replace an existing folder.
        trained: folders of trained students whose mixers are taken in place of new ones.
        fill: called with every mixer before it is written, e.g. to load trained values.
        progress: called with the number of bytes written and of all bytes.
        notify: called with one line if the teacher must be converted in memory as a whole.

    Returns:
        the student; if it was not converted in memory, on the meta device.

    Raises:
        ValueError: as in `convert_model`, `load_model` and `save_student`.
    """
    trained = [model_folder(Path(folder)) for folder in trained]
    check_not_read(out, *trained, None if isinstance(teacher, PreTrainedModel) else teacher)
    check_target(out, overwrite)
    if isinstance(teacher, PreTrainedModel):
        tokenizer, stream = None, None
    else:
        teacher = model_folder(Path(teacher))
        check_model_folder(teacher)
        tokenizer = load_tokenizer(teacher)
        try:
            stream = ConversionStream(teacher, convert)
        except NotStreamable as reason:
            notify(f"{teacher} is converted in memory as a whole, because {reason}")
            stream = None
    student = convert(teacher) if stream is None else stream.student
    _check_trained(trained, student.config.num_hidden_layers)
    lost = tokens_without_embedding(tokenizer, student.get_input_embeddings().num_embeddings) if tokenizer else []
    if lost:
        notify(
            f"the tokenizer of {teacher} has {len(lost)} tokens that the model does not have: {first_names(lost)};"
            f" text that holds them is refused: {RESIZE}"
        )
    if stream is None:
        if trained:
            take_mixers(student, *map(load_model, trained))
        for mixer in memory_mixers(student).values() if fill is not None else ():
            fill(mixer)
        save_student(student, out, tokenizer, overwrite=overwrite)
        return student
    mixers = TrainedMixers(trained) if trained else None
    with explain_write_errors(out, WRITE_AGAIN), atomic_folder(out, overwrite) as folder:
        stream.write(folder, seed, mixers, fill, progress)
        write_beside(stream.student, folder, tokenizer)
    return stream.student


def _check_trained(trained: Sequence[Path], layers: int) -> None:
    """Raise ValueError if a trained student has another number of layers: it came from another teacher."""
    for folder in trained:
        if (theirs := read_config(folder).num_hidden_layers) != layers:
            raise UserError(
                f"the trained student {str(folder)!r} has {theirs} layers, the teacher {layers}; give the teacher it"
                " came from"
            )


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
        student: a converted model.
        path: the folder to write.
        tokenizer: is saved beside the model, if given.
        overwrite: replace an existing folder.
        dtype: cast the student to it first, in place.
        files: contents of further files by name.

    Raises:
        ValueError: the folder is not empty and `overwrite` is not set, a file cannot be written, the student has no
            values (on the meta device), `tokenizer` is no tokenizer, or the student is divided among several processes
            (tensor parallelism).
    """
    # offloaded parameters are on the meta device, too, but the library finds their values
    if not hasattr(student, "hf_device_map") and any(parameter.is_meta for parameter in student.parameters()):
        raise UserError(
            "the student is on the meta device and has no values: load what was written before (load_model), or"
            " convert without out"
        )
    if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
        raise UserError(f"tokenizer is {tokenizer!r}; give a tokenizer, e.g. of AutoTokenizer.from_pretrained")
    if (ranks := tensor_parallel_size(student.config)) > 1:
        raise UserError(
            f"save_student writes from one process, and this model is divided among {ranks}: call"
            " save_pretrained on all of them, which gathers the weights"
        )
    with explain_write_errors(path, WRITE_AGAIN), atomic_folder(path, overwrite) as folder:
        if dtype is not None:
            cast_student(student, dtype)
        student.save_pretrained(folder, max_shard_size=SHARD_SIZE)
        write_beside(student, folder, tokenizer, files)


def write_beside(student: PreTrainedModel, folder: Path, tokenizer=None, files: dict | None = None) -> None:
    """Write what stands beside the weights of a student: tokenizer, conversion report, further files by name."""
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
    return stored.read_text(encoding="utf-8") if student.name_or_path and stored.is_file() else None


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
        raise UserError(
            f"tensors {', '.join(different[:5])}{' ...' if len(different) > 5 else ''} exist in only one of teacher "
            "and student; they would be lost. Is the teacher an unmodified transformers model?"
        )
    own = {**dict(student.named_parameters()), **dict(student.named_buffers())}
    with torch.no_grad():
        for name, tensor in source.items():
            if target[name].dtype != tensor.dtype:  # some families keep a few tensors in fp32
                own[name].data = tensor.clone()
            else:
                target[name].copy_(tensor)
    report.copied = sorted(source)
