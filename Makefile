# Entry points for people; the build itself is CMake with presets. `make` alone prints this list.

PRESET ?= release
NPROC  ?= $(shell nproc 2>/dev/null || echo 2)
BUILD  := build/$(PRESET)
PYTHON ?= python3
VENV   := build/python/venv

cmake_build := cmake --build $(BUILD) --parallel $(NPROC) --target

sources := $(shell find include src tests bench -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh' 2>/dev/null)

.DEFAULT_GOAL := help
.PHONY: help deps configure build tools cuda python wheel models bench-models demo test check-sanitizers \
        check-aarch64 bench format lint clean

help: ## print this list
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20
	@echo
	@echo "Variables: PRESET=release|debug|asan|tsan|aarch64 (default release), NPROC (default: all cores),"
	@echo "           CMAKE_ARGS (for example '-D MINFERENCE_CUDA=OFF')"

deps: ## install missing system packages (apt; needs root or sudo only if something is missing)
	@scripts/install-deps.sh

# Warnings stop continuous integration, not a user with another compiler.
configure: deps
	cmake --preset $(PRESET) -D MINFERENCE_WERROR=$(if $(CI),ON,OFF) $(CMAKE_ARGS)

build: configure ## build the library, the command line and the llama.cpp plug-in
	$(cmake_build) minference minference-cli ggml-minference

tools: configure ## build llama.cpp's own tools as well: llama-server, -cli, -bench, -perplexity, -quantize
	$(cmake_build) tools

cuda: deps ## build the CUDA kernels, their benchmark and tests (needs nvcc; minutes)
	cmake --preset $(PRESET) -D MINFERENCE_CUDA=ON -D MINFERENCE_WERROR=$(if $(CI),ON,OFF)
	$(cmake_build) minference_cuda cuda_bench cuda_tests

# The wheel as `pip install .` makes it, in an environment with what the tests need (torch is large).
python: deps ## build the Python package and install it, with torch and transformers, into build/python/venv
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet -r tests/python/requirements.txt
	rm -rf build/python/wheel
	$(VENV)/bin/python -m pip wheel --quiet --no-deps --wheel-dir build/python/wheel \
	  -C cmake.define.MINFERENCE_WERROR=$(if $(CI),ON,OFF) .
	$(VENV)/bin/python -m pip install --quiet --no-deps --force-reinstall build/python/wheel/minference-*.whl

wheel: deps ## build the wheel for other machines, tried in a fresh environment, and the source distribution into dist/
	scripts/build-wheel.sh $(PYTHON)

models: deps ## fetch the small model and the text into models/
	scripts/fetch.py models
	scripts/fetch.py text

bench-models: models ## fetch the larger model for long prompts into models/
	scripts/fetch.py bench-models

demo: build models ## one 8k-token prompt through stock llama.cpp, our attention, our products too, our sparse attention
	python3 scripts/demo.py --bin-dir $(BUILD)/bin

test: configure models python ## build everything and run every test
	cmake --build $(BUILD) --parallel $(NPROC)
	ctest --preset $(PRESET) --parallel $(NPROC)

check-sanitizers: deps ## unit, property and oracle tests under address, undefined and thread sanitizers
	cmake --preset asan
	cmake --build build/asan --parallel $(NPROC)
	ctest --preset asan --parallel $(NPROC)
	cmake --preset tsan
	cmake --build build/tsan --parallel $(NPROC)
	scripts/without-aslr.sh ctest --preset tsan --parallel $(NPROC)

check-aarch64: ## unit, property and oracle tests of the 64-bit Arm levels, cross-built, under qemu
	@scripts/install-deps.sh aarch64
	cmake --preset aarch64 -D MINFERENCE_WERROR=$(if $(CI),ON,OFF)
	cmake --build build/aarch64 --parallel $(NPROC)
	ctest --preset aarch64 --parallel $(NPROC)

bench: configure ## measure attention and matrix products against llama.cpp's own in the same run
	$(cmake_build) minference-cli
	$(BUILD)/bin/minference bench --attention
	$(BUILD)/bin/minference bench --linear

format: ## format the C++ and CUDA sources in place
	clang-format -i $(sources)

# Files of another processor family are not in the build, so that clang-tidy knows no flags for them.
lint: configure ## run clang-tidy over the C++ sources that the build compiles
	printf '%s\n' $(filter src/%.cc,$(sources)) | \
	  while read -r file; do \
	    ! grep -q "$$file\"" $(BUILD)/compile_commands.json || echo "$$file"; \
	  done | \
	  xargs --max-procs $(NPROC) --max-args 1 clang-tidy --quiet -p $(BUILD)

clean: ## delete build/ (models and the download cache stay)
	rm -rf build
