"""Echo's models of a million parameters, their training on a task of `tasks.py`, and their measurement.

The three models have 4 layers. The outer two are Mamba-2; the inner two are Mamba-2, softmax attention or SKA. A model
answers with the most likely of the 50 values, so chance is 2 %.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_memmix import EchoConfig, EchoForCausalLM
from hf_memmix.mixers import ATTENTION
from hf_memmix.mixers.ska import SKAMixer
from hf_memmix.swap import memory_mixers
from hf_memmix.training.experiments.common.fit import autocast, fit
from hf_memmix.training.experiments.common.harness import device
from hf_memmix.training.experiments.common.mqar import TEST_SEED
from hf_memmix.training.experiments.echo.tasks import VALUES, Examples, draw_examples, mixture

MODELS = {
    "ssm": {"num_ska_layers": 0},
    "attention": {"num_ska_layers": 0, "attention_layers": [1, 2]},
    "ska": {},
}
TRAINED = ("system_prompt", "tool_trace")
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
PAIRS = (2, 4, 8, 16)
BATCHES_PER_DRAW = 64
FORWARD_TOKENS = 2**16  # tokens of one forward in a measurement
DEV_SEED = TEST_SEED // 2  # training seeds are smaller, so development and test sequences are new to the models
# share of the steps at the full rate: the loss stays on a plateau for thousands of steps before recall is learned, and
# a rate that decays during the plateau keeps the loss there
CONSTANT_RATE_SHARE = 0.6


def build(model: str, seed: int, layers: tuple[str, ...] | None = None, **ska) -> EchoForCausalLM:
    """One of `MODELS` on the device.

    Args:
        layers: the mixer of each layer; default: those of the model.
        ska: options of its SKA layers that differ from the preset.

    Raises:
        ValueError: there is no such model.
    """
    if model not in MODELS:
        raise ValueError(f"unknown model {model!r}; known: {sorted(MODELS)}")
    fields = MODELS[model] if layers is None else {"mixer_types": list(layers)}
    mixers = EchoConfig.presets["1m"]["mixers"]
    mixers = mixers | {"ska": mixers["ska"] | ska}
    torch.manual_seed(seed)
    return EchoForCausalLM(EchoConfig.preset("1m", **fields, mixers=mixers)).to(device())


def memory_of(model: str) -> int:
    """How many numbers the memory of one inner layer holds for one sequence, without the last inputs of convolutions.

    The memory of attention grows: its number is 0.
    """
    config = EchoConfig.preset("1m", **MODELS[model])
    if config.mixer_types[1] == ATTENTION:
        return 0
    with torch.device("meta"):
        layer = memory_mixers(EchoForCausalLM(config))[1]
    return sum(math.prod(shape) for name, (shape, _) in layer.state_shapes(1).items() if not name.startswith("conv"))


@torch.no_grad()
def set_ska(model, **options) -> None:
    """Change options of the SKA layers of a trained model."""
    for layer in model.modules():
        if isinstance(layer, SKAMixer):
            layer.options = dataclasses.replace(layer.options, **options)


def seeded_generator(seed: int) -> torch.Generator:
    return torch.Generator(device()).manual_seed(seed)


def value_logits(model, examples: Examples, masked: bool) -> Tensor:
    """Logits [B, n, V] at every question; with `masked`, SKA layers store the tokens of facts only."""
    extra = {"action_mask": examples.action_mask} if masked else {}
    hidden = model.model(input_ids=examples.ids, use_cache=False, **extra).last_hidden_state
    index = examples.positions[..., None].expand(-1, -1, hidden.shape[-1])
    return model.lm_head(hidden.gather(1, index)).float()


def accuracy_of(logits: Tensor, examples: Examples) -> Tensor:
    """The share of questions whose most likely value is the right one; logits [B, n, V] of `value_logits`."""
    values = logits[..., VALUES.start : VALUES.stop].argmax(-1) + VALUES.start
    return (values == examples.values).float().mean()


def learn(model, batches: Iterable[Examples], masked: bool, lr: float, args: SimpleNamespace) -> dict:
    """Train for `args.steps` steps, one batch per step; the loss counts the answers only."""
    stream_of = iter(batches)

    def batch_of(step: int) -> tuple[Tensor, ...]:
        batch = next(stream_of)
        return batch.ids, batch.positions, batch.values, batch.action_mask

    def loss_of(*tensors: Tensor) -> Tensor:
        examples = Examples(*tensors)
        return F.cross_entropy(value_logits(model, examples, masked).flatten(0, 1), examples.values.flatten())

    return fit(model, loss_of, args.steps, lr, args, batch_of, constant_rate_share=CONSTANT_RATE_SHARE)


def training_batches(seed: int, batch: int, length: int, pairs: Iterable[int]) -> Iterator[Examples]:
    """Batches of the two trained tasks, with each of the numbers of pairs, all in equal parts and of one length."""
    generator = seeded_generator(seed)
    while True:
        yield from mixture(TRAINED, batch, length, list(pairs), generator, BATCHES_PER_DRAW)


@torch.no_grad()
def measure(model, task: str, length: int, pairs: int, sequences: int, masked: bool, seed: int) -> dict:
    """Loss and accuracy on sequences that the seed draws; training uses other seeds."""
    model.eval()
    batch = max(1, min(sequences, FORWARD_TOKENS // length))
    generator, losses, right = seeded_generator(seed), [], []
    for _ in range(-(-sequences // batch)):
        examples = draw_examples(task, batch, length, pairs, generator)
        with autocast():
            found = value_logits(model, examples, masked)
        losses.append(F.cross_entropy(found.flatten(0, 1), examples.values.flatten()))
        right.append(accuracy_of(found, examples))
    return {"loss": torch.stack(losses).mean().item(), "accuracy": torch.stack(right).mean().item()}


def training_loss(model, masked: bool, length: int, pairs: Iterable[int], sequences: int) -> float:
    """Mean loss on development sequences of the trained tasks; learning rates are chosen by it."""
    found = [measure(model, task, length, n, sequences, masked, DEV_SEED)["loss"] for task in TRAINED for n in pairs]
    return sum(found) / len(found)


@torch.no_grad()
def decode_agreement(model, masked: bool, length: int, pairs: int, sequences: int) -> float:
    """Share of answers that are equal when the model reads token by token through its cache and in one forward."""
    model.eval()
    examples = draw_examples(TRAINED[0], sequences, length, pairs, seeded_generator(DEV_SEED))
    cache, steps = None, []
    with autocast():
        whole = value_logits(model, examples, masked)
        for t in range(length):
            extra = {"action_mask": examples.action_mask[:, t : t + 1]} if masked else {}
            out = model(input_ids=examples.ids[:, t : t + 1], past_key_values=cache, use_cache=True, **extra)
            cache = out.past_key_values
            steps.append(out.logits[:, 0].float())
    index = examples.positions[..., None].expand(-1, -1, whole.shape[-1])
    answers = torch.stack(steps, 1).gather(1, index)
    return (answers.argmax(-1) == whole.argmax(-1)).float().mean().item()
