# make demo     install, train the example under `otel-dflash run`, show where its time went
# make engines  build collector, Jaeger and Prometheus for `otel-dflash stack up` and the tests, and Kafka for the tests: 23 minutes on two cores, once
# make test     all tests (PYTEST_FLAGS="-k ring" for some)
# make lint     ruff and mypy --strict; make format lets ruff fix what it can
# make docs     generate docs/settings.md and docs/api.md
# make instructions  what the hot path costs in instructions, held to its baseline (needs valgrind)
# make bench    the tables behind every speed claim
# make clean    remove .venv and caches
#
# Needs only make and Python >= 3.10; everything else goes into .venv.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
UV     := $(BIN)/uv pip install --quiet --python $(BIN)/python

.DEFAULT_GOAL := help
.PHONY: help demo engines test lint format docs instructions instructions-baseline bench clean

help:
	@sed -n 's/^# make/make/p' Makefile

# --- what people run

demo: $(VENV)/.demo
	$(BIN)/otel-dflash run -- $(BIN)/python examples/dflash/train.py $(DEMO_FLAGS)

engines: $(VENV)/.base
	$(BIN)/otel-dflash stack build
	$(BIN)/python -m tests.stack.kafka_build

test: $(VENV)/.dev
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(VENV)/.dev
	$(BIN)/python -m docs.generate

instructions: $(VENV)/.base
	$(BIN)/python -m tests.instructions.gate

instructions-baseline: $(VENV)/.base  # this Python's lines anew, on purpose
	$(BIN)/python -m tests.instructions.gate --renew

bench: $(VENV)/.dev
	@for file in tests/bench/bench_*.py; do echo "== $$file"; $(BIN)/python $$file || exit 1; done

clean:
	rm -rf $(VENV) dist .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# --- the environment, made once; a stamp is older than pyproject.toml when that changed

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || \
	  { echo "Python >= 3.10 is needed, and $(PYTHON) is `$(PYTHON) --version 2>&1`; choose another: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "$(PYTHON) has no venv module; install it (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@echo "making $(VENV), once"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv  # torch in half a minute instead of several
	@touch $@

$(VENV)/.base: $(VENV)/.python pyproject.toml
	@echo "installing otel-dflash, once"
	@$(UV) --editable .
	@touch $@

$(VENV)/.demo: $(VENV)/.base
	@echo "installing what the demo needs (torch), once"
	@$(UV) --editable '.[demo]'
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	@echo "installing what the tests need, once"
	@$(UV) --group dev
	@touch $@
