"""TRL trains a saved student as it is, by `memmix run trl ...`: padded batches, packed ones, LoRA, and chats."""

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hf_memmix.conversion import convert_model, load_model, save_student
from tiny_teachers import chat_tokenizer, tiny_teacher, tiny_text, tiny_tokenizer

SFT = """
    --dataset_name data --output_dir out --max_steps 3 --learning_rate 1e-2 --use_cpu --bf16 false
    --per_device_train_batch_size 4 --max_length 16 --report_to none --logging_steps 1 --gradient_checkpointing false
"""


@pytest.mark.product  # a program of another library
@pytest.mark.parametrize("options", ["", "--packing", "--use_peft --lora_r 4 --lora_target_modules q_proj v_proj"])
def test_trl_sft_trains_a_saved_student(tmp_path, options):
    pytest.importorskip("trl")
    student = convert_model(tiny_teacher("llama", layers=2), "gka", keep=[1])
    save_student(student, tmp_path / "student", tiny_tokenizer())
    (tmp_path / "data").mkdir()
    rows = [json.dumps({"text": tiny_text(5 + i % 4, seed=i)}) for i in range(24)]
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(rows))
    start = [sys.executable, "-m", "hf_memmix_cli", "run", "trl"]
    command = [*start, "sft", "--model_name_or_path", "student", *SFT.split(), *options.split()]
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "home")}
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    state = json.loads((tmp_path / "out" / "checkpoint-3" / "trainer_state.json").read_text())
    losses = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    assert len(losses) == 3 and all(0 < loss < 10 for loss in losses)
    if options.startswith("--use_peft"):
        adapter = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
        assert adapter["r"] == 4
        return
    tuned, start = load_model(tmp_path / "out").state_dict(), student.state_dict()
    assert tuned.keys() == start.keys()
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.q_proj.weight"):
        assert not torch.equal(tuned[name], start[name])


USER = [{"role": "user", "content": "the cat"}]
SAID = [{"role": "assistant", "content": text} for text in ("ran", "sat")]
PAIRS = {"prompt": USER, "chosen": SAID[:1], "rejected": SAID[1:]}
# by program: a row of its data, and options of its own
CHATS = {
    "sft": ({"messages": [*USER, SAID[0]]}, ""),
    "dpo": (PAIRS, ""),
    "reward": (PAIRS, ""),
    "grpo": ({"prompt": USER}, "--reward_funcs rewards.variety --num_generations 4 --max_completion_length 6"),
}
REWARD = """
def variety(completions, **kwargs):
    return [float(len(set(completion[0]["content"]))) for completion in completions]
"""


@pytest.mark.product  # programs of another library
@pytest.mark.parametrize("program", CHATS)
def test_trl_trains_a_converted_chat_model(tmp_path, program):
    """Supervised, by preferences, as a model of rewards (another head), and by rewards of its own answers."""
    pytest.importorskip("trl")
    student = convert_model(tiny_teacher("llama", layers=2, vocab_size=300), "gka", keep=[1])
    save_student(student, tmp_path / "student", chat_tokenizer())
    row, own = CHATS[program]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("\n".join([json.dumps(row)] * 24))
    (tmp_path / "rewards.py").write_text(REWARD)
    options = SFT.replace("--max_length 16", "" if program == "grpo" else "--max_length 64").split() + own.split()
    command = [
        sys.executable,
        "-m",
        "hf_memmix_cli",
        "run",
        "trl",
        program,
        "--model_name_or_path",
        "student",
        *options,
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(tmp_path)}
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    kind = AutoModelForSequenceClassification if program == "reward" else AutoModelForCausalLM
    tuned, start = kind.from_pretrained(tmp_path / "out").base_model.state_dict(), student.base_model.state_dict()
    assert tuned.keys() == start.keys()
    for layer in range(2):
        name = f"layers.{layer}.self_attn.q_proj.weight"
        assert tuned[name].isfinite().all() and not torch.equal(tuned[name].float(), start[name].float())
