#!/bin/bash
# Checks and measures train.py on one CUDA card in less than 8 minutes; prints one table, and exits with 1 on any
# mismatch. On a machine without a card, QSHARD_DRY_RUN=1 goes through all of it with a tiny model on the CPU.
#
#   bash tests/gpu/run.sh                                      # PYTHON chooses the Python
#   QSHARD_LAYERS=32 bash tests/gpu/run.sh                     # blocks of the 8B-shaped model (default: 12)
#   QSHARD_TRL_PYTHON=trl/bin/python bash tests/gpu/run.sh     # and the same training with TRL beside it
set -euo pipefail
cd "$(dirname "$0")/../.."
exec timeout --signal=INT 480 "${PYTHON:-python}" tests/gpu/check.py "$@"
