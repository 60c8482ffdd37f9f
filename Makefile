# Each target is one line; what it does lives in the code it calls.
.DEFAULT_GOAL := help
PY := .venv/bin/python
CDC := .venv/bin/cdc -p sample/airport.yaml
PROPERTIES = $(shell grep -rl "^from tests.support.budget import" tests)
STAMP := .venv/.installed
.PHONY: help setup demo test bench chaos properties check up down status clean fmt lint type deps docs unit browser spark contract integration scenarios lock image

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "%-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## .venv with every pinned dependency (again when requirements.lock changes)

$(STAMP): requirements.lock pyproject.toml compose/setup.sh
	@sh compose/setup.sh

demo: setup ## the whole pipeline on real flights, from an empty machine
	@$(PY) -m cdc.sample.demo

test: setup ## every test, in three parts side by side
	@$(PY) -m tests

properties: setup ## random records and histories, 20 times as many as in test; 500 tables
	@CDC_EXAMPLES=20 .venv/bin/pytest --timeout 7200 $(PROPERTIES)

bench: setup ## limits, a plain rival and this pipeline, in one run (SIZE=S, M or L; ONLY="views growth")
	@$(PY) -m bench --size $${SIZE:-M} $(ONLY:%=--only %)

chaos: setup ## break the running pipeline on purpose, and check it (MINUTES=30 SEED=7; ONLY="postgres slot")
	@$(PY) -m chaos --minutes $${MINUTES:-30} --seed $${SEED:-1} $(ONLY:%=--only %)

# Half of the unit tests' time is waiting, for a server that says nothing or a process that ends: so they are in two parts.
check: setup ## before every commit: lint, types, documentation and the tests that need no server
	@$(MAKE) --no-print-directory --jobs 3 --output-sync unit/s-z unit/a-r spark type docs lint deps

up: setup ## start the servers of the sample pipeline
	@$(CDC) up

down: setup ## stop them
	@$(CDC) down

status: setup ## what runs, how far each view is
	@$(CDC) status

clean: ## remove the virtual environment and tool caches (server data stays)
	@rm -rf .venv *.egg-info .mypy_cache .ruff_cache .import_linter_cache .pytest_cache .hypothesis build

fmt: setup ## format the code
	@.venv/bin/ruff check --fix-only -q . && .venv/bin/ruff format .

lint: setup ## ruff, both ways, and that imports go one way
	@.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/lint-imports --no-logo

type: setup ## mypy, strict, sources and tests
	@.venv/bin/mypy

deps: setup ## every declared dependency is used, every used one is declared
	@.venv/bin/deptry .

docs: setup ## the documentation as a site in build/site, strictly
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet

unit: setup ## no server, no JVM
	@.venv/bin/pytest tests/unit

unit/%: setup
	@.venv/bin/pytest tests/unit/test_[$*]*.py

browser: setup ## the page in the system's chromium
	@.venv/bin/pytest tests/browser

spark: setup ## one local Spark session
	@.venv/bin/pytest tests/spark

contract: setup ## the laws of a sink, for every sink
	@.venv/bin/pytest tests/contract

integration: setup ## two servers at a time
	@.venv/bin/pytest tests/integration

scenarios: setup ## the whole stack, with disruptions
	@.venv/bin/pytest tests/scenarios

image: ## the container image `cdc`, with Docker, or by root with buildah
	@sh compose/service/image.sh

lock: setup ## pin the newest versions that fit pyproject.toml, with hashes
	@sh compose/lock.sh
