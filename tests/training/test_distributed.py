"""Two processes on gloo, as DDP, FSDP2 and ZeRO-3: the losses and the student of one process, also after a break.

The settings of FSDP2 and ZeRO-3 are those of the files that ship. ZeRO-3 needs `pip install deepspeed`, which is no
dependency of the tests: it is compiled from its sources. It also runs on two GPUs, where there are two.
"""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from packaging.version import parse

from child import child_env, run_scripts
from hf_memmix.conversion import load_model

CONFIGS = Path(__file__).parents[2] / "training" / "accelerate"
RUN = """
    import json, os, sys
    import torch
    gpus = os.environ.get("TRAIN_ON") == "gpus"
    on_cpu = not gpus and os.environ.get("ACCELERATE_USE_DEEPSPEED") != "true"
    if not gpus and not on_cpu:  # accelerate would not use DeepSpeed
        import zero3_on_cpu
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        import zero3_sharded
    fsdp = "fsdp" in os.environ.get("TRAINER", "") or os.environ.get("ACCELERATE_USE_FSDP") == "true"
    if fsdp and not gpus:  # it would use DDP
        import fsdp_on_cpu
    from tiny_teachers import tiny_teacher
    from transformers import TrainerCallback
    from hf_memmix.conversion import convert_model, save_student
    from hf_memmix.training import compiled_layers
    from hf_memmix.training.data import TokenBlocks
    from hf_memmix.training.train import Recipe, train

    class Stop(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 4:
                raise KeyboardInterrupt

    class Kill(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 4:
                os._exit(1)

    torch.set_num_threads(1)
    backend = compiled_layers.BACKEND = os.environ.get("COMPILE")
    out, broken = sys.argv[1], sys.argv[2] == "broken"
    teacher = tiny_teacher("llama", layers=2, tie_word_embeddings=True)
    student = convert_model(teacher, "gka", keep=[1])
    counted = torch.arange(16) < torch.arange(64)[:, None] % 14 + 2  # of unlike numbers of tokens
    tokens = torch.randint(3, 64, (1024,), generator=torch.Generator().manual_seed(0))
    data = TokenBlocks(tokens, 16, loss_mask=counted)
    results = {}
    for stage in ("align", "distill"):
        recipe = Recipe(stage=stage, steps=6, batch_size=4, block_size=16, learning_rate=3e-3, rest_learning_rate=1e-3,
                        loss="answers", gradient_accumulation=2, warmup_steps=1, save_every=3, bf16=False,
                        gradient_checkpointing=stage == "distill", compile=backend is not None,
                        trainer={"logging_steps": 1, "use_cpu": on_cpu, "disable_tqdm": True,
                                 **json.loads(os.environ.get("TRAINER", "{}"))})
        if broken:
            try:
                train(student, teacher, data, f"{out}/{stage}", recipe=recipe, callbacks=[Stop()])
            except KeyboardInterrupt:
                student = convert_model(teacher, "gka", keep=[1])
                if stage == "distill":
                    student.load_state_dict(aligned)
        killed = [Kill()] if sys.argv[2] == stage else []
        results[stage] = train(student, teacher, data, f"{out}/{stage}", recipe=recipe, callbacks=killed)
        aligned = {name: tensor.clone() for name, tensor in student.state_dict().items()}
    logits = student.cpu()(torch.arange(3, 19)[None]).logits  # every process has a whole, working student
    if int(os.environ.get("RANK", 0)) == 0:
        save_student(student, f"{out}/student")
        losses = {stage: [entry["loss"] for entry in result["log"]] for stage, result in results.items()}
        tokens = results["distill"]["log"][-1]["tokens"]
        json.dump({"losses": losses, "tokens": tokens, "logits": logits.flatten()[:8].tolist()},
                  open(f"{out}/result.json", "w"))
"""


def launch(folder: Path, processes: int, mode: str, zero3=False, gpus=False, launcher=False, **env) -> dict | None:
    """The losses of a run; None if it is killed, in the stage that `mode` names."""
    folder.mkdir(exist_ok=True)
    if gpus or zero3:
        failed, told = _launch(folder, processes, mode, zero3, gpus, launcher, env)
    else:
        ends = run_scripts(textwrap.dedent(RUN), folder, [folder, mode], processes, **env)
        failed, told = any(end.exitcode for end in ends), ends[0].output[-3000:]
    if mode in ("align", "distill"):
        assert failed and not (folder / "result.json").exists()
        assert (folder / mode / "checkpoint-3").exists(), told
        return None
    assert not failed, told
    return json.loads((folder / "result.json").read_text())


def _launch(folder, processes, mode, zero3, gpus, launcher, env) -> tuple[bool, str]:
    """Whether the launcher of a user has failed, and what it has printed."""
    script = folder / "run.py"
    script.write_text(textwrap.dedent(RUN))
    env |= {"TRAIN_ON": "gpus"} if gpus else {"DS_ACCELERATOR": "cpu"}
    if gpus and processes == 1:  # it would take all
        env["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    command = [sys.executable]
    if zero3:
        command += ["-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / "zero3.yaml")]
        command += ["--num_processes", str(processes), "--main_process_port", "0"]
    elif processes > 1 or launcher:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += [str(script), str(folder), mode]
    run = subprocess.run(command, env=child_env(**env), capture_output=True, text=True, timeout=300)
    return run.returncode != 0, run.stderr[-3000:]


def fsdp_environment() -> dict:
    config = yaml.safe_load((CONFIGS / "fsdp2.yaml").read_text())
    return {"ACCELERATE_USE_FSDP": "true"} | {key.upper(): str(value) for key, value in config["fsdp_config"].items()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone") / "run"
    return launch(folder, 1, "whole"), load_model(folder / "student")


# `trainer` of a recipe that keeps weights, gradients and the optimizer's states in the memory of the CPU
OFFLOAD = {"TRAINER": json.dumps({"fsdp": "full_shard offload", "fsdp_config": {"version": 2}})}


@pytest.mark.product  # a training in processes of its own
@pytest.mark.parametrize("kind", ["ddp", "compiled", "fsdp2", "offload"])
def test_two_processes_train_what_one_does(tmp_path, alone, kind):
    # before 5.23 the library cannot resume a CPU run of several processes: it maps tensors to "cpu:0"
    broken = parse(transformers.__version__) >= parse("5.23")
    environment = {"ddp": {}, "compiled": {"COMPILE": "eager"}, "fsdp2": fsdp_environment(), "offload": OFFLOAD}[kind]
    result = launch(tmp_path / kind, 2, "broken" if broken else "whole", **environment)
    check_against_one_process(result, alone, tmp_path / kind / "student")


@pytest.mark.gpu
@pytest.mark.parametrize("processes", [1, 2])
def test_offload_to_the_cpu_trains_what_one_gpu_does(tmp_path, processes):
    if torch.cuda.device_count() < processes:
        pytest.skip("needs two GPUs")
    one = launch(tmp_path / "alone", 1, "whole", gpus=True), load_model(tmp_path / "alone" / "student")
    # a launcher for one process too: FSDP needs one
    result = launch(tmp_path / "offload", processes, "whole", gpus=True, launcher=True, **OFFLOAD)
    check_against_one_process(result, one, tmp_path / "offload" / "student")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("kills", [(), ("align",), ("distill",)])
def test_zero3_trains_on_two_gpus_what_one_does(tmp_path, kills):
    pytest.importorskip("deepspeed", reason="pip install deepspeed")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    one = launch(tmp_path / "alone", 1, "whole", gpus=True), load_model(tmp_path / "alone" / "student")
    for stage in kills:
        launch(tmp_path / "zero3", 2, stage, zero3=True, gpus=True)
    result = launch(tmp_path / "zero3", 2, "whole", zero3=True, gpus=True)
    check_against_one_process(result, one, tmp_path / "zero3" / "student")


@pytest.mark.slow
@pytest.mark.parametrize("kills", [(), ("align", "distill")])
def test_zero3_trains_what_one_process_does(tmp_path, alone, kills):
    pytest.importorskip("deepspeed", reason="pip install deepspeed")
    for stage in kills:
        launch(tmp_path / "zero3", 2, stage, zero3=True)
    result = launch(tmp_path / "zero3", 2, "whole", zero3=True)
    check_against_one_process(result, alone, tmp_path / "zero3" / "student")


def check_against_one_process(result, alone, folder):
    """Losses, logits and weights of several processes are those of one."""
    expected, student = alone
    assert result["tokens"] == expected["tokens"] == 6 * 2 * 4 * 16
    for stage, losses in expected["losses"].items():
        assert len(losses) == 6
        torch.testing.assert_close(torch.tensor(result["losses"][stage]), torch.tensor(losses), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(torch.tensor(result["logits"]), torch.tensor(expected["logits"]), rtol=1e-3, atol=1e-3)
    saved, wanted = load_model(folder).state_dict(), student.state_dict()
    assert saved.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(saved[name], wanted[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["single", "cpu", "ddp", "fsdp2", "zero3"])
def test_shipped_configurations_load(name):
    """`accelerate launch --config_file` takes each file, up to the start of the processes."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    args = launch_command_parser().parse_args(["--config_file", str(CONFIGS / f"{name}.yaml"), "script.py"])
    args, _, _ = _validate_launch_command(args)
    assert args.num_processes == (1 if name in ("single", "cpu") else 2)
    chosen = {"ddp": args.multi_gpu, "fsdp2": args.use_fsdp, "zero3": args.use_deepspeed}
    assert [kind for kind, is_chosen in chosen.items() if is_chosen] == [name] * (name not in ("single", "cpu"))
    # a cast of all weights would take the fp32 of the decays too: the precision is the recipe's
    assert args.mixed_precision == "no"
    assert bool(args.use_cpu) == (name == "cpu")
    if name == "fsdp2":
        assert args.fsdp_version == 2 and str(args.fsdp_cpu_ram_efficient_loading).lower() != "true"
    if name == "zero3":
        assert args.zero_stage == 3 and args.zero3_save_16bit_model
