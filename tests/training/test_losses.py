"""Losses: the chunked KL and the top-k KL against the dense one, and what the relative error means."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_memmix.conversion.logits import LogitsHead
from hf_memmix.training.losses import (
    Squares,
    chunked_forward_kl,
    chunked_top_k_kl,
    forward_kl,
    top_k_kl,
    top_k_of,
)


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
    loss = chunked_forward_kl(student, teacher.requires_grad_(), softcapped, teacher_head, mask, chunk)
    grads = torch.autograd.grad(loss, inputs, retain_graph=True)
    given = torch.autograd.grad(loss, [teacher, teacher_head.weight], allow_unused=True)
    assert given == (None, None)

    dense = forward_kl(softcapped(student), teacher_head(teacher))
    dense = dense.mean() if mask is None else dense[mask].mean()
    torch.testing.assert_close(loss, dense)
    for got, want in zip(grads, torch.autograd.grad(dense, inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_kl_matches_the_library_and_is_zero_on_equal_logits():
    """In half precision it is computed in fp32."""
    student, teacher = torch.randn(7, 11), torch.randn(7, 11)
    want = nn.functional.kl_div(student.log_softmax(-1), teacher.softmax(-1), reduction="none").sum(-1)
    torch.testing.assert_close(forward_kl(student, teacher), want)
    torch.testing.assert_close(forward_kl(teacher, teacher), torch.zeros(7))
    assert not forward_kl(student, teacher.clone().requires_grad_()).requires_grad
    kl = forward_kl(50 * student.bfloat16(), 50 * teacher.bfloat16())
    assert kl.dtype == torch.float32 and kl.isfinite().all()


def test_squares_of_masked_tokens_do_not_count():
    torch.manual_seed(0)
    target, student = torch.randn(2, 4, 3), torch.randn(2, 4, 3)
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    found, wanted = Squares()(student, target, mask), Squares()(student[mask.bool()][None], target[mask.bool()][None])
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(wanted[1], target[mask.bool()].norm() ** 2)


@pytest.mark.parametrize("chunk", [5, 100])
def test_top_k_kl_of_the_whole_vocabulary_is_the_full_kl(pair, chunk):
    student, teacher, student_head, teacher_head = pair
    inputs = [student, *student_head.parameters()]
    top = top_k_of(teacher_head(teacher).detach(), 17)
    loss = chunked_top_k_kl(student, student_head, *top, chunk_tokens=chunk)
    full = chunked_forward_kl(student, teacher, student_head, teacher_head)
    torch.testing.assert_close(loss, full, rtol=1e-6, atol=1e-7)
    wanted = torch.autograd.grad(full, inputs)
    for got, want in zip(torch.autograd.grad(loss, inputs), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)


def test_top_k_kl_merges_the_rest_into_one_class():
    """Against the definition: probabilities of k tokens and of all others together; never above the full KL."""
    student, teacher = torch.randn(5, 11, dtype=torch.float64), torch.randn(5, 11, dtype=torch.float64)
    log_p, ids, log_rest = top_k_of(teacher, 3)
    got = top_k_kl(student, log_p, ids, log_rest)
    p, q = teacher.softmax(-1), student.softmax(-1)
    for row in range(5):
        kept = teacher[row].argsort(descending=True)[:3]
        others = torch.ones(11, dtype=torch.bool).index_fill(0, kept, False)
        classes = [torch.cat([x[row][kept], x[row][others].sum()[None]]) for x in (p, q)]
        want = (classes[0] * (classes[0] / classes[1]).log()).sum()
        torch.testing.assert_close(got[row], want, rtol=1e-5, atol=1e-6)
    assert (got <= forward_kl(student, teacher) + 1e-6).all()


@pytest.mark.parametrize("logits", ([200.0] + 10 * [0.0], [2.0, 1.0] + 9 * [float("-inf")]), ids=("far", "masked"))
def test_top_k_kl_has_a_finite_gradient_where_the_teacher_is_certain(logits):
    student = torch.zeros(1, 11, requires_grad=True)
    log_p, ids, log_rest = top_k_of(torch.tensor([logits]), 2)
    assert log_rest.exp() == 0
    loss = top_k_kl(student, log_p, ids, log_rest).sum()
    loss.backward()
    assert loss.isfinite()
    assert student.grad.isfinite().all() and student.grad[0, 0] < 0


def test_sizes_that_cannot_be_are_refused(pair):
    with pytest.raises(ValueError, match="k is 12; .* 11"):
        top_k_of(torch.zeros(1, 11), 12)
    with pytest.raises(ValueError, match="chunk_tokens is 0"):
        chunked_forward_kl(*pair, chunk_tokens=0)


def test_full_logits_are_never_alive():
    """The largest tensor that forward and backward make is a chunk of logits, or one of hidden size or the weights."""
    tokens, hidden_size, vocabulary, chunk = 64, 8, 512, 4
    hidden = torch.randn(1, tokens, hidden_size, requires_grad=True)
    heads = nn.Linear(hidden_size, vocabulary), nn.Linear(hidden_size, vocabulary)
    seen = []

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            seen.extend(t.numel() for t in (out if isinstance(out, (tuple, list)) else [out]) if torch.is_tensor(t))
            return out

    with Largest():
        chunked_forward_kl(hidden, hidden.detach() + 1, *heads, chunk_tokens=chunk).backward()
    assert hidden.grad is not None
    assert max(seen) == max(vocabulary * hidden_size, chunk * vocabulary) < tokens * vocabulary


class Scaled(nn.Module):
    """Stands for a projection that is not a plain linear layer."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.layer, self.scale = layer, nn.Parameter(torch.ones(17, dtype=torch.float64))

    def forward(self, x):
        return self.layer(x) * self.scale


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", ["plain", "capped", "composed"])
def test_gradients_of_a_head_are_known_after_the_forward_pass(pair, kind, frozen):
    """Of linear heads, of scaled and capped logits, and of other modules; frozen heads and hidden states too."""
    hidden, teacher, linear, teacher_head = pair
    projection = Scaled(linear) if kind == "composed" else linear
    head = LogitsHead(projection, 2.0, 3.0, 5.0) if kind == "capped" else LogitsHead(projection, None, None, None)
    projection.requires_grad_(not frozen)
    inputs = [hidden, *([] if frozen else projection.parameters())]
    calls = []
    linear.register_forward_hook(lambda *args: calls.append(len(args[2])))
    loss = 3 * chunked_forward_kl(hidden, teacher, head, teacher_head, chunk_tokens=7)
    grads = torch.autograd.grad(loss, inputs, retain_graph=True)
    assert calls == [7, 7, 4]
    with pytest.raises(RuntimeError, match="taken already"):
        torch.autograd.grad(loss, inputs)
    dense = 3 * forward_kl(head(hidden), teacher_head(teacher)).mean()
    for got, want in zip(grads, torch.autograd.grad(dense, inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(3 * chunked_forward_kl(hidden, teacher, head, teacher_head), dense.detach())
