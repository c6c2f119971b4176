"""The models that the tests serve, and the prompts that they get: tiny, random, made from the tables of testing.py."""

import dataclasses

from transformers import AutoConfig

from hf_memmix import backbones, memmix_config
from hf_memmix.models import FAMILIES as FROM_SCRATCH
from testing import BESIDE, FAMILIES, MIXERS, MODELS, VOCAB, backbone_config, random_ids
from tiny_teachers import MIXTURES, MOE

BLOCK = 128  # tokens per block of the cache, so large that its page holds the states of every model here
LONGEST = 1024
PREFIX = 2 * BLOCK + 30  # crosses two boundaries of blocks
# the engine that has room for everything, and one that keeps prefixes
ROOMY = {}
CACHING = {"enable_prefix_caching": True, "max_num_batched_tokens": 2 * BLOCK, "max_num_seqs": 4, "block_size": BLOCK}

# the sizes of testing.py with heads of 32, the smallest that vLLM's attention on a CPU takes
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
SIZES |= {"head_dim": 32, "max_position_embeddings": LONGEST}
MULTI_HEAD = {"gpt_neox"}  # as many key/value heads as heads, whatever the configuration says
# some mixtures of experts read one of these fields, some the other
WIDE_EXPERTS = {"moe_intermediate_size": 96, "shared_expert_intermediate_size": 96}
OTHERS = {"biogpt": {"num_key_value_heads": 2}, "afmoe": {"mup_enabled": True}}
OTHERS |= dict.fromkeys(("granitemoe", "granitemoeshared"), {"embedding_multiplier": 2.0})

# prompts by name: token ids; several lengths at once, from one token to several blocks
PROMPTS = {
    "plain": [random_ids(1, n, seed=n)[0].tolist() for n in (1, 2, 7, 63, 64, 65, 300, 700)],
    "few": [random_ids(1, n, seed=n)[0].tolist() for n in (1, 7, 65, 130)],
    # all begin their second block while they decode
    "edge": [random_ids(1, BLOCK - 20, seed=1000 + n)[0].tolist() for n in range(10)],
    # vLLM takes a batch of such prompts for a batch that decodes
    "one": [random_ids(1, 1, seed=3000 + n)[0].tolist() for n in range(6)],
    "prefix": [
        random_ids(1, PREFIX, seed=7)[0].tolist() + random_ids(1, 5 + 9 * n, seed=2000 + n)[0].tolist()
        for n in range(8)
    ],
}
NEW_TOKENS = {"plain": 16, "few": 10, "edge": 40, "one": 24, "prefix": 10}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and which prompts its references are computed for.

    Args:
        kinds: the mixer of each layer.
        family: of the backbone; or the name of a family that is trained from scratch, with `layout`.
        dtypes: of the references.
        labels: of a sequence classifier; 0 for a language model.
        seed: of the weights. With another seed than 0, every tensor differs.
        options: by mixer, further options.
        without_rope: attention layers without rotary embeddings.
    """

    kinds: tuple[str, ...] = ()
    family: str = "llama"
    layout: str | None = None
    prompts: tuple[str, ...] = ("plain",)
    dtypes: tuple[str, ...] = ("float32",)
    labels: int = 0
    seed: int = 0
    options: dict = dataclasses.field(default_factory=dict)
    without_rope: tuple[int, ...] = ()

    def config(self):
        if self.layout is not None:
            row = MODELS[self.family]
            fields = {"num_hidden_layers": 3, "vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1}
            fields |= {"eos_token_id": None} | row["fields"] | SIZES | row["layouts"][self.layout]
            return FROM_SCRATCH[self.family](**fields)
        sizes = SIZES
        if self.family in MULTI_HEAD:
            sizes = {**sizes, "num_key_value_heads": None}
        if self.family == "llama":
            sizes = {**sizes, "num_hidden_layers": len(self.kinds)}
        if self.labels:
            sizes = {**sizes, "num_labels": self.labels}
        if self.family not in FAMILIES:
            sizes = {**sizes, **(MOE | WIDE_EXPERTS if self.family in MIXTURES else {}), **OTHERS.get(self.family, {})}
            window = {"sliding_window": 16} if backbones.BACKBONES[self.family].window else {}
            fields = {"vocab_size": VOCAB, "num_hidden_layers": len(self.kinds), "pad_token_id": 0, "bos_token_id": 1}
            backbone = AutoConfig.for_model(self.family, **fields, **sizes, **window)
        else:
            backbone = backbone_config(self.family, **sizes)
        mixers = {kind: MIXERS[kind] | self.options.get(kind, {}) for kind in self.kinds if kind in MIXERS}
        return memmix_config(backbone, list(self.kinds), mixers, list(self.without_rope) or None)


_KEPT = "attention"
# every feature is tested with these
HYBRIDS = {name: Case((_KEPT, name, _KEPT, name), prompts=tuple(PROMPTS)) for name in MIXERS}
HYBRIDS["several"] = Case(("gka", "gated_delta", _KEPT, "lattice"), prompts=tuple(PROMPTS))  # in one page
ALONE = [name for name in MIXERS if name != BESIDE]  # a layer of two mixers is among the hybrids
# no attention is left: only states
PURE = {f"{name}_pure": Case((name,) * 3, prompts=("plain", "prefix")) for name in ALONE}
PURE["several_pure"] = Case(("gka", "mamba2", "coffee", "lattice", "ska"), prompts=("plain", "prefix"))
LOW = {f"{name}_bf16": Case((_KEPT, name, name), dtypes=("bfloat16",)) for name in ALONE}
LOW_PURE = {f"{name}_pure_bf16": Case((name,) * 3, dtypes=("bfloat16",)) for name in ALONE}
SCRATCH = {
    f"{family}_{layout}": Case(family=family, layout=layout, prompts=("few",))
    for family, row in MODELS.items()
    for layout in row["layouts"]
}
_HALF = ("gka", _KEPT, "gka", _KEPT)
SERVED = [name for name in FAMILIES if not backbones.BACKBONES[name].no_serving]
BACKBONES = {f"backbone_{name}": Case(_HALF, family=name, prompts=("few",)) for name in SERVED}
# all other families that are not refused; only `make serve-test PYTEST="-m product"` serves them
MORE_BACKBONES = {
    f"backbone_{name}": Case(_HALF[:2], family=name, prompts=("few",))
    for name, row in backbones.BACKBONES.items()
    if name not in FAMILIES and not (row.refused or row.no_serving)
}
# the options that recipes of others have
_OPTIONS = {"window": {"output_gate": True, "qk_norm": "head"}, "gka": {"unshare_kv_heads": True}}
RECIPES = {"recipe": Case(("window", _KEPT, "gka", _KEPT), prompts=("few",), options=_OPTIONS, without_rope=(3,))}
# as GPT-OSS converts without options: windows of two sizes, and both kinds of attention in the layers that keep it
RECIPES["two_windows"] = Case(
    ("window", "window", _KEPT, _KEPT), family="gpt_oss", prompts=("few",), options={"window": {"window": None}}
)
CASES = HYBRIDS | PURE | LOW | LOW_PURE | SCRATCH | BACKBONES | MORE_BACKBONES | RECIPES
# the bundled model, which has a tokenizer
ASSET = "tiny_gka"
CASES[ASSET] = Case()
CASES["classifier"] = Case(("gka", _KEPT, "lattice", "ska"), prompts=("few",), labels=3)
# weights are loaded again: all mixers; embeddings that are also the head; other feed-forward layers; experts
CASES["every"] = Case((_KEPT, *MIXERS), prompts=("few",))
RELOADED = ("every", "backbone_gemma2", "Echo_gated", "backbone_mixtral")
SECOND = {name: f"{name}_second" for name in (*RELOADED, "classifier")}
CASES |= {second: dataclasses.replace(CASES[name], seed=1) for name, second in SECOND.items()}
# the log probabilities of their prompts are compared
WITH_PROMPTS = (ASSET, "several")
# its attention layers keep keys and values in fp8
WITH_FP8 = "gka"
# served by two ranks, whose processes do not know the mixer of the tests
CASES["divided"] = Case((_KEPT, *ALONE), prompts=("few",))
DIVIDED = ("divided", "Echo_pure")
