"""The COFFEE paper's core module: its equations, parameter counts, files, copies, and what it refuses."""

import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_memmix.models.coffee_core import CoffeeCore, logit_of_softmin
from hf_memmix_kernels import check_coffee


def core(seed=0, **options):
    torch.manual_seed(seed)
    return CoffeeCore(**{"symbols": 9, "dim": 4, "states": 3, **options})


def test_logits_by_hand():
    """Embedding, eq. 5 and 7 with the filter, distances, softmin, logit: one token at a time, in plain Python."""
    model = core(output_filter=True).double()
    with torch.no_grad():
        model.lam.uniform_(-1.5, -0.1)
        model.w_filter.normal_()
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    logits = model(ids)
    E, lam, w, C, f = (t[0].tolist() for t in (model.embedding, model.lam, model.w, model.C, model.w_filter))
    x = [[0.0] * 3 for _ in range(4)]
    for k, token in enumerate(ids[0].tolist()):
        y = []
        for i in range(4):
            for j in range(3):
                s = 1 / (1 + math.exp(-w[i][j] * x[i][j]))
                x[i][j] += lam[i][j] * s * x[i][j] + s * E[token][i]
            gate = 1 / (1 + math.exp(-sum(a * b for a, b in zip(f[i], x[i], strict=True))))
            y.append(gate * sum(a * b for a, b in zip(C[i], x[i], strict=True)))
        weights = [math.exp(-math.dist(y, row)) for row in E]
        p = [v / sum(weights) for v in weights]
        expected = torch.tensor([math.log(v / (1 - v)) for v in p], dtype=torch.float64)
        torch.testing.assert_close(logits[0, k], expected, rtol=1e-9, atol=1e-9)


def test_parameters_are_counted_as_in_the_paper():
    sizes = {(8, 16, 1): 512, (1, 8, None): 96, (1, 4, None): 48, (1, 2, None): 24, (1, 1, None): 12}
    for (states, dim, fixed), count in sizes.items():
        assert sum(p.numel() for p in core(states=states, dim=dim, fixed=fixed).parameters()) == count


def test_embeddings_start_orthonormal_and_the_fixed_one_is_one():
    rows = core(dim=16).embeddings()[0]
    torch.testing.assert_close(rows @ rows.T, torch.eye(9), rtol=0, atol=1e-5)
    columns = core(dim=2).embeddings()[0]
    torch.testing.assert_close(columns.T @ columns, torch.eye(2), rtol=0, atol=1e-5)
    fixed = core(dim=16, fixed=3)
    assert torch.equal(fixed.embeddings()[0, 3], torch.ones(16)) and fixed.embedding.shape == (1, 8, 16)


def test_copies_are_independent_models():
    """Each copy computes and learns the same as a separate model with its parameters."""
    many = core(copies=3, fixed=1).double()
    ids = torch.randint(9, (3, 5, 7), generator=torch.Generator().manual_seed(1))
    logits = many(ids)
    logits.logsumexp(-1).sum().backward()
    for s in range(3):
        one = core(fixed=1).double()
        with torch.no_grad():
            for p, q in zip(one.parameters(), many.parameters(), strict=True):
                p.copy_(q[s : s + 1])
        alone = one(ids[s])
        torch.testing.assert_close(alone, logits[s])
        alone.logsumexp(-1).sum().backward()
        for p, q in zip(one.parameters(), many.parameters(), strict=True):
            torch.testing.assert_close(p.grad[0], q.grad[s])
    torch.testing.assert_close(many(ids, last=2), logits[:, :, -2:])


def test_logit_is_exact_where_softmin_rounds_to_one():
    logits = logit_of_softmin(torch.tensor([0.0, 60.0, 70.0]))
    torch.testing.assert_close(logits[0].item(), 60.0, rtol=1e-3, atol=0)


def test_saved_and_loaded(tmp_path):
    model = core(output_filter=True, fixed=2)
    with torch.no_grad():
        model.lam.fill_(-0.5)
    model.save_pretrained(tmp_path)
    again = CoffeeCore.from_pretrained(tmp_path)
    ids = torch.arange(9)[None]
    assert torch.equal(model(ids), again(ids))


@pytest.mark.parametrize("value", [0.1, -2.1, float("nan")])
def test_a_file_with_lambda_outside_is_refused(tmp_path, value):
    core().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lam"][0, 1, 2] = value
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"\[-2, 0\]"):
        CoffeeCore.from_pretrained(tmp_path)


def test_projection_keeps_states_bounded():
    model = core()
    with torch.no_grad():
        model.lam.copy_(torch.linspace(-5, 3, 12).view(1, 4, 3))
    model.project_()
    check_coffee(model.lam)
    assert model.lam.min() == -2 and model.lam.max() == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: core(fixed=9), "fixed=9 is not a symbol"),
        (lambda: core(feedback="token"), "feedback='token'"),
        (lambda: core(copies=2)(torch.zeros(3, 1, 4, dtype=torch.long)), r"2 models need \[2, batch"),
        (lambda: core(copies=2)(torch.zeros(1, 4, dtype=torch.long)), r"\[2, batch"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()
