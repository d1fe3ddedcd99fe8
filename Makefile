# Two commands matter: `make demo` and `make test`. Each sets up all it needs in $(VENV).
# To build against a torch you already have: make demo PYTHON=/path/to/its/python VENV=.venv-mine
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
PY := $(VENV)/bin/python
CSRC := $(wildcard csrc/*.cpp csrc/*.h csrc/*.cu csrc/staged/* csrc/svm/*) $(wildcard build_tools/*.py)
FORMATTED := $(wildcard csrc/*.h csrc/*.cpp csrc/*.cu csrc/staged/*.h csrc/staged/*.cpp csrc/staged/*.cu csrc/svm/*.h csrc/svm/*.cpp cpp_tests/*.h cpp_tests/*.cpp cpp_tests/staged/*.h cpp_tests/staged/*.cpp cpp_tests/emulated/*.h cpp_tests/emulated/*.cpp cpp_tests/emulated/include/*.h cpp_tests/virtual_device/*.h cpp_tests/virtual_device/*.cpp)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Hundreds of processes of the tests would compile the same files again where this is set.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-all test-python test-slow test-cpp test-gpu test-versions mutations campaign differential fuzz fingerprints speed bench-gpu gpu-day cuda-check lint format bench build build-tests clean dist sanitize docs

demo: build
	$(PY) -m oases demo

# Five minutes on two hyperthreads; the long ones of test-all take another fifteen.
test: build-tests test-cpp test-python

# One file of tests more than there are cores at a time, because ranks often wait for one another; at most 8 for memory.
WORKERS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n < 8 ? n + 1 : 8)))
test-python: build-tests
	$(PY) -m pytest -n $(WORKERS) --dist loadfile

# With the tests that take seconds each (marked long), of all files: what CI runs.
test-all: build-tests test-cpp
	$(PY) -m pytest -n $(WORKERS) --dist loadfile -m "not gpu and not slow"

# The cases that take minutes, of which `make test-all` runs some.
test-slow: build-tests $(VENV)/group-slow
	$(PY) -m pytest -n 2 --dist loadfile -m slow

# Faults of oases/ and csrc/, one at a time in a copy of the tree: every one must fail a test.
mutations: build-tests
	$(PY) -m reliability.mutations

# Faults that hit training runs, compared with undisturbed runs: an hour; goes on where it was cut off.
# A part, and a report: make campaign CAMPAIGN="--minutes 10 --report campaign.md".
campaign: build-tests
	$(PY) -m reliability.campaign $(CAMPAIGN)

# Random training programs in one process and over ranks: 400 that hold all pairs of choices; goes on where it was cut
# off. A night: make differential DIFFERENTIAL="--cases 20000 --shrink". Faults it must find: DIFFERENTIAL=--faults.
DIFFERENTIAL ?= --covering 400 --shrink
differential: build-tests
	$(PY) -m reliability.differential $(DIFFERENTIAL)

# Coverage-guided fuzzing of every parser, half an hour each: make fuzz MINUTES=1
MINUTES ?= 30
fuzz: build-tests $(VENV)/group-slow
	$(PY) -m reliability.fuzz --minutes $(MINUTES)

# Losses and weights of this tree beside those of another with a compiled oases: make fingerprints BASE=../main
BASE ?=
fingerprints: build-tests
	PYTHONPATH=$(BASE) $(PY) reliability/fingerprints.py --json build/fingerprints-base.json
	PYTHONPATH=. $(PY) reliability/fingerprints.py --json build/fingerprints.json
	$(PY) reliability/fingerprints.py --compare build/fingerprints-base.json build/fingerprints.json

# Benchmarks of this tree and of another with a compiled oases, by turns: make speed BASE=../main
speed: build-tests
	PYTHONPATH=. $(PY) reliability/speed.py $(BASE)

# Every torch and Python that is promised (docs/versions.md), or one: make test-versions SESSION="versions(python='3.11', torch='2.15')".
SESSION ?=
test-versions: $(VENV)/group-release
	$(VENV)/bin/nox $(if $(SESSION),--session "$(SESSION)")

# On a machine with a GPU and a CUDA torch.
test-gpu: build-tests
	$(PY) -m pytest -m gpu

bench-gpu: build
	$(PY) -m oases bench gpu --report build/gpu.md --json docs/benchmarks/gpu/gpu.json

# Everything that a GPU is needed for: tests, sanitizers, kernels beside the copy rate, profile, and a report; goes on
# where it was cut off.
gpu-day: $(VENV)/torch
	@$(PY) -m build_tools.gpu_day --check
	@$(MAKE) --no-print-directory build-tests
	@$(PY) -m build_tools.gpu_day

# Compiles every kernel for every architecture; fails where one spills registers, or where one that moves 16 bytes at a time
# splits them, or uses more registers than it may (build_tools/cuda_check.py). Needs no GPU.
cuda-check: build $(VENV)/group-cuda
	@$(PY) -m build_tools.cuda_check

bench: build
	$(PY) -m oases bench overlap --link 500mbit

# Two at a time: packages install while the extension compiles.
build:
	@$(MAKE) --no-print-directory --jobs=2 $(VENV)/built

build-tests:
	@$(MAKE) --no-print-directory --jobs=2 $(VENV)/built $(VENV)/group-test

# torch without what registers with it, which may be an older oases, or one whose folder was moved.
ALONE := TORCH_DEVICE_BACKEND_AUTOLOAD=0

# A venv that sees the torch of $(PYTHON) where that has one, and a torch of its own where it has none.
$(VENV)/torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "oases needs Python 3.10 or later; give one with make PYTHON=..."; exit 2; }
	@command -v c++ >/dev/null || command -v g++ >/dev/null || { echo "oases needs a C++ compiler; install g++ (Debian: apt-get install g++)"; exit 2; }
	@test -x $(PY) || { $(ALONE) $(PYTHON) -c 'import torch' 2>/dev/null && $(PYTHON) -m venv --system-site-packages $(VENV); } || $(PYTHON) -m venv $(VENV)
	@$(ALONE) $(PY) -c 'import torch' 2>/dev/null || { echo "installing $(TORCH)"; $(PY) -m pip install --quiet '$(TORCH)' setuptools; }
	@touch $@

# pip 25.1 is the first that installs groups of pyproject.toml.
$(VENV)/installed: pyproject.toml $(VENV)/torch
	@$(PY) -m pip install --quiet 'pip>=25.1'
	$(PY) -m pip install --quiet --group dev
	@touch $@

# The packages of a group of pyproject.toml.
$(VENV)/group-%: pyproject.toml $(VENV)/installed
	$(PY) -m pip install --quiet --group $*
	@touch $@

# pip would hide the progress.
$(VENV)/compiled: $(CSRC) setup.py $(VENV)/torch
	@$(PY) setup.py --quiet build_ext --inplace
	@touch $@

$(VENV)/built: pyproject.toml $(VENV)/installed $(VENV)/compiled
	$(PY) -m pip install --quiet --no-build-isolation --no-deps --editable .
	@touch $@

# GoogleTest comes from Debian's libgtest-dev; where it cannot be installed, one line says what to do.
test-cpp: build
	@sh cpp_tests/run.sh $(PY) build/cpp

sanitize: build
	@sh cpp_tests/run.sh $(PY) build/cpp-thread thread
	@sh cpp_tests/run.sh $(PY) build/cpp-address address

# A broken link inside docs/, or a docstring that cannot be rendered, is an error. `make test-all` runs the code blocks.
docs: $(VENV)/built $(VENV)/group-test $(VENV)/group-docs
	$(PY) -m sphinx -q -W --keep-going -b html docs build/docs
	@echo "open build/docs/index.html"

lint: $(VENV)/built $(VENV)/group-lint
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/clang-format --dry-run -Werror $(FORMATTED)
	$(VENV)/bin/codespell $$(git ls-files)

format: $(VENV)/built $(VENV)/group-lint
	$(PY) -m ruff check --fix --quiet . || true
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i $(FORMATTED)

# A wheel for the torch of $(VENV), and the sources. twine checks what a package index shows of them.
dist: $(VENV)/group-release
	rm -rf dist
	OASES_CUDA_ARCHS=$${OASES_CUDA_ARCHS:-all} $(PY) -m build --no-isolation --outdir dist
	$(PY) -m twine check --strict dist/*

clean:
	rm -rf build dist *.egg-info oases/*.so oases_staged/*.so $(VENV)/built $(VENV)/compiled
