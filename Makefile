PYTHON ?= python3.11
export PYTHON
BIN := .venv/bin

.PHONY: help setup demo check test test-full lock clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' Makefile

setup:  ## make .venv hold the locked environment; PYTHON= names another Python 3.11 than python3.11
	@.ci/setup

demo: setup  ## find the heads of six capabilities in a small real model; the study goes to runs/demo
	$(BIN)/cs-localize demo

check: setup  ## lint, formatting, types and the order of the rooms
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy benchmarks  # apart: jobs and benchmarks both have a sweep.py
	$(BIN)/lint-imports

test: check  ## the checks, then every test but the longest
	$(BIN)/python -m pytest -ra --junitxml=.venv/tests.xml

test-full: check  ## the checks, then every test
	$(BIN)/python -m pytest -ra -m ""

lock:  ## resolve the newest versions of everything and write .ci/requirements.lock
	@echo "lock: resolving with $(PYTHON) in a new environment; a minute or two"
	@rm -rf .venv-lock
	@$(PYTHON) -m venv .venv-lock
	@.venv-lock/bin/python -m pip install -qq --disable-pip-version-check packaging
	@.venv-lock/bin/python .ci/lock.py
	@rm -rf .venv-lock

clean:  ## remove the environment and every cache; studies in runs/ stay
	rm -rf .venv .venv-lock build dist *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
