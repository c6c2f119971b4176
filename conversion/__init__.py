"""From a pretrained transformer to a model with recurrent memory: extract attention, convert, compare."""

from hf_memmix.conversion.attention_weights import AttentionWeights, TensorFate
from hf_memmix.conversion.compare import compare_models
from hf_memmix.conversion.convert import ConversionReport, convert_model, load_model, save_student
from hf_memmix.conversion.families import FAMILIES, extract_attention
from hf_memmix.conversion.from_attention import starts
from hf_memmix.conversion.layer_choice import LayerChoice, layers_to_keep
from hf_memmix.conversion.mixer_layout import mixer_types_of

report = compare_models  # the public name

__all__ = [
    "FAMILIES",
    "AttentionWeights",
    "ConversionReport",
    "LayerChoice",
    "TensorFate",
    "convert_model",
    "extract_attention",
    "layers_to_keep",
    "load_model",
    "mixer_types_of",
    "report",
    "save_student",
    "starts",
]
