"""A teacher with adapters of PEFT is refused, also where the student would be written to a folder."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_memmix.conversion import convert_model


def teacher():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))


def with_adapter(kind: str):
    options = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    if kind == "PeftModel":
        return get_peft_model(teacher(), options)
    model = teacher()
    with pytest.MonkeyPatch.context() as patch:  # transformers 5.24 asks for a PEFT that is newer than the newest one
        patch.setattr("transformers.integrations.peft.check_peft_version", lambda *args, **kwargs: None)
        model.add_adapter(options)
    return model


@pytest.mark.parametrize("kind", ["PeftModel", "add_adapter"])
def test_a_teacher_with_adapters_is_refused_and_a_merged_one_is_converted(kind, tmp_path):
    model = with_adapter(kind)
    for out in ({}, {"out": tmp_path / "student"}):
        with pytest.raises(ValueError, match=r"adapters of PEFT \(default\).*merge_and_unload"):
            convert_model(model, **out)
    assert not (tmp_path / "student").exists()
    if kind == "PeftModel":
        plain, merged = teacher(), model.merge_and_unload()
        student = convert_model(merged, mixer="gka", keep=[1])
        kept = student.model.layers[1].self_attn.q_proj.weight
        assert torch.equal(kept, merged.model.layers[1].self_attn.q_proj.weight)
        assert not torch.equal(kept, plain.model.layers[1].self_attn.q_proj.weight)


def test_an_adapter_of_a_student_does_not_name_the_teacher(tmp_path):
    teacher().save_pretrained(tmp_path / "teacher")
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "teacher")
    student = convert_model(loaded, mixer="gka", keep=[1])
    assert loaded.name_or_path == str(tmp_path / "teacher") and student.name_or_path == ""
    student.save_pretrained(tmp_path / "student")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "student")
    adapter = get_peft_model(saved, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    adapter.save_pretrained(tmp_path / "adapter")
    written = LoraConfig.from_pretrained(tmp_path / "adapter").base_model_name_or_path
    assert written == str(tmp_path / "student")
    get_peft_model(student, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "unsaved")
    assert not LoraConfig.from_pretrained(tmp_path / "unsaved").base_model_name_or_path
