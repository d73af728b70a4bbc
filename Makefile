# Two commands do everything: `make race` runs the main job, `make test` passes the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard native/*)

.PHONY: test lint pytest fuzz setup clean

setup: $(VENV)/.installed

$(VENV)/.installed: $(SOURCES)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

test: setup lint pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

pytest: setup
	$(BIN)/pytest

fuzz: setup
	$(BIN)/python native/fuzz/run.py --seconds $(or $(SECONDS_TO_RUN),60)

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache
