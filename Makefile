# `make race` compares methods on emulated hosts; `make test` runs everything that a change must pass.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard native/*.?pp)
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable

# $(call lively,WORK,COMMANDS) runs commands that print nothing for a minute or more, and prints a line every 5 s. The
# shell stops the loop that prints when the commands have ended or are interrupted; if the shell itself is killed, the
# loop notices and ends.
lively = @( trap 'kill $$!; wait; exit' TERM; seconds=0; while sleep 5 & wait $$! && kill -0 $$$$; do \
	seconds=$$((seconds + 5)); echo "$(1): $$seconds s so far"; done ) 2>/dev/null & \
	loop=$$!; trap '{ kill $$loop; wait $$loop; } 2>/dev/null' EXIT; trap 'exit 130' INT; trap 'exit 143' TERM; $(2)

.PHONY: race test test-long lint pytest docs fuzz faults setup clean

race: $(VENV)/.installed
	$(BIN)/thinwire race --report race.html --json race.json
	$(BIN)/thinwire race gpt --methods dense,update --report race-gpt.html --json race-gpt.json

test: lint pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(call lively,mypy,$(BIN)/mypy)
	$(BIN)/codespell
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff

pytest: setup
	$(BIN)/pytest --numprocesses 2 --dist loadfile -m "not long"

# Tests marked `long` take minutes each and run one after the other.
test-long: setup
	$(BIN)/pytest -m long

# A broken link, a missing page or a missing name in the API reference fails the build.
docs: setup
	$(call lively,mkdocs,$(BIN)/mkdocs build --strict)

fuzz: setup
	$(BIN)/python native/fuzz/run.py --seconds $(or $(SECONDS_TO_RUN),60)

# Simulated schedules of faults for the parameter server; a failing seed is printed. JOBS: processes, one for each core
# by default. BUG=NAME tries a deliberate bug.
faults: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.server.simulation --seeds $(or $(SEEDS),10000) \
		$(if $(JOBS),--jobs $(JOBS)) $(if $(BUG),--bug $(BUG))

setup: $(VENV)/.installed-dev

# Two levels of installation, so that `make race` does not wait for the developers' tools.
$(VENV)/.installed: $(SOURCES)
	@echo "Installing thinwire into $(VENV) (about a minute, longer where torch is downloaded)"
	$(call lively,installing,{ test -x $(BIN)/python || $(PYTHON) -m venv $(VENV); } && $(PIP) '.[tools]')
	@touch $@

$(VENV)/.installed-dev: $(SOURCES)
	@echo "Installing thinwire and the developers' tools into $(VENV) (about a minute, longer where torch is downloaded)"
	$(call lively,installing,{ test -x $(BIN)/python || $(PYTHON) -m venv $(VENV); } && $(PIP) '.[dev]')
	@touch $(VENV)/.installed $@

clean:
	rm -rf $(VENV) build site .mypy_cache .ruff_cache .pytest_cache race.html race.json race-gpt.html race-gpt.json
