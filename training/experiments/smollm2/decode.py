"""How fast does a model of SmolLM2's shape write behind a long text, with attention and with what replaces it?

    python training/experiments/smollm2/decode.py --out training/experiments/smollm2/results/decode.json

`generate()` with a static cache, bf16, random weights, on a GPU without other work, timed as in
kernels/benchmarks/llama.py.
"""

import runpy
from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM, LlamaConfig

import hf_memmix
from hf_memmix.conversion.records import CHECKOUT
from hf_memmix.training.experiments.common.harness import Experiment, device
from hf_memmix.training.experiments.common.options import Options, check_names

SHAPE = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "tie_word_embeddings": True,
    "max_position_embeddings": 2**16, "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
}  # fmt: skip
TEACHER, KEPT = "teacher", (7, 18, 20, 23)
MODELS = {  # what replaces attention, as in arms.py
    TEACHER: {},
    "window 384, first token": {"window": {"window": 384, "sinks": 1}},
    "gka + window 64, first token": {"gka": {"local_window": 64}, "window": {"sinks": 1}},
    "gka": {"gka": {}},
}
measure = runpy.run_path(str(CHECKOUT / "kernels" / "benchmarks" / "llama.py"))["measure"]


class Settings(Options):
    models: Annotated[list[str], typer.Option(help="models to compare; repeatable")] = tuple(MODELS)
    context: Annotated[int, typer.Option(help="tokens of the text")] = 8192
    sequences: Annotated[list[int], typer.Option(help="texts at the same time; repeatable")] = (1, 32)
    new_tokens: Annotated[int, typer.Option(help="tokens that are written")] = 80


def rows(done: list[dict], args) -> list[dict]:
    return [{"arm": arm, "sequences": count} for arm in args.models for count in args.sequences]


def model_of(arm: str):
    config = LlamaConfig(**SHAPE, bos_token_id=0, eos_token_id=None, pad_token_id=0)
    if arm != TEACHER:
        memory = next(iter(MODELS[arm]))
        types = ["attention" if layer in KEPT else memory for layer in range(config.num_hidden_layers)]
        config = hf_memmix.memmix_config(config, types, MODELS[arm])
    torch.manual_seed(0)
    with device():
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def run(row: dict, args) -> dict:
    torch.compiler.reset()
    found = measure(model_of(row["arm"]), row["sequences"], args.context, args.new_tokens, "static")
    return {"kept": 0 if row["arm"] == TEACHER else len(KEPT)} | found


main = Experiment("decode", __file__, Settings, rows, lambda a: check_names("--models", a.models, MODELS)).command()

if __name__ == "__main__":
    typer.run(main)
