#!/usr/bin/env bash
# Checks and measures this repository on a machine with NVIDIA GPUs: bash scripts/gpu.sh [--quick] [--model FOLDER]
# Needs no hub. At most 10 minutes on one card (--quick: 3). Writes out/gpu/report.md; scripts/gpu.py says what is in it.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh
setup_environment requirements.txt
unset OMP_NUM_THREADS                                                # one process at a time: all cores for the CPU's part
exec .venv/bin/python scripts/gpu.py "$@"
