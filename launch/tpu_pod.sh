#!/usr/bin/env bash
# Trains on all workers of a Cloud TPU VM slice (GCE). On GKE use k8s/jobset_tpu.yaml.
#
#   TPU=my-tpu ZONE=us-east5-a launch/tpu_pod.sh --config configs/llama3_8b.py --workdir /mnt/share/runs/llama
#
# Before:  once, on all workers: clone, and in the clone: python3 -m venv .venv && .venv/bin/pip install '.[tpu]'
# Edit:    TPU, ZONE, DIR (the clone's folder on the workers; default minitf). All workers must reach the work directory: a mounted
#          share, or gs://BUCKET/DIR with `pip install gcsfs` on all.
# Watch:   this terminal; tensorboard --logdir /mnt/share/runs
# Resume:  the same command. After a preemption, create and prepare the TPU again first.
set -euo pipefail

: "${TPU:?the name of the TPU VM}" "${ZONE:?its zone}"
command="cd ${DIR:-minitf} && .venv/bin/python -m minitf.train$(printf ' %q' "$@")"
exec gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker=all --command="$command"
