"""Every feature of the engine, for every mixer: the tokens are those of `generate()`."""

import pytest
import torch
from greedy import (
    ask,
    assert_greedy,
    assert_log_probabilities,
    assert_near_ties,
    error_ratio,
    logits_at,
    references_of,
    tokens_of,
)
from safetensors.torch import load_file
from serving_cases import BLOCK, CACHING, HYBRIDS, LOW, LOW_PURE, PREFIX, PURE, ROOMY

from hf_memmix.mixers.pages import write_pages
from hf_memmix.serving.vllm.joined import JoinedLayers
from testing import BESIDE

# the engine that cuts prompts into pieces of 48 tokens and has few blocks
NARROW = {"max_num_batched_tokens": 48, "max_num_seqs": 12, "block_size": BLOCK, "max_model_len": 4 * BLOCK}
NARROW |= {"num_gpu_blocks_override": 24}
if torch.cuda.is_available():  # this engine decodes in full CUDA graphs, the others run without
    NARROW |= {"enforce_eager": False, "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
ALL = [*HYBRIDS, *PURE]
# logits in bf16, and how many times the errors of transformers' logits in bf16 their errors may be. The mixers alone
# have 1.0 times these errors, and 1.5 times or more if states are wrong by 5 percent. vLLM's attention rounds more
# often than that of torch: a Llama without mixers has 1.1 times the errors of transformers at 64 tokens, 1.8 at 700
RAW = {"dtype": "bfloat16", "max_logprobs": -1, "logprobs_mode": "raw_logits"}
LARGEST_RATIO = dict.fromkeys(LOW, 2.0) | dict.fromkeys(LOW_PURE, 1.25)


def preemptions(engine) -> int:
    return sum(int(metric.value) for metric in engine.get_metrics() if metric.name == "vllm:num_preemptions")


@pytest.mark.parametrize("case", ALL, scope="module")
def test_one_batch(case, engines):
    references = references_of(engines.folders, case, "plain")
    # models without attention have no test that needs another engine than that of prefix caching
    engine = engines.get(case, **(CACHING if case in PURE else ROOMY))
    outputs = ask(engine, references, logprobs=5)
    assert_greedy(tokens_of(outputs), references)
    assert_log_probabilities(outputs, references)
    assert len({token for reference in references for token in reference["tokens"]}) > 10, (
        "a model that repeats itself"
    )


@pytest.mark.parametrize("case", HYBRIDS, scope="module")
def test_several_answers_and_seeds(case, engines):
    """Answers to one prompt branch off the same states; a seed gives the same answer alone and in a batch.

    The prompts fit into one batch: vLLM on a CPU has no seeds for a prompt that is read in pieces.
    """
    engine, references = engines.get(case, **ROOMY), references_of(engines.folders, case, "plain")[:6]
    for output, reference in zip(ask(engine, references, n=3, temperature=1.0, top_k=1), references, strict=True):
        assert_greedy([list(answer.token_ids) for answer in output.outputs], [reference] * 3)
    sampled = {"temperature": 1.0, "seed": 5}
    several = ask(engine, references, n=3, **sampled)
    assert all(len({tuple(answer.token_ids) for answer in output.outputs}) > 1 for output in several)
    together = tokens_of(ask(engine, references, **sampled))
    assert together[-3:] == [tokens_of(ask(engine, [reference], **sampled))[0] for reference in references[-3:]]
    assert together != tokens_of(ask(engine, references, temperature=1.0, seed=6))


@pytest.mark.parametrize("case", HYBRIDS, scope="module")
def test_a_budget_below_the_prompt(case, engines):
    """Prompts are read in pieces of at most 48 tokens, next to rows that decode."""
    references = [r for r in references_of(engines.folders, case, "plain") if len(r["prompt"]) < 400]
    assert max(len(r["prompt"]) for r in references) > 5 * NARROW["max_num_batched_tokens"]
    assert_greedy(tokens_of(ask(engines.get(case, **NARROW), references)), references)


@pytest.mark.parametrize("case", HYBRIDS, scope="module")
def test_preemption(case, engines):
    """Ten sequences need more blocks than there are: some are thrown out and computed again."""
    engine, references = engines.get(case, **NARROW), references_of(engines.folders, case, "edge")
    before = preemptions(engine)
    assert_greedy(tokens_of(ask(engine, references)), references)
    assert preemptions(engine) > before


@pytest.mark.parametrize("case", HYBRIDS, scope="module")
def test_abort_and_reuse_of_the_block(case, engines):
    """A request that is aborted in mid-decode leaves its states behind; the next owner of the block starts anew."""
    from vllm import SamplingParams

    engine, references = engines.get(case, **NARROW), references_of(engines.folders, case, "edge")
    core, scheduler = engine.llm_engine, engine.llm_engine.engine_core.engine_core.scheduler
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
    answers = {}

    def add(i):
        core.add_request(str(i), {"prompt_token_ids": references[i]["prompt"]}, params)

    def blocks() -> dict[int, set[int]]:
        """The blocks of the running requests."""
        found = {}
        for name in scheduler.requests:
            groups = scheduler.kv_cache_manager.get_block_ids(name)
            found[int(name.split("-")[0])] = {block for group in groups for block in group}
        return found

    def step():
        for output in core.step():
            answers[int(output.request_id)] = list(output.outputs[0].token_ids)

    for i in range(3):
        add(i)
    while min(len(answers.get(i, ())) for i in range(3)) < 3:
        step()
    assert all(len(answers[i]) < 40 for i in range(3))
    dirty = blocks()[1]
    core.abort_request(["1"])
    # as many new requests as blocks are free: one of them gets the block
    for i in range(3, 10):
        add(i)
    reused = set()
    while core.has_unfinished_requests():
        step()
        reused |= {block for i, owned in blocks().items() if i >= 3 for block in owned & dirty}
    assert reused - {0}
    kept = [0, 2, *range(3, 10)]
    assert_greedy([answers[i] for i in kept], [references[i] for i in kept])


@pytest.mark.parametrize("case", HYBRIDS, scope="module")
def test_prompts_of_one_token(case, engines, monkeypatch):
    """Each begins in a block that another sequence has left, alone and next to rows that decode. In such a batch all
    rows must decode, because vLLM may replay its CUDA graph of decode.
    """
    from vllm import SamplingParams

    from hf_memmix.serving.vllm.metadata import MemoryMetadataBuilder

    started, with_pages = [], MemoryMetadataBuilder._with_pages

    def spy(self, metadata):
        started.extend([] if metadata.first_tokens is None else [metadata])
        return with_pages(self, metadata)

    monkeypatch.setattr(MemoryMetadataBuilder, "_with_pages", spy)
    engine = engines.get(case, **NARROW)
    for _ in range(2):  # every block but block 0 has had an owner
        ask(engine, references_of(engines.folders, case, "edge"), max_tokens=2)
    references = references_of(engines.folders, case, "one")
    core, answers = engine.llm_engine, {}
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    for i, reference in enumerate(references):
        core.add_request(str(i), {"prompt_token_ids": reference["prompt"]}, params)
        for output in core.step() + core.step():
            answers[int(output.request_id)] = list(output.outputs[0].token_ids)
    while core.has_unfinished_requests():
        for output in core.step():
            answers[int(output.request_id)] = list(output.outputs[0].token_ids)
    assert_greedy([answers[i] for i in range(len(references))], references)
    assert len(started) >= len(references) and not any(metadata.num_prefills for metadata in started)
    assert_greedy(tokens_of(ask(engine, references)), references)


@pytest.mark.parametrize("case", ALL, scope="module")
def test_prefix_caching(case, engines):
    """Eight prompts share more than two blocks. What is kept of the first ones serves the later ones."""
    engine, references = engines.get(case, **CACHING), references_of(engines.folders, case, "prefix")
    shared = PREFIX // BLOCK * BLOCK
    for attempt in range(2):
        outputs = ask(engine, references)
        assert_greedy(tokens_of(outputs), references)
        hits = [output.num_cached_tokens for output in outputs]
        assert max(hits) >= shared if attempt == 0 else min(hits) >= shared, hits


@pytest.mark.parametrize("case", ["several", "several_pure"], scope="module")
def test_sequences_that_fit(case, engines):
    """`memmix serve` counts as this engine: with padded pages, whole blocks, and a second page per state."""
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

    from hf_memmix.serving.vllm import blocks

    for options, more in ((CACHING, ["--enable-prefix-caching", f"--block-size={BLOCK}"]), (ROOMY, [])):
        engine = engines.get(case, **options).llm_engine
        found = get_max_concurrency_for_kv_cache_config(
            engine.vllm_config, engine.engine_core.engine_core.scheduler.kv_cache_config
        )
        arguments = ["--dtype=float32", "--max-model-len=1024", *(more or ["--no-enable-prefix-caching"])]
        config = blocks.configuration(engines.folders / case, arguments)
        fit = blocks.sequences_that_fit(config, 2**30, (128, 1024, 4096))
        assert list(fit) == [128, 1024] and fit[1024] == found
        # without attention layers the length does not matter
        assert fit[128] > found if case in HYBRIDS else fit[128] == found


@pytest.mark.parametrize("case", LARGEST_RATIO, scope="module")
def test_bf16(case, engines, monkeypatch):
    """The logits by which every token is chosen are as exact as those of transformers in bf16."""
    engine, references = engines.get(case, **RAW), references_of(engines.folders, case, "plain", "bfloat16")
    logits = logits_at(engine, references)
    assert error_ratio(logits, references) <= LARGEST_RATIO[case]
    assert_near_ties(logits, references)
    same = [found.argmax(-1) == torch.tensor(r["tokens"]) for found, r in zip(logits, references, strict=True)]
    assert torch.cat(same).float().mean() > 0.8
    if case in LOW_PURE:  # wrong states are found by the first comparison
        monkeypatch.setattr("hf_memmix.mixers.base.write_pages", noisy_write_pages)
        assert error_ratio(logits_at(engine, references), references) > LARGEST_RATIO[case]


def noisy_write_pages(pools, state_indices, states):
    """`write_pages` with noise of 5 percent in the largest state."""
    name = max(states, key=lambda name: states[name].numel())
    state, generator = states[name], torch.Generator().manual_seed(0)
    size = state.square().mean(tuple(range(1, state.dim())), keepdim=True).sqrt()
    noise = 0.05 * size * torch.randn(state.shape, generator=generator).to(state.device)
    write_pages(pools, state_indices, states | {name: state + noise})


@pytest.mark.cases("gka")
def test_compiled(engines):
    """The model around the mixers is one graph per layer, cut at the operator."""
    references = references_of(engines.folders, "gka", "few")
    engine = engines.get("gka", enforce_eager=False)
    for which in (references, references_of(engines.folders, "gka", "one"), references):
        assert_greedy(tokens_of(ask(engine, which)), which)
    assert engine.llm_engine.vllm_config.compilation_config.mode > 0


@pytest.mark.parametrize(("case", "alone"), [("several", 0), ("mamba2", 2)])  # Mamba-2 has one projection
def test_projections_are_one_product(case, alone, engines):
    """The checkpoint's layers are loaded one by one into one weight."""

    def joined(model):
        return {path: mixer.joined_layers for path, mixer in model.mixers.items()}

    (found,) = engines.get(case, **ROOMY).apply_model(joined)
    saved = load_file(engines.folders / case / "model.safetensors")
    assert sum(layers is None for layers in found.values()) == alone
    for path, layers in found.items():
        if layers is not None:
            parts = [saved[f"model.{path}.{name}.weight"] for name in layers.sizes]
            assert len(parts) >= 3 and torch.equal(layers.weight, torch.cat(parts))


@pytest.mark.cases(BESIDE)
def test_projections_beside_a_window(engines):
    """One product for the memory and one for the window, in both layers that have them."""

    def joined(model):
        return [list(module.sizes) for module in model.modules() if isinstance(module, JoinedLayers)]

    (found,) = engines.get(BESIDE, **ROOMY).apply_model(joined)
    assert len(found) == 4 and all({"q_proj", "k_proj", "v_proj"} <= set(names) for names in found)


def test_graphs_are_cut_at_the_operator():
    """For the configuration of our model only."""
    from vllm.config import CompilationConfig, CompilationMode

    from hf_memmix.serving.vllm.config import OP, cut_graphs

    ours, other = (CompilationConfig(mode=CompilationMode.VLLM_COMPILE) for _ in range(2))
    cut_graphs(ours)
    for each in (ours, other):
        each.set_splitting_ops_for_v1(all2all_backend="naive")
    assert OP in ours.splitting_ops and ours.splitting_ops_contain_attention()
    assert OP not in other.splitting_ops and OP not in CompilationConfig._attention_ops


@pytest.mark.cases("gka")
def test_a_batch_without_metadata_of_a_layer(engines, monkeypatch):
    """It is not taken for the measurement of memory, whose outputs nobody reads."""
    from hf_memmix.serving.vllm import mixer_server

    assert mixer_server.metadata_of(None, "a") is None
    for wrong in ([{}], {"another": object()}, {"a": object()}, {"a": None}):
        with pytest.raises(ValueError, match="vLLM runs layer a without its metadata"):
            mixer_server.metadata_of(wrong, "a")
    engine, given, metadata_of = engines.get("gka", **ROOMY), [], mixer_server.metadata_of

    def spy(batch, name):
        given.append(name)
        return metadata_of({key: value for key, value in batch.items() if key != name}, name)

    monkeypatch.setattr(mixer_server, "metadata_of", spy)
    with pytest.raises(ValueError, match="without its metadata"):
        ask(engine, references_of(engines.folders, "gka", "few"))
    assert given
    engines.close()
