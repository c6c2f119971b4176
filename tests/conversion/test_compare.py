"""The report of a student against its teacher, checked against plain formulas."""

import math

import pytest
import torch
from torch.nn import functional as F

from hf_memmix.conversion import convert_model, report
from hf_memmix.conversion.compare import figures_of
from hf_memmix.conversion.families import attention_module
from hf_memmix.conversion.logits import logits_head
from tiny_teachers import tiny_teacher

TOKENS = torch.randint(3, 64, (70,), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "granite", "cohere2", "gpt2", "gpt_neox"])
def test_report_equals_plain_formulas(model_type):
    teacher = tiny_teacher(model_type)
    student = convert_model(teacher, "gka", keep=[1])
    result = report(student, teacher, TOKENS, block_size=32, batch_size=2)
    logits = {}
    with torch.no_grad():
        for name, model in (("student", student), ("teacher", teacher)):
            pieces = [model(input_ids=piece[None]).logits[0, :-1] for piece in TOKENS.split(32)]
            logits[name] = torch.cat(pieces).float()
    target = torch.cat([piece[1:] for piece in TOKENS.split(32)])
    for name, value in logits.items():
        assert result[f"{name}_ppl"] == pytest.approx(F.cross_entropy(value, target).exp().item(), rel=1e-4)
    assert result["tokens"] == len(target)
    assert result["ppl_ratio"] == pytest.approx(result["student_ppl"] / result["teacher_ppl"])
    agreement = (logits["student"].argmax(-1) == logits["teacher"].argmax(-1)).float().mean().item()
    assert result["top1_agreement"] == pytest.approx(agreement)
    assert sorted(result["layer_error"]) == [0, 2]


def test_layer_error_of_the_first_layer_is_the_plain_relative_error():
    teacher = tiny_teacher()
    student = convert_model(teacher, "gka")
    result = report(student, teacher, TOKENS[:32], block_size=32)
    seen = {}
    hook = attention_module(teacher, 0).register_forward_hook(
        lambda module, args, kwargs, output: seen.update(kwargs, output=output[0]), with_kwargs=True
    )
    with torch.no_grad():
        teacher(input_ids=TOKENS[None, :32])
        hook.remove()
        ours = attention_module(student, 0)(seen["hidden_states"], position_embeddings=seen["position_embeddings"])[0]
    want = (ours - seen["output"]).square().sum() / seen["output"].square().sum()
    assert result["layer_error"][0] == pytest.approx(want.item(), rel=1e-4)


def test_unknown_logit_transform_is_refused():
    teacher = tiny_teacher()
    teacher.lm_head.register_forward_hook(lambda module, args, output: output)
    logits_head(teacher)
    original = teacher.forward

    def forward(*args, **kwargs):
        output = original(*args, **kwargs)
        output.logits = output.logits * 3
        return output

    teacher.forward = forward
    with pytest.raises(ValueError, match="hf_memmix/backbones.py does not describe"):
        logits_head(teacher)


def test_compare_restores_train_and_eval_mode():
    """Each model gets its own mode back."""
    teacher = tiny_teacher()
    student = convert_model(teacher, "gka")
    for student_trains, teacher_trains in ((True, True), (True, False), (False, True), (False, False)):
        student.train(student_trains), teacher.train(teacher_trains)
        report(student, teacher, TOKENS, block_size=32)
        for model, trains in ((student, student_trains), (teacher, teacher_trains)):
            assert {module.training for module in model.modules()} == {trains}
            logits_head(model)
            assert {module.training for module in model.modules()} == {trains}


def test_bad_text_is_refused():
    teacher = tiny_teacher()
    student = convert_model(teacher, "gka")
    with pytest.raises(ValueError, match="at least 2"):
        report(student, teacher, TOKENS[:1])
    with pytest.raises(ValueError, match="outside the vocabulary"):
        report(student, teacher, TOKENS + 64)
    with pytest.raises(ValueError, match="needs its tokenizer"):
        report(student, teacher, "some text")
    with pytest.raises(ValueError, match="give the teacher the student came from"):
        report(student, tiny_teacher(layers=2), TOKENS)
    with pytest.raises(ValueError, match="without memory layers; convert it first"):
        report(teacher, teacher, TOKENS)


def test_a_diverged_student_has_infinite_perplexity():
    """Its loss may be so large that exp() of it overflows."""
    found = figures_of(2, {"teacher": 2.0, "student": 2000.0}, agree=1, kl=4.0, layer_error={})
    assert found["student_ppl"] == found["ppl_ratio"] == math.inf
    assert (found["tokens"], found["top1_agreement"], found["kl"]) == (2, 0.5, 2.0)
