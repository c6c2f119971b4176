"""Every decoder family, in every layout, passes every check of `checks.py`; `make test` takes a part of them."""

import pytest

from core.checks import (
    CHECKS,
    check_assistant,
    check_checkpointing_refuses_a_cache,
    check_gradient_checkpointing,
    check_padding,
)
from testing import (
    DEFAULT_MIXER,
    FAMILIES,
    LAYOUTS,
    MIXERS,
    NO_NATIVE_PACKING,
    in_turn,
    over_tables,
    slides,
    sliding_cache_records_one_forward,
    tiny_model,
)


@over_tables("mixer", "family", "layout", check=CHECKS)
def test_check(mixer, family, layout, check):
    model = tiny_model(family, layout, mixer)
    if check == "packed" and family in NO_NATIVE_PACKING and layout != "all":
        with pytest.raises(ValueError, match="would attend across packed sequences"):
            CHECKS[check](model)
    else:
        CHECKS[check](model)


@in_turn(mixer=MIXERS, family=FAMILIES)
def test_assistant(mixer, family):
    model = tiny_model(family, "odd", mixer)
    if slides(model) and sliding_cache_records_one_forward():
        pytest.skip("this transformers cannot draft with sliding windows")
    check_assistant(model, tiny_model(family, "odd", mixer, seed=1))


@over_tables("mixer", "family")
def test_gradient_checkpointing(mixer, family):
    check_gradient_checkpointing(tiny_model(family, "odd", mixer, fresh=True))


@pytest.mark.product_rows(r"(?!gka-llama).*-all")  # one of several examples stays
@pytest.mark.parametrize("layout", ("odd", "all"))
@pytest.mark.parametrize(
    ("mixer", "family"), [*((mixer, "llama") for mixer in MIXERS), *((DEFAULT_MIXER, family) for family in FAMILIES)]
)
def test_checkpointing_refuses_a_cache(mixer, family, layout):
    check_checkpointing_refuses_a_cache(tiny_model(family, layout, mixer, fresh=True))


@pytest.mark.parametrize("mixer", MIXERS)
def test_padding_with_holes(mixer):
    check_padding(tiny_model("llama", "odd", mixer), kinds=("holes",))
    check_padding(tiny_model("mistral", "all", mixer), kinds=("holes",))


def test_everyday_part_meets_everything():
    """Every mixer runs three families, every family a third of the checks, every check all mixers and layouts."""

    def everyday(test):
        (mark,) = (mark for mark in test.pytestmark if mark.name == "parametrize")
        return [row.values for row in mark.args[1] if not row.marks]

    for test in (test_check, test_gradient_checkpointing):
        rows = everyday(test)
        assert {row[1] for row in rows} == set(FAMILIES)
        assert all(len({row[1] for row in rows if row[0] == mixer}) >= 3 for mixer in MIXERS)
    rows = everyday(test_check)
    for place, table in ((0, MIXERS), (2, LAYOUTS)):
        assert {(row[place], row[3]) for row in rows} == {(a, check) for a in table for check in CHECKS}
    for place, table in ((0, MIXERS), (1, FAMILIES)):
        assert {(row[place], row[2]) for row in rows} == {(a, layout) for a in table for layout in LAYOUTS}
    for family in FAMILIES:
        assert len({row[3] for row in rows if row[1] == family}) >= len(CHECKS) // 3
