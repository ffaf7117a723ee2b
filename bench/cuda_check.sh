#!/usr/bin/env bash
# Checks the CUDA kernels on a machine that has a device: what ctest cannot do without one.
set -euo pipefail

usage() {
  cat <<'TEXT'
Usage: bench/cuda_check.sh [options]

  oracle     every program of tests/cuda against the fp64 reference (MINFERENCE_SWEEP_STRIDE)
  memcheck   the same programs, on fewer cases, under compute-sanitizer
  racecheck  likewise, but for the Hopper kernels, tests named Long* and the programs index_*
  methods    each method on CUDA through the public call, against the CPU; all kernels of the device
  long       one layer of 1M tokens

prints a summary last and exits with 1 when anything failed.

  --build DIR            where the programs are (default build/release): DIR/bin, DIR/tests/cuda
  --no-build             take them as they are; otherwise they are built first
  --only STEP,...        of the five steps above these (default: all)
  --programs GLOB        of the programs of tests/cuda those that match (default: *)
  --stride N             every N-th case of the sweeps (default 1: all)
  --sanitizer-stride N   the same under compute-sanitizer (default 150)
  --methods NAME,...     what the step methods runs (default: all that have kernels)
  --jobs N               programs at a time (default: all cores)
  --limit SECONDS        for one program (default 1200)
  --logs DIR             output of every program (default: a new folder in $TMPDIR)

Examples:
  bench/cuda_check.sh
  bench/cuda_check.sh --no-build --stride 10      # a short one
  bench/cuda_check.sh --only oracle,memcheck --programs 'executor_*'
TEXT
}

fail() {
  echo "cuda_check.sh: error: $*" >&2
  exit 2
}

cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=build/release
build_first=true
steps=oracle,memcheck,racecheck,methods,long
programs='*'
stride=1
sanitizer_stride=150
methods=dense,head_mix,vertical_slash,static,block_sparse,flexprefill,xattention,a_shape,tri_shape,tri_mix,tri_mix_minference,dilated1,dilated2,mminference,video,auto
jobs=$(nproc)
limit=1200
logs=""
while [ $# -gt 0 ]; do
  case "$1" in
    -h | --help) usage; exit 0 ;;
    --no-build) build_first=false; shift; continue ;;
  esac
  [ $# -ge 2 ] || fail "unknown argument '$1', or one without its value; see --help"
  case "$1" in
    --build) build=$2 ;;
    --only) steps=$2 ;;
    --programs) programs=$2 ;;
    --stride) stride=$2 ;;
    --sanitizer-stride) sanitizer_stride=$2 ;;
    --methods) methods=$2 ;;
    --jobs) jobs=$2 ;;
    --limit) limit=$2 ;;
    --logs) logs=$2 ;;
    *) fail "unknown argument '$1'; see --help" ;;
  esac
  shift 2
done
for number in "$stride" "$sanitizer_stride" "$jobs" "$limit"; do
  [[ $number =~ ^[1-9][0-9]*$ ]] || fail "'$number' is no whole number from 1"
done
for step in ${steps//,/ }; do
  [[ ,oracle,memcheck,racecheck,methods,long, == *",$step,"* ]] ||
    fail "unknown step '$step'; legal: oracle, memcheck, racecheck, methods, long"
done
wants() { [[ ,$steps, == *",$1,"* ]]; }

sanitizer=""
if wants memcheck || wants racecheck; then
  sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null) ||
    fail "compute-sanitizer is not installed; --only oracle,methods,long does without"
fi
if $build_first; then
  [ "$build" = build/release ] || fail "--build '$build' needs --no-build; what is built is build/release"
  cmake --preset release -D MINFERENCE_CUDA=ON
  cmake --build build/release --parallel "$jobs" --target cuda_tests cuda_bench minference_cuda
fi
[ -x "$build/bin/cuda_bench" ] || fail "$build/bin/cuda_bench is missing; legal: a build with MINFERENCE_CUDA=ON"
device=$(nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.max.sm --format=csv,noheader | head -n 1) ||
  fail "nvidia-smi finds no device"

if [ -n "$logs" ]; then mkdir -p "$logs"; else logs=$(mktemp -d); fi
results=$logs/results.txt
: >"$results"
export logs results limit sanitizer stride sanitizer_stride

# record <step> <program> <what> <log> <command...>: runs it into the log and notes how it ended.
record() {
  local step=$1 program=$2 what=$3 log=$4 begin=$SECONDS code=0
  shift 4
  timeout "$limit" "$@" >"$log" 2>&1 || code=$?
  echo "$step $program $what $code $((SECONDS - begin)) $log" >>"$results"
  local verdict=ok
  [ $code = 0 ] || verdict="FAILED (exit code $code): $log"
  printf '%-10s %-20s %-32s %4d s  %s\n' "$step" "$program" "$what" $((SECONDS - begin)) "$verdict"
}

# One test of a GoogleTest program, or ('-') all of a program with a main() of its own.
run_test() {
  local step=$1 program=$2 filter=$3 name
  name=$(basename "$program")
  local command=("$program")
  [ "$filter" = - ] || command+=("--gtest_filter=$filter")
  export MINFERENCE_SWEEP_STRIDE=$stride
  if [ "$step" != oracle ]; then
    export MINFERENCE_SWEEP_STRIDE=$sanitizer_stride
    command=("$sanitizer" --tool "$step" --error-exitcode 99 "${command[@]}")
  fi
  # Tests of the whole call would take Hopper's kernels, which list_tests leaves out.
  [ "$step" != racecheck ] || export MINFERENCE_FORCE_CUDA=sm80
  record "$step" "$name" "$filter" "$logs/$step-$name-${filter//\//_}.txt" "${command[@]}"
}
export -f record run_test

list_tests() {
  local step=$1 program
  for program in "$build"/tests/cuda/$programs; do
    [ -f "$program" ] && [ -x "$program" ] || continue
    if ! grep -qa 7testing4Test "$program"; then
      # Its sizes are fixed, too many for the tool that follows every access to shared memory.
      [ "$step" = racecheck ] || echo "$step $program -"
      continue
    fi
    # racecheck does not follow the phases of an mbarrier in inline PTX: what the copy warp of the
    # Hopper kernels hands to their products, and gets back, it takes for races.
    "$program" --gtest_list_tests |
      awk -v step="$step" -v program="$program" '
        /^[^ ].*\.( |$)/ { suite = $1 }
        /^ / && !(step == "racecheck" && (suite $1) ~ /Sm90|^Long/) { print step, program, suite $1 }'
  done
}

for step in racecheck memcheck oracle; do  # the longest first
  if wants $step; then list_tests $step; fi
done >"$logs/tests.txt"
if [ ! -s "$logs/tests.txt" ] && [[ $steps =~ oracle|memcheck|racecheck ]]; then
  fail "no program matches $build/tests/cuda/$programs"
fi
# A process for each test, as many as there are cores, with one thread each: most of the work is the
# reference on the CPU.
OMP_NUM_THREADS=1 xargs -r -P "$jobs" -L 1 bash -c 'run_test "$@"' run_test <"$logs/tests.txt"

if wants methods; then
  record methods cuda_bench device "$logs/methods-device.txt" \
    "$build/bin/cuda_bench" -p 8192 -r 1 -m "$methods"
  MINFERENCE_FORCE_CUDA=sm80 record methods cuda_bench sm80 "$logs/methods-sm80.txt" \
    "$build/bin/cuda_bench" -p 8192 -r 1 -m "$methods"
fi
if wants long; then
  record long cuda_bench 1M "$logs/long.txt" "$build/bin/cuda_bench" -p 1048576 -r 1 -m head_mix
fi

echo
echo "---- cuda_check.sh, $(date -u '+%Y-%m-%d %H:%M UTC')"
echo "device      $device"
awk -v stride="$stride" -v sanitizer_stride="$sanitizer_stride" '
  { key = $1 " " $2; if (!(key in all)) order[++n] = key
    all[key]++; seconds[key] += $5; if ($4 == 0) passed[key]++ }
  END {
    for (i = 1; i <= n; ++i) {
      split(order[i], part, " ")
      every = part[1] == "oracle" ? stride : (part[1] ~ /check$/ ? sanitizer_stride : 0)
      printf "%-11s %-20s %3d of %3d passed %6d s%s\n", part[1], part[2], passed[order[i]], all[order[i]],
             seconds[order[i]], (every ? ", stride " every : "")
    }
  }' "$results"
for log in "$logs"/methods-*.txt "$logs"/long.txt; do
  [ ! -f "$log" ] || grep -E 'relative error|^[a-z_0-9]+ +1048576' "$log" | sed "s/^/$(basename "$log" .txt): /" || true
done
failed=$(awk '$4 != 0' "$results" | wc -l)
if [ ! -s "$results" ]; then
  echo "result      FAILED: nothing was run"
  exit 1
elif [ "$failed" -gt 0 ]; then
  echo "result      FAILED: $failed; output in $logs"
  awk '$4 != 0' "$results" | while read -r step program what _ _ log; do
    echo "            $step $program $what"
    grep -m 3 -E 'Failure|rror:|SUMMARY' "$log" | cut -c 1-160 | sed 's/^/              /' || true
  done
  exit 1
fi
echo "result      passed"
