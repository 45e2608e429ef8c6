# The main commands are `make setup`, `make demo` and `make test`. Each sets up .venv first if it is missing.

PYTHON   ?= python3
VENV     := .venv
BIN      := $(VENV)/bin
FOR_USE  := $(VENV)/.installed
FOR_TEST := $(VENV)/.installed-dev

.PHONY: demo test test-slow lint types docs setup clean versions
.NOTPARALLEL:  # not two installations at once

setup: $(FOR_USE)

# What a user needs, and in addition what the checks need. Installed again only when what is installed has changed;
# without an index reachable, an existing .venv goes on working. $(FOR_TEST) has all of $(FOR_USE), and so makes both.
$(FOR_USE): EXTRAS := demo,serve,encoder,heic
$(FOR_TEST): EXTRAS := dev
$(FOR_USE) $(FOR_TEST): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit("sop_faiss needs Python 3.11 or newer; name one: make PYTHON=python3.11") if sys.version_info < (3, 11) else None'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing .[$(EXTRAS)] into $(VENV) (some minutes the first time: torch is large)"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $(FOR_USE) $@
	@echo "installed; in every new shell: . $(BIN)/activate"

# make demo            built-in photos
# make demo IMAGES=dir your own images, no labels needed
demo: setup
	$(BIN)/python -m sop_faiss.cli.demo $(if $(IMAGES),--images "$(IMAGES)",) --out demo

test: $(FOR_TEST) lint types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

test-slow: $(FOR_TEST)
	$(BIN)/python -m pytest -m slow

lint: $(FOR_TEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@# not CHANGELOG.md, which names keys that were spelled otherwise
	$(BIN)/codespell sop_faiss cli configs studies benchmarks tests docs README.md CONTRIBUTING.md Makefile pyproject.toml

types: $(FOR_TEST)
	@# mypy cannot see that cli/, configs/ and studies/ install below sop_faiss: show it the tree as it is installed
	@rm -rf build/types && mkdir -p build/types/sop_faiss
	@ln -s $(CURDIR)/sop_faiss/* build/types/sop_faiss/ && ln -s $(CURDIR)/cli $(CURDIR)/configs $(CURDIR)/studies build/types/sop_faiss/
	cd build/types && $(CURDIR)/$(BIN)/mypy --cache-dir $(CURDIR)/.mypy_cache --config-file $(CURDIR)/pyproject.toml -p sop_faiss
	cd build/types && MYPYPATH=.:$(CURDIR)/benchmarks $(CURDIR)/$(BIN)/mypy --cache-dir $(CURDIR)/.mypy_cache --config-file $(CURDIR)/pyproject.toml $(CURDIR)/benchmarks/*.py

# docs/ as a site, in build/site; a link or reference that leads nowhere is an error
docs: $(FOR_TEST)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

# The lowest versions that pyproject.toml allows, in build/lowest: make versions PYTHON=python3.11 (needs uv; torch is large)
versions:
	uv venv --clear --python $(PYTHON) build/lowest
	uv pip install --python build/lowest --resolution lowest-direct -e '.[demo,encoder,eval,heic,serve,onnx]'
	uv pip install --python build/lowest pytest pytest-xdist hypothesis beartype
	OMP_NUM_THREADS=1 build/lowest/bin/python -m pytest -m "not slow" -o filterwarnings=default $(TESTS)

clean:
	rm -rf demo build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
