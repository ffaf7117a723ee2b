#!/bin/sh
# Installs the Debian/Ubuntu packages that the build needs and that are missing, with the argument
# "aarch64" also those of the cross build for 64-bit Arm. When nothing is missing it neither asks for
# root nor touches the network.
set -eu

packages="cmake ninja-build g++ ccache nlohmann-json3-dev libcli11-dev libgtest-dev
libpng-dev python3"
case "${1-}" in
  "") ;;
  aarch64) packages="$packages g++-aarch64-linux-gnu libc6-dev-arm64-cross googletest qemu-user" ;;
  *)
    echo "install-deps.sh: unknown argument '$1'; legal: none, aarch64" >&2
    exit 2
    ;;
esac

if ! command -v dpkg-query >/dev/null; then
  echo "install-deps.sh: this system has no dpkg; install these by hand:" $packages python3-pip >&2
  exit 0
fi

missing=""
for package in $packages; do
  # A missing package makes dpkg-query fail; that is an answer, not an error.
  status=$(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null || true)
  [ "$status" = installed ] || missing="$missing $package"
done
# Any pip of the python3 in use will do, packaged or not.
python3 -m pip --version >/dev/null 2>&1 || missing="$missing python3-pip"
# So will its own headers and its own venv, for the Python package.
python3 -c 'import os, sysconfig, sys
sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' 2>/dev/null ||
  missing="$missing python3-dev"
python3 -c 'import ensurepip, venv' 2>/dev/null || missing="$missing python3-venv"

[ -n "$missing" ] || exit 0

if [ "$(id -u)" = 0 ]; then
  root=""
elif command -v sudo >/dev/null; then
  root=sudo
else
  echo "install-deps.sh: root or sudo is needed to install:$missing" >&2
  exit 2
fi
echo "installing:$missing"
export DEBIAN_FRONTEND=noninteractive
$root apt-get update -qq
$root apt-get install -y -qq --no-install-recommends $missing
