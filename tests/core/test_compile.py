"""torch.compile: one graph, no breaks, no recompiles while decoding."""

import pytest
import torch
from torch._dynamo import guards
from torch._dynamo.testing import CompileCounterWithBackend

from core.checks import an_end_token, assert_follows, assert_same_generation, greedy, left_padded, uncached_greedy
from core.compiled import ROUNDINGS, Graphs, bound_of_logits, compiled_generation
from hf_memmix.swap import decoder_layers
from hf_memmix_kernels.gka import op_gates
from hf_memmix_kernels.short_conv import op as short_conv_op
from testing import DEFAULT_MIXER, MIXERS, assert_same, base_model, build, float32_noise, random_ids, tiny_config

pytestmark = pytest.mark.compiles

# two layers are enough to meet a mixer and an attention layer in one graph
LAYERS = {"mixed": (1,), "all": (0, 1), "one": (0,)}


def small(family, layout, dtype=torch.float64, mixer=DEFAULT_MIXER):
    layers = 1 if layout == "one" else 2
    types = {"layer_types": ["full_attention"] * layers} if family == "gemma3_text" else {}
    return build(tiny_config(family, LAYERS[layout], mixer, num_hidden_layers=layers, **types), dtype=dtype)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def skipped_types(node) -> list[type]:
    """The types of the modules below a node of a program's checks that are skipped if nothing was assigned to them."""
    if isinstance(node, guards.DictGuardManager):
        children = [child for pair in node.get_key_value_managers().values() for child in pair if child is not None]
    elif node.is_tag_safe_root():
        return [node.get_type_of_guarded_value()]
    else:
        children = node.get_child_managers()
    return [found for child in children for found in skipped_types(child)]


# torch.compile of a whole model; gka_beside_window has the layers of gka and of window, the other mixers come in turn:
# half of them decode, and half are exported
@pytest.mark.product_rows(r"(?!llama-mixed-(lattice|ska|kda|gka_beside_window)\])")
@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "layout", "mixer"),
    [
        *(("llama", "mixed", mixer) for mixer in MIXERS),
        ("llama", "all", DEFAULT_MIXER),
        *((family, "mixed", DEFAULT_MIXER) for family in ("gpt_neox", "gemma3_text", "stablelm")),
    ],
)
def test_static_decode_is_one_graph(family, layout, mixer, monkeypatch):
    """generate() with a compiled static cache: the tokens of the plain one, from one graph for all steps.

    Once per mixer it goes through AOTAutograd: the fake ops agree with the real ones in shape, dtype and mutation.

    Before each token a compiled program checks what it was made from; with all layers that takes a third of a step. It
    skips layers to which nothing was assigned, if all that it read there are modules, tensors, numbers, texts and
    dictionaries of them: no lists and no other objects. The first layer is checked, since other code reads it, too.
    """
    model, checks, finalize = small(family, layout, mixer=mixer), [], guards.GuardManagerWrapper.finalize
    monkeypatch.setattr(guards.GuardManagerWrapper, "finalize", lambda self: checks.append(self) or finalize(self))
    through_aot = (family, layout) == ("llama", "mixed")
    ids, graphs = random_ids(2 if through_aot else 1, 7), Graphs()
    with torch._dynamo.config.patch(use_recursive_dict_tags_for_guards=True):
        out = compiled_generation(model, ids, graphs.backend("aot_eager" if through_aot else None), new_tokens=8)
    assert_same_generation(out, uncached_greedy(model, ids, 8), "compiled", bound_of_logits(model))
    assert len(graphs) == 1
    if through_aot:
        layer, skipped = decoder_layers(base_model(model))[1], set(skipped_types(checks[-1].root))
        # with transformers 5.17 the decoder layers themselves are checked, and all their parts are skipped
        assert type(layer) in skipped or {type(part) for part in layer.children()} <= skipped


class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids, use_cache=False).logits


@pytest.mark.product_rows(r"(?!(coffee|gated_delta|mamba2|gka_beside_window)\])")  # those above decode
@pytest.mark.parametrize("mixer", MIXERS)
def test_export_with_a_dynamic_length(mixer):
    """One exported program reads every number of rows and tokens, and has the gradients of the model."""
    model = Logits(build(tiny_config("llama", "all", mixer, num_hidden_layers=1), dtype=torch.float64))
    dynamic = {"ids": {0: torch.export.Dim("rows", max=64), 1: torch.export.Dim("tokens", max=4096)}}
    program = torch.export.export(model, (random_ids(2, 70),), dynamic_shapes=dynamic, strict=False).module()
    for rows, tokens in ((2, 2), (3, 63), (2, 64), (5, 65), (2, 200)):
        ids = random_ids(rows, tokens)
        assert_same(program(ids), model(ids))
    below_the_mixer = "model.model.layers.0.input_layernorm.weight"
    gradients = [
        torch.autograd.grad(one(random_ids(2, 70)).square().sum(), one.get_parameter(below_the_mixer))[0]
        for one in (program, model)
    ]
    assert_same(*gradients)


@pytest.mark.product_rows(r"(all|one)-")  # torch.compile of a whole model; with attention, all caches are made
@torch.no_grad()
@pytest.mark.parametrize(
    ("layout", "mixer"), [("mixed", DEFAULT_MIXER), ("all", DEFAULT_MIXER), *(("one", m) for m in [*MIXERS][1::2])]
)
def test_a_prompt_is_one_graph(layout, mixer):
    """The graph also makes the cache, from which plain decoding goes on. Of the other mixers, half have a graph of a
    prompt and half one of training.
    """
    model, ids, graphs = small("llama", layout, mixer=mixer), random_ids(2, 9), Graphs()
    compiled = torch.compile(model, backend=graphs.backend(), fullgraph=True, dynamic=False)
    out = compiled(ids[:, :-1], use_cache=True)
    assert len(graphs) == 1
    logits = model(ids[:, -1:], past_key_values=out.past_key_values).logits
    assert_same(logits[:, 0], model(ids, use_cache=False).logits[:, -1], tolerance=bound_of_logits(model))


@torch.no_grad()
def test_packed_positions_beside_a_mask():
    """They are read beside a mask of ones and refused beside pads, as without torch.compile. The graph breaks."""
    model, ids, mask = small("llama", "mixed"), random_ids(1, 7), torch.ones(1, 7, dtype=torch.long)
    compiled = torch.compile(model, backend=Graphs().backend(), dynamic=False)
    options = {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2]]), "use_cache": False}
    out = compiled(ids, attention_mask=mask, **options).logits
    assert_same(out[:, 4:], model(ids[:, 4:], use_cache=False).logits, tolerance=bound_of_logits(model))
    mask[0, 6] = 0
    with pytest.raises(ValueError, match="row 0 go from 3 to 0 at token 4.*padding mask"):
        compiled(ids, attention_mask=mask, **options)


@torch.no_grad()
def test_second_call_compiles_nothing():
    """Another prompt, shorter and padded, runs in the same graph."""
    model, graphs = small("llama", "mixed"), Graphs()
    backend = graphs.backend()
    compiled_generation(model, random_ids(2, 7), backend, max_length=20, new_tokens=None)
    before = len(graphs)
    rows = [random_ids(1, 7, seed=2), random_ids(1, 5, seed=3)]
    ids, mask = left_padded(rows)
    out = compiled_generation(model, ids, backend, attention_mask=mask, max_length=20, new_tokens=None)
    assert len(graphs) == before
    for i, row in enumerate(rows):
        expected = uncached_greedy(model, row, 6)[1][0]
        assert_same(torch.stack(out.logits, 1)[i, :6].to(expected.dtype), expected, tolerance=bound_of_logits(model))


@pytest.mark.product  # torch.compile of a whole model
@torch.no_grad()
def test_finished_rows_of_a_compiled_decode():
    """A row that ends early keeps its states, and is watched from outside of the one graph."""
    model, graphs = small("llama", "all"), Graphs()
    ids, mask = left_padded([random_ids(1, 9), random_ids(1, 5, seed=5)])
    options = {"new_tokens": 9, "attention_mask": mask}
    end, lengths = an_end_token(greedy(model, ids, **options).sequences[:, 9:])
    out = compiled_generation(model, ids, graphs.backend(), eos_token_id=end, **options)
    assert len(graphs) == 1
    real = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    turn = torch.cat([out.sequences, random_ids(2, 3, seed=2)], 1)
    shown = torch.cat([mask, real, torch.ones(2, 7, dtype=torch.long)], 1)
    out = greedy(model, turn, 4, attention_mask=shown[:, :-4], past_key_values=out.past_key_values)
    assert_follows(model, out, turn, shown, [4, 4], "second turn")


@torch.no_grad()
@pytest.mark.parametrize(
    ("mixer", "op", "name", "parts"),
    [
        pytest.param("gka", op_gates, "gka_gates", "softplus", marks=pytest.mark.product),
        ("gka", short_conv_op, "short_conv_heads", "short_conv_step"),
        pytest.param("lattice", short_conv_op, "short_conv_heads", "short_conv_step", marks=pytest.mark.product),
    ],
)
def test_small_steps_are_one_op_in_a_decode_graph(mixer, op, name, parts, monkeypatch):
    """On a GPU, where each part would be a kernel that mostly waits."""
    monkeypatch.setattr(op, "op_is_faster", lambda x: True)
    model, graphs = small("llama", "all", torch.float32, mixer=mixer), Graphs()
    ids = random_ids(2, 7)
    out = compiled_generation(model, ids, graphs.backend("aot_eager"), new_tokens=4)
    assert_same_generation(out, uncached_greedy(model, ids, 4), "compiled", bound_of_logits(model))
    (graph,) = graphs
    calls = [str(node.target) for node in graph.graph.nodes]
    assert sum(name in call for call in calls) == len(LAYERS["all"])
    assert not any(parts in call for call in calls)


@pytest.mark.product  # torch.compile of a whole model
@pytest.mark.parametrize(
    ("family", "mixer", "tokens"),
    [*(("llama", m, "padded") for m in [*MIXERS][::2]), ("llama", "gka", "plain"), ("stablelm", "gka", "padded")],
)
def test_training_graph(family, mixer, tokens):
    """Forward and backward of a model in one graph each, with and without padding; one mixer beside attention."""
    model = small(family, "mixed" if mixer == DEFAULT_MIXER else "one", mixer=mixer).train()
    model.config.use_cache = False
    ids = random_ids(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=False)

    def gradients(embeddings):
        """All gradients by the embeddings' values, the way from ids to embeddings left out."""
        model.zero_grad()
        model(inputs_embeds=embeddings, labels=ids, use_cache=False).loss.backward()
        return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]

    noise = max(float32_noise(gradients, model.get_input_embeddings()(ids).detach()))
    kwargs = {"attention_mask": mask} if tokens == "padded" else {}
    grads = []
    for run in (model, compiled):
        model.zero_grad()
        run(input_ids=ids, labels=ids, use_cache=False, **kwargs).loss.backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        assert_same(grads[1][name], grad, name, ROUNDINGS * noise)
    assert counter.frame_count == 1


@pytest.mark.product  # torch.compile of a whole model
@pytest.mark.parametrize("layer", (0, 1))
def test_a_layer_that_checkpoints_makes_no_cache(layer):
    """One layer in train mode is enough, whether it has a mixer or attention: in the graph as without it."""
    model = small("llama", "mixed")
    assert model(input_ids=random_ids(1, 5), use_cache=True).past_key_values is not None
    model.gradient_checkpointing_enable()
    decoder_layers(base_model(model))[layer].train()
    compiled = torch.compile(model, backend=Graphs().backend(), fullgraph=True, dynamic=False)
    for run in (model, compiled):
        assert run(input_ids=random_ids(1, 5), use_cache=True).past_key_values is None


@pytest.mark.product  # torch.compile of a whole model
@torch.no_grad()
@pytest.mark.parametrize("family", ("llama", "stablelm"))
def test_padded_rows_are_sorted_once(family):
    """In a graph too; `test_padding.py` has the same without."""
    model, graphs = small(family, "all"), Graphs()
    ids, mask = left_padded([random_ids(1, 9), random_ids(1, 5)])
    compiled = torch.compile(model, backend=graphs.backend(), fullgraph=True, dynamic=False)
    compiled(input_ids=ids, attention_mask=mask, use_cache=False)
    assert len(graphs) == 1
    sorts = [node for node in graphs[0].graph.nodes if "argsort" in str(node.target)]
    assert len(sorts) == 2, "the order and its inverse"


@pytest.mark.product  # torch.compile of a whole model
def test_training_on_other_lengths():
    """Lengths that vary compile to one more graph with a symbolic length, and not to one a length."""
    model = small("llama", "one").train()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for length in (9, 12, 23):
        ids = random_ids(2, length)
        compiled(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert counter.frame_count <= 3


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("family", ("llama", "gemma3_text"))
def test_inductor(family):
    model = small(family, "mixed", torch.float32)
    ids = random_ids(2, 7)
    out = compiled_generation(model, ids, "inductor")
    assert_same_generation(out, uncached_greedy(model, ids), "inductor")
