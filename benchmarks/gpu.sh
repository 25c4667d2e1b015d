#!/usr/bin/env bash
# Decode time and peak memory on one accelerator, within 6 minutes: full, sekv, nestedkv and snapkv at 8K, 32K and 128K.
#
# The backbone has a published architecture and random weights, which time and memory do not depend on. An untrained
# router with fill=true zooms into every row that the budget leaves, the most that a trained one could do.
# Figures go to $OUTPUT as each length is done: bench.json, bench.csv, setting.json and bench.png.
#
# Run: benchmarks/gpu.sh
# Variables: BACKBONE POLICIES LENGTHS BUDGET DTYPE DEVICE STEPS REPEATS OUTPUT PYTHON, and LIMIT in seconds.
set -euo pipefail
cd "$(dirname "$0")/.."

limit=${LIMIT:-345}
shared=(
  --backbone "${BACKBONE:-config:meta-llama/Llama-3.1-8B}"
  --adapter untrained
  --policies "${POLICIES:-full,sekv[fill=true],nestedkv,snapkv}"
  # What is decoded has to fit the 131,072 positions too.
  --lengths "${LENGTHS:-8192,32768,131000}"
  --budget "${BUDGET:-0.1}"
  --dtype "${DTYPE:-bfloat16}"
  --device "${DEVICE:-cuda}"
  --steps "${STEPS:-24}"
  --output "${OUTPUT:-results/gpu}"
)
status=0
# Each part stops in time for the other one; what it has measured by then is kept.
timeout "$((limit * 6 / 10))" "${PYTHON:-python}" -m sekv bench decode "${shared[@]}" --repeats "${REPEATS:-2}" || status=$?
timeout "$((limit - SECONDS))" "${PYTHON:-python}" -m sekv bench memory "${shared[@]}" || status=$?
exit "$status"
