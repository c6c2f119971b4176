"""`memmix plan`: its arithmetic against bytes that are counted on small models, its choices, and wrong inputs."""

import json
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from child import run_scripts
from cli_runner import memmix, result_of
from hf_memmix import memmix_config
from hf_memmix.commands.plan import _hours
from hf_memmix.conversion import convert_model
from hf_memmix.conversion.families import attention_module
from hf_memmix.conversion.records import bytes_text
from hf_memmix.mixers import MIXERS
from hf_memmix.training.groups import freeze_by_rate
from hf_memmix.training.losses import chunked_forward_kl, chunked_top_k_kl, top_k_of
from hf_memmix.training.planning import speed
from hf_memmix.training.planning.memory import LOGIT_BYTES, TOP_K_BYTES, Settings, layer_bytes, memory_of
from hf_memmix.training.planning.shapes import Shapes
from hf_memmix.training.planning.stage_settings import STAGES, measured_beside, need_of, plan_stages
from hf_memmix.training.recipe import Recipe
from hf_memmix.training.train import in_training_dtype, make_pair
from testing import FAMILIES
from tiny_teachers import tiny_teacher

ROOT = Path(__file__).parents[2]
SIZES = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 96}


def models(device="cpu", tied=False, keep=(), **sizes):
    with torch.device(device):
        teacher = AutoModelForCausalLM.from_config(
            LlamaConfig(**SIZES | sizes, tie_word_embeddings=tied), dtype=torch.bfloat16
        ).eval()
    return teacher, convert_model(teacher, "gka", keep=list(keep))


def own_bytes(parameters):
    return sum(p.numel() * p.element_size() for p in {id(p): p for p in parameters}.values())


# ---- weights, optimizer, gradients, teacher


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        Settings("align", checkpointing=True),
        Settings("distill", checkpointing=True),
        Settings("distill", checkpointing=True, teacher="cache"),
        Settings("distill", checkpointing=True, teacher="lora", lora_rank=4),
        Settings("distill", checkpointing=True, teacher="lora", lora_rank=4, lora_mixers=True),
    ],
    ids=lambda run: f"{run.stage}-{run.teacher}-{run.lora_mixers}",
)
def test_weights_optimizer_and_gradients_are_those_of_a_training_step(settings, tied):
    """The arithmetic is equal to the bytes of a real pair, but for fp32 parameters of the mixers in a bf16 model."""
    teacher, student = models(tied=tied, keep=[2])
    expected = memory_of(Shapes.of(*models("meta", tied=tied, keep=[2])), replace(settings, rows=1, length=2))
    cached = settings.teacher == "cache"
    recipe = Recipe(
        stage=settings.stage, teacher="copy" if cached else settings.teacher, bf16=True,
        lora_rank=settings.lora_rank, lora_mixers=settings.lora_mixers,
    )  # fmt: skip
    if settings.stage == "align":
        student.float()
    pair = make_pair(in_training_dtype(student, recipe), None if cached else teacher, recipe)
    freeze_by_rate(student, recipe)
    trained = [p for p in pair.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(trained)
    optimizer.step()
    states = [t for state in optimizer.state.values() for t in state.values() if t.ndim]
    ours = {id(p) for p in pair.parameters()}
    theirs = [] if cached else [p for p in teacher.parameters() if id(p) not in ours]
    assert own_bytes(pair.parameters()) == pytest.approx(expected.weights, rel=2e-3)
    assert own_bytes(states) == pytest.approx(expected.optimizer, rel=2e-3)
    assert own_bytes(theirs) == pytest.approx(expected.teacher, rel=2e-3, abs=1)
    gradients = own_bytes(p.grad for p in trained)
    assert expected.gradients in (pytest.approx(gradients, rel=2e-3), 0.0) or settings.teacher == "copy"


def test_quantized_matrices_take_the_bytes_that_are_counted():
    pytest.importorskip("bitsandbytes")
    wide = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    teacher, student = models(**wide)
    run = Settings("distill", checkpointing=True, teacher="lora", lora_rank=2, lora_mixers=True, quantize="4bit")
    expected = memory_of(Shapes.of(*models("meta", **wide)), replace(run, rows=1, length=2))
    recipe = Recipe(stage="distill", teacher="lora", lora_rank=2, lora_mixers=True, quantize="4bit", bf16=True)
    pair = make_pair(in_training_dtype(student, recipe), teacher, recipe)

    def counted(model):
        found = {}
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                found[id(parameter)] = parameter.numel() * parameter.element_size()
                if (state := getattr(parameter, "quant_state", None)) is not None:
                    scales = (state.absmax, state.state2.absmax)
                    found[id(parameter)] += sum(t.numel() * t.element_size() for t in scales)
        return found

    ours, theirs = counted(pair), counted(teacher)
    assert sum(ours.values()) == pytest.approx(expected.weights, rel=1e-2)
    only = sum(size for key, size in theirs.items() if key not in ours)
    assert only == pytest.approx(expected.teacher, rel=1e-2)


# ---- activations and logits

COUNT = """
import json, sys, torch
from transformers import AutoModelForCausalLM, LlamaConfig
from hf_memmix.conversion import convert_model
from hf_memmix.conversion.families import attention_module
from hf_memmix.training.recipe import Recipe
from hf_memmix.training.teachers import add_lora
from hf_memmix.training.train import in_training_dtype

fields, lora, length = (json.loads(text) for text in sys.argv[1:])
teacher = AutoModelForCausalLM.from_config(LlamaConfig(**fields), dtype=torch.bfloat16)
student = convert_model(teacher, "gka")
recipe = Recipe(stage="distill", teacher="lora" if lora else "copy", lora_mixers=lora, bf16=True)
in_training_dtype(student, recipe)
if lora:
    add_lora(student, 1, mixers=True)
x = torch.randn(1, length, fields["hidden_size"], dtype=student.dtype, requires_grad=True)
angles = student.model.rotary_emb(x, torch.arange(length)[None])
known = {t.untyped_storage().data_ptr() for t in (*student.parameters(), *angles)}
sizes = {tuple(s) for p in student.parameters() for s in (p.shape, p.shape[::-1])}
kept = {}

def keep(t):
    copy = t.ndim == 2 and t.dtype == torch.bfloat16 and tuple(t.shape) in sizes  # of a weight, by autocast
    if t.untyped_storage().data_ptr() not in known and not copy:
        kept[t.untyped_storage().data_ptr()] = t
    return t

with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
    student.model.layers[0](x, position_embeddings=angles, memmix_layout=None)
print("kept", sum(t.untyped_storage().nbytes() for t in kept.values()))
"""


@pytest.mark.product  # a new process
@pytest.mark.parametrize("lora", [False, True])
def test_activations_of_a_layer_are_what_autograd_keeps_with_the_kernels(tmp_path, lora):
    """Triton's interpreter runs the kernels of the GPU, which keep fewer tensors than the torch path."""
    pytest.importorskip("triton")
    length, fields = 256, SIZES | {"num_hidden_layers": 1, "intermediate_size": 272}
    arguments = [json.dumps(value) for value in (fields, lora, length)]
    (run,) = run_scripts(COUNT, tmp_path, arguments, TRITON_INTERPRET="1", HF_MEMMIX_BACKEND="triton")
    assert run.exitcode == 0, run.output
    shapes = Shapes.of(*models("meta", num_hidden_layers=1, intermediate_size=272))
    settings = Settings("distill", rows=1, length=length, teacher="lora" if lora else "copy", lora_mixers=lora)
    assert layer_bytes(shapes, settings) == pytest.approx(int(run.output.split("kept ")[1]), rel=0.06)


class Peak(TorchDispatchMode):
    """Counts the bytes of all tensors that operators make inside this context, and keeps the largest sum."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage()._cdata for t in args if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.known and storage._cdata not in given:
                    self.known.add(storage._cdata)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
                    self.peak = max(self.peak, self.now)
        return result

    def _free(self, key, size):
        if key in self.known:
            self.known.remove(key)
            self.now -= size


@pytest.mark.parametrize("cached", [False, True])
def test_the_logits_of_a_chunk_take_what_the_loss_holds(cached):
    tokens, hidden, vocabulary, chunk = 256, 8, 4096, 128
    head = nn.Linear(hidden, vocabulary, bias=False).bfloat16()
    states = torch.randn(1, tokens, hidden).bfloat16().requires_grad_()
    targets = top_k_of(head(states.detach()), 16)
    with Peak() as counted:
        if cached:
            loss = chunked_top_k_kl(states, head, *targets, chunk_tokens=chunk)
        else:
            loss = chunked_forward_kl(states, states.detach(), head, head, chunk_tokens=chunk)
        loss.backward()
    # without Triton, the log-probabilities of both, the teacher's probabilities and what is zero of them
    per = TOP_K_BYTES if cached else LOGIT_BYTES + 3 * 4 + 1
    assert per * chunk * vocabulary == pytest.approx(counted.peak, rel=0.1)


def test_mixers_beside_gka_take_what_a_measured_training_step_takes():
    """The table is the peak of the benchmark's step with each mixer beside that with gka: 6 bytes per parameter of
    weights and optimizer, the rest are activations of 16 layers of 8 x 2048 tokens.
    """
    rows = {
        row["mixer"]: row
        for row in json.loads((ROOT / "kernels/benchmarks/results/model_h200.json").read_text(encoding="utf-8"))
        if row["phase"] == "train" and not row["compiled"] and (row["B"], row["T"]) == (8, 2048)
    }
    shape = {"vocab_size": 32000, "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32}
    shape |= {"num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192}
    shapes = Shapes.of(*models("meta", tied=True, **shape))
    config, kept = LlamaConfig(**shape, tie_word_embeddings=True), {}
    for kind in MIXERS.keys() & rows.keys():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(memmix_config(config, mixer_types=[kind] * 16))
        kept[kind] = (rows[kind]["peak_mib"] * 2**20 - 6 * model.num_parameters()) / (16 * 8 * 2048)
    assert kept.keys() >= {"gka", "lattice", "coffee", "mamba2", "ska"}
    for kind, bytes_per_token in kept.items():
        widths = shapes.hidden, shapes.queries, shapes.keys, shapes.heads
        expected = MIXERS["gka"].kept_bytes.per_token(*widths) + bytes_per_token - kept["gka"]
        assert MIXERS[kind].kept_bytes.per_token(*widths) == pytest.approx(expected, rel=0.02), kind


@pytest.mark.parametrize("kind", ["gka", "gated_delta", "kda"])
def test_every_layer_that_reads_the_input_keeps_it(kind):
    shape = {"hidden_size": 48, "num_attention_heads": 4, "head_dim": 8, "num_hidden_layers": 1, "vocab_size": 8}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(memmix_config(LlamaConfig(**shape), mixer_types=[kind]))
    layers = [m for m in model.model.layers[0].self_attn.modules() if isinstance(m, torch.nn.Linear)]
    assert MIXERS[kind].kept_bytes.inputs == sum(layer.in_features == 48 for layer in layers)


def kept_per_token(teacher, kind, **options):
    """Bytes per token that autograd keeps for the mixer of a layer on the torch path."""
    mixer, length, found = attention_module(convert_model(teacher, kind, **options), 0).float(), 48, {}
    x = 1 * torch.randn(1, length, 64, requires_grad=True)  # no leaf, whose copies autocast shares
    angles = torch.ones(2, 1, length, 16)

    def keep(t):
        if length in t.shape:  # of tokens
            found[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        mixer(x, position_embeddings=(*angles,))
    return sum(t.untyped_storage().nbytes() for t in found.values()) / length


def test_options_of_recipes_are_counted():
    """Keys and values of its own for every head; a gate of a window, and a window beside a memory."""
    teacher, run = models()[0], Settings("distill", length=1)

    def planned(kind, **options):
        shapes = Shapes.of(teacher, convert_model(teacher, kind, **options))
        return layer_bytes(shapes, run)

    keys = 16 * 2  # channels that two further heads have
    assert planned("gka", unshare_kv_heads=True) - planned("gka") == MIXERS["gka"].kept_bytes.keys * keys
    gate = kept_per_token(teacher, "window", output_gate=True) - kept_per_token(teacher, "window")
    assert planned("window", output_gate=True) - planned("window") == gate
    parts = kept_per_token(teacher, "kda") + kept_per_token(teacher, "window", window=8)
    joined = kept_per_token(teacher, "kda", local_window=8) - parts  # less what both parts share, as angles
    around = 2 * 4 * 64 + 2 * 2 * 64 + 3 * 2 * 160  # norms and the MLP of a layer
    more = planned("kda", local_window=8) - (planned("kda") + planned("window") - around)
    assert joined == pytest.approx(more, rel=0.2)


# ---- the choice


def eight_billion(device="meta"):
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    return models(device, **sizes, num_key_value_heads=8, head_dim=128, vocab_size=128256)


def test_an_8b_model_on_a_gpu_of_24_gib():
    stages = {stage.name: stage for stage in plan_stages(*eight_billion(), 24 * 2**30, 50_000_000)}
    assert list(stages) == [name for name, _, _ in STAGES]
    fits = {name for name, stage in stages.items() if stage.fits}
    assert fits == {"align --stream", "distill, LoRA", "distill, QLoRA"}
    for stage in stages.values():
        assert (stage.need <= 24 * 2**30) == stage.fits and stage.need == need_of(stage.memory)
        # the fields are those of a valid recipe
        Recipe(stage=stage.settings.stage.split()[0], **{"teacher": "copy"} | stage.recipe())
    assert stages["distill, QLoRA"].recipe()["quantize"] == "4bit"


def test_more_memory_and_more_gpus_never_fit_less():
    pair, before = eight_billion(), set()
    for memory, gpus in ((8, 1), (24, 1), (80, 1), (80, 8), (141, 8)):
        stages = plan_stages(*pair, memory * 2**30, 1_000_000, gpus)
        fits = {stage.name for stage in stages if stage.fits}
        assert before <= fits
        before = fits
    assert before == {name for name, _, _ in STAGES}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_has_a_plan(family):
    """Also those without grouped heads, with experts, or with matrices that cannot be quantised."""
    teacher = tiny_teacher(family, layers=2).to("meta")
    stages = plan_stages(teacher, convert_model(teacher, "gka"), 2**34, 1000, length=64)
    named = [name for name, _, base in STAGES if family != "gpt2" or base.quantize == "none"]
    assert [stage.name for stage in stages] == named and all(stage.fits for stage in stages)
    assert all(value >= 0 for stage in stages for value in stage.record()["memory"].values())


def test_only_the_experts_of_a_token_take_time_and_activations():
    sizes = SIZES | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    with torch.device("meta"):
        teacher = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **sizes))
    shapes = Shapes.of(teacher, convert_model(teacher, "gka"))
    assert shapes.teacher - shapes.active == 3 * 6 * (3 * 64 * 32)
    assert 2 * 32 <= shapes.inner < 3 * 32  # the router and the norms are counted too
    dense = Shapes.of(*models("meta"))
    assert dense.active == dense.teacher and dense.inner == 160


def test_a_mixer_without_known_memory_is_refused(monkeypatch):
    monkeypatch.setattr(MIXERS["gka"], "kept_bytes", None)
    with pytest.raises(ValueError, match="the memory of gka in training is not known"):
        plan_stages(*models("meta"), 2**34, 1)


# ---- measurements


def test_computed_memory_is_within_10_percent_of_every_measured_run():
    beside = {row["run"]: row["ratio"] for row in measured_beside()}
    assert beside.keys() >= {"1B full", "8B LoRA", "8B align --stream"}
    assert all(0.9 < ratio < 1.1 for ratio in beside.values()), beside


def test_speed_scales_with_parameters_mixers_and_gpus(monkeypatch):
    rows = [
        {"run": "a", "kind": "full", "parameters": 1e9, "checkpointing": False, "tokens": 2048, "tokens_s": 1000},
        {"run": "b", "kind": "full", "parameters": 1e9, "checkpointing": True, "tokens": 2048, "tokens_s": 800},
        {"run": "c", "kind": "full", "parameters": 8e9, "checkpointing": True, "tokens": 2048, "tokens_s": 90},
    ]
    data = {"rows": rows, "mixers": {"gka": 200.0, "ska": 100.0}, "two_gpus": 0.9}
    monkeypatch.setattr(speed, "measured", lambda: data)
    assert speed.speed_of("lora", 1e9, {"gka": 2}, True, 2048) is None
    plain = speed.speed_of("full", 2e9, {"gka": 2}, False, 2048)
    assert (plain.tokens_s, plain.measured_run, plain.larger) == (pytest.approx(500), "a", 0.5)
    assert speed.speed_of("full", 2e9, {"gka": 1, "ska": 1}, True, 2048).tokens_s == pytest.approx(400 / 0.75)
    assert speed.speed_of("full", 8e9, {"gka": 2}, False, 2048).tokens_s == pytest.approx(90 * 4 / 3)
    assert speed.speed_of("full", 1e9, {"gka": 2}, False, 2048, gpus=4).tokens_s == pytest.approx(4000 * 0.81)
    rows.append(rows[0] | {"run": "d", "tokens_s": 1800, "graph": True})  # one GPU, without checkpointing
    assert speed.speed_of("full", 1e9, {"gka": 2}, False, 2048).measured_run == "d"
    assert speed.speed_of("full", 1e9, {"gka": 2}, False, 2048, gpus=2).measured_run == "a"
    assert speed.speed_of("full", 1e9, {"gka": 2}, True, 2048).measured_run == "b"
    rows.append(rows[3] | {"run": "e", "tokens_s": 2400, "compiled": True})
    assert speed.speed_of("full", 1e9, {"gka": 2}, False, 2048).measured_run == "d"
    for checkpointing, gpus, tokens_s in ((False, 1, 2400), (True, 1, None), (False, 2, None)):
        found = speed.speed_of("full", 1e9, {"gka": 2}, checkpointing, 2048, gpus, compiled=True)
        assert getattr(found, "tokens_s", None) == tokens_s
    rows.append(rows[0] | {"kind": "align --stream"})
    for more, share in (({}, 0.9), ({"two_gpus_stream": 0.95}, 0.95)):
        data.update(more)
        found = speed.speed_of("align --stream", 1e9, {"gka": 2}, False, 2048, gpus=2)
        assert found.tokens_s == pytest.approx(2000 * share)


def test_the_speed_is_that_of_the_run_with_the_nearest_number_of_rows():
    """A run of one row of an 8B model reads half as many tokens per second as one of four."""
    runs = {row["run"]: row for row in speed.measured()["rows"]}
    for rows, run in ((1, "8B LoRA"), (4, "8B LoRA, four rows"), (8, "8B LoRA, four rows")):
        found = speed.speed_of("lora", runs[run]["parameters"], {"gka": 32}, True, 2048 * rows)
        assert (found.measured_run, found.tokens_s) == (run, pytest.approx(runs[run]["tokens_s"]))


# ---- the command


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "teacher"
    LlamaConfig(**SIZES, dtype="bfloat16", architectures=["LlamaForCausalLM"]).save_pretrained(path)
    return path


def test_plan_prints_every_stage_and_the_measured_runs(folder):
    given = ["plan", "--teacher", folder, "--gpu-memory", "24GiB", "--tokens", "50M"]
    record = result_of(memmix(*given, "--json"))
    assert [row["stage"] for row in record["stages"]] == [name for name, _, _ in STAGES]
    assert record["tokens"] == 50_000_000 and all(row["fits"] for row in record["stages"])
    assert record["convert"]["peak_memory"] > 0 and record["measured"] == measured_beside()
    run = memmix(*given)
    assert run.exit_code == 0 and all(name in run.stdout for name, _, _ in STAGES)
    assert "  distill, QLoRA: batch_size: 8, block_size: 2048, teacher: lora" in run.stdout
    # no run of so small a model was measured
    assert "partly idle" in run.stdout and all(row["larger"] > 3 for row in record["stages"])
    assert "│ below 0.01" in run.stdout and "no stage fits" not in run.stdout
    assert all(len(line) <= 80 for line in run.stdout.splitlines() if line.startswith(("│", "┃")))
    hours = [_hours(value) for value in (None, 0.004, 0.021, 1.33, 1234.5)]
    assert hours == ["not measured", "below 0.01", "0.021", "1.3", "1,234"]


def test_plan_takes_the_teachers_limit_and_knows_compiled_runs(tmp_path):
    LlamaConfig(**SIZES, max_position_embeddings=512, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    record = result_of(memmix("plan", "--teacher", tmp_path, "--gpu-memory", "24GiB", "--tokens", "100B", "--json"))
    assert record["length"] == 512 and all(row["recipe"]["block_size"] == 512 for row in record["stages"])
    compiled = {
        row["stage"]: (row["compiled_hours"], row["hours"]) for row in record["stages"] if row["compiled_hours"]
    }
    assert compiled.keys() >= {"align", "distill, all weights"} and "distill, QLoRA" not in compiled
    assert all(hours < other for hours, other in compiled.values())


def test_compiled_hours_are_of_a_run_as_large_as_the_other_one():
    """8B align was measured without compile, with checkpointing: beside it, the compiled run of 1B is no gain."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    sizes |= {"num_hidden_layers": 32, "head_dim": 128, "vocab_size": 128256}
    align = next(stage for stage in plan_stages(*models("meta", **sizes), 200 * 2**30, 10**8) if stage.name == "align")
    assert "8B" in align.measured_run and not align.settings.checkpointing
    assert align.hours is not None and align.compiled_hours is None


def test_plan_takes_layers_and_options_as_convert_does(folder):
    given = ["plan", "--teacher", folder, "--gpu-memory", "24GiB", "--json"]
    plain = result_of(memmix(*given))
    layers = ["--layers", "attention=0 ska=1 gka=rest", "--keep-without-rope", "all"]
    mixed = result_of(memmix(*given, *layers, "--option", "gka.local_window=64"))
    assert mixed["layers"] == ["attention", "ska", "gka"] and mixed["options"] == {"gka": {"local_window": 64}}
    for row, other in zip(plain["stages"], mixed["stages"], strict=True):
        assert row["memory"]["activations"] != other["memory"]["activations"]


def test_plan_names_the_smallest_stage_if_none_fits(folder):
    given = ["plan", "--teacher", folder, "--gpu-memory", "513MiB"]
    least = min(result_of(memmix(*given, "--json"))["stages"], key=lambda row: row["need"])
    assert f"into 513 MiB; {least['stage']} needs least, {bytes_text(least['need'])}" in memmix(*given).stdout
