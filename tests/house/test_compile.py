"""torch.compile: one graph, no breaks, no recompiles while decoding."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from transformers import CompileConfig

from house.checks import assert_same_generation, greedy, left_padded, uncached_greedy
from testing import assert_same, random_ids, tiny_model

FAMILIES = ("llama", "qwen3", "gpt_neox", "gemma3_text", "stablelm")
# a kept sliding-window layer counts its tokens in a Python integer, as in the native model: a graph for every step
COUNTS_STEPS = {("gemma3_text", "odd")}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled_generation(model, ids, backend, **kwargs):
    config = CompileConfig(backend=backend, mode=None, fullgraph=True, dynamic=False)
    config._compile_all_devices = True
    return greedy(model, ids, cache_implementation="static", compile_config=config, **kwargs)


@torch.no_grad()
@pytest.mark.parametrize("layout", ("odd", "all"))
@pytest.mark.parametrize("family", FAMILIES)
def test_static_decode_is_one_graph(family, layout):
    """generate() with a compiled static cache: the tokens of the plain one, from one graph for all steps."""
    model = tiny_model(family, layout, fresh=True)
    ids = random_ids(1, 7)
    counter = CompileCounter()
    out = compiled_generation(model, ids, counter, new_tokens=8)
    assert_same_generation(out, uncached_greedy(model, ids, 8), "compiled")
    assert counter.frame_count >= 1, "nothing was compiled: the check shows nothing"
    if (family, layout) not in COUNTS_STEPS:
        assert counter.frame_count == 1


@torch.no_grad()
def test_second_call_compiles_nothing():
    """Another prompt, shorter and padded, runs in the same graph."""
    model = tiny_model("llama", "odd", fresh=True)
    counter = CompileCounter()
    compiled_generation(model, random_ids(2, 7), counter, max_length=20, new_tokens=None)
    before = counter.frame_count
    rows = [random_ids(1, 7, seed=2), random_ids(1, 5, seed=3)]
    ids, mask = left_padded(rows)
    out = compiled_generation(model, ids, counter, attention_mask=mask, max_length=20, new_tokens=None)
    assert counter.frame_count == before
    for i, row in enumerate(rows):
        expected = uncached_greedy(model, row, 6)[1][0]
        assert_same(torch.stack(out.logits, 1)[i, :6].to(expected.dtype), expected, tolerance=1e-6)


@torch.no_grad()
def test_decode_through_aot_autograd():
    """The fake implementations of the ops agree with the real ones in shape, dtype and mutation."""
    model = tiny_model("llama", "odd", fresh=True)
    ids = random_ids(2, 7)
    out = compiled_generation(model, ids, "aot_eager")
    assert_same_generation(out, uncached_greedy(model, ids), "aot_eager")


@pytest.mark.parametrize("family", FAMILIES)
def test_training_graph(family):
    """Forward and backward of a whole model in one graph each, with and without padding."""
    model = tiny_model(family, "odd", fresh=True).train()
    model.config.use_cache = False
    ids = random_ids(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=False)
    for kwargs in ({}, {"attention_mask": mask}):
        grads = []
        for run in (model, compiled):
            model.zero_grad()
            run(input_ids=ids, labels=ids, use_cache=False, **kwargs).loss.backward()
            grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        assert grads[0].keys() == grads[1].keys()
        for name, grad in grads[0].items():
            assert_same(grads[1][name], grad, name)
    assert counter.frame_count == 2


def test_training_on_other_lengths():
    """Lengths that vary compile to one more graph with a symbolic length, and not to one a length."""
    model = tiny_model("llama", "odd", fresh=True).train()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for length in (9, 12, 17, 23, 31):
        ids = random_ids(2, length)
        compiled(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert counter.frame_count <= 3


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("family", ("llama", "gemma3_text"))
def test_inductor(family):
    model = tiny_model(family, "odd", fresh=True, dtype=torch.float32)
    ids = random_ids(2, 7)
    out = compiled_generation(model, ids, "inductor")
    assert_same_generation(out, uncached_greedy(model, ids), "inductor")
