"""RecurrentStateCache as an object: size, rows, rollback, files."""

import copy
import pickle

import pytest
import torch
from safetensors.torch import save_file
from transformers import DynamicCache, StaticCache

from core.checks import assert_same_generation, greedy, uncached_greedy
from hf_memmix import RecurrentStateCache, memmix_config
from hf_memmix.backbones import BACKBONES
from hf_memmix.cache import fingerprint
from hf_memmix.cache.recurrent import adopt_cache
from testing import (
    BESIDE,
    MIXERS,
    assert_same,
    build,
    in_turn,
    mixers_of,
    one_each,
    random_ids,
    tiny_config,
    tiny_model,
)

FAMILIES = ("llama", "gemma3_text", "gpt_neox")


@torch.no_grad()
def read(model, ids, **kwargs):
    cache = RecurrentStateCache(model.config, **kwargs)
    model(ids, past_key_values=cache, use_cache=True)
    return cache


@torch.no_grad()
def continues(model, cache, ids, following, tokens=None):
    """The cache of `ids` goes on with `following` as a full forward does."""
    out = model(following, past_key_values=cache, use_cache=True).logits
    full = model(torch.cat([ids, following], 1), use_cache=False).logits
    assert_same(out, full[:, -following.shape[1] :])


# ---- size


def test_bytes():
    """Those of the tensors; states do not grow with the context."""
    model, of_one_row = tiny_model("llama", "odd"), set()
    for batch, length in ((2, 3), (2, 200), (4, 3)):
        cache = read(model, random_ids(batch, length))
        states = sum(state.nbytes for i in mixers_of(model) for state in cache.layers[i].get().values())
        keys_and_values = 2 * 2 * (batch * 2 * length * 8) * 8  # two kept layers, [batch, 2, length, 8] in float64
        assert cache.nbytes == states + keys_and_values
        of_one_row.add(states / batch)
    assert len(of_one_row) == 1


@torch.no_grad()
@one_each(mixer=MIXERS, layout=("odd", "all"), length=(None, 24))
def test_states_are_fp32_in_a_bf16_model_of_every_mixer(mixer, layout, length):
    """A static cache allocates the states before the first token; in a dynamic one the mixer makes them."""
    model = tiny_model("llama", layout, mixer, fresh=True).bfloat16()
    ids = random_ids(2, 7)
    if length is None:
        caches = [read(model, ids)]
    else:
        caches = [read(model, ids, max_cache_len=length), greedy(model, ids, cache_implementation="static")]
        caches[1] = caches[1].past_key_values
    for cache in caches:
        for i in mixers_of(model):
            for name, state in cache.layers[i].states.items():
                # inputs of a convolution, keys and values of a window; everything that sums over tokens is in fp32
                inputs = name.startswith("conv") or name in ("window_k", "window_v")
                inputs = inputs or (mixer == "window" and name in ("k", "v"))
                expected = torch.bfloat16 if inputs else torch.long if name.endswith("seen") else torch.float32
                assert state.dtype == expected, f"{name} is {state.dtype}"


WIDE, NARROW = torch.float32, torch.bfloat16
# every two values meet
OTHER_DTYPES = [(NARROW, "odd", None), (WIDE, "odd", 24), (NARROW, "all", 24), (WIDE, "all", None)]


@torch.no_grad()
@one_each(mixer=MIXERS, case=OTHER_DTYPES)
def test_model_of_another_dtype(mixer, case, tmp_path):
    """A cache in memory or from a file continues as if its states had been cast before."""
    written, layout, length = case
    wide = tiny_model("llama", layout, mixer, fresh=True, dtype=WIDE).to(NARROW).to(WIDE)
    narrow = copy.deepcopy(wide).to(NARROW)
    writer, reader = (narrow, wide) if written == NARROW else (wide, narrow)
    ids = random_ids(2, 7)
    alive = read(writer, ids, max_cache_len=length)
    alive.save_pretrained(tmp_path)
    by_hand = read(reader, ids, max_cache_len=length)  # for its dtypes and places
    for layer, source in zip(by_hand.layers, alive.layers, strict=True):
        pairs = [(layer.states[k], v) for k, v in source.states.items()] if hasattr(layer, "states") else []
        for place, state in pairs or ((layer.keys, source.keys), (layer.values, source.values)):
            place.copy_(state)
    for cache in (alive, RecurrentStateCache.from_pretrained(tmp_path)):
        expected = copy.deepcopy(by_hand)
        for tokens in (random_ids(2, 1, seed=3), random_ids(2, 3, seed=4)):
            out, right = (reader(tokens, past_key_values=c).logits for c in (cache, expected))
            assert_same(out, right, tolerance=0)
        for layer, other in zip(cache.layers, expected.layers, strict=True):
            if hasattr(layer, "states"):
                assert {k: v.dtype for k, v in layer.states.items()} == {k: v.dtype for k, v in other.states.items()}


# ---- rows


@pytest.mark.parametrize("family", FAMILIES)
def test_expand(family):
    """One document is read once, and used for two batches of questions."""
    model = tiny_model(family, "odd")
    document, questions = random_ids(1, 9), random_ids(3, 4, seed=5)
    cache = read(model, document)
    for _ in range(2):
        continues(model, cache.expand(3), document.expand(3, -1), questions)
    continues(model, cache, document, questions[:1])


def test_expand_refuses():
    model = tiny_model("llama", "odd")
    with pytest.raises(ValueError, match="expand.*one sequence"):
        read(model, random_ids(2, 5)).expand(3)
    with pytest.raises(ValueError, match="expand"):
        RecurrentStateCache(model.config).expand(3)


@pytest.mark.parametrize("static", (False, True))
def test_reset(static):
    """After reset() a cache works like a new one; a dynamic one also with another batch size."""
    model, rows = tiny_model("llama", "odd"), 2 if static else 3
    cache = read(model, random_ids(2, 5), max_cache_len=20 if static else None)
    cache.reset()
    assert int(cache.get_seq_length()) == 0
    ids = random_ids(rows, 6, seed=3)
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
    continues(model, cache, ids, random_ids(rows, 2, seed=4))


def test_static_addresses_stay():
    model = tiny_model("llama", "all")
    cache = read(model, random_ids(1, 5), max_cache_len=16)
    before = [state.data_ptr() for layer in cache.layers for state in layer.get().values()]
    for n in (1, 1, 3):
        with torch.no_grad():
            model(random_ids(1, n, seed=n), past_key_values=cache, use_cache=True)
    cache.reset()
    with torch.no_grad():
        model(random_ids(1, 4), past_key_values=cache, use_cache=True)
    assert before == [state.data_ptr() for layer in cache.layers for state in layer.get().values()]


def test_a_length_or_configuration_that_does_not_fit_is_refused(tmp_path):
    model = tiny_model("llama", "odd")
    for length in (0, -1, 1.5, "20", True):
        with pytest.raises(ValueError, match=f"max_cache_len is {length!r}; give a number of tokens"):
            RecurrentStateCache(model.config, length)
    read(model, random_ids(1, 5)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is a LlamaConfig without mixers; give the config of the converted model"):
        RecurrentStateCache.from_pretrained(tmp_path, tiny_model("llama", None).config)


def test_offload_and_back():
    model = tiny_model("llama", "odd")
    ids = random_ids(1, 6)
    cache = read(model, ids)
    for layer in cache.layers:
        layer.offload()
        layer.prefetch()
    continues(model, cache, ids, random_ids(1, 2, seed=4))


@pytest.mark.gpu
def test_offloaded_generation():
    """Also while other work keeps the GPU busy, which delays the copies to the CPU."""
    model = tiny_model("llama", "odd", fresh=True).cuda()
    ids = random_ids(1, 9).cuda()
    expected = uncached_greedy(model, ids)
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(5):
        for _ in range(100):
            busy @ busy
        assert_same_generation(greedy(model, ids, cache_implementation="offloaded"), expected, "offloaded cache")


class FakeStream:
    device = "cuda:0"

    def __init__(self, name, calls):
        self.name, self.calls = name, calls

    def wait_stream(self, other):
        self.calls.append(f"{self.name} waits for {other.name}")

    def __enter__(self):
        self.calls.append("begins")

    def __exit__(self, *error):
        self.calls.append("ends")


@pytest.mark.parametrize(("layers", "one"), ((4, False), (2, True)))
@pytest.mark.parametrize("own", (True, False))
def test_offloaded_layers_are_there_when_they_are_used(own, layers, one, monkeypatch):
    """The library does not wait for the copy to the CPU (5.17), nor for the copy back of the only offloaded layer."""
    calls = []
    monkeypatch.setattr(torch, "Stream", lambda: FakeStream("prefetch", calls))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: FakeStream("default", calls))
    config = tiny_config("llama", "first", num_hidden_layers=layers)
    cache = RecurrentStateCache(config, offloading=True) if own else DynamicCache(config=config, offloading=True)
    adopt_cache(cache, config)
    cache.prefetch(0)
    assert calls == ["prefetch waits for default", "begins", "ends"] + ["default waits for prefetch"] * one


def test_pickle():
    model, ids = tiny_model("llama", "odd"), random_ids(1, 6)
    cache = read(model, ids)
    other = pickle.loads(pickle.dumps(cache))
    continues(model, cache, ids, random_ids(1, 3, seed=4))
    continues(model, other, ids, random_ids(1, 3, seed=5))


def test_inference_mode_cache_is_usable_outside():
    """A prefix is read under inference_mode and continued under no_grad, without an error or an old state."""
    model = tiny_model("llama", "odd")
    ids, following = random_ids(1, 6), random_ids(1, 1, seed=4)
    with torch.inference_mode():
        cache = RecurrentStateCache(model.config)
        model(ids, past_key_values=cache, use_cache=True)
    continues(model, cache, ids, following)


# ---- rollback


def test_crop_refuses_what_was_not_recorded():
    model, ids = tiny_model("llama", "odd"), random_ids(1, 9)
    cache = read(model, ids[:, :6])
    with pytest.raises(ValueError, match=r"crop.*2.*activate_past_recording"):
        cache.crop(-2)
    cache.activate_past_recording()
    with torch.no_grad():
        model(ids[:, 6:], past_key_values=cache)
    with pytest.raises(ValueError, match=r"5.*3|3.*5"):
        cache.crop(-5)
    continues(model, cache, ids, random_ids(1, 2, seed=4))  # the refusals have changed nothing


@torch.no_grad()
@in_turn(mixer=MIXERS, layout=("odd", "all"))
def test_crop_to_nothing(mixer, layout):
    """A cache after crop() of all its tokens works like a new one, also for one token."""
    model, cache = tiny_model("llama", layout, mixer), None
    for n in (1, 3):
        cache = RecurrentStateCache(model.config)
        cache.activate_past_recording()
        model(random_ids(2, 5), past_key_values=cache)
        cache.crop(-5)
        tokens = random_ids(2, n, seed=n)
        assert_same(model(tokens, past_key_values=cache).logits, model(tokens, use_cache=False).logits)


@torch.no_grad()
@pytest.mark.parametrize("forget", ("stop_past_recording", "reset"))
def test_crop_does_not_go_back_before_a_reset(forget):
    model, ids = tiny_model("llama", "all"), random_ids(1, 6)
    cache = RecurrentStateCache(model.config)
    cache.activate_past_recording()
    model(ids, past_key_values=cache)
    getattr(cache, forget)()
    with pytest.raises(ValueError, match="only the last 0 tokens"):
        cache.crop(-1)
    if forget == "reset":
        model(ids[:, :2], past_key_values=cache)
        with pytest.raises(ValueError, match="only the last 2 tokens"):
            cache.crop(-3)
        cache.crop(-1)
        continues(model, cache, ids[:, :1], ids[:, 1:3])


@torch.no_grad()
@pytest.mark.parametrize(
    ("change", "argument", "rows"),
    [
        ("batch_select_indices", torch.tensor([1, 0]), [1, 0]),
        ("reorder_cache", torch.tensor([1, 1]), [1, 1]),
        ("batch_repeat_interleave", 2, [0, 0, 1, 1]),
    ],
)
@in_turn(mixer=MIXERS, layout=("odd", "all"))
def test_crop_does_not_go_back_before_a_change_of_rows(mixer, layout, change, argument, rows):
    """Records of the rows before the change are deleted; later tokens are rolled back exactly."""
    model, ids = tiny_model("llama", layout, mixer), random_ids(2, 9)
    cache = RecurrentStateCache(model.config)
    model(ids[:, :4], past_key_values=cache)
    cache.activate_past_recording()
    model(ids[:, 4:6], past_key_values=cache)
    getattr(cache, change)(argument)
    with pytest.raises(ValueError, match="only the last 0 tokens"):
        cache.crop(-1)
    ids = ids[rows]
    model(ids[:, 6:], past_key_values=cache)
    cache.crop(-2)
    continues(model, cache, ids[:, :7], ids[:, 7:])


@torch.no_grad()
@pytest.mark.parametrize("change", ("restore_rows", "cast"))
@pytest.mark.parametrize("mixer", MIXERS)
def test_crop_does_not_go_back_before_other_states(mixer, change):
    """Rows that have ended early and get their states back, and states of another dtype."""
    model, ids = tiny_model("llama", "all", mixer), random_ids(2, 6)
    cache = RecurrentStateCache(model.config)
    cache.activate_past_recording()
    model(ids[:, :4], past_key_values=cache)
    kept = [layer.copy_rows([1]) for layer in cache.layers]
    model(ids[:, 4:], past_key_values=cache)
    assert {layer.recorded for layer in cache.layers} == {6}
    for layer, rows in zip(cache.layers, kept, strict=True):
        if change == "restore_rows":
            layer.restore_rows(rows)
        else:
            layer.cast(dict.fromkeys(layer.states, torch.float32))
        assert layer.recorded == 0
    with pytest.raises(ValueError, match="only the last 0 tokens"):
        cache.crop(-1)


@torch.no_grad()
@pytest.mark.parametrize("family", ("llama", "mistral", "gemma2"))
def test_memory_does_not_grow_after_recording_was_stopped(family):
    """While recording, layers with a sliding window keep all keys, and mixers keep all inputs."""
    model, caches = (
        tiny_model(family, "odd"),
        [RecurrentStateCache(tiny_model(family, "odd").config) for _ in range(2)],
    )
    for cache in caches:
        model(random_ids(1, 12), past_key_values=cache)
    caches[0].activate_past_recording()
    caches[0].stop_past_recording()
    for cache in caches:
        model(random_ids(1, 9, seed=1), past_key_values=cache)
    assert caches[0].nbytes == caches[1].nbytes
    assert not any(getattr(layer, "record_past", False) for layer in caches[0].layers)


# ---- files


@pytest.mark.parametrize("length", (None, 24))
@in_turn(family=FAMILIES, layout=("odd", "all"))
def test_resume(family, layout, length, tmp_path):
    """A loaded cache continues token by token, in generate() and for a batch; its file is small and no pickle."""
    model = tiny_model(family, layout)
    document, questions = random_ids(1, 11), random_ids(2, 4, seed=5)
    cache = read(model, document, max_cache_len=length)
    cache.save_pretrained(tmp_path)
    files = list(tmp_path.iterdir())
    assert {file.suffix for file in files} <= {".safetensors", ".json"}
    assert sum(file.stat().st_size for file in files) < cache.nbytes + 16_000
    resumed, again, batch = (RecurrentStateCache.from_pretrained(tmp_path) for _ in range(3))
    assert resumed.nbytes == cache.nbytes
    assert int(resumed.get_seq_length()) == 11
    continues(model, resumed, document, questions[:1])
    whole = torch.cat([document, questions[:1]], 1)
    assert_same_generation(greedy(model, whole, past_key_values=again), uncached_greedy(model, whole), "resumed")
    if length is None:
        continues(model, batch.expand(2), document.expand(2, -1), questions)


def saved_file(model, folder):
    read(model, random_ids(1, 7)).save_pretrained(folder)
    (file,) = (path for path in folder.iterdir() if path.suffix == ".safetensors")
    return file


@pytest.mark.parametrize("damage", ("truncated", "header", "count", "body", "missing", "other file"))
def test_damaged_state_file(damage, tmp_path):
    file = saved_file(tiny_model("llama", "odd"), tmp_path)
    content = bytearray(file.read_bytes())
    if damage == "truncated":
        file.write_bytes(content[: len(content) // 2])
    elif damage == "header":
        file.write_bytes(b"\xff" * 16 + content[16:])
    elif damage == "count":
        at = content.index(b"seen")
        assert content[at:].split(b",")[0].split(b"}")[0].endswith(b"7")
        at = content.index(b"7", at)
        content[at : at + 1] = b"6"
        file.write_bytes(content)
    elif damage == "body":
        content[-100] ^= 0xFF
        file.write_bytes(content)
    elif damage == "missing":
        file.unlink()
    else:
        save_file({"a": torch.zeros(3)}, file)
    with pytest.raises(ValueError, match=file.name):
        RecurrentStateCache.from_pretrained(tmp_path)


@pytest.mark.parametrize("value", (float("nan"), float("inf"), float("-inf")))
def test_failed_save_keeps_the_old_file(value, tmp_path):
    model = tiny_model("llama", "odd")
    file = saved_file(model, tmp_path)
    before = file.read_bytes()
    cache = read(model, random_ids(1, 7, seed=8))
    cache.layers[1].get()["H"][0, 0, 0, 0] = value
    with pytest.raises(ValueError, match=r"layer 1: H has NaN or infinite entries"):
        cache.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    assert file.read_bytes() == before


def test_empty_cache_is_not_saved(tmp_path):
    """A static cache keeps its tensors after reset(), but they hold no states."""
    model = tiny_model("llama", "all")
    cache = read(model, random_ids(1, 5), max_cache_len=20)
    cache.reset()
    for empty in (cache, RecurrentStateCache(model.config)):
        with pytest.raises(ValueError, match="empty"):
            empty.save_pretrained(tmp_path)


# ---- the wrong model


@pytest.mark.parametrize("other", [("llama", "all"), ("qwen3", "odd")])
def test_saved_cache_of_another_model(other, tmp_path):
    read(tiny_model("llama", "odd"), random_ids(1, 7)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="another model"):
        RecurrentStateCache.from_pretrained(tmp_path, config=tiny_model(*other).config)
    with pytest.raises(ValueError, match="another model"):
        tiny_model(*other)(random_ids(1, 3), past_key_values=RecurrentStateCache.from_pretrained(tmp_path))


# another value of one field of a model's configuration with which its states mean something else
OTHER_VALUES = {
    "vocab_size": 98,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "sliding_window": 6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "layer_types": ["full_attention"] * 4,
}


@in_turn(field=OTHER_VALUES, mixer=MIXERS)
def test_saved_cache_of_a_model_that_differs_in_one_field(field, mixer, tmp_path):
    read(tiny_model("gemma2", "odd", mixer), random_ids(1, 7)).save_pretrained(tmp_path)
    RecurrentStateCache.from_pretrained(tmp_path, config=tiny_config("gemma2", "odd", mixer))
    other = tiny_config("gemma2", "odd", mixer, **{field: OTHER_VALUES[field]})
    with pytest.raises(ValueError, match=f"another model: .*{field}: cache"):
        RecurrentStateCache.from_pretrained(tmp_path, config=other)


def test_saved_cache_of_a_model_that_rotates_other_layers(tmp_path):
    """The fields that say so differ between the families: the cache knows all that a row of the table reads."""
    read(tiny_model("smollm3", "odd"), random_ids(1, 7)).save_pretrained(tmp_path)
    config = tiny_config("smollm3", "odd", no_rope_layers=[0, 1, 1, 0])
    with pytest.raises(ValueError, match="another model: no_rope_layers: cache"):
        RecurrentStateCache.from_pretrained(tmp_path, config=config)

    class Fields(set):
        def __getattr__(self, name):
            self.add(name)
            return ["dense"]

    fields = Fields()
    for row in BACKBONES.values():
        row.rotates(fields, 0)
    assert {"no_rope_layers", "layer_types"} <= fields <= fingerprint(config).keys()


@pytest.mark.parametrize("options", [{"softcap": 3.0}, {"sinks": 0}], ids=str)
def test_cache_of_a_model_with_other_windows_beside_its_memories(options, tmp_path):
    """Saved, and live. Their options stand under the name of a mixer that no layer has."""
    model, config = tiny_model("llama", "odd", BESIDE), tiny_config("llama", "odd", BESIDE)
    other = build(memmix_config(config, config.mixer_types, {**config.mixers, "window": options}))
    cache = read(model, random_ids(1, 7))
    cache.save_pretrained(tmp_path)
    RecurrentStateCache.from_pretrained(tmp_path, config=config)
    different = f"another model: mixers.window.{next(iter(options))}: cache"
    with pytest.raises(ValueError, match=different):
        RecurrentStateCache.from_pretrained(tmp_path, config=other.config)
    with pytest.raises(ValueError, match=different):
        other(random_ids(1, 3), past_key_values=cache)


def test_live_cache_of_another_model():
    """Also one of the library's, whose layers have the right kinds but wrong sizes."""
    odd, everything, wider = tiny_model("llama", "odd"), tiny_model("llama", "all"), tiny_model("qwen3", "odd")
    for source, target in ((odd, everything), (everything, odd), (tiny_model("llama", None), odd), (odd, wider)):
        cache = DynamicCache() if target is wider else None
        with torch.no_grad():
            cache = source(random_ids(1, 5), past_key_values=cache, use_cache=True).past_key_values
        with pytest.raises(ValueError, match="another model" + ".*head_dim" * (target is wider)):
            target(random_ids(1, 3), past_key_values=cache)


def test_other_cache_classes_are_refused():
    model = tiny_model("llama", "odd")
    with pytest.raises(ValueError, match="LlamaConfig"):
        RecurrentStateCache(tiny_model("llama", None).config)
    with pytest.raises((ValueError, TypeError), match="tuple"):
        model(random_ids(1, 3), past_key_values=((torch.zeros(1), torch.zeros(1)),) * 4)


@pytest.mark.parametrize("kind", (DynamicCache, StaticCache))
def test_library_caches_are_adopted_in_place(kind):
    model = tiny_model("llama", "all")
    options = {"config": model.config} | ({"max_cache_len": 20} if kind is StaticCache else {})
    cache = kind(**options)
    before = {*vars(cache)}
    with torch.no_grad():
        model(random_ids(1, 5), past_key_values=cache, use_cache=True)
    assert int(cache.get_seq_length()) == 5
    assert {*vars(cache)} - before == {"memmix"}
    assert cache.memmix.config is model.config and cache.memmix.dtype is model.dtype
    assert cache.memmix.static_length == options.get("max_cache_len")


def test_wrong_batch_size():
    model = tiny_model("llama", "all")
    cache = read(model, random_ids(2, 5))
    with pytest.raises(ValueError, match=r"(?s)2.*3|3.*2"), torch.no_grad():
        model(random_ids(3, 1), past_key_values=cache, use_cache=True)
