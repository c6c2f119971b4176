"""Properties that transformers' own tests of models ask for, which once failed on ours.

They are in the source archive of transformers, not in its package. `ModelTesterMixin` of 5.23 passes on every family
that is trained from scratch and on Llama and Qwen3 with GKA. These differences are meant:

- its tests of rotary scaling want other outputs with other `rope_parameters`; a model without rotary embeddings, such
  as COFFEE in all layers, has none to scale;
- its training tests take a base model for one with a loss unless its class is in the library's table of base models.
"""

import copy
import re

import pytest
import torch

from hf_memmix.models import FAMILIES as REGISTERED
from hf_memmix.swap import fp32_parameter_names
from testing import MIXERS, MODELS, assert_same, build, family_fields, random_ids, tiny_config

SCRATCH = [(name, layout) for name, row in MODELS.items() for layout in row["layouts"]]
CONVERTED = [(family, mixer) for family in ("llama", "qwen3") for mixer in MIXERS]


def config_of(family, kind):
    if family in MODELS:
        return REGISTERED[family](**{**family_fields(family), **MODELS[family]["layouts"][kind]})
    return tiny_config(family, "odd", kind)


every_model = pytest.mark.parametrize(("family", "kind"), [*SCRATCH, *CONVERTED])


@every_model
def test_patterns_of_fp32_parameters(family, kind):
    """As loading reads them and as a module's whole name, they find the same tensors, and each finds one."""
    model = build(config_of(family, kind))
    names, patterns = model.state_dict().keys(), model._keep_in_fp32_modules_strict
    found = {pattern: [name for name in names if re.search(pattern.replace("*", ".*"), name)] for pattern in patterns}
    whole = {p: [name for name in names if re.search(rf"(?:^|\.){p}(?:\.|$)", name)] for p in patterns}
    assert found == whole
    assert all(len(one) == 1 for one in found.values())
    assert {one[0] for one in found.values()} == fp32_parameter_names(model)


@every_model
def test_every_rule_of_the_tensor_parallel_plan_names_something(family, kind):
    model = build(config_of(family, kind))
    for one in (model, model.base_model):
        names = {name for name, _ in (*one.named_modules(), *one.named_parameters())}
        names = {re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names}
        assert one.tp_plan
        assert not one.tp_plan.keys() - names


@torch.no_grad()
@every_model
def test_a_batch_is_its_rows_with_the_largest_epsilon(family, kind):
    config = copy.deepcopy(config_of(family, kind))
    config.rms_norm_eps = 1.0
    config = type(config).from_dict(config.to_dict())
    model, ids = build(config, dtype=torch.float64), random_ids(3, 9)
    assert any(getattr(module, "variance_epsilon", None) == 1.0 for module in model.modules())
    batch = model(ids).logits
    for row in range(3):
        assert_same(batch[row], model(ids[row : row + 1]).logits[0])


@pytest.mark.parametrize("value", (1e-13, 1.001, float("nan")))
def test_an_impossible_epsilon_is_refused(value):
    with pytest.raises(ValueError, match="rms_norm_eps=.* must be 1e-12 to 1"):
        REGISTERED["GKA"](**family_fields("GKA"), rms_norm_eps=value)
