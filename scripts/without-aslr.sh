#!/bin/sh
# Runs a command with address space randomisation off where the system allows that: GCC 12's thread
# sanitizer refuses to start when the kernel randomises more address bits than it expects.
set -eu
if setarch "$(uname -m)" --addr-no-randomize true 2>/dev/null; then
  exec setarch "$(uname -m)" --addr-no-randomize "$@"
fi
exec "$@"
