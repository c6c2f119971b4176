"""Variants of a memory beside a window: what they share, what a delayed memory reads, and their table."""

from types import SimpleNamespace

import numpy
import pytest
import torch

from hf_memmix.training.experiments.smollm2 import beside_window
from tiny_teachers import tiny_teacher, tiny_text, tiny_tokenizer

WINDOW = 8


@pytest.fixture(scope="module")
def args(tmp_path_factory):
    folder = tmp_path_factory.mktemp("beside")
    for write in (tiny_teacher(layers=3), tiny_tokenizer()):
        write.save_pretrained(folder / "teacher")
    (folder / "dev.txt").write_text(tiny_text(300))
    for split in ("train", "heldout"):
        numpy.save(folder / f"{split}.npy", (numpy.arange(200) * 7 % 23).astype(numpy.uint16))
    sizes = {"layers": [1], "windows": [WINDOW], "lrs": [1e-2], "window_lr": 1e-3, "seeds": [0], "steps": 2}
    sizes |= {"rows": [3, 1, 2], "lengths": [24, 32, 32], "deadline": float("inf")}
    return SimpleNamespace(teacher=folder / "teacher", data=folder, **sizes)


def of(variant, mixer="gka"):
    return {"mixer": mixer, "variant": variant, "layer": 1, "window": WINDOW, "lr": 1e-2, "seed": 0}


@pytest.mark.parametrize("mixer", beside_window.MEMORIES)
def test_a_delayed_memory_reads_what_has_left_the_window(args, mixer):
    data, rotary = beside_window.recorded(args.teacher, args.data, (1,), tuple(args.rows), tuple(args.lengths))
    x = data[1]["heldout"][0][:1].float()
    changed = x.clone()
    changed[:, 10] += 1
    for variant, first in (("separate", 11), ("delayed", 10 + WINDOW)):
        memory = beside_window.layer_of(of(variant, mixer), args)[1].memory
        with torch.no_grad():
            before, after = (memory.scan(memory.project(t, rotary), None)[0] for t in (x, changed))
        differs = (before - after).abs().amax((0, 2, 3)) > 1e-6
        # the token's own query differs as well
        assert differs.nonzero().flatten().tolist() == [10, *range(first, 32)]


def test_shared_projections_are_the_window_s(args):
    layers = {variant: beside_window.layer_of(of(variant), args)[1] for variant in beside_window.VARIANTS}
    counts = {variant: sum(p.numel() for p in layer.parameters()) for variant, layer in layers.items()}
    assert counts["separate"] == counts["delayed"] > counts["shared"] == counts["shared, delayed"]


def test_every_variant_is_trained_and_has_a_line(args):
    done = []
    while waiting := [row for row in beside_window.rows_to_run(done, args) if row not in [key(d) for d in done]]:
        done += [row | beside_window.run(row, args) for row in waiting[:1]]
    assert all(row["finite"] and row["trained"]["beyond"] > 0 for row in done)
    environment = {"hardware": "a", "commit": "b"}
    lines = beside_window.table({"rows": done, "settings": vars(args), "environment": environment}).splitlines()
    for row in done:
        if row["variant"]:
            cells = next(line for line in lines if f"| {row['mixer']}, {row['variant']} |" in line)
            assert cells.endswith(f"| {row['trained']['beyond']:.4f} |")


def key(row):
    return {name: row[name] for name in of("")}
