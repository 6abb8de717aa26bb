PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed
BIN := $(VENV)/bin

# Processes that share the tests. One where there is a GPU: engines there take what memory is free.
WORKERS ?= $(if $(shell command -v nvidia-smi),0,2)

.PHONY: demo test test-all lint tables clean

demo: $(STAMP)
	$(BIN)/python -m twostroke demo

test: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

test-all: $(STAMP)
	$(BIN)/python -m pytest -m "" --hypothesis-profile=search

lint: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

tables: $(STAMP)
	$(BIN)/python -m twostroke.bench.report bench/results docs/performance.md

clean:
	rm -rf $(VENV)

# Three kinds of machine. A python3 that has a CUDA build of torch: use that build. A GPU, but no such torch: let pip
# choose one. No GPU: the versions that CI pins, with torch among them, so that pip does not fetch a CUDA build.
$(STAMP): pyproject.toml requirements-ci.txt
	@if $(PYTHON) -c "import torch; raise SystemExit(torch.version.cuda is None)" 2>/dev/null; then \
		set -ex; $(PYTHON) -m venv --system-site-packages $(VENV); $(BIN)/python -m pip install -q -e ".[dev,server]"; \
	elif command -v nvidia-smi >/dev/null; then \
		set -ex; $(PYTHON) -m venv $(VENV); $(BIN)/python -m pip install -q -e ".[dev,server]"; \
	else \
		set -ex; $(PYTHON) -m venv $(VENV); $(BIN)/python -m pip install -q -r requirements-ci.txt -e .; \
	fi
	@touch $@
