# make scan: scan the full 64-layer model here.   make test: all tests.   make test-fast: those that take under 2 minutes.
# make lint: style and types.   make docs: the generated pages.   make wheel: build, install and try the wheel.
# Each sets up .venv itself, once, and again when pyproject.toml or constraints.txt change.
PYTHON = python3
BIN = .venv/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check --quiet
PROJECT = pyproject.toml constraints.txt
# One thread per worker: small tensors gain nothing from two, and two workers would fight for the cores.
PYTEST = HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

.PHONY: scan test test-fast lint docs wheel

scan: .venv/.installed
	$(BIN)/propcheck scan qwen3.8-27b --memory 5GiB

test: .venv/.installed-dev
	$(PYTEST)

test-fast: .venv/.installed-dev
	$(PYTEST) -m "not slow"

lint: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/.installed-dev
	$(BIN)/python docs/reference.py
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/healthy.py

# The wheel in an empty environment, away from the source tree.
wheel: .venv/.installed-dev
	rm -rf build-out
	$(PIP) wheel --no-deps --wheel-dir build-out .
	$(PYTHON) -m venv build-out/venv
	build-out/venv/bin/python -m pip --disable-pip-version-check --quiet install -c constraints.txt build-out/*.whl
	cd build-out && venv/bin/propcheck --version && venv/bin/propcheck scan tiny --no-plots --quiet

.venv/pyvenv.cfg:
	$(PYTHON) -m venv .venv

.venv/.installed: .venv/pyvenv.cfg $(PROJECT)
	$(PIP) install -c constraints.txt -e .
	touch $@

.venv/.installed-dev: .venv/pyvenv.cfg $(PROJECT)
	$(PIP) install 'pip>=25.1,<26.2'  # the first with --group
	$(PIP) install -c constraints.txt -e '.[hf]' --group dev
	touch $@
