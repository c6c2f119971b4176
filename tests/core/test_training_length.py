"""Sequences from which a mixer learns nothing are refused in training, on every path that trains a model."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import DataCollatorForLanguageModeling, DataCollatorWithFlattening, Trainer, TrainingArguments

import hf_memmix
from hf_memmix import MIXERS as MIXER_CLASSES
from testing import MIXERS, build, mixers_of, one_each, random_ids, tiny_config, word_tokenizer

every_mixer = pytest.mark.parametrize("mixer", MIXERS)
REFUSED = "the longest sequence of this batch has {} tokens, but {} learns only from sequences of at least {},"
LONG = 12  # tokens in which every parameter of every other mixer has an effect


def rows(longest):
    """Rows of which only the first is so long."""
    return [{"input_ids": random_ids(1, n, seed=n)[0].tolist()} for n in (longest, 3)]


def plain(longest):
    ids = random_ids(2, longest)
    return {"input_ids": ids, "labels": ids}


def padded(longest):
    tokenizer = word_tokenizer()
    tokenizer.padding_side = "right"  # else the last pad is asked for the first token
    return DataCollatorForLanguageModeling(tokenizer, mlm=False, pad_to_multiple_of=16)(rows(longest))


def packed(longest):
    return dict(DataCollatorWithFlattening(return_seq_idx=True)(3 * rows(longest)))


PATHS = (plain, padded, packed)
every_path = pytest.mark.parametrize("batch", PATHS)


def model_of(mixer, lora=False):
    model = build(tiny_config("llama", "all", mixer)).train()
    if lora:
        targets = MIXER_CLASSES[mixer].lora_targets
        # PEFT starts one of the two matrices at zero, which keeps the gradient from the other one
        model = get_peft_model(model, LoraConfig(target_modules=list(targets), init_lora_weights=False))
    return model


def least_of(model, mixer):
    mixers = mixers_of(model).values()
    return MIXER_CLASSES[mixer].minimum_training_length(next(iter(mixers)).options)


@one_each(mixer=MIXERS, batch=PATHS, lora=(False, True))
def test_every_parameter_of_a_mixer_gets_a_gradient_or_an_error_says_why(mixer, batch, lora):
    model = model_of(mixer, lora)
    least = least_of(model, mixer)
    model(**batch(least if least > 2 else LONG), use_cache=False).loss.backward()
    for layer in mixers_of(model).values():
        trained = {name: p for name, p in layer.named_parameters() if p.requires_grad}
        assert trained
        for name, parameter in trained.items():
            assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
    if least > 2:
        with pytest.raises(ValueError, match=REFUSED.format(least - 1, mixer, least)):
            model(**batch(least - 1), use_cache=False)


def test_the_limit_of_ska_is_one_token_after_a_token_that_reads_a_chunk():
    options = MIXER_CLASSES["ska"].options_class
    limits = {64: {}, 8: {"chunk_size": 8}, 1: {"chunk_size": 1, "power": 0}, 2: {"refresh_every": 1}}
    for chunk, given in limits.items():
        assert MIXER_CLASSES["ska"].minimum_training_length(options(**given)) == chunk + 2


@pytest.mark.parametrize("lora", (False, True), ids=("model", "lora"))
@pytest.mark.parametrize("collator", (None, DataCollatorWithFlattening), ids=("rows", "packed"))
def test_a_trainer_says_so_at_its_first_step(tmp_path, collator, lora):
    config = hf_memmix.memmix_config(tiny_config("llama"), mixer_types=["ska"] * 4)
    model = build(config).train()
    if lora:
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    arguments = TrainingArguments(
        str(tmp_path), max_steps=1, per_device_train_batch_size=2, use_cpu=True, report_to=[], disable_tqdm=True
    )
    collator = {} if collator is None else {"data_collator": collator()}
    for length, refused in ((65, True), (66, False)):
        data = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in random_ids(4, length)]
        run = Trainer(model=model, args=arguments, train_dataset=data, **collator)
        if refused:
            with pytest.raises(ValueError, match=REFUSED.format(65, "ska", 66)):
                run.train()
        else:
            assert run.train().global_step == 1


@every_path
def test_a_memory_beside_a_window_that_gets_no_gradient_is_refused(batch):
    """Only the window would learn. A memory that is frozen is none of its business."""
    model = build(tiny_config("llama", "all", "ska", options={"local_window": 4})).train()
    least = least_of(model, "ska")
    with pytest.raises(ValueError, match=REFUSED.format(least - 1, "ska", least)):
        model(**batch(least - 1), use_cache=False)
    for frozen in (False, True):
        for layer in mixers_of(model).values():
            layer.memory.requires_grad_(not frozen)
        model.zero_grad()
        model(**batch(least - frozen), use_cache=False).loss.backward()
        for layer in mixers_of(model).values():
            assert layer.window.v_proj.weight.grad.abs().max() > 0
            assert frozen or layer.memory.v_proj.weight.grad.abs().max() > 0


def test_what_does_not_train_a_mixer_may_be_short():
    """Evaluation, a forward without gradients, a mixer that is frozen, and a sequence that goes on in a cache."""
    model, ids = model_of("ska"), random_ids(1, 3)
    model.eval()(ids)
    model.train()
    with torch.no_grad():
        model(ids)
    cache = model.eval()(random_ids(1, 9), use_cache=True).past_key_values
    model.train()(ids, past_key_values=cache)
    for layer in mixers_of(model).values():
        layer.requires_grad_(False)
    model(ids, labels=ids).loss.backward()
