"""Devices without float64, for example Apple's GPUs: no op, model or conversion makes a float64 tensor there."""

import pytest
import torch
from ops_table import OPS, Shape

from hf_memmix.conversion import convert_model, report
from hf_memmix.training.data import TokenBlocks
from hf_memmix.training.train import align, distill
from testing import MIXERS, random_ids, tiny_model
from tiny_teachers import CONVERTIBLE, tiny_teacher
from without_float64 import without_float64

every_mixer = pytest.mark.parametrize("mixer", MIXERS)


@pytest.fixture(autouse=True)
def torch_path(monkeypatch):
    monkeypatch.setenv("HF_MEMMIX_BACKEND", "torch")


def test_a_float64_tensor_on_the_device_is_an_error():
    x = torch.ones(2)
    with without_float64():
        double = {"dtype": torch.float64}
        for make in (x.double, lambda: x.to(**double), lambda: torch.zeros(2, device=x.device, **double)):
            with pytest.raises(TypeError, match="float64 tensor"):
                make()
        table = torch.linspace(0, 1, 2, dtype=torch.float64).exp()  # the host's
        x.copy_(table)
        assert (x.cpu().double() + table).dtype == torch.float64
        with pytest.raises(TypeError, match="float64 tensor"):
            table.to(x.device)
    assert x.double().dtype == torch.float64


@pytest.mark.parametrize("packed", [False, True], ids=["batched", "packed"])
@pytest.mark.parametrize("op", OPS, ids=str)
def test_ops(op, packed):
    """Forward, backward and a decode step."""
    shape, bounds = (Shape(1, 18, 4, 2, 16, 16), [0, 7, 18]) if packed else (Shape(2, 18, 4, 2, 16, 16), None)
    inputs = {name: x.requires_grad_() for name, x in op.draw(shape, torch.float32).items()}
    state = op.draw_state(shape, 2, torch.float32)
    bounds = None if bounds is None else torch.tensor(bounds)
    with without_float64():
        o, final = op.run(op.fast, inputs, tuple(s.requires_grad_() for s in state), bounds)
        sum(x.square().sum() for x in (o, *final)).backward()
        if not packed:
            with torch.no_grad():
                op.step(op, op.tokens(inputs, slice(0, 1)), tuple(s.clone() for s in state))
    assert all(torch.isfinite(x.grad).all() for x in inputs.values())


@every_mixer
def test_models(mixer):
    """A training step; generation after a padded prompt and after a prompt in parts."""
    model = tiny_model("llama", "odd", mixer, fresh=True, dtype=torch.float32)
    ids, mask = random_ids(2, 11), torch.ones(2, 11, dtype=torch.long)
    mask[0, :3] = 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = [p.detach().clone() for p in model.parameters()]
    with without_float64():
        model.train()(ids, attention_mask=mask, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.eval().generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
        model.generate(ids, prefill_chunk_size=4, max_new_tokens=3, do_sample=True, top_k=5)
    assert any(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("stage", [align, distill])
def test_training_runs(stage, tmp_path):
    """Two steps of a stage, with its optimizer, schedule and log."""
    teacher = tiny_teacher("llama", layers=2)
    student, data = convert_model(teacher, "gka", keep=[1]), TokenBlocks(random_ids(1, 128)[0] % 61, 16)
    with without_float64():
        result = stage(student, teacher, data, tmp_path, steps=2, batch_size=2, block_size=16, warmup_steps=1)
    assert result["steps"] == 2


@pytest.mark.parametrize("mixer", CONVERTIBLE)
def test_conversion(mixer):
    teacher = tiny_teacher("qwen3")
    tokens = random_ids(1, 40)[0] % 61
    with without_float64():
        student = convert_model(teacher, mixer, keep=[1])
        result = report(student, teacher, tokens, block_size=20)
    assert result["teacher_ppl"] > 1
