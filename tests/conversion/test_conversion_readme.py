"""conversion/README.md: its snippets run, its links lead somewhere. tests/test_readme.py checks its tables."""

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from hf_memmix.conversion import convert_model

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "conversion" / "README.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_the_snippets_run_one_after_the_other(tmp_path, monkeypatch):
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL))
    assert "convert_model" in code
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "<page>", "exec"), {"__name__": "__main__"})
    assert (tmp_path / "student" / "conversion.json").exists()


def test_the_language_model_of_a_model_with_several_parts():
    (code,) = re.findall(r"^```python\n(def language_model.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)
    namespace = {"AutoModelForCausalLM": AutoModelForCausalLM}
    exec(code, namespace)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = sizes | {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64}
    vision = sizes | {"num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision, mm_tokens_per_image=4)
    whole = AutoModelForImageTextToText.from_config(config).eval()
    with pytest.raises(
        ValueError, match=r"'gemma3' has several parts .* convert its language model \('gemma3_text'\)"
    ):
        convert_model(whole, "gka")
    teacher, ids = namespace["language_model"](whole), torch.arange(4, 16)[None]
    assert torch.equal(teacher(ids).logits, whole(ids).logits)
    assert convert_model(teacher, "gka").config.backbone_model_type == "gemma3_text"
