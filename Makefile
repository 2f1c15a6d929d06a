# Every target installs what it needs into .venv first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo layers test browser fuzz lint format bench docs check clean help

help:                ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

demo: $(READY)       ## train on handwritten digits, certify, check, attack and write a report, in one to two minutes
	$(BIN)/onelip demo

layers: $(READY)     ## exact norms of layers before and after they are constrained
	$(BIN)/python examples/layers_at_work.py

test: $(READY)       ## run all tests on all cores
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto

browser: $(READY)    ## run the tests of pages, which need Chromium: apt-get install chromium
	@command -v chromium chromium-browser google-chrome >/dev/null || { echo "Chromium is missing: apt-get install chromium"; exit 1; }
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/report tests/export/test_tryit.py

SECONDS ?= 60
fuzz: $(READY)       ## search for false bounds for SECONDS=60 on all cores; failures go to fuzz/corpus/
	OMP_NUM_THREADS=1 $(BIN)/python -m fuzz --seconds $(SECONDS) --seed $$(date +%s) --jobs $$(nproc)

lint: $(READY)       ## ruff (lint, format), pyright, the layers of imports and the word list
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tools/private_imports.py
	$(BIN)/python tools/words.py

format: $(READY)     ## fix lint and format with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)      ## measure speed and memory; writes results/*.json and the tables of the documents
	$(BIN)/python benchmarks/rescaling.py
	$(BIN)/python benchmarks/activation.py
	$(BIN)/python benchmarks/training_step.py
	$(BIN)/python benchmarks/step_cost.py
	$(BIN)/python benchmarks/inference.py
	$(BIN)/python benchmarks/epoch.py
	$(BIN)/python benchmarks/bounds.py
	$(BIN)/python benchmarks/certify.py
	$(BIN)/python benchmarks/update_tables.py

docs: $(READY)       ## build the documentation into site/; it needs no network
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/python tools/cli_reference.py docs/cli-reference.md
	PYTHONPATH=tools $(BIN)/zensical build --strict --clean
	$(BIN)/python tools/check_site.py site

check: lint test     ## run lint and tests: what a change must pass

# constraints.txt pins the build of torch. Installed again when the inputs change.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:               ## remove the environment, caches and builds
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist site
