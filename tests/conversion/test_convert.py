"""convert_model: what stays bit-equal, what the report says, what is refused; saving is all or nothing."""

import copy
import json
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from cli_runner import memmix
from hf_memmix.backbones import window_of
from hf_memmix.conversion import TensorFate, convert_model, layers_to_keep, load_model, save_student
from hf_memmix.conversion.convert import convert_to_folder
from hf_memmix.conversion.families import FAMILIES, attention_module, attention_prefix
from hf_memmix.conversion.from_attention import STARTS, Start
from hf_memmix.swap import memory_mixers
from testing import every_third, in_turn
from tiny_teachers import CONVERTIBLE, rotating_mixers, tiny_teacher, tiny_text, tiny_tokenizer

IDS = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(0))


def snapshot(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@in_turn(model_type=sorted(FAMILIES), mixer=CONVERTIBLE)
def test_converts_every_family_of_the_table(model_type, mixer):
    teacher = tiny_teacher(model_type)
    before = snapshot(teacher)
    student = convert_model(teacher, mixer, keep=[1])
    converted = tuple(attention_prefix(student, i) + "." for i in (0, 2))
    after = student.state_dict()
    for name, tensor in teacher.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)  # the teacher is untouched
        if not name.startswith(converted):
            torch.testing.assert_close(after[name], tensor, rtol=0, atol=0)
    report = student.conversion_report
    sources = {name for row in report.tensors for name in row["source"].split(", ")}
    assert sources == {name for name in before if name.startswith(converted)}
    assert all(row["reason"] for row in report.tensors if row["fate"] != "used")
    filled = {f"{attention_prefix(student, row['layer'])}.{t}" for row in report.tensors for t in row["targets"]}
    mixers = {name for name, _ in student.named_parameters() if name.startswith(converted)}
    assert filled | set(report.fresh) == mixers and not filled & set(report.fresh)
    logits, expected = student(input_ids=IDS).logits, teacher(input_ids=IDS).logits
    if mixer == "window":
        torch.testing.assert_close(logits, expected)
    else:
        assert logits.isfinite().all() and not torch.equal(logits, expected)


@every_third("model_type", sorted(FAMILIES))
def test_a_tensor_in_fp32_of_a_teacher_in_bf16_stays_as_it_is(model_type):
    """As the routers of some families: bit-equal, not rounded to the dtype of the model."""
    teacher = tiny_teacher(model_type).bfloat16()
    prefix = tuple(attention_prefix(teacher, i) + "." for i in (0, 2))
    names = [name for name, p in teacher.named_parameters() if not name.startswith(prefix)]
    for name in (names[-1], next(name for name in names if "embed" not in name)):
        parameter = teacher.get_parameter(name)
        parameter.data = torch.randn(parameter.shape)
    student = convert_model(teacher, "gka", keep=[1])
    # and the frequencies of rotary embeddings, which are not saved
    buffers = AutoModelForCausalLM.from_config(teacher.config, dtype=torch.bfloat16).named_buffers()
    tables = {name: table for name, table in buffers if "inv_freq" in name}
    found = student.state_dict() | dict(student.named_buffers())
    for name, tensor in (teacher.state_dict() | tables).items():
        if not name.startswith(prefix):
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.product_rows(r"(?!gpt2|gemma|phi3|qwen2_moe|stablelm)")  # some families stay
@every_third("model_type", sorted(FAMILIES))
def test_student_of_every_family_ignores_padding_and_is_saved(model_type, tmp_path):
    student = convert_model(tiny_teacher(model_type), "gka", keep=[1])
    save_student(student, tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.state_dict().keys() == student.state_dict().keys()
    for name, tensor in student.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor, rtol=0, atol=0)
    mask = torch.ones_like(IDS)
    mask[0, :5] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = loaded(input_ids=IDS, attention_mask=mask, position_ids=positions).logits
        alone = student(input_ids=IDS[:1, 5:], position_ids=positions[:1, 5:]).logits
    torch.testing.assert_close(logits[:1, 5:], alone, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("mixer", rotating_mixers())
def test_mixers_do_not_rotate_in_layers_without_rotary_embeddings(mixer, tmp_path):
    convert_model(tiny_teacher("smollm3", layers=5), mixer).save_pretrained(tmp_path)
    student = load_model(tmp_path)
    assert [attention_module(student, i).use_rope for i in range(5)] == [True, True, True, False, True]
    for model_type, rotates in (("llama", True), ("gpt2", False)):
        student = convert_model(tiny_teacher(model_type), mixer)
        assert [attention_module(student, i).use_rope for i in range(3)] == [rotates] * 3


def test_fused_and_separate_projections_convert_alike():
    """A Phi-3 and a Llama with the same attention become the same mixer."""
    llama, phi = tiny_teacher("llama"), tiny_teacher("phi3")
    with torch.no_grad():
        for i in range(3):
            a, b = attention_module(llama, i), attention_module(phi, i)
            b.qkv_proj.weight.copy_(torch.cat([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight]))
            b.o_proj.weight.copy_(a.o_proj.weight)
    mixers = [attention_module(convert_model(teacher, "gka", keep=[1]), 2).state_dict() for teacher in (llama, phi)]
    assert mixers[0].keys() == mixers[1].keys()
    for name, tensor in mixers[0].items():
        torch.testing.assert_close(tensor, mixers[1][name], rtol=0, atol=0)


def test_grouped_keys_and_values_follow_their_heads():
    """Permuting kv groups together with their query heads permutes the mixer's heads: the output stays the same."""
    teacher = tiny_teacher("llama", layers=2)
    # decay and gate differ from head to head: leave them out
    bare = {"use_gate": False, "use_decay": False}
    student = convert_model(teacher, "gka", keep=[0], **bare)
    swapped = copy.deepcopy(teacher)
    attention = attention_module(swapped, 1)
    with torch.no_grad():
        for name, heads, axis in (("q_proj", 4, 0), ("k_proj", 2, 0), ("v_proj", 2, 0), ("o_proj", 4, 1)):
            weight = getattr(attention, name).weight
            blocks = weight.unflatten(axis, (2, heads // 2 * 8))
            weight.copy_(blocks.flip(axis).flatten(axis, axis + 1))
    torch.testing.assert_close(swapped(input_ids=IDS).logits, teacher(input_ids=IDS).logits, rtol=1e-4, atol=1e-4)
    other = convert_model(swapped, "gka", keep=[0], **bare)
    x = torch.randn(1, 7, 32, generator=torch.Generator().manual_seed(2))
    rotary = teacher.model.rotary_emb(x, torch.arange(7)[None])
    outputs = [attention_module(m, 1)(x, position_embeddings=rotary)[0] for m in (student, other)]
    torch.testing.assert_close(*outputs, rtol=1e-3, atol=1e-4)


def test_keep_values():
    found = {str(keep): layers_to_keep(keep, 8) for keep in ("none", [1], (3, 0), 0.25, 0.5, 0.01)}
    assert list(found.values()) == [[], [1], [0, 3], [2, 6], [1, 3, 5, 7], [4]], found


def test_the_default_is_a_window_that_reads_the_first_token():
    student = convert_model(tiny_teacher(), keep=[1], window=4)
    assert student.config.mixer_types == ["window", "attention", "window"]
    assert student.config.mixers["window"]["sinks"] == 1


def test_the_default_window_is_not_longer_than_that_of_the_attention(tmp_path):
    """The configuration holds the number if it is the same in all layers."""
    teacher = tiny_teacher("gpt_oss", layers=4, sliding_window=6)  # in layers 0 and 2
    for keep, size, sizes in ((None, None, [6, 512, 6, 512]), ([1, 3], 6, [6, 6]), ([0, 2], 512, [512, 512])):
        student = convert_model(teacher, keep=keep)
        assert student.config.mixers["window"]["window"] == size
        assert [mixer.options.window for mixer in memory_mixers(student).values()] == sizes
        save_student(student, tmp_path / "student", overwrite=True)
        again = load_model(tmp_path / "student")
        torch.testing.assert_close(again(input_ids=IDS).logits, student(input_ids=IDS).logits, rtol=0, atol=0)
    teacher.save_pretrained(tmp_path / "teacher")
    convert_to_folder(tmp_path / "teacher", tmp_path / "all", convert_model)
    take = {"trained": [tmp_path / "all"]}  # its option is null
    convert_to_folder(tmp_path / "teacher", tmp_path / "some", partial(convert_model, keep=[0, 2]), **take)
    for wrong in ({"window": 7}, {"mixer": "gka", "local_window": 7}):
        with pytest.raises(ValueError, match=f"{[*wrong][-1]}.* at most 6"):
            convert_model(teacher, **wrong)


@pytest.mark.parametrize("model_type", sorted(name for name, row in FAMILIES.items() if row.window))
def test_a_sliding_window_starts_equal_to_its_attention(model_type):
    """Beyond it, too: the first token, which it does not read, is visible in other layers only."""
    teacher = tiny_teacher(model_type, layers=4, sliding_window=6)
    slides = [window_of(teacher.config, i) is not None for i in range(4)]
    student = convert_model(teacher)
    ids = IDS.reshape(1, -1)  # four times as long
    torch.testing.assert_close(student(input_ids=ids).logits, teacher(input_ids=ids).logits)
    firsts = [mixer.options.sinks for mixer in memory_mixers(student).values()]
    assert firsts == [0 if own else 1 for own in slides]
    assert student.config.mixers["window"]["sinks"] == (firsts[0] if len({*firsts}) == 1 else None)
    if all(slides):  # a shorter window has the first token
        shorter, beside = convert_model(teacher, window=5), convert_model(teacher, "gka", local_window=6)
        assert [model.config.mixers["window"]["sinks"] for model in (shorter, beside)] == [1, 0]
        assert {mixer.window.options.sinks for mixer in memory_mixers(beside).values()} == {0}


def test_bad_keep_is_refused():
    teacher = tiny_teacher()
    for keep, message in (
        ("all", "keep is 'all'"),
        (1, "keep is 1; give"),
        (True, "keep is True; give"),
        (0.0, "keep is 0.0; give"),
        (1.0, "keep is 1.0; give"),
        ([0.5], "give a list"),
        ([3], "names layers 3, but there are layers 0 to 2"),
        ([-1], "names layers -1"),
        ([1, 1], "names layer 1 twice"),
        ([0, 1, 2], "nothing is left to convert"),
    ):
        with pytest.raises(ValueError, match=message):
            convert_model(teacher, "gka", keep=keep)


def test_what_is_no_causal_language_model_is_refused():
    teacher = tiny_teacher()
    for wrong in (None, 5, torch.nn.Linear(2, 2), teacher.model, teacher.config, type(teacher)):
        with pytest.raises(ValueError, match=f"the teacher is a {type(wrong).__name__}; give a causal language model"):
            convert_model(wrong)


def test_trained_students_of_another_number_of_layers_are_refused(tmp_path):
    """The mixers of their first layers would fit."""
    for layers in (2, 3):
        tiny_teacher(layers=layers).save_pretrained(tmp_path / f"{layers}")
    convert_model(tmp_path / "3", "gka", out=tmp_path / "trained")
    convert = partial(convert_model, mixer="gka")
    for teacher in (tmp_path / "2", tiny_teacher(layers=2)):
        with pytest.raises(ValueError, match="trained' has 3 layers, the teacher 2; give the teacher it came from"):
            convert_to_folder(teacher, tmp_path / "out", convert, trained=[tmp_path / "trained"])
    assert not (tmp_path / "out").exists()


def test_a_student_without_values_and_what_is_no_tokenizer_are_not_saved(tmp_path):
    tiny_teacher().save_pretrained(tmp_path / "teacher")
    without = convert_model(tmp_path / "teacher", "gka", out=tmp_path / "first")
    with pytest.raises(ValueError, match="meta device and has no values"):
        save_student(without, tmp_path / "second")
    with pytest.raises(ValueError, match="tokenizer is '.*teacher'; give a tokenizer"):
        save_student(load_model(tmp_path / "first"), tmp_path / "second", str(tmp_path / "teacher"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "teacher"]


def test_wrong_teachers_and_mixers_are_refused(tmp_path):
    teacher = tiny_teacher()
    for arguments, message in (
        ({"teacher": tiny_teacher("bloom")}, "'bloom' cannot be converted"),
        ({"mixer": "nosuch"}, "mixer 'nosuch' is unknown; registered: .*gka"),
        ({"num_iterationz": 3}, "num_iterationz"),
        ({"teacher": tmp_path / "nothing"}, "not a model folder"),
        ({"teacher": convert_model(teacher, "gka", keep=[0])}, "converted model already"),
    ):
        with pytest.raises(ValueError, match=message):
            convert_model(**{"teacher": teacher} | arguments)


def test_a_tensor_without_a_fate_is_an_error(monkeypatch):
    """A mixer must report a fate for every tensor."""
    honest = STARTS["gka"]
    silent = Start(honest.options, lambda m, a: [f for f in honest.take_over(m, a) if f.field != "q_weight"])
    monkeypatch.setitem(STARTS, "gka", silent)
    with pytest.raises(ValueError, match="one fate for each tensor, but does not for q_weight"):
        convert_model(tiny_teacher(), "gka")
    twice = Start(honest.options, lambda m, a: [*honest.take_over(m, a), TensorFate("v_bias", "dropped", reason="no")])
    monkeypatch.setitem(STARTS, "gka", twice)
    with pytest.raises(ValueError, match="one fate for each tensor, but does not for v_bias"):
        convert_model(tiny_teacher("qwen2"), "gka")


def test_seed_decides_fresh_parameters_and_global_generator_does_not_change():
    teacher = tiny_teacher()
    state = torch.get_rng_state()
    # without its bias the output gate is the one parameter that starts at random
    a, b, c = (snapshot(convert_model(teacher, "gka", seed=seed, gate_bias=False)) for seed in (0, 0, 1))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert {name.split(".")[-2] for name in a if not torch.equal(a[name], c[name])} == {"g_proj"}


def test_bf16_teacher_gives_a_bf16_student_with_fp32_decays():
    student = convert_model(tiny_teacher("qwen3").bfloat16(), "gka", keep=[1])
    mixer = attention_module(student, 0)
    for name, parameter in mixer.named_parameters():
        assert parameter.dtype == (torch.float32 if name in mixer.fp32_parameters else torch.bfloat16), name
    assert student(input_ids=IDS).logits.isfinite().all()


def test_generation_settings_are_carried_over(tmp_path):
    """They are copied, and saved in the folder."""
    teacher = tiny_teacher()
    teacher.generation_config.update(do_sample=True, temperature=0.7, top_k=5, eos_token_id=[2, 9])
    student = convert_model(teacher, "gka")
    settings = student.generation_config.to_dict()
    assert settings == teacher.generation_config.to_dict() and settings["temperature"] == 0.7
    save_student(student, tmp_path / "student")
    loaded = load_model(tmp_path / "student").generation_config
    assert (loaded.temperature, loaded.top_k, loaded.eos_token_id) == (0.7, 5, [2, 9])
    student.generation_config.temperature = 0.1
    assert teacher.generation_config.temperature == 0.7


def test_generation_settings_that_contradict_each_other(tmp_path):
    """Published models have a temperature without sampling. Newer releases of transformers save such settings again if
    they are unchanged, older ones never; then the conversion is refused before the work."""
    tiny_teacher().save_pretrained(tmp_path / "teacher")
    path = tmp_path / "teacher" / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"temperature": 0.6, "top_p": 0.9}))
    teacher = load_model(tmp_path / "teacher")
    try:
        teacher.save_pretrained(tmp_path / "again")
    except ValueError:
        pass
    else:
        for source, name in ((teacher, "a"), (tmp_path / "teacher", "b")):
            convert_model(source, "gka", out=tmp_path / name)
            assert load_model(tmp_path / name).generation_config.temperature == 0.6
    teacher.generation_config.temperature = 0.5
    with pytest.raises(ValueError, match="teacher contradict each other.*`temperature`: .*generation_config.json"):
        convert_model(teacher, "gka", out=tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_failed_save_leaves_nothing_behind(tmp_path, monkeypatch):
    student = convert_model(tiny_teacher(), "gka", keep=[1])
    save_student(student, tmp_path / "student")
    before = {p.name: p.read_bytes() for p in (tmp_path / "student").iterdir()}

    def half(folder, **kwargs):
        (folder / "config.json").write_text("{")
        raise OSError("disk full")

    monkeypatch.setattr(student, "save_pretrained", half)
    for target, overwrite in (("student", True), ("other", False)):
        with pytest.raises(ValueError, match="cannot write .*: disk full"):
            save_student(student, tmp_path / target, overwrite=overwrite)
    assert {p.name: p.read_bytes() for p in (tmp_path / "student").iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["student"]


def test_a_student_that_is_made_in_inference_mode_can_be_trained(tmp_path):
    """Its parameters were inference tensors, whose first training step is a RuntimeError."""
    model, ids = tiny_teacher("llama", layers=2), torch.arange(40)[None]
    model.save_pretrained(tmp_path / "teacher")
    with torch.inference_mode():
        convert_model(tmp_path / "teacher", "gka", out=tmp_path / "student")
        students = [
            convert_model(given, "gka") for given in (model, tiny_teacher("llama", layers=2), tmp_path / "teacher")
        ]
        students.append(load_model(tmp_path / "student"))
    for student in students:
        assert not any(tensor.is_inference() for tensor in [*student.parameters(), *student.buffers()])
        student(input_ids=ids, labels=ids).loss.backward()
        assert all(parameter.grad is not None for parameter in student.model.layers[0].self_attn.parameters())


def test_tokens_without_an_embedding_are_told_and_refused_where_they_are_read(tmp_path):
    """A special token was added to the tokenizer, and the embeddings were not resized: IndexError, or nothing."""
    tiny_teacher("llama", layers=2).save_pretrained(tmp_path / "teacher")
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<extra-{i}>" for i in range(100)]})
    tokenizer.save_pretrained(tmp_path / "teacher")
    told = memmix("convert", "--teacher", tmp_path / "teacher", "--out", tmp_path / "student")
    assert told.exit_code == 0 and "tokens that the model does not have: <extra-" in told.output
    for model, prompt, code in (
        ("teacher", "the <extra-99>", 1),
        ("student", "the <extra-99>", 1),
        ("teacher", "the", 0),
    ):
        run = memmix("generate", "--model", tmp_path / model, "--prompt", prompt, "--max-new-tokens", "1")
        assert run.exit_code == code and ("--prompt holds '<extra-99>'" in run.output) == (code == 1)
    (tmp_path / "text.txt").write_text(f"<extra-99> {tiny_text(300)}")
    read = ["--teacher", tmp_path / "teacher", "--text", tmp_path / "text.txt", "--out", tmp_path / "out"]
    for command in (
        ["eval", tmp_path / "student", "--lengths", "64", "--samples", "2"],
        ["select", "--length", "32", "--tasks", "none", "--mixer", "gka"],
        ["align", "--student", tmp_path / "student", "--block-size", "16", "--steps", "1"],
        ["cache-teacher", "--block-size", "16"],
    ):
        run = memmix(*command, *read)
        assert run.exit_code == 1 and "token 123" in run.output.splitlines()[-1]
