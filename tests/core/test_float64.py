"""float64.py keeps what it promises: a float64 model of any family makes no float32 value."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from testing import DEFAULT_MIXER, FAMILIES, MIXERS, random_ids, tiny_model


class Float32Values(TorchFunctionMode):
    """The names of the functions of torch that returned a float32 tensor."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
            self.names.add(getattr(func, "__name__", str(func)))
        return result


@pytest.mark.parametrize(
    ("family", "mixer"),
    [
        *((family, DEFAULT_MIXER) for family in FAMILIES),
        *(("llama", mixer) for mixer in MIXERS if mixer != DEFAULT_MIXER),
    ],
)
def test_no_float32(family, mixer):
    """Forward with a loss; generation hands out float64 logits."""
    model, ids = tiny_model(family, "odd", mixer), random_ids(1, 11)
    with Float32Values() as seen:
        out = model(ids, labels=ids)
    assert not seen.names, "these functions return float32; take the dtype of an input, as layers.at_least_fp32 does"
    assert out.loss.dtype == out.logits.dtype == torch.float64
    out = model.generate(ids, max_new_tokens=2, do_sample=False, return_dict_in_generate=True, output_logits=True)
    assert {t.dtype for t in out.logits} == {torch.float64}


def test_float32_models_keep_the_library_as_it_is():
    """And so does a cast that our code or a test makes."""
    model, ids = tiny_model("llama", "odd", dtype=torch.float32), random_ids(1, 11)
    with Float32Values() as seen:
        assert model(ids).logits.dtype == torch.float32
    assert seen.names
    assert torch.ones(2, dtype=torch.float64).to(torch.float32).dtype == torch.float32
