# Everything from a bare clone: each target sets up .venv by itself.
PYTHON ?= python3
BIN := .venv/bin
# pytests side by side: one a core of a small machine; 0: all in one
JOBS ?= 2

# Python keeps what it compiles of the packages, so pip need not compile all of them beforehand.
export PYTHONDONTWRITEBYTECODE :=
PIP_INSTALL := $(BIN)/python -m pip install --quiet --no-compile

.PHONY: demo test lint format clean

demo: .venv/package
	$(BIN)/python examples/demo.py

test: .venv/ready .venv/scotch
	$(BIN)/python -m pytest -n $(JOBS)

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# A CPU build of torch comes first, wherever pip finds it: torch's default build for Linux is one of
# CUDA, of gigabytes. `make TORCH=torch` takes that one; any torch from 2.11 on will do.
TORCH ?= torch==2.13.0+cpu
CPU_BUILDS := https://download.pytorch.org/whl/cpu

# The C++ runner and the code of searches, which the first plan would build.
SET_UP := from dovetail.pipeline.planning import compile_search; \
	from dovetail.runtime.native import build_native; build_native(print, compile_search)

# The package and what it needs to plan, run and train: what a user installs.
.venv/package: pyproject.toml
	$(PYTHON) -m venv .venv
	$(PIP_INSTALL) '$(TORCH)' 2>/dev/null || \
	  $(PIP_INSTALL) --index-url $(CPU_BUILDS) '$(TORCH)' || \
	  $(PIP_INSTALL) 'torch>=2.11'
	$(PIP_INSTALL) --editable .
	$(BIN)/python -c '$(SET_UP)' || true
	touch $@

# The same, with what the tests and the linters need.
.venv/ready: .venv/package
	$(PIP_INSTALL) --editable '.[dev]'
	touch $@

# Scotch is optional: without it the placers `scotch` and `mincut` say how to install it, and their
# tests are skipped. Tried once, never fails; `rm .venv/scotch` to try again.
APT := timeout 120 $$sudo env DEBIAN_FRONTEND=noninteractive apt-get -qq -o Acquire::Retries=1 \
	-o Acquire::http::Timeout=10 -o DPkg::Lock::Timeout=30
HAS_SCOTCH := $(BIN)/python -c 'from dovetail.placers.scotch import load_scotch as f; f()'

.venv/scotch: .venv/ready
	@if $(HAS_SCOTCH) 2>/dev/null; then touch $@; exit 0; fi; \
	echo "installing Scotch, which is optional"; \
	sudo=""; test "$$(id -u)" = 0 || sudo="sudo -n"; \
	if command -v apt-get >/dev/null && $$sudo true 2>/dev/null; then \
	  for try in 1 2; do \
	    package=$$(apt-cache pkgnames libscotch- 2>/dev/null | grep '^libscotch-[0-9]' | sort -V | tail -1); \
	    $(APT) install -y --no-install-recommends $${package:-libscotch-dev} >/dev/null 2>&1 && break; \
	    test $$try = 2 || $(APT) update >/dev/null 2>&1; \
	  done; \
	elif command -v brew >/dev/null; then brew install --quiet scotch >/dev/null 2>&1; fi; \
	$(HAS_SCOTCH) 2>/dev/null || echo "Scotch is not here; all but scotch and mincut works without"; \
	touch $@

clean:
	rm -rf .venv demo build
