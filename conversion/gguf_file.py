"""Reads a GGUF file by transformers' own loader (extra `gguf`) into a plain model with the tokenizer of the file.

The weights are dequantized: they have the values that the file stands for, which are not those of the original model.
"""

import struct
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_memmix.conversion.families import family_of
from hf_memmix.conversion.loading import check_finite_weights, check_loading, one_line
from hf_memmix.errors import UserError


def read_gguf(file: Path, dtype: str = "bfloat16") -> tuple[PreTrainedModel, object]:
    """The model and the tokenizer of a GGUF file.

    Args:
        dtype: bfloat16, float16 or float32, in which the dequantized weights are held.

    Raises:
        ValueError: transformers cannot read the file, the model is of no family that can be converted, or a weight is
            missing, NaN or infinite.
    """
    where, name = {"gguf_file": file.name}, repr(str(file))
    try:
        options = {"dtype": getattr(torch, dtype), "output_loading_info": True, **_dequantized()}
        model, loading = AutoModelForCausalLM.from_pretrained(file.parent, **where, **options)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **where)
    # the library and the reader of the format raise exceptions of many kinds for broken and unknown files
    except (ValueError, LookupError, TypeError, AttributeError, OSError, RuntimeError, struct.error) as error:
        raise UserError(f"transformers cannot read {name}: {one_line(error)}") from None
    check_loading(name, loading)
    check_finite_weights(model, name)
    family_of(model.config)
    # transformers 5.17 gives the tokenizer another end of text than the file
    if isinstance(model.config.eos_token_id, int):
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    model.config.name_or_path = ""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model.eval(), tokenizer


def _dequantized() -> dict:
    """The argument by which transformers dequantizes. Before 5.23 it did so without one."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}
