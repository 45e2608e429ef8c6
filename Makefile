# The two commands of the project: `make demo` and `make test`. Each sets up .venv first if it is missing.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test test-slow lint types setup clean

setup: $(STAMP)

# Installed anew only when what is installed has changed; without an index reachable, an existing .venv goes on working.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit("sop_faiss needs Python 3.11 or newer; name one: make PYTHON=python3.11") if sys.version_info < (3, 11) else None'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (some minutes: torch is large)"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

# make demo            the built-in digits
# make demo IMAGES=dir your own images, no labels needed
demo: setup
	$(BIN)/python -m sop_faiss.cli.demo $(if $(IMAGES),--images "$(IMAGES)",) --out demo

test: setup lint types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow"

test-slow: setup
	$(BIN)/python -m pytest -m slow

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@# not CHANGELOG.md, which names keys that were spelled otherwise
	$(BIN)/codespell sop_faiss cli configs benchmarks tests docs README.md CONTRIBUTING.md Makefile pyproject.toml

types: setup
	@# mypy cannot see that cli/, configs/ and studies/ install below sop_faiss: show it the tree as it is installed
	@rm -rf build/types && mkdir -p build/types/sop_faiss
	@ln -s $(CURDIR)/sop_faiss/* build/types/sop_faiss/ && ln -s $(CURDIR)/cli $(CURDIR)/configs $(CURDIR)/studies build/types/sop_faiss/
	cd build/types && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml -p sop_faiss

clean:
	rm -rf demo build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
