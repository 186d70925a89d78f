PYTHON ?= python3
VENV ?= .venv
export NO_MKDOCS_2_WARNING = 1
BIN = $(VENV)/bin

.PHONY: run test test-all test-method tables readme docs clean

run: $(VENV)/.run
	$(BIN)/fedbayes quickstart

test: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

test-all: test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[simulation]'
	$(BIN)/python -m pytest -n 2 --dist loadfile -m slow

# All common tests of one method: make test-method NAME=fedlinear
test-method: tables
	$(BIN)/python -m pytest -n 0 tests --method $(NAME)

# What follows from the registry: the type stub, README's table and the reference of algorithms
tables: $(VENV)/.test
	$(BIN)/python docs/tables.py

# README's first screen, from a run of the quickstart; after a change of defaults
readme: $(VENV)/.test
	$(BIN)/python docs/quickstart.py

docs: $(VENV)/.test
	$(BIN)/mkdocs build --strict

$(VENV)/.run: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/.test: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) site build
