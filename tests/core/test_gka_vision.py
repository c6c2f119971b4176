"""GKAVision: sizes of the paper, images alone and in a batch, checkpoints, the Auto classes, training, refusals."""

import json
import re
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    ViTImageProcessorPil,
    pipeline,
)

import hf_memmix
from hf_memmix import GKAVisionConfig, GKAVisionForImageClassification, GKAVisionModel
from hf_memmix.mixers import MIXERS
from hf_memmix.models.gka_vision_model import join_windows, split_windows
from hf_memmix_kernels import naive_gka
from testing import assert_same

TINY = {
    "stem_size": 8,
    "embed_dim": 8,
    "depths": [1, 1, 3, 2],
    "attention_heads": [2, 4],
    "mixer_heads": [1, 2],
    "window_sizes": [3, 2],
    "num_labels": 5,
    "initializer_range": 0.2,
}


def tiny(**fields):
    torch.manual_seed(0)
    return GKAVisionForImageClassification(GKAVisionConfig(**{**TINY, **fields})).double().eval()


def images(count=3, height=64, width=64):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 3, height, width, generator=generator, dtype=torch.float64)


# ---- the paper's sizes


def test_the_classes_of_a_preset():
    """1000, as in ImageNet, unless the user names or counts them."""
    named = GKAVisionConfig.preset("tiny", id2label={0: "cat", 1: "dog"}, label2id={"cat": 0, "dog": 1})
    assert named.num_labels == 2 and named.id2label == {0: "cat", 1: "dog"}
    assert GKAVisionConfig.preset("tiny").num_labels == 1000
    assert GKAVisionConfig.preset("tiny", num_labels=3).num_labels == 3


def test_the_tiny_preset_has_the_parameters_of_the_paper():
    with torch.device("meta"):
        model = AutoModelForImageClassification.from_config(GKAVisionConfig.preset("tiny"))
    count = sum(p.numel() for p in model.parameters())
    assert abs(count / 31.8e6 - 1) < 0.005, f"{count / 1e6:.2f} M"
    kinds = [[type(block.mixer).__name__ for block in stage.blocks] for stage in model.model.stages[2:]]
    assert kinds == [["GKAMixer"] * 4 + ["WindowAttention"] * 4, ["GKAMixer"] * 2 + ["WindowAttention"] * 2]
    with pytest.raises(ValueError, match=r"unknown preset 'huge'; known: \['tiny'\]"):
        GKAVisionConfig.preset("huge")


def test_the_code_of_the_card_runs():
    text = (Path(hf_memmix.__file__).parents[1] / "model_cards" / "gka_vision" / "README.md").read_text()
    names = {}
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], names)
    assert names["logits"].shape == (1, 1000) and names["logits"].isfinite().all()


# ---- what is computed


@pytest.mark.parametrize(("height", "width"), [(4, 6), (5, 3), (2, 2)])
def test_windows(height, width):
    """Tokens of a window stand row by row; joining takes the padding away."""
    x = torch.arange(2 * 3 * height * width, dtype=torch.float32).view(2, 3, height, width)
    tokens = split_windows(x, 2)
    assert torch.equal(join_windows(tokens, 2, height, width), x)
    assert torch.equal(tokens[0], x[0, :, :2, :2].flatten(1).T)


def test_a_mixer_is_the_reference_over_a_window():
    """The paper's recurrence, token by token, row by row, between the projections and the read-out of the layer."""
    mixer = tiny().model.stages[2].blocks[0].mixer
    x = torch.randn(4, 9, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        tokens = mixer.project(x, None)
        q, k, v, log_decay, beta, _ = mixer.memory_inputs(tokens, None, None, None)
        solver = {"refinement": tuple(mixer.options.solver_phases), "ridge": mixer.options.ridge}
        y, _ = naive_gka(q, k, v, log_decay, tokens["alpha"], beta, **solver)
        assert_same(mixer(x)[0], mixer.readout(y, x), tolerance=1e-9)


def test_a_mixer_reads_rows_in_order_and_windows_apart():
    stage = tiny().model.stages[2]
    x = images(2)[:, :1].expand(-1, 32, -1, -1)[..., :6, :6].contiguous()
    other = x.clone()
    other[0, :, 1, 4] += 1  # the fifth token of the second window of the first image
    before, after = (stage.blocks[0].mixer(split_windows(t, 3))[0].detach() for t in (x, other))
    changed = (before - after).abs().amax(-1) > 1e-9
    assert changed[1].tolist() == [False] * 4 + [True] * 5
    assert not changed[[0, *range(2, 8)]].any()


@torch.no_grad()
@pytest.mark.parametrize("size", [(64, 64), (96, 33)], ids=str)
def test_an_image_does_not_depend_on_the_others(size):
    model, x = tiny(), images(3, *size)
    together = model(x).logits
    assert_same(torch.cat([model(one[None]).logits for one in x]), together, tolerance=1e-10)
    assert_same(model(x.flip(0)).logits.flip(0), together, tolerance=1e-10)
    assert (together[0] - together[1]).abs().max() > 1e-3


@torch.no_grad()
def test_outputs():
    model = tiny()
    found = model(images(), output_hidden_states=True)
    assert found.logits.shape == (3, 5) and found.loss is None
    sizes = [tuple(t.shape[1:]) for t in found.hidden_states]
    assert sizes == [(8, 16, 16), (16, 8, 8), (32, 4, 4), (64, 2, 2), (64, 2, 2)]
    base = model.model(images())
    assert base.last_hidden_state.shape == (3, 64, 2, 2) and base.hidden_states is None
    assert torch.equal(model.classifier(base.pooler_output), found.logits)
    as_tuple = model(images(), return_dict=False)
    assert isinstance(as_tuple, tuple) and torch.equal(as_tuple[0], found.logits)


@pytest.mark.parametrize("mixer", ["attention", *MIXERS])
def test_every_mixer_trains(mixer):
    """Every parameter gets a finite gradient that is not zero."""
    options = {"head_dim": 16, "state_size": 8} if mixer == "mamba2" else None
    windows = [12, 12] if mixer == "ska" else [4, 4]  # SKA learns from more than 64 tokens
    fields = {"mixer": mixer, "mixer_options": options, "window_sizes": windows}
    model = tiny(**fields, drop_path_rate=0.0, layer_scale=0.5).train()
    for _, parameter in model.named_parameters():
        if not parameter.any():  # a zero output projection would hide what comes before it
            torch.nn.init.normal_(parameter, std=0.1)
    x = images(4, 128, 128)
    model(x, labels=torch.tensor([0, 1, 2, 3])).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


def test_drop_path_drops_rows_in_training_only():
    model = tiny(drop_path_rate=0.9)
    block = model.model.stages[3].blocks[-1]
    x = images(1)[0, 0, :, :4].reshape(64, 4).repeat(1, 16)[:, None].expand(-1, 4, -1)
    with torch.no_grad():
        assert torch.equal(block(x), block(x))
        block.train()
        same = (block(x) == x).flatten(1).all(1)
    assert 0.5 < same.double().mean() < 1  # both branches of a row are dropped with probability 0.81


# ---- training


def test_gradient_checkpointing_changes_nothing():
    model, gradients, calls = tiny(drop_path_rate=0.0).train(), [], []
    for on in (False, True):
        if on:
            model.gradient_checkpointing_enable()
            model.model.stages[2].blocks[0].mixer.register_forward_hook(lambda *_: calls.append(1))
        model.zero_grad()
        model(images(), labels=torch.tensor([0, 1, 2])).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert len(calls) == 2, "forward and once more in backward"
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


# ---- checkpoints and the Auto classes


@torch.no_grad()
def test_save_and_load(tmp_path):
    model = tiny(layer_scale=0.1).float()
    model.model.norm.running_mean.normal_()  # statistics of a training, which are buffers
    model.save_pretrained(tmp_path)
    again, report = AutoModelForImageClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert type(again) is GKAVisionForImageClassification and not any(report.values())
    assert again.config.to_dict() == AutoConfig.from_pretrained(tmp_path).to_dict()
    x = images().float()
    assert torch.equal(again.eval()(x).logits, model(x).logits)
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base) is GKAVisionModel
    assert torch.equal(base.eval()(x).pooler_output, model.model(x).pooler_output)


@torch.no_grad()
def test_half_precision_keeps_decays_in_fp32(tmp_path):
    model = tiny().float()
    model.save_pretrained(tmp_path)
    half = AutoModelForImageClassification.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    kept = {name for name, p in half.named_parameters() if p.dtype == torch.float32}
    assert kept == {name for name, _ in model.named_parameters() if name.endswith(("A_log", "dt_bias"))} and kept
    assert half(images()).logits.dtype == torch.bfloat16
    assert_same(half(images()).logits.float(), model(images()).logits, tolerance=0.1)


def test_initial_weights():
    """Mixers fill themselves: decays as in a language model, not the normal values of a linear layer."""
    mixer = tiny(layer_scale=0.25).model.stages[2].blocks[0].mixer
    assert (mixer.A_log.exp() <= 16).all() and (torch.nn.functional.softplus(mixer.dt_bias) < 0.11).all()
    assert (tiny(layer_scale=0.25).model.stages[0].blocks[0].scale.weight == 0.25).all()


@pytest.mark.skipif(
    getattr(AutoImageProcessor, "is_dummy", False), reason="transformers 5.17 has it only with torchvision"
)
def test_image_processor_and_pipeline(tmp_path):
    """transformers' own processor, by the name in its file or by the configuration of the model."""
    tiny().float().save_pretrained(tmp_path)
    ViTImageProcessorPil(size={"height": 64, "width": 64}).save_pretrained(tmp_path)
    picture = Image.fromarray(numpy.random.default_rng(0).integers(0, 255, (40, 50, 3), dtype=numpy.uint8))
    (file,) = tmp_path.glob("*processor_config.json")
    found = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    assert found(picture, return_tensors="pt").pixel_values.shape == (1, 3, 64, 64)
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "image_processor_type"}))
    assert type(AutoImageProcessor.from_pretrained(tmp_path, backend="pil")) is ViTImageProcessorPil
    scores = pipeline("image-classification", str(tmp_path), image_processor=found, device="cpu")(picture, top_k=5)
    assert len(scores) == 5 and sum(row["score"] for row in scores) == pytest.approx(1)


# ---- refusals


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"depths": [1, 1, 1]}, r"depths=\[1, 1, 1\] must be a list of 4 whole numbers >= 1"),
        ({"window_sizes": [7, 0]}, r"window_sizes=\[7, 0\] must be a list of 2 whole numbers"),
        ({"embed_dim": 8.5}, r"embed_dim=8.5 must be a whole number >= 1"),
        ({"embed_dim": 9, "attention_heads": [5, 9]}, r"attention_heads=\[5, 9\] must divide .* \[36, 72\]"),
        ({"mixer": "cnn"}, r"unknown mixer 'cnn'; known: \['attention', "),
        ({"mixer": "attention", "mixer_options": {"ridge": 1}}, "without a mixer: mixer is 'attention'"),
        ({"mixer_options": {"rigde": 1}}, "rigde"),
        ({"mixer_options": {"local_window": 4}}, "local_window=4"),
        ({"mixer_options": ["ridge"]}, "must be a dictionary of options, or None"),
        ({"mixer": "ska", "mixer_options": {}}, r"ska learns from sequences of 65 tokens .* window_sizes=\[3, 2\]"),
        ({"drop_path_rate": 1.5}, "drop_path_rate=1.5 must be a number from 0 to 0.99"),
        ({"layer_scale": "small"}, "layer_scale='small' must be a number, or None"),
    ],
)
def test_wrong_configurations_are_refused(fields, message):
    with pytest.raises(ValueError, match=message) as error:
        GKAVisionConfig(**{**TINY, **fields})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((0, 3, 64, 64), "pixel_values hold no image; give at least one"),
        ((2, 3, 31, 64), "images of 31 x 64 pixels are too small: .* at least 32 x 32"),
        ((2, 1, 64, 64), "1 channels, the model takes 3"),
        ((3, 64, 64), r"\(3, 64, 64\) must have the shape \[images, channels, height, width\]"),
    ],
)
def test_wrong_images_are_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        tiny()(torch.zeros(shape, dtype=torch.float64))
