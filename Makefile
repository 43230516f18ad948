PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
comma := ,
CXX_FILES := $(shell find csrc -name '*.cpp' -o -name '*.hpp' -o -name '*.cu')
CXX_TESTS := $(wildcard tests/native/*.cpp tests/native/*.hpp)

.PHONY: demo demo-paddle gpu-extra test test-gpu test-mooncake check nightly lint format stubs bench clean

# Installed afresh whenever a source that the build reads is newer than the last install.
$(VENV)/.installed-%: pyproject.toml constraints.txt CMakeLists.txt $(CXX_FILES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt 'scikit-build-core' 'nanobind' 'cmake' 'ninja'
	PATH="$(abspath $(BIN)):$$PATH" $(PIP) install --quiet --no-build-isolation --constraint constraints.txt --editable '.[$*]'
	touch $@

demo: $(VENV)/.installed-plot  ## install, the embedded cache on chat traffic, then a service with two engines and a look inside
	$(BIN)/fdcache replay --workload chat
	$(BIN)/python examples/node.py

demo-paddle: $(VENV)/.installed-plot,paddle  ## a model on Paddle answers the same with and without the cache; exits 1 if not
	$(BIN)/python -W ignore -m examples.paddle_engine --workload chat --plot paddle-engine.png

test: $(VENV)/.installed-test  ## all tests but the long ones
	$(BIN)/pytest -n 2 --dist worksteal -m 'not slow and not nightly'

test-mooncake: $(VENV)/.installed-test  ## the tests with a Mooncake master; skipped with the reason where its libraries are missing
	$(BIN)/pytest -n 2 -m 'not slow and not nightly' $(wildcard tests/integration/test_*mooncake*.py)

check: $(VENV)/.installed-test  ## the longer property, fault and stress runs, a tenth of their seeds
	FDCACHE_TEST_SEEDS=$${FDCACHE_TEST_SEEDS:-10} $(BIN)/pytest -n 2 --dist worksteal -m slow --timeout 1800 --durations 15

nightly: $(VENV)/.installed-test  ## all seeds of the longer runs, and tests that take minutes each
	FDCACHE_TEST_SEEDS=100 $(BIN)/pytest -n 2 --dist worksteal -m 'slow or nightly' --timeout 3600

# CUDA=cuda12 or CUDA=cuda13 installs CuPy too.
test-gpu: $(VENV)/.installed-test$(if $(CUDA),$(comma)$(CUDA))  ## the tests that need a GPU; skipped with the reason where there is none
	$(BIN)/pytest -m gpu tests/gpu

lint: $(VENV)/.installed-dev  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES) $(CXX_TESTS)

gpu-extra: $(VENV)/.installed-dev  ## the extra for GPUs resolves; nothing is installed
	$(PIP) install --quiet --dry-run --no-build-isolation --constraint constraints.txt '.[gpu]'

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES) $(CXX_TESTS)

stubs: $(VENV)/.installed-dev  ## fdcache/_core.pyi and fdcache/replay/_pattern.pyi, generated from the native modules
	$(BIN)/python -m nanobind.stubgen -q -m fdcache._core -o fdcache/_core.pyi
	$(BIN)/python -m nanobind.stubgen -q -m fdcache.replay._pattern -o fdcache/replay/_pattern.pyi
	$(BIN)/ruff format --quiet fdcache/_core.pyi fdcache/replay/_pattern.pyi

bench: $(VENV)/.installed-test  ## microseconds per request and eviction cost, with the machine they ran on
	$(BIN)/python -m benchmarks.scheduler
	$(BIN)/python -m benchmarks.steps
	$(BIN)/python -m benchmarks.eviction
	$(BIN)/python -m benchmarks.host_runs
	$(BIN)/python -m benchmarks.hashing
	$(BIN)/python -m benchmarks.copies
	$(BIN)/python -m benchmarks.submission
	$(BIN)/python -m benchmarks.settings

clean:
	rm -rf $(VENV) build dist *.egg-info
