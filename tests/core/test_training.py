"""Training with the tools that users have: loss, Trainer, PEFT, gradient checkpointing, truncated backpropagation."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import constants
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_pt_utils import LabelSmoother

from hf_memmix import MIXERS as MIXER_CLASSES
from hf_memmix import lora_target_modules
from testing import (
    DEFAULT_MIXER,
    FAMILIES,
    MIXERS,
    assert_same,
    build,
    in_turn,
    mixers_of,
    random_ids,
    tiny_config,
    tiny_model,
    word_tokenizer,
)

IDS = random_ids(4, 12)
every_mixer = pytest.mark.parametrize("mixer", MIXERS)
# GKA's gradient is that of the solved system, so it is the same for all splits only where the solver has converged
CONVERGED = {"gka": {"solver_phases": [80]}}


def fit(model, steps=20, rate=1e-2):
    """Losses of a few steps on one batch."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def mixer_gradients(loss, model):
    return torch.autograd.grad(loss, [p for mixer in mixers_of(model).values() for p in mixer.parameters()])


@in_turn(family=FAMILIES, mixer=MIXERS)
def test_every_mixer_parameter_gets_a_gradient(family, mixer):
    model = tiny_model(family, "odd", mixer, fresh=True)
    model(input_ids=IDS, labels=IDS).loss.backward()
    for i, mixer in mixers_of(model).items():
        for name, parameter in mixer.named_parameters():
            assert parameter.grad is not None, f"layer {i}: {name} is not used"
            assert torch.isfinite(parameter.grad).all(), f"layer {i}: {name}"
            assert parameter.grad.any(), f"layer {i}: {name} has gradient zero"


@every_mixer
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_autocast(dtype, mixer):
    model = build(tiny_config("llama", "odd", mixer)).train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model.to(dtype)(input_ids=IDS, labels=IDS).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@every_mixer
def test_gradient_flows_through_a_carried_state(mixer):
    model = build(tiny_config("llama", "all", mixer, options=CONVERGED.get(mixer)), dtype=torch.float64)
    # the rest of the tokens at once, and one token, which steps in place where nothing trains
    for start in (6, IDS.shape[1] - 1):
        expected = mixer_gradients(model(IDS, use_cache=False).logits[:, start:].square().sum(), model)
        first = model(IDS[:, :start], use_cache=True)
        second = model(IDS[:, start:], past_key_values=first.past_key_values, use_cache=True)
        for got, wanted in zip(mixer_gradients(second.logits.square().sum(), model), expected, strict=True):
            assert_same(got, wanted)


# ---- PEFT


@pytest.mark.product_rows(r"(gpt2|gpt_neox)")  # some families stay
@pytest.mark.parametrize(
    ("family", "targets", "mixer"),
    [
        *(("llama", None, mixer) for mixer in MIXERS),
        ("gpt_neox", ["q_proj", "v_proj"], DEFAULT_MIXER),
        ("gemma3_text", "all-linear", DEFAULT_MIXER),
        ("gpt2", ["q_proj", "o_proj"], DEFAULT_MIXER),
    ],
)
def test_lora(family, targets, mixer, tmp_path):
    """Adapters train, are saved and loaded, and merge into the weights; None: `lora_target_modules`."""
    model = build(tiny_config(family, "odd", mixer))
    base = {name: p.clone() for name, p in model.named_parameters()}
    targets = lora_target_modules(model) if targets is None else targets
    config = LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=True)
    adapted = get_peft_model(model, config).train()
    names = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert any(".1." in name and "lora" in name for name in names)
    losses = fit(adapted, 6)
    assert losses[-1] < losses[0]
    adapted.eval()
    with torch.no_grad():
        expected = adapted(input_ids=IDS).logits
    adapted.save_pretrained(tmp_path)
    with torch.no_grad():
        fresh = PeftModel.from_pretrained(build(model.config), tmp_path).eval()
        assert_same(fresh(input_ids=IDS).logits, expected, "adapter loaded", tolerance=1e-6)
        tokens = adapted.generate(input_ids=IDS, max_new_tokens=4, do_sample=False)
        merged = adapted.merge_and_unload()
        assert_same(merged(input_ids=IDS).logits, expected, "merged")
        assert tokens.tolist() == merged.generate(input_ids=IDS, max_new_tokens=4, do_sample=False).tolist()
    changed = {name for name, p in merged.named_parameters() if not torch.equal(p, base[name])}
    assert changed
    assert all("_proj" in name or "dense" in name or "_fc" in name or "query" in name for name in changed)


@every_mixer
@torch.no_grad()
def test_lora_of_convolution_weights_acts_in_every_forward(mixer):
    """PEFT adapts a parameter by a module around its own; steps of decoding must not read the weight past it."""
    model = build(tiny_config("llama", "odd", mixer))
    targets = [f"{name}.weight" for name, _ in mixers_of(model)[1].named_children() if "conv1d" in name]
    if not targets:
        pytest.skip("no convolution")
    plain = model(IDS, use_cache=False).logits
    config = LoraConfig(r=2, target_modules=[], target_parameters=targets, init_lora_weights=False)
    adapted = get_peft_model(model, config).eval()
    expected, cache, steps = adapted(input_ids=IDS, use_cache=False).logits, None, []
    assert not torch.allclose(plain, expected, atol=1e-3)
    for token in IDS.split(1, 1):
        out = adapted(input_ids=token, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        steps.append(out.logits)
    assert_same(torch.cat(steps, 1), expected)


@pytest.mark.parametrize("mixer", MIXERS)
def test_lora_target_modules(mixer):
    """The mixer's projections, and those of attention that is kept; from a model or its configuration."""
    own = set(MIXER_CLASSES[mixer].lora_targets)
    hybrid, pure = (tiny_model("llama", layout, mixer) for layout in ("odd", "all"))
    assert set(lora_target_modules(pure)) == own
    assert set(lora_target_modules(hybrid)) == own | {"q_proj", "v_proj"}
    assert lora_target_modules(hybrid.config) == lora_target_modules(hybrid)
    beside = {**MIXERS[mixer], "local_window": 4 * (mixer != "window")}
    assert set(lora_target_modules(tiny_config("llama", "all", mixer, beside))) == own | {"q_proj", "v_proj"}
    for model in (tiny_model("llama", None), None):
        with pytest.raises(ValueError, match="no memmix model"):
            lora_target_modules(model)


def test_lora_without_targets_is_refused_by_peft():
    """Importing this package does not change PEFT's tables, so PEFT raises its own error."""
    before = dict(constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING)
    model = build(tiny_config("llama", "odd"))
    model.config.to_dict()
    with pytest.raises(ValueError, match="target_modules"):
        get_peft_model(model, LoraConfig(r=2, task_type="CAUSAL_LM"))
    assert before == constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING


# ---- Trainer


def trainer(model, folder, **kwargs):
    rows = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in random_ids(12, 10, seed=7)]
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        max_steps=6,
        save_steps=3,
        learning_rate=1e-3,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
    )
    return Trainer(model=model, args=arguments, train_dataset=rows, **kwargs)


@pytest.mark.parametrize("lora", [False, True], ids=["model", "lora"])
def test_label_smoothing_shifts_the_labels(tmp_path, lora):
    """The Trainer looks the name of the class up, to know whether a token's label is the next token."""
    model = tiny_model("llama", "odd", DEFAULT_MIXER)
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj"])) if lora else model
    run = trainer(model, tmp_path)
    run.label_smoother = LabelSmoother(epsilon=0.1)
    ids = random_ids(2, 9)
    found = run.compute_loss(model.eval(), {"input_ids": ids, "labels": ids.clone()})
    logits = model(ids).logits[:, :-1].float()
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), label_smoothing=0.1)
    assert_same(found, expected)


def parameters(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.product_rows(r"(?!llama-(gka|ska))")  # one training per kind of mixer stays
@pytest.mark.parametrize(("family", "mixer"), [*(("llama", mixer) for mixer in MIXERS), ("gpt2", DEFAULT_MIXER)])
def test_trainer_resumes(family, mixer, tmp_path):
    """Three steps, a stop and three more steps give the same weights as six steps."""
    config = tiny_config(family, "odd", mixer)
    whole = trainer(build(config), tmp_path / "whole")
    whole.train()
    resumed = trainer(build(config, seed=5), tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert resumed.state.global_step == 6
    assert torch.equal(parameters(resumed.model), parameters(whole.model))
    losses = [[row["loss"] for row in t.state.log_history if "loss" in row] for t in (whole, resumed)]
    assert losses[0] == losses[1]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "resumed" / "checkpoint-6")
    assert torch.equal(parameters(loaded), parameters(resumed.model))


@every_mixer
def test_trainer_with_padding_and_packing(mixer):
    """The collators of transformers: padded rows, and rows flattened into one with position ids that start again."""
    rows = [{"input_ids": random_ids(1, n, seed=n)[0].tolist()} for n in (5, 9, 3, 7)]
    model = build(tiny_config("llama", "odd", mixer)).double().train()
    tokenizer = word_tokenizer()
    tokenizer.padding_side = "right"  # else the last pad is asked for the first token
    padded = DataCollatorForLanguageModeling(tokenizer, mlm=False)([dict(row) for row in rows])
    flat = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)([dict(row) for row in rows])
    # flattening drops the first token of every row from the loss, and so does the shift of a padded batch
    losses = [model(**batch, use_cache=False).loss for batch in (padded, flat)]
    assert_same(losses[0][None], losses[1][None])
    for padded, flat in zip(*(mixer_gradients(loss, model) for loss in losses), strict=True):
        assert_same(padded, flat)
