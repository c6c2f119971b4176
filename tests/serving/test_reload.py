"""Weights that are loaded again while the engine runs, as trainers do: the answers are those of the new weights."""

from types import SimpleNamespace

import pytest
import torch
from greedy import ask, assert_greedy, assert_log_probabilities, pooled, references_of, tokens_of
from references import ready
from safetensors.torch import load_file, save_file
from serving_cases import RELOADED, SECOND

from hf_memmix.conversion import load_model
from hf_memmix.serving.vllm.packing import THREADS, pack_alike


def reload_from(engine, folder):
    engine.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
    engine.reset_prefix_cache()


def engine_of(engines, case, **options):
    ready(engines.folders / SECOND[case])
    return engines.get(case, max_num_batched_tokens=256, max_num_seqs=4, **options)


def assert_answers(engine, references):
    outputs = ask(engine, references, logprobs=5)
    assert_greedy(tokens_of(outputs), references)
    assert_log_probabilities(outputs, references)


@pytest.mark.parametrize("names", [(name, SECOND[name]) for name in RELOADED], ids=RELOADED)
def test_reload(names, engines):
    case = names[0]
    engine = engine_of(engines, case)
    first, second = (references_of(engines.folders, name, "few") for name in (case, SECOND[case]))
    assert not any(a["tokens"] == b["tokens"] for a, b in zip(first, second, strict=True))
    assert_answers(engine, first)
    if case == "backbone_mixtral" and not torch.cuda.is_available():
        with pytest.raises(ValueError, match="on a CPU vLLM cannot load the weights of experts again"):
            reload_from(engine, engines.folders / SECOND[case])
        engines.close()
        return
    for name, references in ((SECOND[case], second), (case, first)):
        reload_from(engine, engines.folders / name)
        assert_answers(engine, references)


@pytest.mark.cases("classifier", SECOND["classifier"])
def test_reload_of_a_classifier(engines):
    ready(engines.folders / SECOND["classifier"])
    engine, prompts, first = pooled(engines, "classifier")
    second = torch.load(ready(engines.folders / SECOND["classifier"]) / "references.pt", weights_only=True)["pooled"]
    for name, expected in ((SECOND["classifier"], [r["vector"] for r in second]), ("classifier", first)):
        reload_from(engine, engines.folders / name)
        for output, vector in zip(engine.classify(prompts, use_tqdm=False), expected, strict=True):
            torch.testing.assert_close(torch.tensor(output.outputs.probs), vector, rtol=1e-4, atol=1e-5)


@pytest.mark.cases("every", SECOND["every"])
def test_tensors_that_a_trainer_sends(engines):
    """One after the other, between vLLM's start and end of an update."""
    engine = engine_of(engines, "every")
    tensors = load_file(engines.folders / SECOND["every"] / "model.safetensors")

    def update(model):
        from vllm.config import get_current_vllm_config_or_none, set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        with set_current_vllm_config(get_current_vllm_config_or_none() or model.vllm_config):
            initialize_layerwise_reload(model)
            for pair in tensors.items():
                model.load_weights([pair])
            finalize_layerwise_reload(model, model.model_config)

    if not torch.cuda.is_available():  # without them, as TRL sends tensors
        with pytest.raises(ValueError, match="on a CPU vLLM has packed the weights of linear layers"):
            engine.apply_model(lambda model: [model.load_weights([pair]) for pair in tensors.items()])
    engine.apply_model(update)
    assert_answers(engine, references_of(engines.folders, SECOND["every"], "few"))
    reload_from(engine, engines.folders / "every")
    assert_answers(engine, references_of(engines.folders, "every", "few"))


@pytest.mark.cases("every", SECOND["every"])
def test_a_trainer_in_the_process_of_the_engine(engines):
    """vLLM changes the class of the backbone: a model that is not vLLM's is loaded, called and trained as ever."""
    engine = engine_of(engines, "every")
    reference = references_of(engines.folders, "every", "few")[0]
    model = load_model(engines.folders / "every", dtype=torch.float32)
    calls = []
    model.base_model.register_forward_hook(lambda *args: calls.append(1))
    ids = torch.tensor([[*reference["prompt"], *reference["tokens"]]])
    logits = model(ids, labels=ids)
    logits.loss.backward()
    start = len(reference["prompt"]) - 1
    assert calls and logits.logits[0, start:-1].argmax(-1).tolist() == reference["tokens"]
    assert_answers(engine, [reference])


@pytest.fixture
def another_number_of_threads():
    """Draft tokens change it, too."""
    now = torch.get_num_threads()
    torch._C.set_num_threads(THREADS + 1)
    yield THREADS + 1
    torch._C.set_num_threads(now)


@pytest.mark.cases("every", SECOND["every"])
def test_reload_with_another_number_of_threads(engines, request):
    """Which processors pack weights in another layout then, and for which sizes, is oneDNN's choice."""
    engine = engine_of(engines, "every")
    assert_answers(engine, references_of(engines.folders, "every", "few"))
    request.getfixturevalue("another_number_of_threads")
    for case in (SECOND["every"], "every"):
        reload_from(engine, engines.folders / case)
        assert_answers(engine, references_of(engines.folders, case, "few"))


def test_weights_are_packed_with_one_number_of_threads(another_number_of_threads):
    ops = SimpleNamespace(create_onednn_mm=lambda weight: torch.get_num_threads())
    pack_alike(ops)
    once = ops.create_onednn_mm
    assert once("weight") == THREADS and torch.get_num_threads() == another_number_of_threads
    pack_alike(ops)
    assert ops.create_onednn_mm is once


@pytest.mark.cases("every", SECOND["every"])
def test_reload_of_an_incomplete_checkpoint(engines, tmp_path):
    """The first one lacks a part of a joined weight: vLLM would fill it with what happens to be in memory."""
    engine = engine_of(engines, "every")
    tensors = load_file(engines.folders / SECOND["every"] / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"the checkpoint lacks 1 tensors of the model: {name}"):
        reload_from(engine, tmp_path)
    for case in (SECOND["every"], "every"):
        reload_from(engine, engines.folders / case)
        assert_answers(engine, references_of(engines.folders, case, "few"))
