# Everything runs in .venv, which is made on demand and brought up to date whenever pyproject.toml changes.
# Needs Python 3.11 or newer and make, nothing else:  make demo   or   make test PYTHON=python3.12

PYTHON  ?= python3
WORKERS ?= 2
# make test-pythons: those to try, by name or path.
PYTHONS ?= python3.11 python3.12 python3.13 python3.14
# make gpu: a Python with meshcast's packages and a torch for CUDA, the folder of its files, and minutes of a slice.
GPU_PYTHON ?= python3
MEASURED   ?= measured
MINUTES    ?= 9
# make fuzz, make kills, make mutants: number of files or attacks in all, and the first seed.
N    ?= 100000
SEED ?= 0
VENV    := .venv
BIN     := $(VENV)/bin
# Python compiles what it imports; compiling all of the packages would take half of the installation's time.
PIP     := $(BIN)/python -m pip install --no-compile --quiet --quiet --disable-pip-version-check

BASE := $(VENV)/.base-installed
DEV  := $(VENV)/.dev-installed
SITE := $(VENV)/.site-installed

OLDEST       := .venv-oldest
OLDEST_TORCH := $(shell sed -n 's/^torch = \["torch>=\([0-9.]*\)"\].*/\1/p' pyproject.toml)

# Containers often forbid bytecode files; then each of the processes that tests start compiles all modules anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: demo test test-all test-oldest-torch test-pythons fuzz kills mutants gpu lint bench golden snapshots docs docs-accuracy docs-catalog docs-claims docs-envelope docs-excerpts docs-figures \
        docs-benchmark docs-performance docs-job docs-learning docs-models docs-pages docs-peak-errors docs-plots docs-python docs-readme docs-regimes docs-schemes docs-site papers clean help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-17s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(BASE) ## forecast two well-known runs, sweep and scale, compare with published runs; figures in out/
	@mkdir -p out
	$(BIN)/meshcast predict examples/llama3-70b-dgx-h100.yaml --plot out/llama3-70b/
	$(BIN)/meshcast predict examples/gpt3-175b-dgx-a100.yaml --plot out/gpt3-175b/
	$(BIN)/meshcast sweep examples/sweep-llama3-70b.yaml --out out/sweep.parquet --restart
	$(BIN)/meshcast plot out/sweep.parquet --out out/sweep.png --title "Llama 3 70B on 512 H100"
	$(BIN)/meshcast scale examples/llama3-8b-dgx-h100.yaml --gpus 8..4096 --plot out/scaling.png
	$(BIN)/meshcast validate published --plot out/published/

test: $(DEV) ## run the tests (WORKERS=2 processes)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -q

test-all: $(DEV) ## the same with slow tests and up to sixteen times as many drawn examples
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -q --hypothesis-profile=all -m "not gpu and not network"

test-oldest-torch: $(OLDEST)/.installed ## tests/validation with the oldest torch that pyproject.toml admits
	$(OLDEST)/bin/python -m pytest -n $(WORKERS) --dist worksteal -q tests/validation

gpu: ## measure the GPUs of this machine for 9 minutes (MINUTES=9); again to go on. See docs/validation.md
	$(GPU_PYTHON) -m meshcast.experiments.cli measure campaign validation/campaigns/gpu.yaml --out $(MEASURED) --minutes $(MINUTES)

lint: $(DEV) ## check style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-pythons: $(DEV) ## install the wheel for each of PYTHONS that is found, into an empty environment, and do the tutorial there
	$(BIN)/python -m tests.pythons $(PYTHONS)

fuzz: $(DEV) ## give N=100000 malformed files and command lines to every command; SEED=100000 goes on with others
	$(BIN)/python -m tests.fuzz.run -n $(N) --seed $(SEED)

kills: N = 200
kills: $(DEV) ## kill N=200 commands that write files, fill their disks, shut their folders, start them twice, change their inputs; SEED=200 goes on
	$(BIN)/python -m tests.fuzz.kills -n $(N) --seed $(SEED)

mutants: N = 30
mutants: $(DEV) ## change N=30 places of every room, one at a time, and try its tests; hours. See CONTRIBUTING
	@$(PIP) "cosmic-ray>=8.7,<9"
	$(BIN)/python -m tools.mutants -n $(N) --seed $(SEED)

bench: $(DEV) ## time meshcast, and beside it the peers that CALCULON and SIMUMAX name; see benchmarks/race.py
	$(BIN)/python -m benchmarks.race

snapshots: $(DEV) ## keep what commands print in tests/snapshots
	$(BIN)/python -m tests.experiments.cli.test_snapshots

golden: $(DEV) ## keep the forecasts of tests/golden as they are now, and print what changed
	$(BIN)/python -m tests.golden.rewrite

docs: docs-pages docs-site ## make all of the docs: the pages that come from the code, then the site in site/

docs-pages: docs-catalog docs-excerpts docs-figures docs-job docs-models docs-python docs-readme docs-schemes ## write all pages that are made from the code, as below

docs-site: $(SITE) ## build the site of docs/ in site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs-accuracy: $(BASE) ## write docs/accuracy.md from published runs: make docs-accuracy RUNS="runs.jsonl more.jsonl"
	$(BIN)/python -m tools.pages.accuracy $(RUNS) docs/accuracy.md

docs-catalog: $(BASE) ## write docs/catalog.md from the files in hardware/catalog/
	$(BIN)/python -m tools.pages.catalog docs/catalog.md

docs-claims: $(BASE) ## write docs/claims.md from the files in validation/claims/; some minutes
	$(BIN)/python -m tools.pages.claims docs/claims.md

docs-benchmark: $(BASE) ## write the tables of docs/planners.md from the jobs of examples/benchmark; ten minutes
	$(BIN)/python -m tools.pages.benchmark docs/planners.md

docs-learning: $(BASE) ## write docs/learning.md and the prior of steps: make docs-learning RUNS="runs.jsonl more.jsonl"; half an hour
	$(BIN)/python -m tools.pages.learning $(RUNS) docs/learning.md

docs-performance: $(DEV) ## write the table of docs/performance.md; as make bench
	$(BIN)/python -m benchmarks.race docs/performance.md

docs-envelope: $(BASE) ## write what published runs have measured: make docs-envelope RUNS=runs.jsonl
	$(BIN)/python -m tools.data.measured_range $(RUNS)

docs-peak-errors: $(BASE) ## write how far published peaks of memory lie from their forecasts: make docs-peak-errors RUNS="runs.jsonl more.jsonl"
	$(BIN)/python -m tools.data.peak_errors $(RUNS)

docs-regimes: $(BASE) ## write how far steps of published runs lie from their forecasts: make docs-regimes RUNS="runs.jsonl more.jsonl"
	$(BIN)/python -m tools.data.regimes $(RUNS)

docs-excerpts: $(DEV) ## write what the commands print into docs/tutorial.md, docs/sweeps.md and docs/size.md; a minute
	$(BIN)/python -m tests.excerpts docs/tutorial.md docs/sweeps.md docs/size.md

docs-figures: $(BASE) ## write docs/figures.md from the table in simulator/report/figures.py
	$(BIN)/python -m tools.pages.figures docs/figures.md

docs-inputs: $(BASE) ## write docs/inputs.md from a folder of public launch files: make docs-inputs FILES=folder RUNS=runs.jsonl
	$(BIN)/python -m tools.pages.inputs $(FILES) $(RUNS) docs/inputs.md

docs-job: $(BASE) ## write the keys of a plan in docs/job.md from the table in simulator/job/plan_keys.py
	$(BIN)/python -m tools.pages.plan_keys docs/job.md

docs-models: $(BASE) ## write docs/models.md from the tables of types in tests/simulator/models
	$(BIN)/python -m tools.pages.models docs/models.md

docs-python: $(BASE) ## execute the cells of docs/python.md and write their outputs
	$(BIN)/python -m tools.pages.python_page docs/python.md

docs-plots: $(BASE) ## draw the images of docs/plots.md and of the README; a minute
	@mkdir -p out
	$(BIN)/python -m tools.pages.plots docs/plots.md

docs-readme: $(BASE) ## write the page of the README's example
	$(BIN)/python -m tools.pages.readme

docs-schemes: $(BASE) ## write docs/schemes.md from the files in simulator/schemes/
	$(BIN)/python -m tools.pages.schemes docs/schemes.md

papers: $(BASE) ## redraw figures of papers in out/papers/, and write docs/papers.md; five minutes
	$(BIN)/python -m tools.papers

clean: ## remove everything that make has made, .venv included
	rm -rf $(VENV) $(OLDEST) build dist out site *.egg-info .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -type d -name __pycache__ -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "meshcast needs Python 3.11 or newer; name one with: make PYTHON=python3.12" >&2; exit 1; }
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# The stamps are touched only after a complete installation, so an interrupted one is taken up again.
# $(BIN)/python is order-only: it is a link to an interpreter whose own date means nothing here.
$(BASE): pyproject.toml | $(BIN)/python
	@echo "installing meshcast into $(VENV)"
	@$(PIP) --config-settings editable_mode=compat --editable .
	@touch $@

$(DEV): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing meshcast and its development tools into $(VENV)"
	@$(PIP) --constraint constraints.txt --config-settings editable_mode=compat --editable ".[dev,torch,search,solvers,batch]"
	@touch $@ $(BASE)

$(SITE): pyproject.toml | $(BIN)/python
	@echo "installing meshcast and mkdocs into $(VENV)"
	@$(PIP) --config-settings editable_mode=compat --editable ".[docs]"
	@touch $@ $(BASE)

$(OLDEST)/.installed: pyproject.toml constraints.txt
	@echo "installing meshcast and torch $(OLDEST_TORCH) into $(OLDEST)"
	@test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	@sed '/^torch==/d' constraints.txt > $(OLDEST)/constraints.txt
	@$(OLDEST)/bin/python -m pip install --no-compile --quiet --quiet --disable-pip-version-check \
		--constraint $(OLDEST)/constraints.txt --config-settings editable_mode=compat --editable ".[dev,solvers]" "torch==$(OLDEST_TORCH)"
	@touch $@
