"""Sequences that are split over two and three processes (gloo): loss and gradients are those of one process.

`context_parallel_run.py` computes the cases, in float64. torch's ring attention runs on GPUs only, so kept attention
layers gather all keys here.
"""

import functools
import json
import re
import sys
import types

import pytest
import torch
import torch.distributed as dist
from accelerate.big_modeling import _attach_context_parallel_hooks

from child import forked, run_scripts
from context_parallel_run import check_meetings, measure
from core.checks import CHECKS
from core.mixer_variants import VARIANTS, made
from hf_memmix import MIXERS as MIXER_CLASSES
from hf_memmix.mixers.ranks import decayed_sum, states_before
from testing import MIXERS, assert_same, build, random_ids, tiny_config, tiny_model

CASES = {
    # balanced as torch does for causal attention: a rank has tokens from the front and from the end
    **{f"{name}, balanced": {"mixer": name, "balanced": True} for name in MIXERS},
    # what is computed again in backward must send nothing again
    **{f"{name}, checkpointing": {"mixer": name, "checkpointing": "plain"} for name in MIXERS},
    "gka, reentrant checkpointing": {"mixer": "gka", "checkpointing": "reentrant"},
    "lattice, reentrant checkpointing": {"mixer": "lattice", "checkpointing": "reentrant", "balanced": True},
    "gka, hybrid": {"mixer": "gka", "layout": [0], "balanced": True},
    "lattice, hybrid": {"mixer": "lattice", "layout": [1], "checkpointing": "plain"},
    # one rank has padding and another has none
    "gka, right padding": {"mixer": "gka", "mask": "right"},
    "gka, left padding": {"mixer": "gka", "mask": "left", "balanced": True},
    **{f"{name}, holes": {"mixer": name, "mask": "holes", "balanced": name == "ska"} for name in MIXERS},
    # a piece ends within a chunk
    "ska, odd chunks": {"mixer": "ska", "options": {"chunk_size": 7}, "balanced": True},
    "ska, a new estimate at every token": {"mixer": "ska", "options": {"refresh_every": 1}},
    "gka, sketch and no gates": {
        "mixer": "gka",
        "options": {"sketch_dim": 3, "use_beta": False, "use_decay": False, "use_v_conv": False, "use_rope": True},
    },
    "mamba2, one group": {"mixer": "mamba2", "options": {"n_groups": 1, "time_step_limit": [0.01, 0.05]}},
    # pieces with fewer tokens than a convolution reads
    **{
        f"{name}, few tokens": {"mixer": name, "tokens": 12, "options": {"conv_size": 6}, "balanced": name == "gka"}
        for name in ("gka", "mamba2")
    },
    # no gradient reaches the first mixer
    "gka, frozen layers": {"mixer": "gka", "frozen": True},
    "lattice, frozen layers": {"mixer": "lattice", "frozen": True, "checkpointing": "plain"},
    # a family whose layers drop further keyword arguments
    "coffee, stablelm": {"mixer": "coffee", "family": "stablelm"},
    # as accelerate prepares a model: its hooks drop the masks of the modules "self_attn"
    "coffee, stablelm, hooks": {"mixer": "coffee", "family": "stablelm", "mask": "holes", "hooks": True},
    "gka, hybrid, hooks": {"mixer": "gka", "layout": [0], "hooks": True},
}
# memories without a window beside them, which has no piece to write
LINEAR = [
    (mixer, options)
    for mixer, options in VARIANTS
    if MIXER_CLASSES[mixer].linear and not {**MIXERS[mixer], **options}.get("local_window")
]
REFUSED = {
    "packed": ({"mixer": "gka", "restart": 40}, "packed sequences cannot be split"),
    "many packed": ({"mixer": "gka", "restart": 5}, "rank 0 start again"),
    "second half first": (
        {"mixer": "gka", "reversed": True},
        "rank 0 go back to 0 after a part from 24",
    ),
    "positions of one part": ({"mixer": "gka", "forget_positions": True}, "do not follow each other"),
    "generate": ({"mixer": "gka", "generate": True}, "generate\\(\\) outside"),
    "padding with attention": ({"mixer": "gka", "layout": [1], "mask": "right"}, "have padding"),
    "own mask": ({"mixer": "gka", "layout": [1], "own_mask": True}, "attention_mask of your own"),
    "too short": ({"mixer": "gka", "tokens": 1}, "rank 1 has no tokens"),
    # each process would see its own tokens only, or more than the window
    "eager attention": ({"mixer": "gka", "layout": [1], "attention": "eager"}, "attn_implementation='eager'"),
    "sliding window": ({"mixer": "gka", "layout": [1], "family": "mistral"}, "layer 0 has a sliding window of 7"),
    # the label of a part's last token is in another part; only one process has the last token
    "labels of parts": ({"mixer": "gka", "labels": True}, "give them as shift_labels"),
    "classifier": ({"mixer": "gka", "pooled": "SequenceClassification"}, "MemMixLlamaForSequenceClassification gives"),
    "answers": ({"mixer": "gka", "pooled": "QuestionAnswering"}, "MemMixLlamaForQuestionAnswering gives"),
    "sequence_max": ({"mixer": "ska", "options": {"normalization": "sequence_max"}}, "normalization='sequence_max'"),
}


@pytest.fixture(scope="module")
def messages(tmp_path_factory):
    """The errors of two processes. They train nothing, so copies of this process, which start at once, are enough."""
    folder = tmp_path_factory.mktemp("refused")
    cases = [json.dumps(case) for case, _ in REFUSED.values()]
    ranks = [forked(functools.partial(rank_of_two, rank, folder, cases)) for rank in range(2)]
    for process in ranks:
        process.join(120)
        process.kill()  # if it waits for the other one, which failed
    assert [process.exitcode for process in ranks] == [0, 0]
    return dict(zip(REFUSED, json.loads((folder / "measured.json").read_text()), strict=True))


def rank_of_two(rank, folder, cases):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    measure(folder / "measured.json", *cases)


@pytest.fixture(scope="module")
def by_three(tmp_path_factory):
    """What `context_parallel_run.py` measures, by the names of CASES, from one launch."""
    result = tmp_path_factory.mktemp("three") / "measured.json"
    source = "import sys, context_parallel_run; context_parallel_run.main(*sys.argv[1:])"
    arguments = [result, *map(json.dumps, CASES.values())]
    for rank in run_scripts(source, result.parent, arguments, processes=3):
        assert rank.exitcode == 0, rank.output[-3000:]
    return dict(zip(CASES, json.loads(result.read_text()), strict=True))


@torch.no_grad()
@pytest.mark.parametrize(("mixer", "options"), LINEAR, ids=str)
def test_what_a_piece_writes_is_the_memory_after_it(mixer, options):
    """From states of zero; and decayed by what the tokens forget, the memory before it."""
    layer, x, rotary = made(mixer, options)
    tokens = layer.project(x, rotary)
    first = layer.allocate_states(3, x.device, x.dtype)
    written, log_decay = layer.piece_writes(tokens, first)
    found, (_, states) = layer.memory_states(written), layer.scan(tokens, None)
    assert found.keys() | layer.convolved(tokens).keys() == states.keys()
    for name, memory in found.items():
        assert_same(memory, states[name], name)
    again, _ = layer.piece_writes(tokens, states)
    found = layer.memory_states(log_decay.exp()[..., None, None] * written + again)
    expected = layer.scan(tokens, states)[1]
    for name, memory in found.items():
        assert_same(memory, expected[name], f"{name} after a second piece")


@pytest.mark.product
@pytest.mark.parametrize("name", CASES)
def test_three_processes_equal_one(by_three, name):
    measured = by_three[name]
    assert isinstance(measured, float), measured
    assert measured <= 1e-10


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(messages, name):
    assert re.search(REFUSED[name][1], str(messages[name]))


def test_processes_that_would_wait_forever():
    state, together = ((4,), "torch.float32"), ("all_reduce", None, (2,), "torch.float32")
    sends, receives = [("isend", 1, *state), ("recv", 1, *state)], [("recv", 0, *state), ("isend", 0, *state)]
    check_meetings([[*sends, together], [*receives, together]])
    for wrong in (
        [sends, receives[::-1]],  # both send first
        [[*sends, together], receives],
        [sends, [("recv", 0, (5,), "torch.float32"), receives[1]]],
    ):
        with pytest.raises(ValueError, match="wait for each other forever"):
            check_meetings(wrong)


@pytest.mark.parametrize(
    ("layout", "family"),
    [("odd", "llama"), ("odd", "gpt2"), ("odd", "granite"), ("odd", "mixtral"), ("all", "stablelm")],
)
def test_hooks_of_accelerate_change_nothing_outside_of_the_context(layout, family):
    """accelerate attaches them in `prepare`, for good: they drop the masks of all modules "self_attn"."""
    model = tiny_model(family, layout, fresh=True)
    _attach_context_parallel_hooks(model)
    for name in ("padding", "packed", "chunked_prefill"):
        CHECKS[name](model)


@pytest.mark.product  # torch.compile of a whole model
def test_hooks_of_accelerate_under_compile():
    """The model was never called without torch.compile after the hooks were attached."""
    model = build(tiny_config("llama", (1,), num_hidden_layers=2))
    ids, mask = random_ids(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        _attach_context_parallel_hooks(model)
        found = torch.compile(model, backend="eager")(ids, attention_mask=mask).logits
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-4)


def test_sequence_parallelism_of_deepspeed_is_refused_in_training(monkeypatch):
    """A mixer would begin anew in each process. In evaluation DeepSpeed splits nothing."""
    group = types.SimpleNamespace(size=lambda: 4)
    state = types.SimpleNamespace(_SEQUENCE_PARALLEL_GROUP=group)
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.sequence_parallel.parallel_state_sp", state)
    model, ids = tiny_model("llama", "odd", fresh=True), random_ids(1, 6)
    model.eval()(ids)
    with pytest.raises(ValueError, match=r"sp_size=4.*cp_size=4"):
        model.train()(ids)
    group.size = lambda: 1
    model(ids)


def test_states_before_equal_the_recurrence():
    generator = torch.Generator().manual_seed(0)
    W, g = torch.randn(5, 2, 3, 4, 6, generator=generator), -torch.rand(5, 2, 3, generator=generator)
    g[2] = -1e5  # forgets everything; what is before must not blur what comes after
    W, g = W.double(), g.double()
    state, expected = torch.zeros_like(W[0]), []
    for written, decay in zip(W, g, strict=True):
        expected.append(state)
        state = decay.exp()[..., None, None] * state + written
    torch.testing.assert_close(states_before(W, g), torch.stack(expected))
    torch.testing.assert_close(states_before(W.float(), g.float()), torch.stack(expected).float())


def test_states_stay_fp32_under_autocast():
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(2, 9, 6, 4, generator=generator) for _ in range(2))
    log_decay = -torch.rand(2, 9, 6, generator=generator)
    W, g = torch.randn(3, 2, 6, 4, 4, generator=generator), -torch.rand(3, 2, 6, generator=generator)
    expected = *decayed_sum(k, v, log_decay), states_before(W, g)
    with torch.autocast("cpu", torch.bfloat16):
        found = *decayed_sum(k, v, log_decay), states_before(W, g)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("k_heads", "v_heads"), [(6, 6), (2, 6), (2, 2)])
def test_decayed_sum_equals_the_recurrence(k_heads, v_heads):
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(2, 9, heads, 4, generator=generator).double() for heads in (k_heads, v_heads))
    log_decay, strength = (torch.rand(2, 9, 6, generator=generator).double() for _ in range(2))
    log_decay = -log_decay
    expected = torch.zeros(2, 6, 4, 4, dtype=torch.float64)
    for t in range(9):
        one, other = (x[:, t].repeat_interleave(6 // x.shape[2], 1) for x in (k, v))
        written = strength[:, t, :, None, None] * one[..., None] * other[..., None, :]
        expected = log_decay[:, t, :, None, None].exp() * expected + written
    written, total = decayed_sum(k, v, log_decay, strength)
    torch.testing.assert_close(written, expected)
    torch.testing.assert_close(total, log_decay.sum(1))
