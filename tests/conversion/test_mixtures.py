"""Students with several mixers: which layer gets which, the same results as with one, saving, generation, refusals."""

import json
from functools import partial

import pytest
import torch

from cli_runner import memmix, result_of
from hf_memmix import RecurrentStateCache
from hf_memmix.conversion import convert_model, load_model, mixer_types_of, save_student
from hf_memmix.conversion.convert import convert_to_folder
from hf_memmix.conversion.estimate import estimate
from hf_memmix.conversion.families import attention_module
from hf_memmix.conversion.layer_plan import read_plan, write_plan
from hf_memmix.conversion.mixer_files import convert_by_plan, load_mixers, mixer_file, write_mixers
from hf_memmix.conversion.taken_mixers import take_mixers
from hf_memmix.mixers import MIXERS
from hf_memmix.models.echo import EchoConfig
from hf_memmix.serving.footprint import Footprint
from testing import MIXERS as TINY
from tiny_teachers import tiny_teacher, tiny_tokenizer

IDS = torch.randint(3, 64, (2, 20), generator=torch.Generator().manual_seed(0))
LAYERS = {"ska": [1], "attention": [0], "mamba2": "rest"}
TYPES = ["attention", "ska", "mamba2", "mamba2"]


def test_ways_to_write_a_mixture():
    for layers, types in (
        (LAYERS, TYPES),
        ("ska=1 attention=0 mamba2=rest", TYPES),
        (" mamba2=rest  ska=1-1 attention=0 ", TYPES),
        (TYPES, TYPES),
        (tuple(TYPES), TYPES),
        ({"ska": "1", "attention": (0,), "mamba2": range(2, 4)}, TYPES),
        ({"attention": 0.25, "gka": "rest"}, ["gka", "gka", "attention", "gka"]),
        ({"attention": [], "gka": "rest"}, ["gka"] * 4),
        ({"lattice": "0-3"}, ["lattice"] * 4),
        ("echo", ["mamba2", "ska", "ska", "mamba2"]),
    ):
        assert mixer_types_of(layers, 4) == types


def test_the_preset_is_the_layout_of_the_papers_models():
    for name in ("1m", "50m", "180m"):
        config = EchoConfig.preset(name)
        if config.num_ska_layers == 2:
            assert mixer_types_of("echo", config.num_hidden_layers) == config.mixer_types
    with pytest.raises(ValueError, match="num_ska_layers=2 must be 0 to 1"):
        mixer_types_of("echo", 3)


def test_mistakes_in_a_mixture_are_one_clear_line():
    for layers, message in (
        ({"ska": [3, 1], "mamba2": [1], "gka": "rest"}, "gives layer 1 to ska and to mamba2"),
        ({"ska": [1, 1], "gka": "rest"}, "layers of ska is .*names layer 1 twice"),
        ({"ska": [4], "gka": "rest"}, "names layers 4, but there are layers 0 to 3"),
        ({"ska": [0], "gka": [3]}, "leaves layers 1-2 without a mixer"),
        ({"ska": "rest", "gka": "rest"}, 'gives "rest" to ska and to gka'),
        ({"nosuch": "rest"}, "names 'nosuch', .* attention, "),
        ("ska=1 nosuch=rest", "names 'nosuch', which is not a mixer"),
        (["gka", "nosuch", "gka", "gka"], "names 'nosuch', which is not a mixer"),
        (["gka"] * 3, "has 3 entries, but there are 4 layers"),
        ({"attention": "rest"}, "all 4 layers"),
        ("ska=1 ska=2 gka=rest", "names ska twice"),
        ("ska=1, 2 gka=rest", "give layers by mixer, e.g."),
        ("nosuch", "or a preset: echo"),
        ("", "is empty"),
        ({"ska": None, "gka": "rest"}, "layers of ska is None"),
        ({"ska": 3, "gka": "rest"}, "layers of ska is 3"),
        ({"ska": {}, "gka": "rest"}, "layers of ska is {}"),
        (7, "layers is 7"),
    ):
        with pytest.raises(ValueError, match=f"^[^\n]*{message}[^\n]*$"):
            mixer_types_of(layers, 4)


def test_mistakes_in_arguments():
    for arguments, message in (
        ({"layers": LAYERS, "mixer": "gka"}, "replaces mixer and keep"),
        ({"layers": LAYERS, "keep": [0]}, "replaces mixer and keep"),
        ({"layers": LAYERS, "mixers": {"gka": {}}}, "options of 'gka', .* used here: ska"),
        ({"mixer": "gka", "mixers": {"ska": {}}}, "options of 'ska', but no layer uses it"),
        (
            {"mixer": "gka", "local_window": 4, "mixers": {"window": {"window": 8}}},
            "window=8, but no layer is a window alone; .* local_window",
        ),
        (
            {"mixer": "gka", "local_window": 4, "mixers": {"window": {"sinks": 8}}},
            "sinks=8 are more than local_window=4",
        ),
        ({"layers": LAYERS, "rank": 4}, "rank is an option of one mixer, but the layers use ska, mamba2"),
        ({"mixer": "gka", "mixers": {"gka": {"ridge": 0.5}}, "ridge": 0.25}, r"ridge=0\.25.*gka.*0\.5"),
        ({"layers": LAYERS, "mixers": {"ska": 3}}, "give options by mixer"),
        ({"layers": LAYERS, "mixers": {"ska": {"nosuch": 3}}}, "nosuch"),
    ):
        with pytest.raises(ValueError, match=message):
            convert_model(tiny_teacher(layers=4), **arguments)


def test_a_mixture_of_one_mixer_is_the_old_conversion():
    teacher = tiny_teacher("qwen3", layers=4)
    old = convert_model(teacher, "gka", keep=[1], solver_phases=[9])
    for arguments in (
        {"layers": {"attention": [1], "gka": "rest"}, "solver_phases": [9]},
        {"layers": "attention=1 gka=rest", "mixers": {"gka": {"solver_phases": [9]}}},
        {"mixer": "gka", "keep": [1], "mixers": {"gka": {"solver_phases": [9]}}},
    ):
        new = convert_model(teacher, **arguments)
        assert new.config.to_dict() == old.config.to_dict()
        assert new.conversion_report.record() == old.conversion_report.record()
        assert all(torch.equal(tensor, old.state_dict()[name]) for name, tensor in new.state_dict().items())
    assert old.conversion_report.mixer == "gka" and old.conversion_report.layers == ["gka", "attention", "gka", "gka"]


# grouped keys; fused projections and biases; sliding windows and norms of q and k
@pytest.mark.product_rows(r"gemma3_text")  # one of several examples stays
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma3_text"])
def test_a_student_of_several_mixers(family, tmp_path):
    """Every layer is that of a conversion to its mixer alone; generation equals the forward; a folder holds all."""
    layers = {"gka": [1], "mamba2": [3], "lattice": "4", "ska": [2], "attention": "rest"}
    tiny = {kind: {name: v for name, v in TINY[kind].items() if name == "chunk_size"} for kind in ("gka", "ska")}
    teacher = tiny_teacher(family, layers=6)
    student = convert_model(teacher, layers=layers, mixers=tiny)
    assert student.config.mixer_types == ["attention", "gka", "ska", "mamba2", "lattice", "attention"]
    for layer, kind in enumerate(student.config.mixer_types):
        if kind != "attention":
            alone = attention_module(convert_model(teacher, kind, mixers={kind: tiny.get(kind, {})}), layer)
            assert type(attention_module(student, layer)) is MIXERS[kind]
            found = attention_module(student, layer).state_dict()
            assert found and all(torch.equal(found[name], tensor) for name, tensor in alone.state_dict().items())
    assert student.conversion_report.mixer is None and student.conversion_report.kept == [0, 5]

    with torch.no_grad():
        logits = student(IDS).logits
        cache = RecurrentStateCache(config=student.config)
        parts = [student(part, past_key_values=cache, use_cache=True).logits for part in IDS.split([11, 1, 8], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), logits, rtol=1e-4, atol=1e-4)
        made = student.generate(IDS, max_new_tokens=6, do_sample=False, eos_token_id=None)
        again = student(made).logits[:, IDS.shape[1] - 1 : -1].argmax(-1)
    assert torch.equal(made[:, IDS.shape[1] :], again)

    save_student(student, tmp_path / "s", tiny_tokenizer())
    loaded = load_model(tmp_path / "s")
    assert loaded.config.mixer_types == student.config.mixer_types
    assert all(torch.equal(tensor, student.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    saved = json.loads((tmp_path / "s" / "conversion.json").read_text())
    assert saved["mixer"] is None and saved["layers"] == student.config.mixer_types


def test_what_a_mixture_costs():
    teacher = tiny_teacher(layers=4)
    student = convert_model(teacher, layers=LAYERS)
    found = estimate(tiny_teacher(layers=4), layers=LAYERS, contexts=(64,))
    assert found["mixer"] is None and found["layers"] == TYPES and set(found["options"]) == {"ska", "mamba2"}
    (row,) = found["state"]
    assert row["context"] == 64 and row["student"] == Footprint.of(student.config, teacher.dtype).total(64)
    alone = [estimate(tiny_teacher(layers=4), kind, contexts=(64,)) for kind in ("ska", "mamba2")]
    assert len({row["state"][0]["student"] for row in [found, *alone]}) == 3
    assert found["counts"] == student.conversion_report.counts()


def test_mixers_are_taken_from_several_trained_students(tmp_path):
    teacher = tiny_teacher(layers=4)
    trained = {kind: convert_model(teacher, kind, seed=3) for kind in ("ska", "mamba2")}
    with torch.no_grad():
        for model in trained.values():
            for layer in range(4):
                for parameter in attention_module(model, layer).parameters():
                    parameter.add_(0.01)
    student = convert_model(teacher, layers=LAYERS)
    take_mixers(student, *trained.values())
    teacher.save_pretrained(tmp_path / "teacher")
    for kind, model in trained.items():
        save_student(model, tmp_path / f"all {kind}")
    folders = [tmp_path / f"all {kind}" for kind in trained]
    convert = partial(convert_model, layers=LAYERS)
    convert_to_folder(tmp_path / "teacher", tmp_path / "streamed", convert, trained=folders)
    streamed = load_model(tmp_path / "streamed")
    from_files = convert_model(teacher, layers=LAYERS)
    for kind, model in trained.items():
        write_mixers(model, mixer_file(tmp_path, kind), {"test": kind})
    load_mixers(from_files, tmp_path)
    for layer, kind in enumerate(TYPES[1:], 1):
        source = attention_module(trained[kind], layer).state_dict()
        for filled in (student, streamed, from_files):
            found = attention_module(filled, layer).state_dict()
            assert all(torch.equal(found[name], tensor) for name, tensor in source.items())
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == ["mamba2.safetensors", "ska.safetensors"]
    with pytest.raises(ValueError, match="lacks|has no gka.safetensors"):
        load_mixers(convert_model(teacher, "gka"), tmp_path)
    with pytest.raises(ValueError, match="ska.safetensors.* layer 1: .*other options .ska.rank is 3 and 8"):
        load_mixers(convert_model(teacher, layers=LAYERS, mixers={"ska": {"rank": 3}}), tmp_path)
    with pytest.raises(ValueError, match="mixers of layer 0 differ"):
        take_mixers(convert_model(teacher, "gka"), *trained.values())


@pytest.mark.parametrize(
    ("own", "theirs", "message"),
    [
        ({}, {"gka": {"ridge": 0.3}}, "gka.ridge is 0.05 and 0.3"),
        # of the window beside a memory: its own default has no first token, where that is the attention's own window
        ({"local_window": 6}, {"gka": {"local_window": 6}, "window": {"sinks": 1}}, "window.sinks is 0 and 1"),
    ],
    ids=["memory", "window"],
)
def test_mixers_of_other_options_with_the_same_shapes_are_not_taken(own, theirs, message, tmp_path):
    """They compute something else with the same tensors. Options that can be changed at inference are free."""
    teacher = tiny_teacher("mistral", layers=2, sliding_window=6)
    trained = convert_model(teacher, "gka", mixers=theirs)
    teacher.save_pretrained(tmp_path / "teacher")
    save_student(trained, tmp_path / "trained")
    write_mixers(trained, mixer_file(tmp_path, "gka"), {})
    free = {"gka": theirs["gka"] | {"solver_phases": [5]}}
    other, same = convert_model(teacher, "gka", **own), convert_model(teacher, "gka", mixers=theirs | free)
    for take in (lambda to: take_mixers(to, trained), lambda to: load_mixers(to, tmp_path)):
        take(same)
        with pytest.raises(ValueError, match=message):
            take(other)
    to_gka = partial(convert_model, mixer="gka", **own)
    for source in (teacher, tmp_path / "teacher"):  # in memory, and by streaming
        with pytest.raises(ValueError, match=message):
            convert_to_folder(source, tmp_path / "out", to_gka, trained=[tmp_path / "trained"])
    assert not (tmp_path / "out").exists()


def test_a_plan_of_a_mixture(tmp_path):
    teacher, path = tiny_teacher(layers=4), tmp_path / "plan.json"
    plan = {"mixer_types": TYPES, "num_layers": 4, "mixers": {"ska": {"rank": 5}}}
    write_plan(plan, path)
    assert read_plan(path, 4) == plan
    student = convert_by_plan(teacher, path)
    assert student.config.mixer_types == TYPES and student.config.mixers["ska"]["rank"] == 5
    for by_hand in (LAYERS, "ska=1 attention=0 mamba2=rest"):
        write_plan({"layers": by_hand}, path)
        assert read_plan(path, 4)["mixer_types"] == TYPES
        assert convert_by_plan(teacher, path).config.mixer_types == TYPES
    for wrong, message in (
        ({"layers": {"ska": [1]}}, "leaves layers 0,2-3 without a mixer"),
        ({**plan, "num_layers": 5}, "is for 5 layers"),
        ({**plan, "mixer_types": TYPES[:3]}, "has 3 entries"),
        ({**plan, "mixer_types": ["gka", "x", "gka", "gka"]}, "names 'x', which is not a mixer"),
        ({**plan, "mixer_types": 3}, "is not a plan: it lacks mixer_types, num_layers"),
    ):
        write_plan(wrong, path)
        with pytest.raises(ValueError, match=message):
            read_plan(path, 4)
    write_plan(plan | {"trained": "plan.mixers"}, path)
    with pytest.raises(ValueError, match="needs its aligned mixers in .*plan.mixers"):
        convert_by_plan(teacher, path)


def test_what_a_plan_says_is_used_or_refused(tmp_path):
    """Options in a plan for one mixer, and fields that contradict each other or have a wrong type."""
    teacher, path = tiny_teacher(layers=4), tmp_path / "plan.json"
    one = {"mixer": "gka", "keep": [0], "num_layers": 4}
    path.write_text(json.dumps(one | {"mixers": {"gka": {"ridge": 0.5}}}), encoding="utf-8-sig")  # as some editors do
    assert convert_by_plan(teacher, path).config.mixers["gka"]["ridge"] == 0.5
    assert convert_by_plan(teacher, path, ridge=0.25).config.mixers["gka"]["ridge"] == 0.25
    several = {"mixer_types": TYPES, "num_layers": 4}
    write_plan(several | {"keep": [0], "mixers": None}, path)
    assert convert_by_plan(teacher, path).config.mixer_types == TYPES
    for wrong, message in (
        (one | {"mixers": "x"}, "mixers of .* is 'x'; give options by mixer"),
        (several | {"mixers": {"ska": []}}, r"mixers of .* is {'ska': \[\]}; give options by mixer"),
        (one | {"trained": 5}, "trained of .* is 5; give the folder"),
        (several | {"keep": [1]}, r"keep of .* is \[1\], but its layers keep attention in \[0\]"),
        ({"layers": "gka=rest", "mixer": "ska"}, "mixer of .* is 'ska', but its layers name the mixers"),
        ({"layers": "gka=rest", "mixer_types": TYPES}, "names the mixers by layers and by mixer_types"),
        (one | {"keep_layers": [1], "option": 0}, "has 'keep_layers', 'option', which a plan does not have; it may"),
    ):
        write_plan(wrong, path)
        with pytest.raises(ValueError, match=message):
            read_plan(path, 4)


# ---- the command line; test_mixer_search.py goes on with a mixture to its card


@pytest.mark.product  # a whole command; its parts have tests
def test_commands_with_a_mixture(tmp_path):
    teacher = ["--teacher", tmp_path / "teacher"]
    save_student(tiny_teacher("llama", layers=4), tmp_path / "teacher", tiny_tokenizer())
    layers = ["--layers", "ska=1 attention=0 mamba2=rest", "--option", "ska.rank=5", "--option", "ska.chunk_size=4"]
    done = result_of(memmix("convert", *teacher, *layers, "--out", tmp_path / "s0", "--json"))
    assert done["layers"] == TYPES and done["kept"] == [0] and done["converted"] == [1, 2, 3]
    config = json.loads((tmp_path / "s0" / "config.json").read_text())
    assert config["mixer_types"] == TYPES and config["mixers"]["ska"]["rank"] == 5
    for_people = memmix("convert", *teacher, *layers, "--out", tmp_path / "s0", "--overwrite")
    assert "layers 1-3 converted to ska 1, mamba2 2-3, 0 kept" in for_people.stdout
    dry = memmix("convert", *teacher, *layers, "--dry-run")
    assert dry.exit_code == 0 and "3 become ska 1, mamba2 2-3, attention stays in [0]" in dry.stdout
    assert "\nska: " in dry.stdout and "\nmamba2: " in dry.stdout
