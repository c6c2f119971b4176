"""The example of training/long_sequences.md that fine-tunes on long rows: two processes train what one does.

Both run in float32, with SGD, which keeps differences of gradients small, and with FSDP2 as in the file that ships: on
a CPU, and on two GPUs where there are two.
"""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import yaml
from accelerate.utils import FullyShardedDataParallelPlugin

from child import TESTS, child_env, run_scripts
from hf_memmix.context_parallel import keep_fp32_weights
from hf_memmix.conversion import load_model, save_student
from hf_memmix.training.recipe import Recipe
from hf_memmix.training.trainer_arguments import training_arguments
from testing import build, tiny_config, word_tokenizer

TRAINING = TESTS.parent / "training"
CONFIG = yaml.safe_load((TRAINING / "accelerate" / "context_parallel.yaml").read_text(encoding="utf-8"))
PAGE = (TRAINING / "long_sequences.md").read_text(encoding="utf-8")
EXAMPLE = re.search(r"```python\n# finetune.py\n(.*?)```", PAGE, re.S)[1]
ON_GPUS = {"bf16=True": "disable_tqdm=True", "learning_rate=1e-4": 'learning_rate=0.1, optim="sgd"'}
ON_A_CPU = {"bf16=True": "use_cpu=True, disable_tqdm=True", "learning_rate=1e-4": 'learning_rate=0.1, optim="sgd"'}


def environment() -> dict[str, str]:
    """What `accelerate launch` makes of the file that ships."""
    settings = {**CONFIG["fsdp_config"], **CONFIG["parallelism_config"]}
    flags = {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_USE_PARALLELISM_CONFIG": "true"}
    return flags | {name.upper(): str(value) for name, value in settings.items()}


def finetune(folder, student, processes, changes=ON_A_CPU, gpus=False) -> dict:
    """The weights that the example trains; `changes`: what is replaced in its text."""
    text, out, code = folder / "text.txt", folder / f"out{processes}", EXAMPLE
    for old, new in changes.items():
        assert old in code
        code = code.replace(old, new)
    generator = torch.Generator().manual_seed(0)
    text.write_text(" ".join(f"w{i}" for i in torch.randint(3, 90, (400,), generator=generator).tolist()))
    arguments, variables = [student, text, "64", out], environment() if processes > 1 else {}
    if gpus:
        _on_gpus(folder, code, processes, arguments, variables)
    else:
        code = "import fsdp_on_cpu\n" * (processes > 1) + code
        for end in run_scripts(code, folder, arguments, processes, **variables):
            assert end.exitcode == 0, end.output[-3000:]
    return load_model(out).state_dict()


def _on_gpus(folder, code, processes, arguments, variables):
    script, command = folder / "finetune.py", [sys.executable]
    script.write_text(code)
    if processes == 1:  # it would take all
        variables["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    else:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += [str(part) for part in (script, *arguments)]
    run = subprocess.run(command, env=child_env(**variables), capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]


def check_training(folder, config, **how):
    """Raise AssertionError if the weights that two processes train are not those of one."""
    student = folder / "student"
    save_student(build(config), student, tokenizer=word_tokenizer())
    start = load_model(student).state_dict()
    alone, together = finetune(folder, student, 1, **how), finetune(folder, student, 2, **how)
    assert alone.keys() == together.keys() == start.keys()
    changed = {name for name in start if not torch.equal(alone[name], start[name])}
    assert len(changed) > 0.9 * len(start)
    for name in changed:
        step, wanted = together[name] - start[name], alone[name] - start[name]
        assert (step - wanted).norm() <= 1e-2 * wanted.norm() + 1e-7, name


@pytest.mark.product
@pytest.mark.parametrize("mixer", ["gka", "lattice"])
def test_two_processes_train_what_one_does(tmp_path, mixer):
    check_training(tmp_path, tiny_config("llama", (0, 1, 2, 3), mixer))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(("mixer", "layout"), [("gka", (0, 1, 2, 3)), ("lattice", (0, 1, 2, 3)), ("gka", (0, 2))])
def test_two_gpus_train_what_one_does(tmp_path, mixer, layout):
    """With (0, 2), the kept attention is torch's ring attention, which cannot share keys in float32."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    check_training(tmp_path, tiny_config("llama", layout, mixer, num_key_value_heads=4), changes=ON_GPUS, gpus=True)


def test_weights_stay_fp32_under_mixed_precision():
    """As accelerate prepares FSDP2 on GPUs; `fsdp_on_cpu` does the same for the example in bf16."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    plugin.set_mixed_precision("bf16")
    assert plugin.mixed_precision_policy.param_dtype == torch.bfloat16
    keep_fp32_weights(SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin)))
    assert plugin.mixed_precision_policy is None
    keep_fp32_weights(SimpleNamespace(state=SimpleNamespace()))  # without FSDP


@pytest.mark.product
def test_the_example_in_bf16_keeps_the_decays_in_fp32(tmp_path):
    student = tmp_path / "student"
    save_student(build(tiny_config("llama", (0, 1, 2, 3), "gka")), student, tokenizer=word_tokenizer())
    look = """
from hf_memmix.mixers import MemoryMixer
mix, seen = MemoryMixer.forward, set()
def look(mixer, *args, **kwargs):
    seen.update(parameter.dtype for parameter in mixer.parameters())
    return mix(mixer, *args, **kwargs)
MemoryMixer.forward = look
trainer.train()
assert seen == {torch.float32}, seen
"""
    in_bf16 = {"bf16=True": "use_cpu=True, disable_tqdm=True, bf16=True", "trainer.train()\n": "import torch" + look}
    finetune(tmp_path, student, 2, in_bf16)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({}, "cp_size 2"), ({"PARALLELISM_CONFIG_CP_SIZE": "1", "PARALLELISM_CONFIG_SP_SIZE": "4"}, "sp_size 4")],
)
def test_the_engine_refuses_it(monkeypatch, tmp_path, settings, message):
    for name, value in (environment() | settings).items():
        monkeypatch.setitem(os.environ, name, value)
    with pytest.raises(ValueError, match=message):
        training_arguments(Recipe(stage="align"), tmp_path)
