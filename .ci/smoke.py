"""What an installed wheel must do outside the checkout: python smoke.py (in an empty folder)."""

import subprocess
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_memmix
from hf_memmix.assets import asset_path
from hf_memmix.conversion import convert_model

ROOT = Path(__file__).resolve().parents[1]
assert ROOT not in Path(hf_memmix.__file__).parents, f"imported from the checkout: {hf_memmix.__file__}"

sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 97}
teacher = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, head_dim=32))
student = convert_model(teacher, mixer="gka", keep=[1])
student.save_pretrained("student")

load = """
import sys
import torch
from transformers import AutoModelForCausalLM
import hf_memmix
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
out = model.generate(torch.arange(8)[None], max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
print(type(model).__name__, out.tolist())
"""
inputs = torch.arange(8)[None]
expected = student.generate(inputs, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None).tolist()
for folder, wanted in (("student", expected), (asset_path("tiny_gka"), None)):
    printed = subprocess.run(
        [sys.executable, "-c", load, str(folder)], check=True, capture_output=True, text=True
    ).stdout
    print(printed.strip())
    assert wanted is None or str(wanted) in printed

for name in ("tiny_teacher", "tiny_gka", "heldout.txt", "dev.txt", "train.txt"):
    assert Path(asset_path(name)).exists(), name
memmix = Path(sys.executable).with_name("memmix")
assert "convert" in subprocess.run([memmix, "--help"], check=True, capture_output=True, text=True).stdout
print("smoke test passed")
