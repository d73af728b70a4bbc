# Two commands do everything: `make race` runs the main job, `make test` passes the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard native/*.?pp)
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable

.PHONY: race test lint pytest fuzz setup clean

race: $(VENV)/.installed
	$(BIN)/thinwire race --report race.html --json race.json

test: lint pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

pytest: setup
	$(BIN)/pytest --numprocesses 2 --dist loadfile

fuzz: setup
	$(BIN)/python native/fuzz/run.py --seconds $(or $(SECONDS_TO_RUN),60)

setup: $(VENV)/.installed-dev

# What users need, and with it what developers need: a race does not wait for linters.
$(VENV)/.installed: $(SOURCES)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing thinwire into $(VENV) (about a minute)"
	@$(INSTALL) '.[tools]'
	@touch $@

$(VENV)/.installed-dev: $(SOURCES)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing thinwire and its tests' tools into $(VENV)"
	@$(INSTALL) '.[dev]'
	@touch $(VENV)/.installed $@

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache race.html race.json
