"""How much one last digit of bf16 changes the gradients of `distill` with kept attention.

python training/experiments/budget/last_digit.py --out training/experiments/budget/results/last_digit_cpu.json
"""

import argparse
from pathlib import Path

import torch

from hf_memmix.conversion.families import attention_module
from hf_memmix.conversion.records import environment, write_json
from hf_memmix.training.experiments.budget.measure_levers import DEVICE, EIGHT, Step

LENGTH = 64
LAST_DIGIT = 2**-7  # of the largest element, relative


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    torch.manual_seed(0)
    step = Step("distill", "135M", EIGHT, 1, LENGTH)
    step.pair.bf16 = True
    names = ["loss", *(name for name, parameter in step.pair.named_parameters() if parameter.requires_grad)]
    plain, rows = step.gradients(), []
    for layer in [None, *EIGHT[::-2]]:
        hooks = [] if layer is None else [_change(attention_module(step.pair.plain_student, layer).q_proj)]
        changed = step.gradients()
        for hook in hooks:
            hook.remove()
        found = [
            (((ours - theirs).double().norm() / theirs.double().norm().clamp_min(1e-30)).item(), name)
            for ours, theirs, name in zip(changed, plain, names, strict=True)
            if theirs is not None
        ]
        off, name = max(found)
        rows.append({"layer": "none" if layer is None else layer, "off_by": off, "parameter": name if off else ""})
        print(rows[-1], flush=True)
        write_json(
            out, {"experiment": "last_digit", "tokens": LENGTH, "environment": environment(DEVICE), "rows": rows}
        )


def _change(layer: torch.nn.Module):
    """Change the largest element of the gradient of a layer's output in its last digit."""

    def change(gradient):
        gradient = gradient.clone()
        largest = gradient.view(-1)[gradient.abs().argmax()]
        largest.mul_(1 + LAST_DIGIT)
        return gradient

    def hook(module, inputs, output):
        output.register_hook(change)

    return layer.register_forward_hook(hook)


if __name__ == "__main__":
    main()
