# make scan: scan the full 64-layer model here.   make test, make lint: what CI runs.   make docs: the generated pages.
# Each does its own set-up in .venv, once, and again when pyproject.toml or constraints.txt change.
PYTHON = python3
BIN = .venv/bin
PROJECT = pyproject.toml constraints.txt

.PHONY: scan test lint docs

scan: .venv/.installed
	$(BIN)/propcheck scan qwen3.8-27b --memory 5GiB

# One thread a worker: many small tensors gain nothing from two, and two workers would fight for the cores.
test: .venv/.installed-test
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

lint: .venv/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/.installed-test
	$(BIN)/python docs/reference.py
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/healthy.py

.venv/pyvenv.cfg:
	$(PYTHON) -m venv .venv

.venv/.installed: .venv/pyvenv.cfg $(PROJECT)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	touch $@

.venv/.installed-test: .venv/pyvenv.cfg $(PROJECT)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test]'
	touch $@
