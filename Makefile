# Every target sets up its own virtual environment in the checkout; Python >= 3.11 is all it needs.
#   make demo                       convert, align and distil the bundled transformer; table, plot, checkpoint in runs/demo
#   make test                       all tests that run on a CPU; TRANSFORMERS=5.17.0 tests another version in its own venv
#   make lint                       ruff check and ruff format --check
#   make bench                      the kernels on this machine's NVIDIA GPU
#   make card                       figures of README.md and of the model cards against the committed measurements
#   make clean                      remove everything that make made

.DEFAULT_GOAL := help
SHELL := /bin/bash
TRANSFORMERS ?=
VENV ?= .venv$(if $(TRANSFORMERS),-transformers-$(TRANSFORMERS))
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
JOBS ?= 2

# small models: more than one thread a process only makes the two processes wait for each other
test: export OMP_NUM_THREADS = 1
# a thread that waits for another gives its core away soon: less time lost beside other work, a few percent alone
demo: export GOMP_SPINCOUNT = 1000
test demo: export HF_HUB_OFFLINE = 1
test demo: export TOKENIZERS_PARALLELISM = false

.PHONY: help demo test lint bench card clean

help:
	@sed -n '2,8s/^# *//p' Makefile

$(STAMP): pyproject.toml setup.py constraints.txt .ci/venv
	@.ci/venv $(VENV) $(TRANSFORMERS)

demo: $(STAMP)
	$(BIN)/python -m hf_memmix.training.bundled.demo --output runs/demo

test: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) $(PYTEST)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: $(STAMP)
	$(BIN)/python kernels/benchmarks/benchmark.py

card: $(STAMP)
	$(BIN)/python -m hf_memmix.training.documents.readme_tables
	$(BIN)/python model_cards/build.py
	$(BIN)/python -m pytest tests/test_cards.py tests/test_readme.py

clean:
	rm -rf .venv* build dist runs *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
