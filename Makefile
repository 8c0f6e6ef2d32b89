# Towline's targets. All of them work in a virtual environment of the checkout's own, .venv, which `setup` makes.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
EXTRAS := torch,local,fast,checksums,dev

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint clean bench-weights

help:
	@echo "make setup   the virtual environment (the other targets call it; nothing to do: under a second)"
	@echo "make demo    a whole RL run on this machine: towline up examples/demo.toml"
	@echo "make test    ruff, mypy, pytest"
	@echo "make lint    ruff and mypy alone"
	@echo "make bench-weights   weight deltas on real optimiser steps, against others' ways (both cores idle; ARGS=--check)"
	@echo "make clean   remove caches and runs/; .venv stays"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing (a few minutes the first time)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@

demo: setup
	@$(BIN)/towline up examples/demo.toml

$(VENV)/.stamp-bench: $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$(EXTRAS),bench]'
	@touch $@

bench-weights: $(VENV)/.stamp-bench
	@$(BIN)/python -m loadtests.weights $(ARGS)

lint: setup
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --quiet --check || { echo "run: $(BIN)/ruff format"; exit 1; }
	@$(BIN)/mypy

test: lint
	@$(BIN)/pytest --quiet

clean:
	@rm -rf runs dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find libs services examples tests -name __pycache__ -type d -prune -exec rm -rf {} +
