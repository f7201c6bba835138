# Needs Python 3.11, make and the package registry; everything else lands in .venv.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
TYPED := build/types
MYPY = ../../$(BIN)/python -m mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo test lint format types bench clean

help:  ## Show this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):[^#]*## */  make \1\t/' | expand -t 18

$(STAMP): requirements.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet "$$(grep '^torch==' requirements.txt)"
	$(PIP) install --quiet -r requirements.txt
	$(PIP) install --quiet --no-deps --no-build-isolation -e .
	touch $(STAMP)

install: $(STAMP)  ## Make .venv with every pinned package and perfopt itself

demo: $(STAMP)  ## Train a small GPT with eager and with perfopt, side by side
	$(BIN)/python examples/train_gpt.py $(ARGS)

test: $(STAMP)  ## Run the tests; ARGS="-k softmax -x" passes options to pytest
	$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP)  ## Check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)  ## Format every file and mend what can be mended
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP)  ## Check types on an installed copy, from another directory
	rm -rf build
	$(PIP) install --quiet --no-deps --no-build-isolation --target $(TYPED) .
	cd $(TYPED) && $(MYPY) -p perfopt
	cd $(TYPED) && MYPYPATH=.:../.. $(MYPY) --explicit-package-bases ../../examples ../../benchmarks

bench: $(STAMP)  ## Measure regions, call overhead, steps and first steps; takes minutes
	$(BIN)/python -m benchmarks.regions $(ARGS)
	$(BIN)/python -m benchmarks.overhead $(ARGS)
	$(BIN)/python -m benchmarks.steps $(ARGS)
	$(BIN)/python -m benchmarks.first_step $(ARGS)

clean:  ## Remove what the other commands made, .venv too
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
