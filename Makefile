# Every target does the set-up it needs; each line is a command that a person could type.
# PYTHON chooses the interpreter for .venv, ACCEL=gpu the lock for NVIDIA GPUs, PRESET the parameters of the demo.
PYTHON ?= python3
ACCEL ?=
PRESET ?=
SETUP = $(PYTHON) tools/setup.py --accel "$(ACCEL)" $(if $(filter file,$(origin PYTHON)),,--this-python)

export PATH := $(CURDIR)/.venv/bin:$(PATH)
export DO_NOT_TRACK := 1
export DVC_NO_ANALYTICS := 1
export VLLM_NO_USAGE_STATS := 1
export HF_HUB_DISABLE_TELEMETRY := 1

.PHONY: help setup setup-dev demo test mutations parity replay bench lint format deps

help:
	@echo "make demo    install, train a small model with PPO through dvc repro, show base against final"
	@echo "make demo PRESET=sums  the same with parameters from presets/ (docs/presets.md); they stay in params.yaml"
	@echo "make test    install, run all tests (real vLLM included)"
	@echo "make parity  install TRL into a venv of its own, compare its PPO numbers with ours"
	@echo "make mutations  break the maths line by line; a test must notice each"
	@echo "make bench   measure speed and memory against bare loops on this machine (docs/performance.md)"
	@echo "make lint    ruff and mypy"
	@echo "make format  ruff format"
	@echo "make replay ITER=2  run an iteration again in a temporary copy and compare every byte"
	@echo "make deps    write the code files that each stage imports into dvc.yaml"
	@echo "make setup   only install; ACCEL=gpu for NVIDIA GPUs"

setup:
	@$(SETUP)

setup-dev:
	@$(SETUP) --dev

demo: setup
	$(if $(PRESET),rlhf preset "$(PRESET)")
	dvc repro
	python -m rlhf_core.report.table

test: setup-dev
	python -m pytest -n 2

parity: setup
	python -m tools.setup_parity
	.venv-parity/bin/python -m pytest tests/parity

mutations: setup-dev
	python -m tools.mutate

replay: setup
	rlhf replay "$(ITER)"

bench: setup
	python -m benchmarks.advantages
	python -m benchmarks.score
	python -m benchmarks.ppo_update
	dvc repro ingest
	python -m benchmarks.rollout

lint: setup-dev
	ruff check .
	ruff format --check .
	mypy

format: setup-dev
	ruff format .

deps: setup-dev
	python -m tools.update_deps
