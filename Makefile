# `make demo` and `make test` each work alone on a fresh machine: python3 >= 3.11, make and a package index.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: env demo test test-slow check docs clean

env: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v >= (3, 11) else f"Expected python3 >= 3.11, got {v[0]}.{v[1]}. Pass PYTHON=/path/to/python3.11.")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test,check,docs]'
	@touch $(STAMP)

demo: env
	$(BIN)/silobayes demo

# The tests of a file run in one process, so that what they share is compiled once.
test: env
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: env
	$(BIN)/python -m pytest -n 2 -m slow

check: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

docs: env
	$(BIN)/mkdocs build --strict

clean:
	rm -rf .venv build dist site .pytest_cache .ruff_cache .hypothesis
