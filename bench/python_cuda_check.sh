#!/usr/bin/env bash
# Checks the Python package on a machine with a CUDA device.
#
#   bench/python_cuda_check.sh                     # all of it; kernels built with nvcc
#   MINFERENCE_CUDA_LIBRARY=/path/libminference_cuda.so bench/python_cuda_check.sh   # built elsewhere
#   bench/python_cuda_check.sh wheel tensors       # some steps, in this order
#
# Steps: wheel (builds it and installs it into a folder of its own), tensors (attention() on CUDA tensors),
# models (Hugging Face models in 16 bits), float32 (the CPU's tests of such models, on the device) and
# overhead (of a call). Needs python3 with torch, transformers, pytest, nanobind and scikit-build-core; no
# network. PYTHON names another interpreter, CHECK_DIR the folder to build in (default: build/python-cuda).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
folder=$(realpath -m "${CHECK_DIR:-build/python-cuda}")
cuda=ON
if [[ -n ${MINFERENCE_CUDA_LIBRARY:-} ]]; then
  MINFERENCE_CUDA_LIBRARY=$(realpath "$MINFERENCE_CUDA_LIBRARY")
  export MINFERENCE_CUDA_LIBRARY
  cuda=OFF
fi
export PYTHONPATH=$folder/site
status=0

build_wheel() {
  rm -rf "$folder/site"
  mkdir -p "$folder"
  if ! CMAKE_BUILD_PARALLEL_LEVEL=$(nproc) "$python" -m pip wheel --quiet --no-deps --no-build-isolation \
    --wheel-dir "$folder" -C cmake.define.MINFERENCE_CUDA="$cuda" -C build-dir="$folder/build" . \
    > "$folder/wheel.log" 2>&1; then
    tail -n 30 "$folder/wheel.log"
    exit 1
  fi
  "$python" -m pip install --quiet --no-deps --no-index --target "$folder/site" "$folder"/minference-*.whl
}

run_tests() {  # arguments of pytest
  "$python" -m pytest -q --no-header -p no:cacheprovider --show-capture=no --tb=short "$@" 2>&1 |
    tail -n "${TEST_LINES:-40}" || status=1
}

steps=("$@")
if [[ ${#steps[@]} -eq 0 ]]; then steps=(wheel tensors models float32 overhead); fi
for step in "${steps[@]}"; do
  echo "== $step"
  case $step in
    wheel) build_wheel ;;
    tensors) run_tests tests/python/test_cuda.py ;;
    models) run_tests tests/python/test_cuda_hf.py ;;
    float32)
      # Many small ones: several at a time where pytest-xdist is there.
      parallel=()
      if "$python" -c 'import xdist' 2> /dev/null; then parallel=(-n 6); fi
      MINFERENCE_TEST_DEVICE=cuda run_tests "${parallel[@]}" \
        tests/python/test_hf_models.py tests/python/test_hf_masks.py tests/python/test_hf_patch.py
      ;;
    overhead) "$python" bench/python_overhead.py --device cuda || status=1 ;;
    *)
      echo "unknown step '$step'; legal: wheel, tensors, models, float32, overhead" >&2
      exit 2
      ;;
  esac
done
exit $status
