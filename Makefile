# Every target does its own set-up: it needs only make and Python 3.11 or later. `make` alone says what there is.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CACHE := $(abspath $(or $(RETRAIN_CACHE),$(HOME)/.cache/retrain))
SERVERS := $(CACHE)/servers
# A process for each core; one that has run out of tests takes some from the others, so that all are busy until the end. Bytecode is kept
# even where the environment says otherwise: dozens of tests start processes, which would all compile the package again.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal
# The short tests wait for children a fifth of their time: one process more than there are cores to use.
ONE_MORE := $(shell echo $$(($$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN) + 1)))
# 3.11 first: constraints.txt pins the versions that the tests run on for it.
PYTHON ?= $(shell for name in python3.11 python3 python3.12 python3.13 python3.14 python; do \
	"$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$name" && break; done)

.DEFAULT_GOAL := help
.PHONY: help setup run conclude first-look replications test test-slow test-faults test-faults-long coverage test-newest test-servers test-environments test-max lint types docs docs-check site check clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup: $(STAMP) ## install into .venv, again only when pyproject.toml or constraints.txt changed

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "retrain needs Python 3.11 or later; name it with make PYTHON=/path/to/python3.11" >&2; exit 3; }
	@echo "Installing into $(VENV): about 2.3 GB, which takes minutes and prints nothing"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,report]"
	@touch $@

run: $(STAMP) ## train the lab model on arithmetic and show what it learned (minutes on 2 cores)
	$(BIN)/retrain examples/lab.toml --overwrite
	@$(BIN)/python scripts/plot_runs.py logs/lab --output logs/lab/curve.svg

conclude: $(STAMP) ## a campaign that concludes, and a null that does not, with the report (minutes on 2 cores; continues where it stopped)
	@if [ -f logs/conclude/manifest.json ]; then $(BIN)/retrain examples/conclude.toml --resume logs/conclude; \
		else $(BIN)/retrain examples/conclude.toml; fi
	@$(BIN)/retrain report logs/conclude
	@$(BIN)/python -m webbrowser -t "file://$(abspath logs/conclude/report.html)" >/dev/null 2>&1 || true

first-look: $(STAMP) ## README's first picture: the standard ablation on the lab, and the credit of each token (minutes on 2 cores; continues where it stopped)
	$(BIN)/retrain examples/campaign_lab.toml --batch-size 16 --campaign-max-steps 20 --campaign-parallel true --campaign-max-workers 2 \
		--log-dir logs/first-look $(if $(wildcard logs/first-look/manifest.json),--resume logs/first-look)
	@$(BIN)/python scripts/first_look.py logs/first-look maxrl+gtpo_hicra --output docs/first-look.png

replications: $(STAMP) ## benchmarks/results/replications: four claims of papers on the lab (an hour on 2 cores; continues where it stopped; ONLY=nsr), or with SMOLLM2=FOLDER on that model (hours)
	$(BIN)/python scripts/replications.py $(ONLY) $(if $(SMOLLM2),--smollm2 "$(SMOLLM2)")

test: $(STAMP) ## the tests and the ten slowest, in one process more than there are cores
	$(PYTEST) --numprocesses $(ONE_MORE) --durations=10
	@echo "Left out: whole runs that take long (make test-slow), tests/servers, which need real inference servers (make test-servers), and tests/environments (make test-environments)."

test-slow: $(STAMP) ## the tests that are marked slow: runs in many processes, long pages
	$(PYTEST) -m "slow and not faults"

test-faults: $(STAMP) ## kills, damaged folders, hostile code and text: the rows of docs/reliability.md (minutes)
	$(PYTEST) -m faults

test-faults-long: $(STAMP) ## the same with more kills and stops, every disk operation and 1,000 steps (an hour)
	$(PYTEST) -m faults --kills 20 --stops 50 --long

coverage: $(STAMP) ## both, and which lines of the package no test runs (slower)
	$(PYTEST) -m "not servers and not environments and not max" --cov --cov-report=term:skip-covered

test-newest: $(STAMP) ## import the package and run the lab on the newest other Python of this machine, unpinned but for torch
	$(BIN)/python scripts/newest_python.py

test-servers: $(STAMP) ## install the real servers in RETRAIN_CACHE (~/.cache/retrain; gigabytes) and test against them
	$(BIN)/python scripts/test_servers.py

test-max: $(STAMP) ## the same for Modular's MAX, whose first start compiles for minutes
	@mkdir -p "$(SERVERS)"; PYTHON=$(BIN)/python scripts/servers/max-install.sh "$(SERVERS)/max"
	RETRAIN_SERVERS="$(SERVERS)" $(BIN)/python -m pytest -m max tests/servers -rP

test-environments: $(STAMP) ## environments of verifiers, reasoning_gym and OpenEnv, each library in an environment of its own
	$(BIN)/python scripts/test_environments.py

lint: $(STAMP) ## ruff, and the budget of each folder
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/python scripts/house.py --budget

types: $(STAMP) ## mypy --strict over the package
	$(BIN)/mypy

docs: $(STAMP) ## write the documents that are made from the code: keys, metrics, commands
	$(BIN)/python scripts/docs_check.py --write

site: ## the manual as a site in build/site, strictly (installs mkdocs-material in RETRAIN_CACHE, 60 MB)
	@test -x "$(CACHE)/site/bin/latex2mathml" || { $(PYTHON) -m venv "$(CACHE)/site" && \
		"$(CACHE)/site/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt mkdocs mkdocs-material latex2mathml; }
	NO_MKDOCS_2_WARNING=1 "$(CACHE)/site/bin/mkdocs" build --strict --quiet
	@echo "Site: build/site; look at it with: python3 -m http.server --directory build/site"

docs-check: $(STAMP) ## commands, files and configurations in the documents; generated files
	$(BIN)/python scripts/docs_check.py

check: lint types docs-check site test test-slow test-faults test-newest test-environments test-servers ## everything that .ci/run does

clean: ## caches and the environment; never a run
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
