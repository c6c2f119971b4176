"""Libraries of other versions than the tested ones are refused; a part that has moved is noticed at run time.

Each way in which transformers could move what `hf_memmix/_generation_hooks.py` relies on is imitated here.
"""

import re
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
from packaging.specifiers import SpecifierSet
from transformers import CONFIG_MAPPING, GenerationMixin, LlamaForCausalLM, LlamaModel, PreTrainedModel

import hf_memmix
from hf_memmix import _generation_hooks as hooks
from hf_memmix import _model_hooks as model_hooks
from hf_memmix import environment, versions
from hf_memmix._transformers import CONFIG_MAPPING_NAMES, model_class_of
from hf_memmix.backbones import BACKBONES
from hf_memmix.given_cache import CACHE_NAMES
from hf_memmix.modeling_memmix import _KINDS
from testing import mixers_of, random_ids, tiny_model

# ---- versions


def specifiers():
    file = Path(hf_memmix.__file__).parents[1] / "pyproject.toml"
    project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
    return {
        name: SpecifierSet(rest)
        for name, rest in (re.match(r"([\w-]+)(.*)", line).groups() for line in project["dependencies"])
    }


@pytest.mark.parametrize("package", versions.RANGES)
def test_the_range_is_that_of_pyproject(package):
    assert SpecifierSet(versions.requirement(package).removeprefix(package)) == specifiers()[package]


@pytest.fixture
def install(monkeypatch):
    """A function that pretends that a version of one of the two packages is installed, and a good one of the other."""
    monkeypatch.delenv(environment.ANY_VERSION, raising=False)

    def pretend(package, text):
        found = {"torch": "2.11.0", "transformers": "5.17.0"} | {package: text}
        monkeypatch.setattr(versions, "version", found.__getitem__)

    return pretend


GOOD = [("torch", "2.11.0+cu130"), ("torch", "2.15.0.dev20261101"), ("torch", "3.0"), ("transformers", "5.17.0.dev0")]
BAD = [
    ("torch", "2.10.1"),
    ("torch", "1.13.1+cu117"),
    ("transformers", "5.16.9"),
    ("transformers", "6.0.0rc1"),
    ("transformers", "unknown"),
    ("transformers", "{}.{}.0.dev0".format(*versions.RANGES["transformers"][1])),
]


@pytest.mark.parametrize(("package", "text"), GOOD)
def test_tested_versions_pass(package, text, install):
    install(package, text)
    versions.check_versions()


@pytest.mark.parametrize(("package", "text"), BAD)
def test_other_versions_are_refused(package, text, install, monkeypatch):
    """One line with the value, the range and the remedy; a variable lets developers pass."""
    install(package, text)
    with pytest.raises(ImportError) as raised:
        versions.check_versions()
    message = str(raised.value)
    assert "\n" not in message
    assert all(
        part in message for part in (f"{package} {text}", versions.requirement(package), environment.ANY_VERSION)
    )
    monkeypatch.setenv(environment.ANY_VERSION, "1")
    versions.check_versions()


def test_a_missing_library_is_named(monkeypatch):
    def version(package):
        raise PackageNotFoundError(package)

    monkeypatch.delenv(environment.ANY_VERSION, raising=False)
    monkeypatch.setattr(versions, "version", version)
    with pytest.raises(ImportError, match=r"torch, which is not installed; run: pip install 'torch>=2.11'"):
        versions.check_versions()


# ---- the cache under another name


def renamed(forward):
    """A forward to which the library hands the cache under a name that nobody knows."""

    def wrapped(*args, **kwargs):
        names = [name for name in CACHE_NAMES if name in kwargs]
        return forward(*args, **{"kv_store" if name in names else name: value for name, value in kwargs.items()})

    return wrapped


@pytest.mark.parametrize("of", (lambda model: model.model, lambda model: mixers_of(model)[3]), ids=("model", "layer"))
def test_the_cache_comes_under_another_name(of, monkeypatch):
    model = tiny_model("llama", "odd")
    monkeypatch.setattr(of(model), "forward", renamed(of(model).forward))
    with pytest.raises(RuntimeError, match=r"'kv_store'.*pip install 'transformers>="):
        model.generate(random_ids(1, 5), max_new_tokens=2)


def test_a_layer_gets_no_cache(monkeypatch):
    model = tiny_model("llama", "odd")
    forward = mixers_of(model)[3].forward

    def without(*args, **kwargs):
        return forward(*args, **{name: value for name, value in kwargs.items() if name not in CACHE_NAMES})

    monkeypatch.setattr(mixers_of(model)[3], "forward", without)
    with pytest.raises(RuntimeError, match="layer 3 does not receive the cache"):
        model(random_ids(1, 5), use_cache=True)


def test_the_cache_is_given_once():
    model = tiny_model("llama", "all")
    cache = hf_memmix.RecurrentStateCache(model.config)
    with pytest.raises(ValueError, match="two names of one argument"):
        model.model(random_ids(1, 5), past_key_values=cache, cache=cache)


@torch.no_grad()
def test_both_names_are_taken():
    """The base model takes the name of every tested release."""
    model = tiny_model("llama", "odd")
    ids, outputs = random_ids(1, 9), []
    for name in ("past_key_values", "cache"):
        cache = hf_memmix.RecurrentStateCache(model.config)
        outputs += [model.model(part, **{name: cache}).last_hidden_state for part in (ids[:, :4], ids[:, 4:])]
        assert int(cache.get_seq_length()) == 9
    assert torch.equal(outputs[1], outputs[3])


# ---- a method that generate() does not call any more, or calls in another way

# and the options with which generate() calls it
CALLED = {
    "_prepare_cache_for_generation": {},
    "_prefill": {},
    "_sample": {},
    "prepare_inputs_for_generation": {},
    "_beam_search": {"num_beams": 2},
    "_assisted_decoding": {"prompt_lookup_num_tokens": 2},
}


@pytest.mark.parametrize("method", CALLED)
def test_a_method_is_not_called(method, monkeypatch):
    """As if the library had taken another name for it."""
    model = tiny_model("llama", "odd")
    monkeypatch.setattr(type(model), method, getattr(GenerationMixin, method))
    with pytest.raises(RuntimeError, match=f"not called .*{method}"):
        model.generate(random_ids(1, 5), max_new_tokens=2, **CALLED[method])


@pytest.fixture
def unchecked():
    """Methods are compared with `RELIED_ON` once per process: forget it before and after."""
    hooks.check_generate.cache_clear()
    yield
    hooks.check_generate.cache_clear()


@pytest.mark.parametrize("method", hooks.RELIED_ON)
def test_a_method_has_moved_or_has_other_parameters(method, monkeypatch, unchecked):
    monkeypatch.setattr(GenerationMixin, method, lambda self, other, *args, **kwargs: None)
    for gone in (False, True):
        hooks.check_generate.cache_clear()
        if gone:
            monkeypatch.delattr(GenerationMixin, method)
        if gone or hooks.RELIED_ON[method]:
            with pytest.raises(RuntimeError, match=f"no method {method}"):
                tiny_model("llama", "odd").generate(random_ids(1, 5), max_new_tokens=2)


def test_inputs_are_prepared_from_other_arguments(monkeypatch, unchecked):
    monkeypatch.setattr(GenerationMixin, "prepare_inputs_for_generation", lambda self, input_ids, **kwargs: {})
    with pytest.raises(RuntimeError, match="prepare_inputs_for_generation has no argument"):
        tiny_model("llama", "odd").generate(random_ids(1, 5), max_new_tokens=2)


@pytest.mark.parametrize("name", [*model_hooks.RELIED_ON, *model_hooks._ATTRIBUTES])
def test_a_model_has_moved(name, monkeypatch):
    """A model class that is made then says so."""
    model_hooks.check_models.cache_clear()
    for owner in [owner for owner in PreTrainedModel.__mro__ if name in vars(owner)]:
        monkeypatch.delattr(owner, name)
    with pytest.raises(RuntimeError, match=f"PreTrainedModel has no (method|attribute) {name}"):
        model_hooks.check_models()
    assert model_hooks.check_models.cache_info().currsize == 0


@pytest.mark.parametrize("family", [name for name, row in BACKBONES.items() if row.refused is None])
def test_the_forward_of_every_family_is_as_expected(family):
    config_class = CONFIG_MAPPING[family] if family in CONFIG_MAPPING_NAMES else None  # newer than this transformers
    for kind in _KINDS:
        model_class = config_class and model_class_of(config_class, kind._auto_class_for)
        if model_class is not None:  # not every family has every head
            hooks.check_forward(model_class, cache=kind._takes_cache)


@pytest.mark.parametrize("model_class", (LlamaModel, LlamaForCausalLM))
def test_a_forward_has_other_arguments(model_class, monkeypatch):
    hooks.check_forward(model_class)
    monkeypatch.setattr(model_class, "forward", lambda self, input_ids, attention_mask, **kwargs: None)
    with pytest.raises(RuntimeError, match=f"{model_class.__name__}.forward has no argument"):
        hooks.check_forward(model_class)


def test_a_loop_of_the_user_may_take_the_place_of_ours():
    model, ids = tiny_model("llama", "odd"), random_ids(1, 5)

    def loop(model, input_ids, **kwargs):
        inputs = model.prepare_inputs_for_generation(input_ids, **kwargs)
        return torch.cat([input_ids, model(**inputs).logits[:, -1:].argmax(-1)], 1)

    out = model.generate(ids, max_new_tokens=1, do_sample=False, custom_generate=loop)
    assert torch.equal(out, model.generate(ids, max_new_tokens=1, do_sample=False))
