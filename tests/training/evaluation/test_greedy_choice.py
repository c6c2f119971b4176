"""The greedy choice of kept layers: runs from a layer on are those of the whole model, steps those of brute force."""

import itertools

import pytest
import torch

from hf_memmix.conversion import convert_model, load_model
from hf_memmix.conversion.families import FAMILIES
from hf_memmix.training.evaluation.greedy_choice import Search
from hf_memmix.training.evaluation.layer_runs import LayerRuns
from hf_memmix.training.evaluation.layer_selection import cost_of_swaps
from hf_memmix.training.evaluation.probes import Material, draw
from hf_memmix.training.evaluation.selection_data import SelectionData
from testing import every_third
from tiny_teachers import tiny_teacher, tiny_text, tiny_tokenizer

LAYERS, WINDOW = 4, 5


@pytest.fixture(scope="module")
def data():
    material = Material(tiny_tokenizer(), tiny_text(200))
    samples = {"niah": draw("niah", material, 48, 0.5, 0, 3), "mqar": draw("mqar", material, 48, None, 0, 1)}
    blocks = torch.randint(3, 24, (5, 20), generator=torch.Generator().manual_seed(0))
    return SelectionData(blocks, samples, {"text": "drawn"})


@pytest.fixture(scope="module")
def teacher():
    return tiny_teacher(layers=LAYERS)


def search_of(teacher, data, **options):
    return Search(teacher, data, **{"window": WINDOW, "weight": 0.5, "batch_size": 2} | options)


@every_third(("family", "sinks"), list(zip(sorted(FAMILIES), itertools.cycle([0, 2]), strict=False)))
def test_a_run_from_a_layer_on_is_that_of_the_whole_model(family, sinks):
    teacher, windowed = tiny_teacher(family, layers=LAYERS), [0, 1, 3]
    ids = torch.randint(3, 64, (3, 12), generator=torch.Generator().manual_seed(0))
    student = convert_model(teacher, "window", keep=[2], window=WINDOW, sinks=sinks)

    def alone(model):
        with torch.no_grad():
            return model.base_model(input_ids=ids, use_cache=False).last_hidden_state

    before, runs, hidden = alone(teacher), LayerRuns(teacher, WINDOW, sinks), None
    with runs.routed():
        whole = runs.last_hidden(ids, windowed)
        torch.testing.assert_close(whole, alone(student), rtol=1e-4, atol=1e-4)
        assert torch.equal(runs.last_hidden(ids), before) and not torch.equal(whole, before)
        for layer in range(LAYERS - 1):
            hidden = runs.next_hidden(ids, windowed, layer, hidden)
            assert torch.equal(runs.last_hidden(ids, windowed, layer + 1, hidden), whole)
    assert torch.equal(alone(teacher), before)


@pytest.mark.parametrize("drop", [False, True])
def test_every_step_is_that_of_brute_force(teacher, data, drop):
    """The losses of `cost_of_swaps`, with mixers of a converted student and a whole forward for every set."""
    found = search_of(teacher, data, drop=drop).run(2)
    student, changed, every = convert_model(teacher, "window", window=WINDOW), [], set(range(LAYERS))
    for row in found["trace"]:
        left = [layer for layer in range(LAYERS) if layer not in changed] if row["candidates"] else [None]
        sets = [set(changed) | ({layer} - {None}) for layer in left]
        swaps = [sorted(some if drop else every - some) for some in sets]
        base, costs = cost_of_swaps(teacher, student, swaps, data.blocks, data.samples)
        rises = [[cost["answers"][task] - base["answers"][task] for task in data.samples] for cost in costs]
        losses = [cost["kl"] + 0.5 * sum(rise) / 2 for cost, rise in zip(costs, rises, strict=True)]
        best = losses.index(min(losses))
        assert row["layer"] == left[best] and row["loss"] == pytest.approx(losses[best], rel=1e-3, abs=1e-6)
        assert row["text_loss"] == pytest.approx(costs[best]["loss"], rel=1e-4)
        if row["candidates"]:
            assert list(row["candidates"]) == left
            assert list(row["candidates"].values()) == pytest.approx(losses, rel=1e-3, abs=1e-6)
            changed.append(row["layer"])
    assert found["keep"] == sorted(every - set(changed) if drop else changed)
    assert [row["kept"] for row in found["trace"]] == ([4, 3, 2] if drop else [0, 1, 2])
    assert found["teacher"]["text_loss"] == pytest.approx(base["loss"], rel=1e-5)


def test_a_teacher_that_is_partly_on_disk_has_the_same_trace(teacher, data, tmp_path):
    teacher.save_pretrained(tmp_path / "teacher")
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{i}": "disk" if i == 1 else "cpu" for i in range(LAYERS)}
    spread = load_model(tmp_path / "teacher", "float32", device_map=places, offload_folder=str(tmp_path / "offloaded"))
    assert search_of(spread, data).run(1) == search_of(teacher, data).run(1)


class Stop(Exception):  # noqa: N818
    pass


def stopped_after(passes):
    def progress(done, total):
        if done == passes:
            raise Stop

    return progress


def test_an_interrupted_search_continues_as_the_same(teacher, data, tmp_path):
    whole, seen = search_of(teacher, data), []
    expected = whole.run(2, lambda *at: seen.append(at))
    assert seen[-1] == (len(seen), len(seen))
    for passes in (3, 20):  # in the first step, and in a later one
        options, again = {"file": tmp_path / f"{passes}.search"}, []
        with pytest.raises(Stop):
            search_of(teacher, data, **options).run(2, stopped_after(passes))
        assert search_of(teacher, data, **options).run(2, lambda *at, again=again: again.append(at)) == expected
        assert again[-1][1] < seen[-1][1]
    longer = search_of(teacher, data, **options)
    assert longer.run(2, stopped_after(1)) == expected  # nothing is measured again
    assert longer.run(3) == search_of(teacher, data).run(3)


def test_a_file_of_another_search_is_refused(teacher, data, tmp_path):
    options = {"file": tmp_path / "a.search", "identity": {"teacher": "a"}}
    search_of(teacher, data, **options).run(1)
    for other, name in (
        ({"window": 6}, "window"),
        ({"sinks": 2}, "sinks"),
        ({"drop": True}, "drop"),
        ({"identity": {"teacher": "b"}}, "teacher"),
    ):
        with pytest.raises(ValueError, match=name):
            search_of(teacher, data, **options | other)
    restarted = search_of(teacher, data, **options | {"window": 6}, restart=True)
    assert restarted.run(1) == search_of(teacher, data, **options | {"window": 6, "file": None}).run(1)
    content = options["file"].read_text()
    options["file"].write_text(content.replace('"kl"', '"kL"', 1))
    with pytest.raises(ValueError, match="corrupt"):
        search_of(teacher, data, **options | {"window": 6})


def test_windows_as_long_as_the_sequences_cost_nothing(teacher, data):
    found, told = search_of(teacher, data, window=64), []
    trace = found.run(1, estimate=told.append)["trace"]
    assert all(row["loss"] == 0 for row in trace) and trace[1]["layer"] == 0
    assert len(told) == 1 and told[0] > 0


def test_the_model_keeps_its_mode_if_a_search_fails(data):
    teacher = tiny_teacher(layers=2).train()
    with pytest.raises(Stop):
        search_of(teacher, data).run(1, stopped_after(1))
    assert all(module.training for module in teacher.modules())
    assert not any("forward" in vars(module) for module in teacher.modules())


def test_mistakes(teacher, data):
    for count in (0, LAYERS):
        with pytest.raises(ValueError, match=f"count is {count}"):
            search_of(teacher, data).run(count)
    for options, message in (
        ({"window": 0}, "window is 0"),
        ({"sinks": 6}, "sinks are 6"),
        ({"weight": -1.0}, "weight of the answers is -1"),
    ):
        with pytest.raises(ValueError, match=message):
            search_of(teacher, data, **options)
    broken = tiny_teacher(layers=2)
    broken.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="flash_attention_2"):
        LayerRuns(broken, WINDOW)
    broken = tiny_teacher(layers=2)
    search = search_of(broken, data)
    with torch.no_grad():
        broken.model.layers[1].self_attn.o_proj.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        search.run(1)
