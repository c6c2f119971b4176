"""Losses: the chunked KL against the dense one, and what the relative error means."""

import pytest
import torch
from torch import nn

from hf_memmix.training.losses import chunked_forward_kl, forward_kl, relative_mse


@pytest.fixture
def pair():
    torch.manual_seed(0)
    hidden = torch.randn(2, 9, 6, dtype=torch.float64, requires_grad=True)
    return hidden, torch.randn(2, 9, 5, dtype=torch.float64), nn.Linear(6, 17).double(), nn.Linear(5, 17).double()


@pytest.mark.parametrize("chunk", [1, 4, 18, 100])
@pytest.mark.parametrize("masked", [False, True])
def test_chunked_kl_and_its_gradients_equal_the_dense_loss(pair, chunk, masked):
    student, teacher, student_head, teacher_head = pair
    mask = (torch.rand(2, 9, generator=torch.Generator().manual_seed(1)) > 0.3) if masked else None

    def softcapped(x):
        return 5 * torch.tanh(student_head(x) / 5)

    inputs = [student, *student_head.parameters()]
    loss = chunked_forward_kl(student, teacher, softcapped, teacher_head, mask, chunk)
    grads = torch.autograd.grad(loss, inputs)

    dense = forward_kl(softcapped(student), teacher_head(teacher))
    dense = dense.mean() if mask is None else dense[mask].mean()
    torch.testing.assert_close(loss, dense)
    for got, want in zip(grads, torch.autograd.grad(dense, inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_kl_matches_the_library_and_is_zero_on_equal_logits():
    student, teacher = torch.randn(7, 11), torch.randn(7, 11)
    want = nn.functional.kl_div(student.log_softmax(-1), teacher.softmax(-1), reduction="none").sum(-1)
    torch.testing.assert_close(forward_kl(student, teacher), want)
    torch.testing.assert_close(forward_kl(teacher, teacher), torch.zeros(7))


def test_kl_of_half_precision_logits_is_fp32_and_finite():
    student, teacher = 50 * torch.randn(3, 11).bfloat16(), 50 * torch.randn(3, 11).bfloat16()
    kl = forward_kl(student, teacher)
    assert kl.dtype == torch.float32 and kl.isfinite().all()


def test_teacher_gets_no_gradient(pair):
    student, teacher, student_head, teacher_head = pair
    teacher.requires_grad_()
    chunked_forward_kl(student, teacher, student_head, teacher_head).backward()
    assert teacher.grad is None and teacher_head.weight.grad is None


def test_relative_error_ignores_scale_and_masked_tokens():
    torch.manual_seed(0)
    target, student = torch.randn(2, 4, 3), torch.randn(2, 4, 3)
    torch.testing.assert_close(relative_mse(1e3 * student, 1e3 * target), relative_mse(student, target))
    torch.testing.assert_close(relative_mse(torch.zeros_like(target), target), torch.tensor(1.0))
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    torch.testing.assert_close(
        relative_mse(student, target, mask), relative_mse(student[mask.bool()][None], target[mask.bool()][None])
    )
    assert relative_mse(student, torch.zeros_like(target)).isfinite()


def test_bad_chunk_is_refused(pair):
    with pytest.raises(ValueError, match="chunk_tokens is 0"):
        chunked_forward_kl(*pair, chunk_tokens=0)
