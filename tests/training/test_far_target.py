"""The second target of `align`: tokens weigh as much as their attention reads from outside a window."""

import pytest
import torch

from hf_memmix.conversion import convert_model
from hf_memmix.conversion.families import attention_module, extract_attention
from hf_memmix.conversion.far_attention import Near, check_far, share_from_outside
from hf_memmix.conversion.teacher_forcing import run_teacher_forced
from hf_memmix.training.recipe import Recipe
from hf_memmix.training.student_teacher import AlignStudentTeacher
from hf_memmix.training.train import make_pair
from testing import FAMILIES
from tiny_teachers import tiny_teacher

WINDOW = 4
NEAR = Near(WINDOW)
IDS = torch.randint(3, 60, (2, 20), generator=torch.Generator().manual_seed(0))
PACKED = torch.cat([torch.arange(9), torch.arange(11)]).expand(2, -1)


def recorded(teacher, student, near, position_ids=None):
    """By layer: outputs of mixer and attention, and the shares."""
    found = {}
    windows = dict.fromkeys(student.config.memory_layers, near)
    run_teacher_forced(
        teacher, student, IDS, lambda layer, *seen: found.update({layer: seen}), position_ids=position_ids,
        far_windows=windows,
    )  # fmt: skip
    return found


@torch.no_grad()
@pytest.mark.parametrize("near", [NEAR, Near(WINDOW, 2)], ids=["last tokens", "and the first"])
@pytest.mark.parametrize("family", FAMILIES)
def test_shares_are_those_of_the_weights(family, near):
    """In every family, from the weights that eager attention returns and the values of the layer."""
    teacher = tiny_teacher(family, attn_implementation="eager")
    student = convert_model(teacher, "ska")
    inputs = []

    def keep(module, args, kwargs, output):
        inputs.append((kwargs["hidden_states"] if "hidden_states" in kwargs else args[0], output[1]))

    for layer in student.config.memory_layers:
        attention_module(teacher, layer).register_forward_hook(keep, with_kwargs=True)
    shares = {layer: seen[2] for layer, seen in recorded(teacher, student, near).items()}
    for layer, (x, weights) in zip(shares, inputs, strict=True):
        own = extract_attention(teacher, layer)
        v = torch.nn.functional.linear(x, own.v_weight, own.v_bias).unflatten(-1, (own.num_kv_heads, -1))
        v = v.repeat_interleave(own.num_heads // own.num_kv_heads, 2).transpose(1, 2)
        whole, far = weights[..., :20] @ v, weights[..., :20].tril(-WINDOW)
        far[..., : near.first] = 0
        expected = (far @ v).square().sum((1, 3)) / whole.square().sum((1, 3))
        torch.testing.assert_close(shares[layer], expected.clamp_max(1), rtol=1e-3, atol=1e-5)
        assert (shares[layer][:, :WINDOW] == 0).all()


def test_many_queries_are_read_in_parts(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 20, 8, generator=generator) for heads in (4, 2, 2))
    expected = share_from_outside(q, k, v, None, NEAR)
    monkeypatch.setattr("hf_memmix.conversion.far_attention.ROWS", 7)
    torch.testing.assert_close(share_from_outside(q, k, v, None, NEAR), expected)


@pytest.mark.parametrize("position_ids", [None, PACKED], ids=["rows", "packed"])
@pytest.mark.parametrize("options", [{}, {"local_window": WINDOW}], ids=["memory", "beside a window"])
def test_the_loss_and_its_gradient_are_those_of_the_definition(options, position_ids):
    """The mean relative error, and the factor times the one in which each token has its share as its weight."""
    teacher = tiny_teacher().float()
    student = convert_model(teacher, "gka", keep=[1], **options)
    given = {"far_weight": 0.5} | ({} if options else {"far_window": WINDOW})
    pair = make_pair(student, teacher, Recipe(block_size=20, bf16=False, **given))
    mask = torch.rand(2, 20, generator=torch.Generator().manual_seed(1)) > 0.3
    loss = pair(IDS, position_ids, loss_mask=mask)["loss"]
    parameters = list(pair.parameters())
    found = torch.autograd.grad(loss, parameters)
    # the window beside the memory reads the first token, too
    seen = recorded(teacher, student, Near(WINDOW, 1) if options else NEAR, position_ids).values()

    def relative_error(ours, theirs, weight):
        return ((ours - theirs).square().sum(-1) * weight).sum() / (theirs.square().sum(-1) * weight).sum()

    expected = sum(relative_error(o, t, mask) + 0.5 * relative_error(o, t, s * mask) for o, t, s in seen) / len(seen)
    torch.testing.assert_close(loss, expected)
    for gradient, wanted in zip(found, torch.autograd.grad(expected, parameters), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-7)


def test_shares_do_not_cross_packed_documents():
    teacher = tiny_teacher().float()
    student = convert_model(teacher, "gka")
    for first in (0, 2):
        seen, begin = recorded(teacher, student, Near(WINDOW, first), PACKED)[0][2], 9 + WINDOW + first
        assert (seen[:, 9:begin] == 0).all() and (seen[:, begin:] > 0).all()


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_attention_inside_the_window_adds_nothing(family):
    """A window as long as the row, or as the sliding window of the teacher."""
    teacher = tiny_teacher().float()
    window = 20
    if family == "mistral":
        teacher, window = tiny_teacher("mistral", sliding_window=6), 6
    student = convert_model(teacher, "gka", keep=[1])
    plain, far = (AlignStudentTeacher(student, teacher, far_weight=w, far_window=window) for w in (0.0, 10.0))
    assert torch.equal(plain(IDS)["loss"], far(IDS)["loss"])


def test_attentions_that_do_not_tell_are_refused():
    """Without masks, or a family that computes by itself."""
    teacher = tiny_teacher()
    student, inputs = convert_model(teacher, "gka"), {"far_weight": 1.0, "far_window": WINDOW}
    attention = attention_module(teacher, 0)
    attention.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(ValueError, match="LlamaAttention computes its attention by itself.* set far_weight to 0"):
        AlignStudentTeacher(student, teacher, **inputs)(IDS)
    teacher.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="'flash_attention_2' does not have; load the teacher with .* sdpa"):
        check_far(attention)
