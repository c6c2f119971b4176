"""Decoder families in every layout, with all mixers in turn, pass every check of `checks.py`."""

import itertools

import pytest

from core.checks import (
    CHECKS,
    check_assistant,
    check_checkpointing_refuses_a_cache,
    check_gradient_checkpointing,
    check_padding,
    check_written_pad,
)
from testing import (
    ALIKE,
    DEFAULT_MIXER,
    FAMILIES,
    LAYOUTS,
    MIXERS,
    NO_NATIVE_PACKING,
    in_turn,
    slides,
    sliding_cache_records_one_forward,
    tiny_model,
)

# families that are ALIKE have these checks and, in `make test-all`, a third of the others in turn
FORWARD = ("memory_reaches_the_end", "splits", "padding", "packed", "padded_generation")
TABLES = {"family": FAMILIES, "check": CHECKS, "layout": LAYOUTS, "mixer": MIXERS}
ROWS = [
    row
    for row in in_turn(**TABLES).args[1]
    if row[0] not in ALIKE or row[1] in FORWARD or ([*ALIKE].index(row[0]) + [*CHECKS].index(row[1])) % 3 == 0
]


@pytest.mark.product_rows(f"({'|'.join(ALIKE)})-(?!({'|'.join(FORWARD)})-)")
@pytest.mark.parametrize([*TABLES], ROWS)
def test_check(family, check, layout, mixer):
    model = tiny_model(family, layout, mixer)
    if check == "packed" and family in NO_NATIVE_PACKING and layout != "all":
        with pytest.raises(ValueError, match="would attend across packed sequences"):
            CHECKS[check](model)
    else:
        CHECKS[check](model)


@pytest.mark.product_rows(f"({'|'.join(ALIKE)})-")
@in_turn(family=FAMILIES, mixer=MIXERS)
def test_assistant(family, mixer):
    model = tiny_model(family, "odd", mixer)
    if slides(model) and sliding_cache_records_one_forward():
        pytest.skip("this transformers cannot draft with sliding windows")
    check_assistant(model, tiny_model(family, "odd", mixer, seed=1))


@pytest.mark.parametrize("mixer", MIXERS)
def test_written_pad(mixer):
    check_written_pad(tiny_model("llama", "odd", mixer))


@in_turn(family=FAMILIES, mixer=MIXERS)
def test_gradient_checkpointing(family, mixer):
    model = tiny_model(family, "odd", mixer, fresh=True)
    check_gradient_checkpointing(model)
    check_checkpointing_refuses_a_cache(model)


def test_checkpointing_refuses_a_cache_of_memories_alone():
    check_checkpointing_refuses_a_cache(tiny_model("llama", "all", DEFAULT_MIXER, fresh=True))


@pytest.mark.parametrize("mixer", MIXERS)
def test_padding_with_holes(mixer):
    check_padding(tiny_model("llama", "odd", mixer), kinds=("holes",))
    check_padding(tiny_model("mistral", "all", mixer), kinds=("holes",))


def test_rows_in_turn_meet():
    """Every two values of different tables, but for checks of ALIKE families; each check has some of these."""
    few = TABLES | {"family": FAMILIES.keys() - ALIKE.keys()}
    for one, other in itertools.combinations(range(len(TABLES)), 2):
        names = [[*TABLES][place] for place in (one, other)]
        met = {(row[one], row[other]) for row in ROWS if row[0] in few["family"]}
        assert met == set(itertools.product(*(few[name] for name in names))), names
    assert {row[1] for row in ROWS if row[0] in ALIKE} == CHECKS.keys()
