"""The files of a model folder, checked before torch or transformers is imported.

transformers takes defaults in place of some files that it cannot read, e.g. generation_config.json, and applies an
adapter that lies beside a model. Here such a folder is refused.
"""

import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from hf_memmix.backbones import BACKBONES
from hf_memmix.errors import UserError

DEQUANTIZED = ("mxfp4",)  # quantization of the released gpt_oss models, which transformers removes while loading
SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
ORIGINAL = "give the original weights in bf16, fp16 or fp32"
DEEPEST = 100  # levels of nesting of a JSON file
# files that a model folder may have, by what they must hold
OBJECTS = [f"{name}.json" for name in ("generation_config", "tokenizer_config", "special_tokens_map", "added_tokens")]
OBJECTS += [f"{name}.json" for name in ("vocab", "chat_template", "preprocessor_config", "processor_config")]
TEXTS = ["chat_template.jinja", "additional_chat_templates/*.jinja", "merges.txt", "vocab.txt"]
OTHERS = ["tokenizer.json", "tokenizer.model", "*.tiktoken"]  # the library refuses broken ones


def check_model_folder(folder: str | Path) -> dict:
    """The content of config.json in the folder of a causal LM.

    Raises:
        UserError: there is no config.json, it has impossible sizes, another file is broken, the weights are quantized,
            or the folder holds an adapter.
    """
    folder = Path(folder)
    if (folder / "adapter_config.json").is_symlink() or (folder / "adapter_config.json").exists():
        beside = " beside a model" if (folder / "config.json").is_file() else ", not a model"
        raise UserError(
            f"{str(folder)!r} holds an adapter{beside}; merge it into its base model (PEFT: merge_and_unload, then"
            " save_pretrained) and give that folder"
        )
    if not os.path.lexists(folder / "config.json"):
        _refuse_gguf(folder)
        there = "it has no config.json" if folder.is_dir() else "it is a file; give its folder"
        reason = there if folder.exists() else "it does not exist"
        raise UserError(f"{str(folder)!r} is not a model folder: {reason}")
    _check_kind(folder / "config.json")
    raw = read_json(folder / "config.json")
    if (method := quantization_of(raw)) and not str(raw.get("model_type", "")).startswith("memmix"):
        raise UserError(f"{str(folder)!r} holds weights quantized by {method!r}; {ORIGINAL}")
    check_sizes(folder, raw.get)
    check_other_files(folder)
    return raw


def check_converted(config: dict) -> None:
    """Raise UserError if this configuration of a student is that of a plain transformer."""
    if "mixer_types" not in config:
        raise UserError(
            f"the student is a plain {config.get('model_type')!r} model without memory layers; convert it first"
        )


def check_released(config: dict) -> None:
    """Raise UserError if this configuration is not that of a checkpoint of the official GKA release."""
    kind = str(config.get("model_type"))
    released = [f"hybrid_{name}" for name, row in BACKBONES.items() if row.gka_release]
    if kind not in released:
        raise UserError(f"model_type {kind!r} is not of the GKA release; supported: {', '.join(released)}")
    if not isinstance(config.get("gka_config"), dict):
        raise UserError("config.json has no gka_config, so no layer is GKA; nothing is left to import")
    if config.get("quantization_config"):
        raise UserError("the checkpoint is quantized; import the original weights")


def check_transformer(config: dict) -> None:
    """Raise UserError if this configuration of a teacher is that of a converted model."""
    if "mixer_types" in config:  # a student must learn from the original attention
        raise UserError(
            "the teacher is a converted model, not a transformer; give the transformer that the student came from"
        )


def check_limit(limit: float, role: str, length: int, name: str, remedy: str) -> None:
    """Raise UserError if a model for `limit` tokens cannot read `length`, which the option `name` holds."""
    if length > limit:
        raise UserError(f"{name} is {length}, but the {role} was made for {limit} tokens; {remedy}")


def check_sizes(folder: Path, get: Callable[[str], object]) -> None:
    """Raise UserError if a size is below 1, or the query heads cannot be divided among the key/value heads.

    `get(name)`: the value of a field, or None.
    """
    for name in SIZES:
        size = get(name)
        if isinstance(size, int) and size < 1:
            raise UserError(f"{str(folder)!r} has {name} {size} in config.json; it must be at least 1")
    heads, groups = get("num_attention_heads"), get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(groups, int) and heads % groups:
        raise UserError(
            f"{str(folder)!r} has num_attention_heads {heads} in config.json; it must be a multiple of"
            f" num_key_value_heads, {groups}"
        )


def read_json(file: Path) -> dict:
    """The object in a JSON file. Raises UserError with its name if it cannot be read, or is no JSON or no object."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except RecursionError:
        _refuse_depth(file)
    except ValueError as error:
        raise UserError(f"{str(file)!r} is not JSON ({error}); copy it again") from None
    except OSError as error:
        _refuse_unreadable(file, error)
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [part for part in level if isinstance(part, (dict, list))]
        level = [part for outer in level for part in (outer.values() if isinstance(outer, dict) else outer)]
    if level:  # how deep `json` itself reads depends on the release of Python
        _refuse_depth(file)
    if not isinstance(value, dict):
        raise UserError(f"{str(file)!r} holds no JSON object; copy it again")
    return value


def first_names(names: Iterable[str], count: int = 3) -> str:
    """The first `count` names, with "..." if there are more."""
    names = list(names)
    return ", ".join(names[:count]) + (" ..." if len(names) > count else "")


def _refuse_unreadable(file: Path, error: OSError):
    raise UserError(f"{str(file)!r} cannot be read ({error.strerror}); correct that, or copy it again") from None


def _refuse_depth(file: Path):
    raise UserError(f"{str(file)!r} is nested more than {DEEPEST} levels deep; copy it again")


def _refuse_gguf(folder: Path) -> None:
    """Raise UserError for a GGUF file, or a folder that holds nothing but such files."""
    found = [folder] if folder.suffix == ".gguf" else sorted(folder.glob("*.gguf")) if folder.is_dir() else []
    if found or (folder.is_dir() and "gguf" in str(folder).lower()):
        file = str(found[0]) if found else "FILE.gguf"
        raise UserError(
            f"{str(folder)!r} holds weights quantized by 'gguf'; {ORIGINAL}: the model from which the GGUF file was"
            f" made, or the folder that memmix import-gguf {file} FOLDER writes"
        )


def find_gguf(place: Path) -> Path:
    """The GGUF file that a path names: itself, or the only one in a folder.

    Raises:
        ValueError: there is no such file, there are several, it is a part of a model, or gguf is not installed.
    """
    files = [place] if place.is_file() else sorted(place.glob("*.gguf")) if place.is_dir() else []
    if not files:
        raise UserError(f"{str(place)!r} is no GGUF file, nor a folder with one")
    if re.search(r"-\d{5}-of-\d{5}$", files[0].stem):
        raise UserError(
            f"{str(files[0])!r} is one of several parts of a model; join them with gguf-split --merge, and give the"
            " result"
        )
    if len(files) > 1:
        raise UserError(f"{str(place)!r} holds {len(files)} GGUF files; give one of them, e.g. {str(files[0])!r}")
    with files[0].open("rb") as file:
        if file.read(4) != b"GGUF":
            raise UserError(f"{str(files[0])!r} is not a GGUF file; copy it again")
    if importlib.util.find_spec("gguf") is None:
        raise UserError("the package gguf, which reads these files, is not installed: pip install gguf")
    return files[0]


def chat_template_of(folder: Path) -> Path | None:
    """Return the file with the chat template of a tokenizer, or None if the tokenizer has no template."""
    if (template := folder / "chat_template.jinja").is_file():
        return template
    config = folder / "tokenizer_config.json"
    return config if config.is_file() and read_json(config).get("chat_template") else None


def quantization_of(raw: dict) -> str | None:
    """The quantization method in a config.json; None if there is none or transformers removes it while loading."""
    found = raw.get("quantization_config")
    if not found:
        return None
    method = str(found.get("quant_method", "unknown")) if isinstance(found, dict) else repr(found)
    return None if method in DEQUANTIZED else method


def check_other_files(folder: Path) -> None:
    """Raise UserError if a file of the tokenizer, the generation settings or a processor is broken."""
    for file in _present(folder, OBJECTS):
        read_json(file)
    for file in _present(folder, TEXTS):
        try:
            file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{str(file)!r} is not UTF-8 (byte {error.start}); copy it again") from None
        except OSError as error:
            _refuse_unreadable(file, error)
    for _ in _present(folder, OTHERS):
        pass


def _present(folder: Path, names: list[str]) -> Iterable[Path]:
    """The files of these names or patterns that are in the folder."""
    for name in names:
        for file in sorted(folder.glob(name)) if "*" in name else [folder / name]:
            if os.path.lexists(file):
                _check_kind(file)
                yield file


def _check_kind(file: Path) -> None:
    """Raise UserError for a folder in place of a file, and for a link to nothing, which libraries take for no file."""
    if not file.is_file():
        kind = "a link to a file that is not there" if file.is_symlink() else "not a file"
        raise UserError(f"{str(file)!r} is {kind}; copy it again")
