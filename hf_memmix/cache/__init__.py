"""The cache of a model with memory layers.

layer.py           one layer: named states of fixed size, a token count, exact rollback
recurrent.py       `RecurrentStateCache`, and `adopt_cache`, which makes the library's caches fit
rows.py            whether an input may continue a cache
finished_rows.py   rows that end early in generate()
record.py          `cache.memmix`: what a model notes in a cache
identity.py        which model a cache belongs to
file.py            a cache as a safetensors file
"""

from .finished_rows import FinishedRows, feeds_pads
from .identity import check_same_model, fingerprint
from .layer import RecurrentLayer, memory_layers_of
from .record import note_dtype, static_length_of
from .recurrent import (
    RecurrentStateCache,
    adopt_cache,
    cast_cache,
    replace_layers,
    stop_past_recording,
)
from .rows import check_hidden, check_rows, check_whole

__all__ = [
    "FinishedRows",
    "RecurrentLayer",
    "RecurrentStateCache",
    "adopt_cache",
    "cast_cache",
    "check_hidden",
    "check_rows",
    "check_same_model",
    "check_whole",
    "feeds_pads",
    "fingerprint",
    "memory_layers_of",
    "note_dtype",
    "replace_layers",
    "static_length_of",
    "stop_past_recording",
]
