"""The table of decoder families: no other code names one, it agrees with transformers' own configurations."""

import ast
import dataclasses
import re
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import model_type_to_module_name

from hf_memmix import backbones, memmix_config
from hf_memmix._transformers import CONFIG_MAPPING_NAMES, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from hf_memmix.backbones import BACKBONES, UNLISTED, backbone_of, layer_rotates, refusal_of, window_of
from hf_memmix.conversion.families import FAMILIES, REFUSED, family_of
from hf_memmix.swap import attention_name, layers_name
from testing import DEFAULT_MIXER, LAYERS, MIXERS, build, difference, mixer_types
from tiny_teachers import MOE, tiny_teacher

ROOT = Path(__file__).parents[2]
MODELS = Path(transformers.__file__).parent / "models"
ROOMS = ("hf_memmix", "conversion", "training")
TABLE = ROOT / "hf_memmix" / "backbones.py"
# the oldest supported transformers does not have all of them
ROWS = {name: row for name, row in BACKBONES.items() if name in CONFIG_MAPPING_NAMES}


def families_named_in(file):
    """Lines of the string literals, other than docstrings, that are a family's name or hold it as a word."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    scopes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, scopes) and ast.get_docstring(node)
    }
    return [
        (node.lineno, name)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
        for name in re.findall(r"\w+", node.value)
        if name in BACKBONES
    ]


def test_no_other_code_names_a_family():
    programs = {"experiments", "benchmarks"}  # they measure models of their own choice
    files = [file for room in ROOMS for file in sorted((ROOT / room).rglob("*.py")) if programs.isdisjoint(file.parts)]
    found = {
        str(file.relative_to(ROOT)): names for file in files if file != TABLE and (names := families_named_in(file))
    }
    assert len(files) > 100 and not found
    assert {name for _, name in families_named_in(TABLE)} == set(
        BACKBONES
    )  # the search finds names where there are any


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if not row.refused])
def test_rows_agree_with_the_configurations(name):
    """Checks the window and the steps after the output projection: a missing entry would cause no error."""
    row, fields = BACKBONES[name], AutoConfig.for_model(name).to_dict()
    for step in dataclasses.fields(UNLISTED.logits):
        field = getattr(UNLISTED.logits, step.name)
        assert getattr(row.logits, step.name) == (field if field in fields else None), step.name
    assert row.window == ("sliding_window" in fields)
    assert ("no_rope_layers" in fields) == (row.rotates is BACKBONES["smollm3"].rotates)


def rotates_by_a_condition(file):
    """Whether an attention of a modelling file applies the rotary embeddings under a condition on its layer."""
    source = file.read_text(encoding="utf-8")
    of_layer = r"self\.(sliding_window|is_sliding|is_local|use_rope|force_rope|layer_type)"
    if "apply_rotary" not in source or not re.search(of_layer, source):
        return False
    conditions = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.If))
    return any(
        re.search(of_layer, ast.unparse(node.test)) and any("apply_rotary" in ast.unparse(line) for line in node.body)
        for node in conditions
    )


def test_every_family_with_layers_that_do_not_rotate_has_a_row():
    """By the source of all causal language models of this transformers: without a row, all layers rotate."""
    found = set()
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() & CONFIG_MAPPING_NAMES.keys():
        source = MODELS / model_type_to_module_name(name)
        if any(rotates_by_a_condition(file) for file in source.glob("modeling_*.py")):
            found.add(name)
    assert {"cohere2", "smollm3"} <= found
    texts = {AutoConfig.for_model(name).get_text_config().model_type for name in found}  # of a model with parts
    rows = {name: BACKBONES.get(name, UNLISTED) for name in texts}
    assert not [name for name, row in rows.items() if row.rotates is UNLISTED.rotates and not row.refused]


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_rows_name_the_modules(name):
    """A family has one name for each module, and `UNLISTED` finds the same module."""
    row, base = BACKBONES[name], tiny_teacher(name, layers=2).base_model
    assert (layers_name(base),) == row.layers and (attention_name(base, 1),) == row.attention
    assert {*row.layers} < {*UNLISTED.layers} and {*row.attention} < {*UNLISTED.attention}


def test_a_family_without_a_row_gets_the_common_properties():
    config = AutoConfig.for_model("xglm")
    assert backbone_of(config) is UNLISTED and layer_rotates(config, 0)
    with pytest.raises(ValueError, match="'xglm' is not supported; supported: .*hf_memmix/backbones.py"):
        family_of(config)
    assert refusal_of(config, "XGLMForCausalLM") is None
    reasons = {
        "layers use the keys and values of other layers": ({"num_kv_shared_layers": 2}, "XForCausalLM"),
        "some of its layers are recurrent already": ({"layer_types": ["full_attention", "conv"]}, "XForCausalLM"),
        "it has no attention cache of the usual kind": ({}, "SomeMambaForCausalLM"),
    }
    for reason, (fields, class_name) in reasons.items():
        assert refusal_of(PreTrainedConfig(**fields), class_name).startswith(reason)


@pytest.mark.parametrize("name", sorted(REFUSED.keys() & ROWS.keys()))
def test_refusals_give_the_reason_of_the_row(name):
    config = AutoConfig.for_model(name)
    with pytest.raises(
        ValueError, match=f"'{name}' cannot be converted: {REFUSED[name]}. Use a decoder such as llama"
    ):
        family_of(config)
    if reason := BACKBONES[name].refused:
        with pytest.raises(ValueError, match=f"'{name}' is not supported: {reason}. Use a decoder such as llama"):
            memmix_config(config)


# latent attention is given in ranks and two head sizes
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}


def difference_of_a_padded_row(model):
    """How far the logits of a row with pads before it are from those of the row alone."""
    ids, mask = torch.arange(3, 21).view(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        padded = model(ids, attention_mask=mask, position_ids=positions).logits[0, 4:]
        return difference(padded, model(ids[:1, 4:]).logits[0])


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.no_conversion])
def test_families_that_cannot_be_converted_can_have_mixers(name):
    """As conversion/README.md states. A padded row gives the same logits as the row alone."""
    own = {**MOE, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1}
    own |= LATENT if "latent" in BACKBONES[name].no_conversion else {}
    native = tiny_teacher(name, layers=LAYERS, **own).eval()
    # the attention of Doge in transformers 5.17 sees pads: no layer may keep it there
    layout = "first" if difference_of_a_padded_row(native) < 1e-3 else "all"
    assert layout == "first" or name == "doge"
    model = build(memmix_config(native.config, mixer_types(layout), {DEFAULT_MIXER: MIXERS[DEFAULT_MIXER]}))
    assert difference_of_a_padded_row(model) < 1e-3


def test_where_layers_rotate():
    def rotation(name, **fields):
        return [layer_rotates(AutoConfig.for_model(name, num_hidden_layers=4, **fields), i) for i in range(4)]

    kinds = ["sliding_attention", "full_attention"] * 2
    for name in ("afmoe", "cohere2", "exaone4", "exaone_moe"):
        assert rotation(name, layer_types=kinds) == [True, False, True, False]
    assert rotation("exaone4", sliding_window=None, layer_types=["full_attention"] * 4) == [True] * 4
    assert rotation("cohere2", sliding_window=None, layer_types=["full_attention"] * 4) == [False] * 4
    assert rotation("smollm3", no_rope_layers=[1, 0, 1, 1]) == [True, False, True, True]
    assert rotation("gemma2", layer_types=kinds) == [True] * 4
    for name in {"flint", "kolibri1"} & ROWS.keys():
        assert rotation(name, layer_types=kinds) == [True, False, True, False]
    if "cohere2_moe" in ROWS:
        dense = {"layer_types": kinds[::-1], "mlp_layer_types": ["dense", *["sparse"] * 3]}
        assert rotation("cohere2_moe", **dense, prefix_dense_sliding_window_pattern=1) == [True, True, False, True]
        assert rotation("cohere2_moe", **dense, prefix_dense_sliding_window_pattern=4) == [False, True, False, True]
    if "exaone4_5" in CONFIG_MAPPING_NAMES:  # has a language model of the family that has a row
        assert AutoConfig.for_model("exaone4_5").get_text_config().model_type == "exaone4"
    config = memmix_config(AutoConfig.for_model("smollm3", num_hidden_layers=2, no_rope_layers=[0, 1]))
    assert [layer_rotates(config, i) for i in range(2)] == [False, True]  # a converted model keeps its family


def test_windows():
    kinds = ["sliding_attention", "full_attention"]
    mixed = AutoConfig.for_model("gemma2", num_hidden_layers=2, sliding_window=7, layer_types=kinds)
    assert [window_of(mixed, i) for i in range(2)] == [7, None]
    assert window_of(AutoConfig.for_model("mistral", sliding_window=7), 0) == 7
    assert window_of(AutoConfig.for_model("mistral", sliding_window=None), 0) is None
    assert window_of(AutoConfig.for_model("llama"), 0) is None


def test_the_table_imports_neither_torch_nor_transformers():
    tree = ast.parse(Path(backbones.__file__).read_text(encoding="utf-8"))
    imported = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert imported == ["collections.abc", "dataclasses", "types"]
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
