"""Every decoder family, in every layout, passes every check of `checks.py`."""

import pytest

from house.checks import (
    CHECKS,
    check_assistant,
    check_checkpointing_refuses_a_cache,
    check_gradient_checkpointing,
    check_padding,
)
from testing import (
    FAMILIES,
    HOUSE_MIXER,
    LAYOUTS,
    MIXERS,
    NO_NATIVE_PACKING,
    slides,
    sliding_cache_records_one_forward,
    tiny_model,
)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mixer", MIXERS)
def test_check(mixer, family, layout, check):
    model = tiny_model(family, layout, mixer)
    if check == "packed" and family in NO_NATIVE_PACKING and layout != "all":
        with pytest.raises(ValueError, match="would attend across packed sequences"):
            CHECKS[check](model)
    else:
        CHECKS[check](model)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mixer", MIXERS)
def test_assistant(mixer, family):
    model = tiny_model(family, "odd", mixer)
    if slides(model) and sliding_cache_records_one_forward():
        pytest.skip("this transformers cannot draft with sliding windows")
    check_assistant(model, tiny_model(family, "odd", mixer, seed=1))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mixer", MIXERS)
def test_gradient_checkpointing(mixer, family):
    check_gradient_checkpointing(tiny_model(family, "odd", mixer, fresh=True))


@pytest.mark.parametrize("layout", ("odd", "all"))
@pytest.mark.parametrize(
    ("mixer", "family"), [*((mixer, "llama") for mixer in MIXERS), *((HOUSE_MIXER, family) for family in FAMILIES)]
)
def test_checkpointing_refuses_a_cache(mixer, family, layout):
    check_checkpointing_refuses_a_cache(tiny_model(family, layout, mixer, fresh=True))


@pytest.mark.parametrize("mixer", MIXERS)
def test_padding_with_holes(mixer):
    check_padding(tiny_model("llama", "odd", mixer), kinds=("holes",))
    check_padding(tiny_model("mistral", "all", mixer), kinds=("holes",))
