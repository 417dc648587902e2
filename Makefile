# Every target sets up what it needs; a second run reuses it.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: setup demo up test test-equality lint format proto wheel clean help

help:            ## Show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

setup: $(STAMP)  ## Make .venv with everything the commands below need

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "prfaas needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) -V)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (first run only, about a minute; torch is the largest part) ..."
	@$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	@$(BIN)/python -m pip install --quiet --editable ".[embedded,plots,zstd]" --group dev
	@touch $(STAMP)

demo: $(STAMP)   ## Build a tiny hybrid model, start both clusters, replay real traffic, check every claim
	@$(BIN)/prfaas demo

up: $(STAMP)     ## The demo's topology, left running until Ctrl-C
	@$(BIN)/prfaas up

test: $(STAMP)   ## The tests
	$(BIN)/python -m pytest -m "not slow"

test-equality: $(STAMP)  ## Token equality with transformers.generate: every architecture, all lengths (slow)
	$(BIN)/python -m pytest -m slow -o faulthandler_timeout=1800 tests/equality tests/engine

lint: $(STAMP)   ## Format, lint, types and import directions, as CI checks them
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## Apply formatting and safe fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: $(STAMP)  ## Regenerate the gRPC code from transport/proto/*.proto
	$(BIN)/python -m transport.proto.generate

wheel: $(STAMP)  ## Build the wheel, install it into a clean venv and start the CLI from there
	./.ci/check-wheel

clean:           ## Remove what was set up or generated
	rm -rf $(VENV) dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
