"""Measures models with mixers whose weights are rounded to 4 or 8 bit, on a GPU.

    python quantized.py  # one GPU, bitsandbytes and torchao, 6 GB of disk

`shape`: a Llama of 1.2B parameters with random weights and `gka` in every layer. `student`: the bundled student, with
its perplexity on the bundled held-out text. Each is loaded by `from_pretrained` with every quantiser.

Correctness comes first. `error` is the RMS difference of the logits to those of a model in fp32 whose weights are
those that the quantised layers multiply with, divided by the RMS of the latter. `error_of_bf16` is that of the bf16
model to its own weights in fp32. If the error of a method is more than twice as large, its speed is not measured.
`rounding` is the RMS difference to the logits of bf16, divided in the same way.

`decode_tokens_s` is one sequence on the GPU's clock, with the step in a CUDA graph; `generate_tokens_s` is what
`generate()` reaches without options. `weights` is the memory after loading, `peak` that of the decode.
"""

import argparse
import gc
import json
import math
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, TorchAoConfig

import hf_memmix
from hf_memmix.assets import asset_path
from hf_memmix.conversion.records import environment, write_json
from hf_memmix.training.data import tokenize_files
from hf_memmix.training.experiments.bundled.versions import bundled_teacher, check_teacher

RESULTS = Path(__file__).parent / "results" / "quantized_h200.json"
ROWS, LENGTH = 2, 256  # of the tokens whose logits are compared
NEW_TOKENS, REPLAYS = 64, 200
MOST = 2.0  # times the error of bf16, as for kernels


def quantization(method: str):
    """The config of a quantiser; None for bf16."""
    if method == "bf16":
        return None
    if method == "bitsandbytes nf4":
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig

    if method == "torchao int8":
        return TorchAoConfig(Int8WeightOnlyConfig())
    # the packing of PyTorch's own kernel; the default one needs a further package
    return TorchAoConfig(Int4WeightOnlyConfig(group_size=128, int4_packing_format="tile_packed_to_4d"))


METHODS = ("bf16", "torchao int8", "torchao int4", "bitsandbytes nf4")


def load(folder: Path, method: str, device: torch.device) -> nn.Module:
    """The model of a folder in bf16 with quantised weights."""
    options = {"dtype": torch.bfloat16, "device_map": {"": device}}
    if (config := quantization(method)) is not None:
        options["quantization_config"] = config
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


@torch.no_grad()
def in_fp32(folder: Path, model: nn.Module, device: torch.device) -> nn.Module:
    """The model of a folder in fp32, with the weights that the layers of `model` multiply with.

    A layer tells them by its outputs for the identity matrix, which are exact but for their rounding to bf16.
    """
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).float().to(device).eval()
    for name, layer in model.named_modules():
        weight = getattr(layer, "weight", None)
        if hasattr(layer, "in_features") and weight is not None and type(weight) is not nn.Parameter:
            ones = torch.eye(layer.in_features, dtype=torch.bfloat16, device=device)
            values = layer(ones).float()
            if layer.bias is not None:
                values -= layer.bias.float()
            plain.get_submodule(name).weight.copy_(values.T)
    return plain


@torch.no_grad()
def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids, use_cache=False).logits.float()


def relative(ours: Tensor, theirs: Tensor) -> float:
    """RMS of the difference, divided by the RMS of `theirs`."""
    return ((ours - theirs).square().mean() / theirs.square().mean()).sqrt().item()


@torch.no_grad()
def decode_speed(model: nn.Module, device: torch.device) -> dict:
    """Tokens per second of one sequence, and the memory at the peak."""
    ids = torch.full((1, 16), 5, device=device)
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    model.generate(ids, **options)
    start = _now(device)
    model.generate(ids, **options)
    found = {"generate_tokens_s": round(NEW_TOKENS / (_now(device) - start), 1)}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        graph, used = step_graph(model, ids)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        ms = begin.elapsed_time(end) / REPLAYS
        found |= {"decode_ms": round(ms, 3), "decode_tokens_s": round(1e3 / ms, 1)}
        found["peak"] = torch.cuda.max_memory_allocated()
        del used
    return found


def step_graph(model: nn.Module, ids: Tensor) -> tuple:
    """A CUDA graph of the step that follows the prompt `ids` [1, T], and the tensors that it uses.

    Each replay advances the states by one token.
    """
    prompt = hf_memmix.PromptGraph(model, *ids.shape)
    prompt(ids)
    token = ids[:, :1].clone()

    def step():
        return model(token, past_key_values=prompt.cache, use_cache=True, memmix_mask=None).logits

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step()
    return graph, (prompt, token, logits)


def measure(folder: Path, blocks: Tensor | None, device: torch.device, save) -> None:
    """Measure the model of a folder with every method: correctness, then perplexity or speed.

    blocks: [B, T], tokens for the perplexity; None: measure the speed.
    """
    cuda = device.type == "cuda"
    vocabulary = AutoConfig.from_pretrained(folder).vocab_size
    ids = torch.randint(3, vocabulary, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0)).to(device)
    if blocks is not None:
        ids = blocks[:ROWS].to(device)
    of_bf16 = logits_bf16 = None
    for method in METHODS:
        row = {"method": method}
        try:
            if cuda:
                _release()
                before = torch.cuda.memory_allocated()
            model = load(folder, method, device)
            if cuda:
                row["weights"] = torch.cuda.memory_allocated() - before
            ours = logits_of(model, ids)
            plain = in_fp32(folder, model, device)
            row["error"] = relative(ours, logits_of(plain, ids))
            del plain
            if method == "bf16":
                of_bf16, logits_bf16 = row["error"], ours
            row |= {"error_of_bf16": of_bf16, "rounding": relative(ours, logits_bf16)}
            row["right"] = row["error"] <= MOST * of_bf16
            if blocks is not None:
                row["perplexity"] = perplexity(model, blocks.to(device))
            elif row["right"]:
                _release()
                row |= decode_speed(model, device)
        except Exception as error:  # noqa: BLE001, the other methods are measured
            row["error_text"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300]}"
        model = None
        save(row)
        print(json.dumps(row), flush=True)


@torch.no_grad()
def perplexity(model: nn.Module, blocks: Tensor) -> float:
    losses = [model(part, labels=part, use_cache=False).loss.float().item() for part in blocks.split(16)]
    return round(math.exp(sum(losses) / len(losses)), 4)


def make_shape(folder: Path, device: torch.device) -> Path:
    """Write a student with random weights in bf16."""
    from transformers import LlamaConfig

    from hf_memmix.training.experiments.common.llamas import DISTILLED

    config = LlamaConfig(**DISTILLED.fields)
    config = hf_memmix.memmix_config(config, mixer_types=["gka"] * config.num_hidden_layers)
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def _release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--part", choices=("shape", "student"), action="append", help="default: all")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    check_teacher(args.out, {"teacher": bundled_teacher()})
    record = json.loads(args.out.read_text()) if args.out.exists() else {}
    record["environment"] = environment(device) | versions()
    record["teacher"] = bundled_teacher()

    with tempfile.TemporaryDirectory(prefix="memmix-quantized-") as name:
        for part in args.part or ("student", "shape"):
            rows = record[part] = []

            def save(row, rows=rows):
                rows.append(row)
                write_json(args.out, record)

            if part == "shape":
                measure(make_shape(Path(name) / "shape", device), None, device, save)
            else:
                tokens = tokenize_files(
                    [asset_path("heldout.txt")], AutoTokenizer.from_pretrained(asset_path("tiny_gka"))
                )
                blocks = tokens[: len(tokens) // 256 * 256].view(-1, 256)[:64]
                measure(asset_path("tiny_gka"), blocks, device, save)


def versions() -> dict[str, str]:
    """The versions of the quantisers."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for package in ("torchao", "bitsandbytes"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "missing"
    return found


if __name__ == "__main__":
    main()
