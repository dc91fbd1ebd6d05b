# One virtual environment, made on first use and brought up to date when a file in INPUTS changes.
# To choose: make test PYTHON=python3.12 VENV=.venv-312 JOBS=1 ARGS="-k early_stopping"

PYTHON ?= python3
VENV ?= .venv
XLA_VENV ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/trainkit/xla-2.9
LIGHTNING ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/trainkit/lightning-2.6.6
LIBRARIES ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/trainkit/libraries
PEERS ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/trainkit/peers
VENDORS ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/trainkit/vendors
JOBS ?= auto
ARGS ?=

RUN := $(VENV)/bin/python
INSTALL := $(RUN) -m pip install --disable-pip-version-check -c constraints.txt
INPUTS := setup.py pyproject.toml constraints.txt

# Tests start Python some thousand times: without its cache each of them would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

# The tests pin one thread per process, so that sums are the same everywhere and two processes fit on two cores.
PYTEST := OMP_NUM_THREADS=1 $(RUN) -m pytest
PARALLEL := -n $(JOBS) --maxprocesses 4 --dist worksteal

# What these tests assert is how the source, the pages and the package are laid out: `make check` runs them.
LAYOUT := tests/test_house.py tests/test_docs.py tests/test_advice.py tests/test_packaging.py

# The strategies, and other tests that have a mark: to import all tests takes a minute.
marked = tests/strategies $(shell grep -rlE 'mark\.$(1)\b' tests --include='test_*.py' --exclude-dir=strategies)

# What `make test-changed` compares with: on a branch, where it left main.
SINCE ?= $(shell git merge-base HEAD main)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test test-changed test-docs test-slow test-fsdp test-zero test-xla test-lightning test-vendors environment \
  xla-environment zero-extensions bench check docs docs-serve dist format clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

demo: $(VENV)/.demo ## train a small GPT on Python's own source files
	$(RUN) -m trainkit demo $(ARGS)

test: $(VENV)/.test ## install what the tests need and run them
	$(PYTEST) $(PARALLEL) $(addprefix --ignore=,$(LAYOUT)) $(ARGS)

test-changed: $(VENV)/.test ## the tests of the rooms that the changes since SINCE (main) reach
	paths=$$($(RUN) tests/helpers/changed.py $(SINCE)) && { [ -z "$$paths" ] || $(PYTEST) $(PARALLEL) $$paths $(ARGS); }

test-docs: $(VENV)/.test ## run the code of the documentation's pages
	$(PYTEST) $(PARALLEL) -m docs tests/docs $(ARGS)

test-slow: $(VENV)/.test $(LIBRARIES)/.made ## the tests marked slow, with all cases of the grids, and those of how soon things happen
	$(RUN) tests/helpers/zero/compile_extensions.py
	TRAINKIT_LIBRARIES="$(abspath $(LIBRARIES))" \
	  $(PYTEST) $(PARALLEL) -m "slow and not prompt and not xla and not docs" $(ARGS) || [ $$? -eq 5 ]  # 5: there are none
	$(PYTEST) -m "prompt and not xla and not docs" $(ARGS) || [ $$? -eq 5 ]
	TRAINKIT_ALL_EXAMPLES=1 $(PYTEST) $(PARALLEL) -m hypothesis $(ARGS) || [ $$? -eq 5 ]

test-fsdp: $(VENV)/.test ## the grids of FSDPStrategy; ARGS='-m fsdp' for all of them
	$(PYTEST) $(PARALLEL) -m "fsdp and not slow" $(call marked,fsdp) $(ARGS)

test-zero: $(VENV)/.test ## the grids of ZeRO; ARGS='-m zero' for all of them; compiles a part of DeepSpeed the first time
	$(RUN) tests/helpers/zero/compile_extensions.py
	$(PYTEST) $(PARALLEL) -m "zero and not slow" $(call marked,zero) $(ARGS)

# Outside of the tree, for all checkouts: see tests/helpers/xla/xla_environment.py. The main environment has a part in some of the tests.
test-xla: $(VENV)/.test ## the tests of XLA, in an environment of their own with torch 2.9 (7 GB); ARGS='-m xla' for all of them
	$(RUN) tests/helpers/xla/xla_environment.py "$(XLA_VENV)"
	PJRT_DEVICE=$${PJRT_DEVICE:-CPU} TRAINKIT_MAIN_PYTHON="$(abspath $(RUN))" OMP_NUM_THREADS=1 "$(XLA_VENV)/bin/python" -m pytest \
	  $(PARALLEL) -m "xla and not slow" $(call marked,xla) $(ARGS)

# For .ci/run, which makes them while other things run. The second one begins before the first has ended, so it uses the Python of
# the machine.
environment: $(VENV)/.test

xla-environment:
	$(PYTHON) tests/helpers/xla/xla_environment.py "$(XLA_VENV)"

zero-extensions: $(VENV)/.test
	$(RUN) tests/helpers/zero/compile_extensions.py

# Alone in a folder outside of the tree: what it depends on is in the environment of the tests.
test-lightning: $(VENV)/.test ## scripts written for Lightning, under Lightning and here
	[ -d "$(LIGHTNING)/lightning" ] || $(INSTALL) --no-deps --target "$(LIGHTNING)" lightning==2.6.6
	TRAINKIT_LIGHTNING="$(abspath $(LIGHTNING))" $(PYTEST) $(PARALLEL) -m lightning tests/moving_over $(ARGS)

test-vendors: $(VENDORS)/.made ## integrations with Optuna, Ray, hydra and DVCLive, in an environment of their own (2 GB)
	OMP_NUM_THREADS=1 "$(VENDORS)/bin/python" -m pytest -m "vendors or not slow" tests/integrations $(ARGS)

# On an idle machine. ARGS chooses: ARGS="--only overhead input", ARGS="--skip faults", ARGS=--quick to try the programs.
bench: $(VENV)/.test $(PEERS)/.made ## the benchmarks, as tables in bench.md; hours; ARGS="--only input", ARGS=--quick
	$(RUN) benchmarks/bench.py --python "$(PEERS)/bin/python" --xla-python "$(firstword $(wildcard $(XLA_VENV)/bin/python) $(RUN))" $(ARGS)

check: $(VENV)/.test docs ## ruff, the layers, mypy, the documentation, and the tests of how all that is laid out
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(VENV)/bin/lint-imports --no-cache
	$(RUN) -m mypy
	$(PYTEST) $(PARALLEL) $(LAYOUT)

docs: $(VENV)/.test ## build the documentation into site/; a warning or a broken link fails
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

docs-serve: $(VENV)/.test ## show the documentation on http://127.0.0.1:8000 and follow changes
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs serve --watch trainkit --watch callbacks --watch strategies

# With the build tools of the environment, and not with those that pip would download for an isolated build.
dist: $(VENV)/.test ## build the wheel and the source distribution into dist/, check them, and try the wheel in a fresh environment
	rm -rf dist
	$(RUN) -m build --no-isolation --outdir dist .
	$(RUN) -m twine check --strict dist/*
	$(RUN) -m check_wheel_contents dist/*.whl
	$(RUN) tests/helpers/try_wheel.py dist/*.whl

format: $(VENV)/.test ## let ruff put the source in order
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

clean: ## remove what builds, tests and tools leave behind (the environment stays)
	rm -rf build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(RUN):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "expected Python 3.10 or newer, got: $$($(PYTHON) --version 2>&1)"; \
	  echo "Name another one:  make $(MAKECMDGOALS) PYTHON=python3.11"; \
	  exit 1; }
	@rm -f $(VENV)/bin/python*
	@$(PYTHON) -m venv $(VENV) || { \
	  rm -f $(RUN); \
	  echo "$(PYTHON) cannot make a virtual environment. On Debian and Ubuntu: apt install python3-venv"; \
	  exit 1; }

# No Python there, or a link to one that has gone: then what the stamps say is worth nothing.
ifeq ($(wildcard $(RUN)),)
.PHONY: $(VENV)/.demo $(VENV)/.test
endif

# The frameworks that trainkit is compared with, for all checkouts. Lightning and ignite are fixed here, since no test needs them.
$(PEERS)/.made: constraints.txt | $(RUN)
	[ -x "$(PEERS)/bin/python" ] || $(RUN) -m venv "$(PEERS)"
	"$(PEERS)/bin/python" -m pip install --disable-pip-version-check -c constraints.txt \
	  torch numpy accelerate transformers lightning==2.6.6 pytorch-ignite==0.5.5
	@touch $@

# Outside of the tree, for all checkouts, because it is large; hydra needs an older omegaconf than the main environment has. Neither
# Lightning nor trainkit is installed in it.
$(VENDORS)/.made: constraints.txt constraints-vendors.txt | $(RUN)
	[ -x "$(VENDORS)/bin/python" ] || $(RUN) -m venv "$(VENDORS)"
	grep -v '^omegaconf==' constraints.txt | cat - constraints-vendors.txt > "$(VENDORS)/constraints.txt"
	"$(VENDORS)/bin/python" -m pip install --disable-pip-version-check -c "$(VENDORS)/constraints.txt" \
	  torch cloudpickle fsspec numpy PyYAML safetensors tqdm xxhash hypothesis pytest scikit-learn tensorboard torchmetrics \
	  dvclive hydra-core joblib optuna optuna-integration 'ray[train,tune]'

# Libraries that are built on Lightning or import Accelerate, with both; trainkit is read from the checkout.
$(LIBRARIES)/.made: constraints.txt | $(RUN)
	[ -x "$(LIBRARIES)/bin/python" ] || $(RUN) -m venv "$(LIBRARIES)"
	"$(LIBRARIES)/bin/python" -m pip install --disable-pip-version-check -c constraints.txt \
	  torch lightning==2.6.6 xxhash tensorboard "darts[torch]==0.48.1" scvi-tools==1.4.2 \
	  accelerate peft transformers diffusers==0.42.1 trl==1.16.0
	@touch $@

# What the demo needs; the tests need that and more.
$(VENV)/.demo: $(INPUTS) | $(RUN)
	$(INSTALL) -e '.[tensorboard,plot]'
	@touch $@

$(VENV)/.test: $(INPUTS) | $(RUN)
	$(INSTALL) -e '.[dev,docs,deepspeed,tensorboard,wandb,mlflow,comet,plot,report,cli,fp8,rich]'
	@touch $@ $(VENV)/.demo
