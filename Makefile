# make demo: install into .venv and answer a prompt.   make test: install with the developers' tools and run the suite.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
BIN := .venv/bin
PROMPT ?= Explain in three sentences why the sky is blue.

# What was installed is named by a checksum of the sources: an edited, added, deleted or older source installs anew, and
# nothing else does.
SOURCES := $(shell find src csrc CMakeLists.txt pyproject.toml -type f ! -name '*.pyc' ! -name '*.so' 2>/dev/null | LC_ALL=C sort)
VERSION := $(shell cksum $(SOURCES) | cksum | cut -d' ' -f1)
INSTALLED := .venv/installed-$(VERSION)
DEVELOPED := .venv/developed-$(VERSION)

.PHONY: help
help:
	@echo "make demo             answer a prompt with the default model (PROMPT='...' to ask something else)"
	@echo "make test             the whole test suite"
	@echo "make lint             ruff and mypy"
	@echo "make drill            a server among many clients, for minutes (CONNECTIONS=256 REQUESTS=2000 MODEL=smollm2-135m)"
	@echo "make drill-cache      kill processes that use the SSD tier, 200 times, and check every block and answer (ROUNDS=200)"
	@echo "make sanitize         the kernel tests with address and undefined-behaviour sanitizers"
	@echo "make bench-scheduler  time of planning and settling a step for 256 sequences"
	@echo "make clean            remove .venv, build products and caches"

.PHONY: demo
demo: $(INSTALLED)
	@$(BIN)/obole run --max-tokens 200 "$$PROMPT"

.PHONY: test
test: $(DEVELOPED)
	@$(BIN)/python -m pytest

.PHONY: lint
lint: $(DEVELOPED)
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The kernel tests once more, on native code that checks every access and every shift. Leaks are not looked for: Python
# itself has some.
SANITIZED := build/sanitize
.PHONY: sanitize
sanitize: $(DEVELOPED)
	@export PATH="$$PWD/$(BIN):$$PATH"
	cmake -S . -B $(SANITIZED) -G Ninja -DOBOLE_SANITIZE=ON -DCMAKE_BUILD_TYPE=None -DPython_EXECUTABLE="$$PWD/$(BIN)/python" > /dev/null
	cmake --build $(SANITIZED)
	rm -rf $(SANITIZED)/site && mkdir -p $(SANITIZED)/site && cp -r src/obole $(SANITIZED)/site/
	cp $(SANITIZED)/_native*.so $(SANITIZED)/site/obole/kernels/
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
	  ASAN_OPTIONS=detect_leaks=0:alloc_dealloc_mismatch=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	  PYTHONPATH=$(SANITIZED)/site $(BIN)/python -m pytest tests/kernels tests/speculate/test_suffix.py -p no:cacheprovider

# The test of the server among many clients, with more of them, and a real model.
CONNECTIONS ?= 256
REQUESTS ?= 2000
MODEL ?= smollm2-135m
.PHONY: drill
drill: $(DEVELOPED)
	@OBOLE_SOAK_CONNECTIONS="$(CONNECTIONS)" OBOLE_SOAK_REQUESTS="$(REQUESTS)" OBOLE_SOAK_MODEL="$(MODEL)" \
	  $(BIN)/python -m pytest tests/server/test_soak.py -s

# The tests of the SSD tier under kill -9, with more rounds: of the store, and of an engine.
ROUNDS ?= 200
.PHONY: drill-cache
drill-cache: $(INSTALLED)
	@$(BIN)/python benchmarks/kill_drill.py --rounds "$(ROUNDS)"
	@$(BIN)/python benchmarks/kill_engine.py --rounds "$(ROUNDS)"

.PHONY: bench-scheduler
bench-scheduler: $(INSTALLED)
	@$(BIN)/python benchmarks/scheduler.py

.PHONY: clean
clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

export PROMPT

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
	  echo "obole needs Python 3.11 or newer, and $(PYTHON) is not: install one and name it, as in: make demo PYTHON=python3.12" >&2
	  exit 1
	}
	$(PYTHON) -m venv .venv || {
	  rm -rf .venv
	  echo "$(PYTHON) cannot make a virtual environment: install its venv module (on Debian and Ubuntu: apt install python3-venv)" >&2
	  exit 1
	}

# The steps of pip that take long are shown, the rest is not; errors come on standard error, unfiltered.
define install
	@echo "installing $(1) into .venv (the first time takes some minutes: torch is large)"
	$(BIN)/python -m pip install --disable-pip-version-check --no-input '$(1)' \
	  | sed -nu 's/^ *\(Downloading\|Building wheel for\|Installing\) \(.\{1,90\}\).*/  \1 \2/p'
	rm -f .venv/installed-* .venv/developed-*
endef

$(INSTALLED): | .venv/bin/python
	$(call install,.)
	touch $@

$(DEVELOPED): | .venv/bin/python
	$(call install,.[dev])
	touch $(INSTALLED) $@
