"""Where the time of a server's processor goes in one decode step of vLLM: memory layers against a native Llama.

    python serving_host.py --label NAME                    # in the environment of `make serve-test`
    python serving_host.py --label NAME --parts launches

The model is so small (hidden size 64) that the arithmetic takes little time beside the calls. All engines run without
graphs on one thread of a CPU. On a GPU, graphs of decode replace what happens inside of `forward`: there the times of
`metadata`, of the scheduler and of the runner remain in each step, and prompts still pay for every call in a layer.

    steps      microseconds of processor time (of the thread, so that other programs do not count) per decode step, by
               function, with the functions that it calls: the median of all measured steps
    launches   what one GKA layer of the 1B shape would launch for the prompts of one batch: calls of operators that
               are neither views nor allocations, and Triton kernels, which are counted and do not run

Results go to results/serving_host.json, by label. Written down before the first measurement: with one sequence the
metadata of a pure GKA model cost 100 us more per step than those of attention, and a layer of GKA takes three times as
long as one of attention; of about 53 launches per layer of a prompt, 25 read and write states. A lean `build` saves
two thirds of its time; states that are read and written as whole pages save 20 launches; four groups of layers cost
100 us more than two.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "serving_host.json"
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1",
}  # fmt: skip
SHAPE = {
    "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 16, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 32, "intermediate_size": 96, "max_position_embeddings": 2048,
}  # fmt: skip
LARGE = {
    "vocab_size": 512, "hidden_size": 2048, "num_hidden_layers": 1, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192,
}  # fmt: skip
MODELS = ("llama", "llama_transformers", "gka", "gka_3of4")
SEQUENCES = (1, 16, 64)
PROMPT, WARM, STEPS = 8, 10, 60
# whether each prompt of a batch goes on from a state
BATCHES = {"one_new": [False], "one_old": [True], "four_new": [False] * 4, "four_mixed": [True, False, False, False]}
LENGTH = 2048  # of a prompt
NO_LAUNCH = (
    "empty", "new_empty", "as_strided", "resolve_", "resize_", "reshape", "result_type", "promote_types",
    "_unsafe_view", "linear",
)  # fmt: skip


class Clock:
    """Sums the processor time of functions over one step of the engine."""

    def __init__(self):
        self.now: dict[str, list] = {}
        self.steps: list[dict[str, list]] = []

    def wrap(self, owner: type, name: str, label: str):
        """Time all calls of a method; a class that inherits it from a timed class is not timed twice."""
        function = getattr(owner, name)
        if hasattr(function, "timed"):
            return

        @functools.wraps(function)
        def timed(*args, **kwargs):
            start = time.thread_time_ns()
            try:
                return function(*args, **kwargs)
            finally:
                entry = self.now.setdefault(label, [0, 0])
                entry[0] += time.thread_time_ns() - start
                entry[1] += 1

        timed.timed = True
        setattr(owner, name, timed)

    def end_step(self):
        self.steps.append(self.now)
        self.now = {}

    def rows(self) -> dict[str, dict]:
        """By function: microseconds per step and calls per step, medians over the steps."""
        labels = {label for step in self.steps for label in step}
        found = {}
        for label in sorted(labels):
            entries = [step.get(label, (0, 0)) for step in self.steps]
            us, calls = (statistics.median(entry[i] for entry in entries) for i in (0, 1))
            found[label] = {"us": round(us / 1000, 1), "calls": calls}
        return found


def wrap_all(clock: Clock, model):
    """Time what a decode step consists of. `model`: of the engine."""
    from vllm.model_executor.models.llama import LlamaAttention
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from hf_memmix.mixers import MIXERS
    from hf_memmix.serving.vllm.layer import MemoryLayer
    from hf_memmix.serving.vllm.metadata import MemoryMetadataBuilder

    clock.wrap(LLMEngine, "step", "step")
    clock.wrap(Scheduler, "schedule", "step/schedule")
    clock.wrap(Scheduler, "update_from_output", "step/update")
    clock.wrap(GPUModelRunner, "_build_attention_metadata", "step/metadata")
    clock.wrap(CPUAttentionMetadataBuilder, "build", "step/metadata/attention")
    clock.wrap(MemoryMetadataBuilder, "build", "step/metadata/memory")
    clock.wrap(MemoryMetadataBuilder, "update_block_table", "step/metadata/memory_again")
    clock.wrap(type(model), "forward", "step/forward")
    clock.wrap(LlamaAttention, "forward", "step/forward/attention")
    clock.wrap(MemoryLayer, "__call__", "step/forward/memory")
    clock.wrap(MemoryLayer, "run", "step/forward/memory/operator")
    for mixer in MIXERS.values():
        clock.wrap(mixer, "project_rows", "step/forward/memory/project")
        clock.wrap(mixer, "step", "step/forward/memory/operator/step")
        clock.wrap(mixer, "readout", "step/forward/memory/readout")


def save_model(folder: Path, name: str) -> Path:
    """A folder with a config.json, from which vLLM makes random weights."""
    from transformers import LlamaConfig

    import hf_memmix

    config = LlamaConfig(**SHAPE, bos_token_id=0, eos_token_id=1)
    config.architectures = ["LlamaForCausalLM"]
    if name.startswith("gka"):
        every = 4 if name == "gka_3of4" else SHAPE["num_hidden_layers"] + 1
        kinds = ["attention" if i % every == every - 1 else "gka" for i in range(SHAPE["num_hidden_layers"])]
        config = hf_memmix.memmix_config(config, mixer_types=kinds)
        config.architectures = ["MemMixLlamaForCausalLM"]
    config.save_pretrained(folder / name)
    return folder / name


def measure_steps(folder: Path, name: str) -> dict:
    """By number of sequences, the times of one model."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        str(save_model(folder, name)), load_format="dummy", skip_tokenizer_init=True, enforce_eager=True, seed=0,
        max_model_len=1024, max_num_seqs=max(SEQUENCES), enable_prefix_caching=False, dtype="bfloat16",
        model_impl="transformers" if name == "llama_transformers" else "auto", disable_log_stats=True,
    )  # fmt: skip
    core, clock, found = engine.llm_engine, Clock(), {}
    runner = core.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    wrap_all(clock, runner.get_model())
    params = SamplingParams(temperature=0, max_tokens=WARM + STEPS + 20, ignore_eos=True, detokenize=False)
    for count in SEQUENCES:
        for i in range(count):
            prompt = [3 + (7 * i + j) % 500 for j in range(PROMPT)]
            core.add_request(f"{count}-{i}", {"prompt_token_ids": prompt}, params)
        for _ in range(WARM):
            core.step()
        clock.steps.clear()
        clock.now.clear()
        for _ in range(STEPS):
            core.step()
            clock.end_step()
        found[str(count)] = clock.rows()
        while core.has_unfinished_requests():
            core.step()
    groups = len(runner.kv_cache_config.kv_cache_groups)
    return {"groups": groups, "sequences": found}


def measure_launches() -> dict:
    """By kind of batch, the launches of one GKA layer while it reads prompts, without its projections."""
    import torch

    from hf_memmix_kernels import _recorder, _tape

    _tape.ENABLED = False
    kernels = []

    def count_only(self, grid):
        return lambda *args, **kwargs: kernels.append(self.function.__name__)

    _recorder.Kernel.__getitem__ = count_only
    found = {}
    for batch, is_old in BATCHES.items():
        run = reading(is_old)
        kernels.clear()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, torch.no_grad():
            run()
        operators = Counter(event.name for event in profile.events() if is_launch(event))
        found[batch] = {
            "operators": operators.total(), "kernels": len(kernels), "by_name": dict(sorted(operators.items())),
        }  # fmt: skip
    return found


def reading(is_old: list[bool]):
    """A function that runs one layer on prompts of `LENGTH` tokens each; old ones go on from a state."""
    from types import SimpleNamespace

    import torch
    from transformers import LlamaConfig

    from hf_memmix import memmix_config
    from hf_memmix.mixers import MIXERS
    from hf_memmix.serving.vllm.joined import join_layers
    from hf_memmix.serving.vllm.layer import PAGE_DTYPE, MemoryLayer, page_bytes, page_shape
    from hf_memmix.serving.vllm.metadata import MemoryMetadata, starts_anew
    from hf_memmix_kernels._chunks import keep_tables

    dtype, count = torch.bfloat16, len(is_old)
    with torch.device("meta"):
        mixer = MIXERS["gka"](memmix_config(LlamaConfig(**LARGE), mixer_types=["gka"]), 0)
    join_layers(mixer, {}, 0, 1, dtype, "cpu")
    mixer.to_empty(device="cpu").to(dtype)
    for name in mixer.fp32_parameters:
        setattr(mixer, name, torch.nn.Parameter(getattr(mixer, name).float()))
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=dtype),
        device_config=SimpleNamespace(device=torch.device("cpu")),
        scheduler_config=SimpleNamespace(max_num_seqs=64),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )
    size = page_bytes(mixer, dtype)
    layer = MemoryLayer(mixer, "layer", config, size)
    layer.kv_cache = (torch.zeros(count + 1, *page_shape(size)[0], dtype=PAGE_DTYPE),)
    x = torch.zeros(1, LENGTH * count, LARGE["hidden_size"], dtype=dtype)
    tokens, output = mixer.project_rows(x, None), torch.empty_like(x)
    fields = {
        "num_prefills": count, "num_prefill_tokens": LENGTH * count, "num_decodes": 0, "num_decode_tokens": 0,
        "num_reqs": count, "has_initial_states_p": torch.tensor(is_old), "state_indices_tensor_d": None,
        "query_start_loc_p": torch.arange(count + 1, dtype=torch.int32) * LENGTH, "query_start_loc_d": None,
        "state_indices_tensor_p": torch.arange(1, count + 1, dtype=torch.int32), "num_accepted_tokens": None,
        "seq_lens": torch.full((count,), LENGTH),
    }  # fmt: skip
    keep_tables(fields["query_start_loc_p"])
    rows = SimpleNamespace(
        query_start_loc_cpu=fields["query_start_loc_p"],
        seq_lens_cpu_upper_bound=LENGTH * (1 + fields["has_initial_states_p"].int()),
    )
    batch = MemoryMetadata(**fields)
    batch.starts_anew = starts_anew(rows, batch)
    layer.run(x, tokens, output, batch)  # computes the tables that all layers share
    return lambda: layer.run(x, tokens, output, batch)


def is_launch(event) -> bool:
    """Whether an event of the profiler is an operator of torch that computes itself and makes no view."""
    import torch

    if not event.name.startswith("aten::") or any(is_launch(child) for child in event.cpu_children):
        return False
    name = event.name.removeprefix("aten::")
    packet = getattr(torch.ops.aten, name, None)
    views = packet is not None and any(getattr(packet, overload).is_view for overload in packet.overloads())
    return not (views or name.startswith(NO_LAUNCH))


def measure(part: str) -> dict:
    """Of one part, in a process of its own."""
    if part == "launches":
        return measure_launches()
    with tempfile.TemporaryDirectory() as folder:
        return measure_steps(Path(folder), part)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--label", required=True, help="of the measured state of the code, a key of the file")
    parser.add_argument("--parts", nargs="+", default=[*MODELS, "launches"], choices=[*MODELS, "launches"])
    parser.add_argument("--only", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        print(json.dumps(measure(args.only)))
        return
    import torch
    import transformers
    import vllm

    record = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    record |= {"shape": SHAPE, "launches_shape": LARGE, "torch": torch.__version__, "vllm": vllm.__version__}
    record["transformers"] = transformers.__version__
    for part in args.parts:
        backend = {"HF_MEMMIX_BACKEND": "triton", "TRITON_INTERPRET": "1"} if part == "launches" else {}
        command = [sys.executable, __file__, "--label", args.label, "--only", part]
        result = subprocess.run(command, env=os.environ | SETTINGS | backend, stdout=subprocess.PIPE, check=True)
        record.setdefault(args.label, {})[part] = json.loads(result.stdout.splitlines()[-1])
        RESULTS.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
