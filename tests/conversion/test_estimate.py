"""What a dry run says, against what a conversion does and what the caches then hold."""

import json

import pytest
import torch
from transformers import DynamicCache

from cli_runner import memmix, result_of
from hf_memmix import memmix_config
from hf_memmix.cache import RecurrentStateCache
from hf_memmix.cache.identity import check_same_model, fingerprint
from hf_memmix.conversion import convert_model, load_model
from hf_memmix.conversion.convert import save_student
from hf_memmix.conversion.estimate import estimate, meta_teacher
from hf_memmix.conversion.families import FAMILIES
from hf_memmix.conversion.from_attention import STARTS, Start
from hf_memmix.serving.footprint import Footprint
from hf_memmix.swap import memory_mixers
from testing import every_third
from tiny_teachers import CONVERTIBLE, tiny_teacher

LENGTH = 11


def on_meta(folder, teacher):
    """The teacher as the config.json of a saved model describes it."""
    teacher.config.dtype = teacher.dtype  # save_pretrained of a model notes it
    teacher.config.save_pretrained(folder)
    return meta_teacher(folder)


def bytes_of(cache):
    if isinstance(cache, RecurrentStateCache):
        return cache.nbytes
    tensors = [t for layer in cache.layers for t in (layer.keys, layer.values)]
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("mixer", CONVERTIBLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_estimate_is_what_the_conversion_makes(tmp_path, mixer, dtype):
    teacher = tiny_teacher("qwen3").to(dtype)
    found = estimate(on_meta(tmp_path, teacher), mixer, [1], (LENGTH,))
    student = convert_model(teacher, mixer, [1])
    report = student.conversion_report
    assert found["counts"] == report.counts() and found["kinds"] == report.kinds()
    assert found["options"] == student.config.mixers[mixer] and found["layers"] == student.config.mixer_types
    mixers = sum(p.numel() for m in memory_mixers(student).values() for p in m.parameters())
    sizes = {"teacher": teacher.num_parameters(), "student": student.num_parameters(), "mixers": mixers}
    assert found["parameters"] == sizes and found["dtype"] == str(dtype).removeprefix("torch.")
    stored = sum(p.numel() * p.element_size() for p in teacher.parameters())
    assert found["weights"]["distill"] == stored + 16 * sizes["student"]
    assert found["weights"]["align"] == stored + 4 * sizes["student"] + 12 * mixers


@pytest.mark.parametrize(
    ("model_type", "mixer"),
    [
        *((family, "gka") for family in ("llama", "gemma2", "gpt_oss", "mistral", "gpt_neox", "gpt2")),
        ("gpt_oss", "window"),  # longer in the layers without sliding windows
    ],
)
def test_memory_of_a_sequence_is_what_the_caches_hold(tmp_path, model_type, mixer):
    """Also with sliding windows, grouped keys and fused projections; and what `serve` counts."""
    windows = {} if model_type in ("llama", "gpt_neox", "gpt2") else {"sliding_window": 6}
    teacher = tiny_teacher(model_type, **windows)
    keep = [1] if mixer == "gka" else None
    (row,) = estimate(on_meta(tmp_path, teacher), mixer, keep, (LENGTH,))["state"]
    ids = torch.randint(3, 64, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    held = {}
    for name, model in (("teacher", teacher), ("student", convert_model(teacher, mixer, keep))):
        cache = DynamicCache(config=teacher.config) if name == "teacher" else RecurrentStateCache(model.config)
        with torch.no_grad():
            model(ids, past_key_values=cache, use_cache=True)
        held[name] = bytes_of(cache)
        assert Footprint.of(model.config, torch.float32).total(LENGTH) == held[name]
    assert row == {"context": LENGTH, **held}


def test_a_sketch_makes_the_memory_of_a_sequence_smaller(tmp_path):
    """[4, 4] and [8, 4] float32 numbers per query head instead of twice [8, 8], in each of two layers."""
    teacher, rows = tiny_teacher("llama"), {}
    for size in (None, 8, 4):
        found = estimate(on_meta(tmp_path / str(size), teacher), "gka", [1], (LENGTH,), sketch_dim=size)
        assert found["options"]["sketch_dim"] == size
        rows[size] = found["state"][0]["student"]
        cache = RecurrentStateCache((student := convert_model(teacher, "gka", [1], sketch_dim=size)).config)
        with torch.no_grad():
            student(torch.ones(1, LENGTH, dtype=torch.long), past_key_values=cache, use_cache=True)
        assert rows[size] == bytes_of(cache)
    assert rows[None] == rows[8] and rows[8] - rows[4] == 2 * 4 * (2 * 64 - 16 - 32) * 4


@every_third("model_type", sorted(FAMILIES))
def test_every_family_is_planned_without_weights(tmp_path, model_type):
    teacher = tiny_teacher(model_type)
    found = estimate(on_meta(tmp_path, teacher), "gka", [1])
    assert found["counts"] == convert_model(teacher, "gka", [1]).conversion_report.counts()


def test_command_needs_config_alone_and_writes_nothing(tmp_path):
    tiny_teacher("llama", layers=4).config.save_pretrained(tmp_path / "teacher")
    command = [
        "convert",
        "--teacher",
        tmp_path / "teacher",
        "--dry-run",
        "--keep-count",
        "0.25",
        "--option",
        "window=8",
    ]
    result = result_of(memmix(*command, "--context", "100", "--context", "1000", "--json"))
    assert result["layers"] == ["window", "window", "attention", "window"] and result["options"]["window"] == 8
    assert [row["context"] for row in result["state"]] == [100, 1000]
    # four layers of K and V, two heads of eight channels; one of them stays
    assert [row["teacher"] for row in result["state"]] == [4 * 2 * 2 * 8 * 4 * n for n in (100, 1000)]
    assert result["state"][1]["student"] - result["state"][0]["student"] == 2 * 2 * 8 * 4 * 900
    run = memmix(*command)
    assert run.exit_code == 0 and "3 become window" in run.stdout and "131,072" in run.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["teacher"]
    run = memmix("convert", "--teacher", tmp_path / "teacher")
    assert run.exit_code == 1 and "--out" in run.output


def test_windows_that_differ_are_told_by_layer(tmp_path):
    tiny_teacher("gpt_oss", layers=4, sliding_window=6).config.save_pretrained(tmp_path)
    command = ["convert", "--teacher", tmp_path, "--dry-run"]
    windows = [{"window": 6, "sinks": 0, "layers": [0, 2]}, {"window": 512, "sinks": 1, "layers": [1, 3]}]
    assert result_of(memmix(*command, "--json"))["windows"] == windows
    for more, count in (([], 2), (["--keep-layers", "0,2"], 1)):
        printed = memmix(*command, *more).stdout
        assert "=None, sinks" not in printed and printed.count("sinks=") == count, printed


def test_what_windows_beside_memories_read_is_told(tmp_path):
    tiny_teacher(layers=2).config.save_pretrained(tmp_path)
    for options, sinks in ([], 1), (["--option", "window.sinks=0"], 0):
        run = memmix(
            "convert", "--teacher", tmp_path, "--dry-run", "--mixer", "gka", "--option", "gka.local_window=4", *options
        )
        assert f"layers 0-1: window=4, sinks={sinks}" in run.stdout, run.output


def test_options_of_recipes_are_planned_saved_and_loaded(tmp_path):
    """The dry run counts what the student has, and the loaded student computes and generates the same."""
    teacher, ids = tiny_teacher("qwen2", layers=4), torch.randint(3, 64, (2, 9))
    options = {"local_window": 5, "unshare_kv_heads": True, "qk_norm": "head"}
    arguments = {"mixers": {"gka": options, "window": {"output_gate": True}}, "keep_without_rope": [1]}
    student = convert_model(teacher, "gka", [1, 2], **arguments)
    planned = estimate(on_meta(tmp_path, teacher), "gka", [1, 2], (64,), **arguments)
    assert planned["parameters"]["student"] == student.num_parameters()
    assert planned["counts"] == student.conversion_report.counts()
    plain = estimate(on_meta(tmp_path, teacher), "gka", [1, 2], (64,), mixers={"gka": {"local_window": 5}})
    # keys and values for four heads in place of two, in two layers: weight and bias of each; norms; the gate
    unshared, gate = 2 * 2 * 2 * 8 * (32 + 1), 2 * 32 * 32
    more = planned["parameters"]["student"] - plain["parameters"]["student"]
    assert more == unshared + gate + 2 * 2 * 8 + 2 * 2 * 2 * 8 * 4  # taps of the convolutions of k and v
    save_student(student, tmp_path / "student")
    loaded = load_model(tmp_path / "student")
    assert loaded.config.attention_without_rope == [1]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, student(ids).logits)
        rotated = convert_model(teacher, "gka", [1, 2], mixers=arguments["mixers"])
        assert not torch.allclose(rotated(ids).logits, student(ids).logits)
        tokens = loaded.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False)
        again = student(tokens).logits.argmax(-1)
    assert torch.equal(again[:, 8:-1], tokens[:, 9:])
    with pytest.raises(ValueError, match="attention_without_rope"):
        check_same_model(fingerprint(student.config), rotated.config)
    no_layer = memmix_config(rotated.config, rotated.config.mixer_types, rotated.config.mixers, [])
    assert no_layer.attention_without_rope is None and fingerprint(no_layer) == fingerprint(rotated.config)


def test_report_is_saved_beside_the_student_and_printed_by_kind(tmp_path):
    teacher = tiny_teacher("gpt_oss")
    student = convert_model(teacher, "gka", [1])
    save_student(student, tmp_path / "student")
    record = json.loads((tmp_path / "student" / "conversion.json").read_text())
    assert record == student.conversion_report.record() and record["counts"]["dropped"] == 2
    kinds = {row["source"]: row for row in student.conversion_report.kinds() if row["fate"] != "fresh"}
    sinks = kinds["model.layers.{i}.self_attn.sinks"]
    assert sinks["layers"] == [0, 2] and sinks["fate"] == "dropped" and "softmax" in sinks["reason"]
    assert kinds["model.layers.{i}.self_attn.q_proj.weight"]["fate"] == "used"
    fresh = [row for row in student.conversion_report.kinds() if row["fate"] == "fresh"]
    assert sum(len(row["layers"]) for row in fresh) == record["counts"]["fresh"]
    teacher.save_pretrained(tmp_path / "teacher")
    run = memmix("convert", "--teacher", tmp_path / "teacher", "--mixer", "gka", "--out", tmp_path / "again")
    assert run.exit_code == 0
    for word in ("used", "fresh", "dropped", "copied", "sinks", "3 dropped"):
        assert word in run.stdout, word


def test_a_wrong_report_of_a_copied_tensor_is_an_error(monkeypatch):
    """The mixer reports a copy of a tensor, but has changed its values."""
    honest = STARTS["gka"]

    def false(mixer, attention):
        fates = honest.take_over(mixer, attention)
        with torch.no_grad():
            mixer.v_proj.weight.mul_(2)
        return fates

    monkeypatch.setitem(STARTS, "gka", Start(honest.options, false))
    with pytest.raises(ValueError, match="reports that v_weight was copied to v_proj.weight, but"):
        convert_model(tiny_teacher(), "gka")
