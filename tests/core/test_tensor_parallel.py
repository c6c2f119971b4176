"""Tensor parallelism: the plans; and in transformers two processes compute, train and save what one does."""

import copy
import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import hf_memmix
from child import run_scripts
from core.mixer_variants import every_third_variant, made
from hf_memmix import RecurrentStateCache, memmix_config
from hf_memmix.conversion import save_student
from hf_memmix.mixers import MIXERS as REGISTERED
from hf_memmix.mixers import KoopmanMLP, MemoryMixer
from hf_memmix.mixers.tp_plan import Cut, Part, TensorParallelPlan, divide
from hf_memmix.tensor_parallel import check_attention, check_distributed_checkpoint, check_mesh
from tensor_parallel_run import ADAPTER, load, measure
from testing import (
    MIXERS,
    assert_same,
    backbone_config,
    build,
    difference,
    family_fields,
    mixer_types,
    random_ids,
    tiny_model,
)

# a wrong gradient is wrong by more; parameters that stay in float32 have gradients in float32
LARGEST_DIFFERENCE = 1e-6
LAYOUT = (0,)  # the second layer keeps its attention
EVEN = {"vocab_size": 100}  # transformers 5.17 shares out the vocabulary equally or not at all


def config_of(mixer, family="llama", layout=LAYOUT, options=None, **fields):
    backbone = backbone_config(family, **EVEN, num_hidden_layers=len(ALL), **fields)
    types = mixer_types(layout, mixer, backbone.num_hidden_layers)
    return memmix_config(backbone, mixer_types=types, mixers={mixer: {**MIXERS[mixer], **(options or {})}})


ALL = (0, 1)
FULL_NORMS = {"qk_norm": "full", "qkv_bias": True, "o_bias": True, "gate_bias": True, "use_rope": True}
ROWS = {
    "gka, hybrid": lambda: config_of("gka"),
    **{f"{name}, hybrid": lambda name=name: config_of(name) for name in MIXERS if name != "gka"},
    # norms over all heads, which span the ranks; biases on both sides of the memory
    "gka, norms over all heads": lambda: config_of("gka", layout=ALL, options=FULL_NORMS),
    "coffee, all options": lambda: config_of(
        "coffee",
        options={"use_output_filter": True, "use_gate": True, "gate_bias": True, "u_bias": True, "o_bias": True},
    ),
    "mamba2, one group": lambda: config_of("mamba2", options={"n_groups": 1, "head_dim": 16, "use_bias": True}),
    "gka, sketched": lambda: config_of("gka", options={"sketch_dim": 3}),
    # fewer key/value heads than ranks: both hold the same one
    "gka, one key head": lambda: config_of(
        "gka", layout=ALL, options={**FULL_NORMS, "sketch_dim": 4}, num_key_value_heads=1
    ),
    "lattice, one key head": lambda: config_of(
        "lattice", layout=ALL, options={"share_qk": False, "qk_norm": "head"}, num_key_value_heads=1
    ),
    "ska, one key head": lambda: config_of("ska", layout=ALL, options={"use_cg_lift": True}, num_key_value_heads=1),
    "ska, an operator per token": lambda: config_of("ska", layout=ALL, options={"refresh_every": 1}),
    "echo": lambda: hf_memmix.EchoConfig(**family_fields("Echo") | EVEN),
    "echo, gated": lambda: hf_memmix.EchoConfig(**family_fields("Echo") | EVEN, feed_forward="koopman_gated"),
    # fused projections, sliding windows, experts
    "gka in gpt_neox": lambda: config_of("gka", "gpt_neox"),
    "gka in gemma2": lambda: config_of("gka", "gemma2", layer_types=["full_attention", "sliding_attention"]),
    "gka in mixtral": lambda: config_of("gka", "mixtral"),
}


def with_an_adapter(folder):
    """A saved model with LoRA beside it."""
    model = build(config_of("gka"))
    model.save_pretrained(folder)
    lora = LoraConfig(r=2, target_modules=hf_memmix.lora_target_modules(model))
    get_peft_model(model, lora).save_pretrained(folder / ADAPTER)


# by name: saves a model that cannot be shared out, and what the error says
REFUSED = {
    "channels": (
        lambda folder: build(config_of("coffee", layout=ALL, options={"inner_size": 47})).save_pretrained(folder),
        "coffee of layer 0: 47 channels",
    ),
    "kept attention": (
        lambda folder: build(config_of("gka", num_key_value_heads=1)).save_pretrained(folder),
        "attention layers: 1 key/value heads",
    ),
    "adapters": (with_an_adapter, "PEFT's adapters ['default'] do not fit into layers that are divided over"),
}


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """A function of a row, or of a name of REFUSED: its folder, after one launch of two processes for all of them."""
    folders = {}

    def folder_of(row):
        if not folders:
            folders.update((name, tmp_path_factory.mktemp(f"row{i}")) for i, name in enumerate([*ROWS, *REFUSED]))
            for name, config in ROWS.items():
                build(config(), dtype=torch.float64).save_pretrained(folders[name])
            for name, (save, _) in REFUSED.items():
                save(folders[name])
            launch(folders.values())
        return folders[row]

    return folder_of


def launch(folders, processes=2):
    folders = list(folders)
    source = "import sys, tensor_parallel_run; tensor_parallel_run.main(sys.argv[1:])"
    for rank in run_scripts(source, folders[0], folders, processes=processes):
        assert rank.exitcode == 0, rank.output[-3000:]


@pytest.mark.product
@pytest.mark.parametrize("row", ROWS)
def test_two_processes_equal_one(row, launched):
    check_against_one_process(launched(row))


@pytest.mark.product
def test_four_processes_of_which_two_hold_the_same_key_head(tmp_path):
    config = config_of("gka", layout=ALL, options={"qk_norm": "full", "qkv_bias": True})
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    build(config, dtype=torch.float64).save_pretrained(tmp_path)
    launch([tmp_path], processes=4)
    check_against_one_process(tmp_path)


def check_against_one_process(folder):
    """What the processes measured and saved is what this process computes."""
    model = load(folder)
    expected, found = measure(model), torch.load(folder / "measured.pt")
    expected["logits by tp_plan"] = expected["logits"]
    assert found.keys() == expected.keys(), found.get("error")
    for name in expected:
        error = difference(found[name], expected[name])
        assert error <= LARGEST_DIFFERENCE, f"{name}: {error:.1e}"
    # whole weights, which one process loads: those after the training step
    again, trained = load(folder / "again").state_dict(), model.state_dict()
    assert again.keys() == trained.keys()
    for name in trained:
        assert difference(again[name], trained[name]) <= LARGEST_DIFFERENCE, name


@pytest.mark.product
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_shared_out_is_refused(name, launched):
    error = torch.load(launched(name) / "measured.pt")["error"]
    assert REFUSED[name][1] in error
    assert "2 ranks" in error
    assert "\n" not in error


# ---- plans


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", MIXERS)
def test_the_parts_of_all_ranks_are_the_whole(name, ranks):
    options = {"n_groups": 1, "head_dim": 16} if name == "mamba2" else {}
    mixer = tiny_mixer(name, options)
    plan = mixer.tp_plan(ranks)
    assert plan.columns or plan.parameters
    for path, cut in plan.cuts(mixer).items():
        whole = mixer.get_parameter(path).detach()
        parts = [cut.local(whole, rank, ranks) for rank in range(ranks)]
        assert all(part.shape[cut.dim] == cut.local_size() for part in parts)
        assert torch.equal(cut.whole(parts), whole), path


@pytest.mark.parametrize("name", MIXERS)
def test_states_are_shared_out(name):
    """No rank holds more than its share of the states, but for key/value heads and groups that several ranks hold."""
    mixer = tiny_mixer(name, {})
    before = mixer.state_shapes(1)
    divide(mixer, mixer.tp_plan(2), average=lambda x: x)
    after = mixer.state_shapes(1)
    assert before.keys() == after.keys()
    for state, (shape, dtype) in after.items():
        assert torch.Size(shape).numel() * 2 == torch.Size(before[state][0]).numel(), state
        assert dtype == before[state][1]


class RanksInThreads:
    """Each rank of a divided mixer is a thread of this process; `average` is the mean over them."""

    def __init__(self, ranks):
        self.barrier, self.given = threading.Barrier(ranks), {}

    def average(self, tensor):
        self.given[threading.get_ident()] = tensor
        self.barrier.wait(60)
        mean = sum(self.given.values()) / len(self.given)
        self.barrier.wait(60)
        return mean

    def run(self, calls):
        with ThreadPoolExecutor(len(calls)) as pool:
            return [future.result() for future in [pool.submit(torch.no_grad()(call)) for call in calls]]


@torch.no_grad()
@every_third_variant
def test_the_outputs_of_all_ranks_add_up_to_those_of_the_whole(mixer, options):
    """A scan and a step after it, with random norms and biases; `test_two_processes_equal_one` is of whole models."""
    layer, x, rotary = made(mixer, options)
    for name, parameter in layer.named_parameters():
        if name.endswith("norm.weight") or name.endswith("bias"):
            parameter.add_(0.3 * torch.randn_like(parameter))
    plan, ranks = layer.tp_plan(2), RanksInThreads(2)
    prompt, token = (x[:, :12], *(t[:, :12] for t in rotary)), (x[:, 12:], *(t[:, 12:] for t in rotary))

    def outputs(layer):
        y, states = layer.scan(layer.project(prompt[0], prompt[1:]), None)
        states = {name: state.clone() for name, state in states.items()}
        last = layer.step(layer.project(token[0], token[1:]), states)
        return torch.cat([layer.readout(y, prompt[0]), layer.readout(last, token[0])], 1)

    expected, parts = outputs(layer), []
    for rank in range(2):
        part = copy.deepcopy(layer)
        for path, cut in plan.cuts(layer).items():
            owner, _, name = path.rpartition(".")
            setattr(part.get_submodule(owner), name, nn.Parameter(cut.local(layer.get_parameter(path), rank, 2)))
        divide(part, plan, average=ranks.average)
        for name in plan.rows:  # a bias is added once
            if rank and part.get_submodule(name).bias is not None:
                part.get_submodule(name).bias.zero_()
        parts.append(functools.partial(outputs, part))
    assert_same(sum(ranks.run(parts)), expected)


def test_parts_that_lie_apart():
    cut = Cut(0, (Part(4, 2), Part(2, 1), Part(2, 2)))
    whole = torch.arange(8)
    assert cut.local(whole, 0, 2).tolist() == [0, 1, 4, 5, 6]
    assert cut.local(whole, 1, 2).tolist() == [2, 3, 4, 5, 7]
    assert not cut.is_even(2)
    assert cut.local_size() == 5


@pytest.mark.parametrize(
    ("name", "options", "ranks", "text"),
    [
        ("gka", {}, 5, "gka of layer 0: 4 heads cannot be divided equally among 5 ranks.*1, 2"),
        ("coffee", {}, 5, "coffee of layer 0: 48 channels cannot be divided equally among 5 ranks.*1, 2"),
        ("mamba2", {}, 5, "mamba2 of layer 0: 2 heads cannot be divided equally among 5 ranks.*1, 2"),
        ("mamba2", {"head_dim": 16}, 4, "2 groups"),
    ],
)
def test_a_size_that_does_not_fit_names_those_that_do(name, options, ranks, text):
    with pytest.raises(ValueError, match=text):
        tiny_mixer(name, options).tp_plan(ranks)


def test_a_mixer_without_a_plan_is_refused_by_name():
    class Unplanned(REGISTERED["gka"]):
        tp_plan = MemoryMixer.tp_plan

    config = config_of("gka")
    with pytest.raises(ValueError, match="gka of layer 2 has no tensor-parallel plan.*Unplanned.tp_plan"):
        Unplanned(config, 2).tp_plan(2)


def test_norms_over_all_ranks_need_an_average():
    mixer = tiny_mixer("coffee", {})
    with pytest.raises(ValueError, match="o_norm"):
        divide(mixer, mixer.tp_plan(2))


def test_a_koopman_mlp_with_an_odd_number_of_pairs_stays_whole():
    assert KoopmanMLP(8, 12).tp_plan(2).columns == ("in_proj",)
    assert KoopmanMLP(8, 10).tp_plan(2) == TensorParallelPlan(2)


def tiny_mixer(name, options):
    mixer = REGISTERED[name](config_of(name, layout=ALL, options=options), 0)
    mixer.init_weights()
    return mixer


# ---- refusals in one process


@pytest.mark.parametrize("field", ["fsdp_size", "pp_size"])
def test_another_kind_of_parallelism_beside_it_is_refused(field):
    with pytest.raises(ValueError, match=f"{field}=2; use tp_size=2 alone"):
        check_mesh(SimpleNamespace(tp_size=2, **{field: 2}))


def test_kept_attention_that_the_family_does_not_share_out_by_heads_may_have_any_heads():
    config = config_of("gka", "phi3", num_key_value_heads=1)
    plan = {"model.layers.*.self_attn.qkv_proj": "colwise_gather_output", "model.layers.*.mlp.down_proj": "colwise"}
    check_attention(config, plan, 2)
    with pytest.raises(ValueError, match="attention layers: 1 key/value heads"):
        check_attention(config, plan | {"model.layers.*.self_attn.k_proj": "colwise"}, 2)
    check_attention(config_of("gka", layout=ALL, num_key_value_heads=1), {"layers.*.self_attn.k_proj": "colwise"}, 2)


def test_a_distributed_checkpoint_of_parts_that_lie_apart_is_refused():
    """DTensor would put them in the order of the ranks."""
    model = nn.Module()
    model.mixer = tiny_mixer("mamba2", {})
    cuts = model.mixer.tp_plan(2).cuts(model.mixer)
    model.mixer.memmix_divided = SimpleNamespace(ranks=2, cuts=cuts)
    with pytest.raises(ValueError, match=r"cannot hold mixer\.in_proj\.weight.*without distributed_checkpoint"):
        check_distributed_checkpoint(model)
    model.mixer.memmix_divided = SimpleNamespace(ranks=2, cuts={"A_log": cuts["A_log"]})
    check_distributed_checkpoint(model)


def test_states_of_a_rank_are_neither_saved_nor_taken_for_whole_ones(tmp_path):
    model = tiny_model("llama", "all", fresh=True)
    cache = RecurrentStateCache(model.config)
    with torch.no_grad():
        model(random_ids(1, 5), past_key_values=cache)
    cache.save_pretrained(tmp_path)

    model.config.distributed_config = SimpleNamespace(tp_size=2)
    with pytest.raises(ValueError, match="save_pretrained on all of them"):
        save_student(model, tmp_path / "student")
    assert not (tmp_path / "student").exists()
    with pytest.raises(ValueError, match="one rank's heads"):
        cache.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="tensor_parallel_size"):
        RecurrentStateCache.from_pretrained(tmp_path, model.config)
