# Everything starts with one of these; the first use also makes .venv with what is needed (Python 3.11 to 3.14).
#
#   PYTHON=python3.12        the interpreter that .venv is made from
#   TORCH_INDEX_URL=URL      where torch comes from; https://download.pytorch.org/whl/cpu has builds without CUDA,
#                            hundreds of megabytes instead of gigabytes, and they are enough for all of this
#   NCZ_CACHE=DIR            where the next clone finds what was compiled, Horovod and what tests need: ~/.cache/ncz_plugins
#   COVERAGE=DIR             where make coverage writes, by default .cache/coverage
#   SECONDS=60               how long make fuzz runs, an hour by default, and make soak, half an hour
#   ARGS="..."               passed on: make test ARGS="-k ring", make demo ARGS="--steps 50"

PYTHON ?= python3
TORCH_INDEX_URL ?=
ARGS ?=
SECONDS ?=
export TORCH_INDEX_URL
# Hundreds of processes import this package in a run of the tests: they need not compile it each.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
COVERAGE ?= $(CURDIR)/.cache/coverage

.DEFAULT_GOAL := help
.PHONY: help setup setup-demo setup-tools demo quick test coverage lint bench gpu carry convergence results fuzz soak thirdparty versions wheels installed release docs clean

help:   ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' Makefile

setup:  ## make .venv and build the native library (done by the others when needed)
	@$(PYTHON) tools/bootstrap.py

setup-demo:
	@$(PYTHON) tools/bootstrap.py demo

setup-tools:  # all but Horovod, whose compilation takes longer than the rest
	@$(PYTHON) tools/bootstrap.py tools

demo: setup-demo  ## train a small GPT with DeepSpeed, plain and compressed, and compare
	@$(BIN)/python examples/demo.py $(ARGS)

quick: setup-tools  ## the tests that start no processes, in 3 minutes
	@$(BIN)/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder -m "not processes and not slow" tests/unit $(ARGS)

# Two workers start processes, which wait; a third one computes meanwhile: tests/conftest.py hands out the files.
test: setup  ## all tests, in 17 to 30 minutes on two cores
	@$(BIN)/python -m pytest -n 3 --dist loadscope --no-loadscope-reorder --durations=10 --require-packages $(ARGS)

# The processes that tests start are measured as well (patch in .coveragerc), wherever they run: so an absolute path.
coverage: export COVERAGE_FILE = $(COVERAGE)/data
coverage: setup  ## all tests, and which lines of ncz_plugins they run: .cache/coverage/html (30 minutes)
	@rm -rf $(COVERAGE) && mkdir -p $(COVERAGE)
	@$(BIN)/coverage run -m pytest -n 2 --dist loadscope --no-loadscope-reorder --timeout 600 $(ARGS)
	@$(BIN)/coverage combine --quiet
	@$(BIN)/coverage html --quiet --directory $(COVERAGE)/html
	@$(BIN)/coverage report --skip-covered

lint: setup-tools  ## style of all Python files
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

bench: setup-tools  ## speed of the coders beside memcpy
	@$(BIN)/python benchmarks/codec.py $(ARGS)

gpu: setup    ## all there is to run on a machine with a GPU, in 9 minutes (TORCH_INDEX_URL: a torch that sees it)
	@$(BIN)/python benchmarks/gpu.py $(ARGS)

carry: setup-tools  ## a folder, carry/, for a machine with a GPU, torch and no network: python3 benchmarks/gpu.py there
	@$(BIN)/python tools/carry.py $(ARGS)

convergence: setup ## train models plain and compressed, search for quantizers: docs/results/convergence.md (4 hours)
	@$(BIN)/python benchmarks/convergence/suite.py $(ARGS)
	@$(BIN)/python benchmarks/convergence/frontier.py $(ARGS)
	@$(BIN)/python benchmarks/convergence/activations.py $(ARGS)

results: setup  ## measure what docs/results shows, write its tables (two days; ARGS="--list", ARGS="perf-* small-calls"; root)
	@$(BIN)/python -m benchmarks.remake $(ARGS)

fuzz: setup-tools  ## fuzz the native library for SECONDS (3600), two processes
	@$(BIN)/python tests/fuzz/run.py --seconds $(or $(SECONDS),3600) $(ARGS)

soak: setup-tools  ## random collectives on 4 ranks for SECONDS (1800), each checked on every rank: docs/results/soak.md
	@$(BIN)/python benchmarks/soak/soak.py --seconds $(or $(SECONDS),1800) $(ARGS)

thirdparty: setup  ## Horovod's and DeepSpeed's own tests, plain and compressed: what fails only with us? (20 minutes)
	@$(BIN)/python -m benchmarks.thirdparty.run $(ARGS)

versions: setup-tools  ## a part of the tests with several versions of Python and torch: docs/reference/compatibility.md (an hour)
	@$(BIN)/nox $(ARGS)

wheels: setup-tools  ## what is published: a source distribution and a wheel for all Pythons, in dist/
	@$(BIN)/python tools/wheels.py $(ARGS)

installed: setup-tools  ## the wheel in dist/ without a checkout, with the oldest and the newest Python and torch (10 minutes)
	@$(BIN)/nox -s installed $(ARGS)

release:  ## check that all places name one version, and with ARGS="--tag v1.2.3" that a tag fits
	@$(PYTHON) tools/release.py $(ARGS)

docs: setup-tools  ## the documentation as a site in site/, with every link checked
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

clean:  ## remove .venv, build products and results
	rm -rf .venv build dist results *.egg-info .pytest_cache .hypothesis .ruff_cache .cache site carry
	find ncz_plugins -name '*.so' -delete
	find ncz_plugins examples benchmarks tests tools -name __pycache__ -prune -exec rm -rf {} +
