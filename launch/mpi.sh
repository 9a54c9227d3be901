#!/usr/bin/env bash
# Trains in N processes started by Open MPI's mpirun (version 4 or 5), without mpi4py.
#
#   launch/mpi.sh 4 --config configs/tiny.py
#   HOSTFILE=hosts PORT=8476 launch/mpi.sh 16 --config configs/llama3_8b.py --workdir /shared/runs/llama
#
# Edit:    HOSTFILE (lines like `node1 slots=8`; this host first, since process 0 listens here), PORT (free on this host), PYTHON.
#          Processes on a host share its GPUs evenly. The work directory must be on a file system that all hosts share.
# Watch:   the terminal; tensorboard --logdir /shared/runs
# Resume:  the same command, with any number of processes.
set -euo pipefail

if [[ ! "${1:-}" =~ ^[1-9][0-9]*$ ]]; then
  echo "usage: launch/mpi.sh N ARGUMENTS-OF-minitf.train" >&2
  exit 2
fi
n=$1
shift
python=${PYTHON:-$(cd "$(dirname "$0")/.." && pwd)/.venv/bin/python}
[ -x "$(command -v "$python")" ] || python=python3
host=$(hostname)
[ -n "${HOSTFILE:-}" ] || host=127.0.0.1

exec mpirun -np "$n" ${HOSTFILE:+--hostfile "$HOSTFILE"} -x "MINITF_COORDINATOR=$host:${PORT:-8476}" \
  "$python" -m minitf.train "$@"
