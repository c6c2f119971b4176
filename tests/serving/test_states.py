"""States of prompts on disk: another engine goes on from them, and answers as if it had read the prompt itself."""

import json
from types import SimpleNamespace

import pytest
from greedy import ask, assert_greedy, references_of, refused, tokens_of
from serving_cases import BLOCK, CACHING, PREFIX

from hf_memmix.serving.state_store import KEYS, STATES, SUFFIX, StateStore
from hf_memmix.serving.vllm.state_metrics import COUNTERS, GAUGES

SHARED = PREFIX // BLOCK * BLOCK


def options_of(engines, case, folder) -> dict:
    """Those of an engine that `memmix serve --states` starts."""
    from hf_memmix.serving.vllm.options import options_of_states

    given = options_of_states(engines.folders / case, folder, 10**9)[-1]
    return CACHING | {"kv_transfer_config": json.loads(given)}


def keeping(engines, case, folder):
    """A new engine that keeps states in the folder."""
    engines.close()
    return engines.get(case, **options_of(engines, case, folder))


def files(folder) -> set[str]:
    return {path.name.split(".", 1)[1].removesuffix(SUFFIX) for path in folder.rglob(f"*{SUFFIX}")}


def states_metrics(engine) -> dict[str, float]:
    found = {m.name: m.value for m in engine.get_metrics() if hasattr(m, "value")}
    return {name: found[f"vllm:memmix_states_{name}"] for name in (*COUNTERS, *GAUGES)}


def test_only_states_that_follow_from_the_tokens_are_kept():
    """Not those of a prompt with an image, nor those of an adapter, which belong to other weights."""
    from hf_memmix.serving.vllm.states import MemMixStates

    states = MemMixStates.__new__(MemMixStates)
    states.block, states.requests = 4, {}
    plain = {"prompt_token_ids": list(range(9)), "cache_salt": None, "mm_features": [], "lora_request": None}
    counts = {
        name: len(states._known(SimpleNamespace(request_id=name, **plain | {name: value})).names)
        for name, value in (("cache_salt", "salt"), ("mm_features", ["image"]), ("lora_request", "adapter"))
    }
    assert counts == {"cache_salt": 2, "mm_features": 0, "lora_request": 0}


@pytest.mark.parametrize("case", ["several", "several_pure"])
def test_another_engine_goes_on(case, engines, tmp_path, monkeypatch):
    """Not from the states of other weights, and not from a file that is gone or cut off."""
    references = references_of(engines.folders, case, "prefix")
    outputs = ask(keeping(engines, case, tmp_path), references[:1])
    assert outputs[0].num_cached_tokens == 0
    assert files(tmp_path) == {f"{STATES}.0"} | ({f"{KEYS}.0"} if case == "several" else set())
    sizes = [path.stat().st_size for path in tmp_path.rglob(f"*{SUFFIX}")]
    counts = states_metrics(engines.engine)
    assert counts["written_bytes"] == counts["disk_bytes"] == sum(sizes) and not counts["loads"]
    engine = keeping(engines, case, tmp_path)
    assert_greedy(tokens_of(outputs), references[:1])
    outputs = ask(engine, references)
    assert_greedy(tokens_of(outputs), references)
    assert min(output.num_cached_tokens for output in outputs) == SHARED
    hits = [m.value for m in engine.get_metrics() if m.name == "vllm:external_prefix_cache_hits"]
    assert sum(hits) >= SHARED
    counts = states_metrics(engine)
    assert counts["loads"] and counts["read_bytes"] and counts["disk_bytes"] >= sum(sizes)
    assert not counts["failed_loads"]
    with pytest.raises(ValueError, match="with --states weights cannot be loaded again"):
        engine.collective_rpc("reload_weights", kwargs={"weights_path": str(engines.folders / case)})
    engine = keeping(engines, case, tmp_path)  # its weights are not half loaded
    asked, read = [], StateStore.read

    def gone(self, kind, name, rank):
        asked.append(kind)
        return None if kind == STATES else read(self, kind, name, rank)

    monkeypatch.setattr(StateStore, "read", gone)
    outputs = ask(engine, references[:2])
    assert_greedy(tokens_of(outputs), references[:2])
    assert STATES in asked and outputs[0].num_cached_tokens == 0
    engines.close()


@pytest.mark.cases("backbone_mistral")
def test_windows_are_refused(engines, tmp_path):
    message = refused(engines, "backbone_mistral", **options_of(engines, "backbone_mistral", tmp_path))
    assert "keep the keys of a window of tokens" in message
