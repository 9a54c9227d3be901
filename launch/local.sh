#!/usr/bin/env bash
# Trains in N processes on one host, connected over loopback: for tests, and to try out multi-host training.
#
#   launch/local.sh 4 --config configs/tiny.py        # 4 processes; the other arguments are passed to python -m minitf.train
#   DEVICES=2 launch/local.sh 4 --config configs/tiny.py
#
# Edit:    DEVICES (simulated CPU devices of each process, 1), PORT (any free one), PYTHON (.venv/bin/python of this checkout).
# Watch:   the terminal shows all processes, of which the first one logs; tensorboard --logdir runs
# Resume:  the same command, with any number of processes. ^C and kill -TERM save first and end with status 3.
set -euo pipefail

if [[ ! "${1:-}" =~ ^[1-9][0-9]*$ ]]; then
  echo "usage: launch/local.sh N ARGUMENTS-OF-minitf.train" >&2
  exit 2
fi
export MINITF_NUM_PROCESSES=$1
shift
python=${PYTHON:-$(dirname "$0")/../.venv/bin/python}
[ -x "$(command -v "$python")" ] || python=python3
export JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=${DEVICES:-1}
export MINITF_COORDINATOR=127.0.0.1:${PORT:-$((20000 + RANDOM % 10000))}

set -m # each process in its own group: it gets each signal once, from this script
pids=()
trap 'kill -INT "${pids[@]}" 2>/dev/null || true' INT
trap 'kill -TERM "${pids[@]}" 2>/dev/null || true' TERM
for ((i = 0; i < MINITF_NUM_PROCESSES; i++)); do
  MINITF_PROCESS_ID=$i "$python" -m minitf.train "$@" &
  pids+=($!)
done

status=0
for pid in "${pids[@]}"; do
  while kill -0 "$pid" 2>/dev/null; do wait "$pid" || true; done # a signal interrupts wait
  wait "$pid" || { code=$?; ((code <= status)) || status=$code; }
done
exit "$status"
