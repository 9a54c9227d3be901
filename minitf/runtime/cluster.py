"""Detects a multi-process run from the environment: number of processes, id of this one, address of process 0, and which devices of
the host belong to this process."""

import glob
import importlib.util
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Env = Mapping[str, str]


class Machine(NamedTuple):
    """Facts about the host that environment variables do not give."""

    gpus: int  # number of GPUs visible to this process
    tpu: bool  # the host has TPU chips, and libtpu is installed
    packages: frozenset[str]  # installed ones of the packages that JAX needs to detect some clusters


def this_machine(env: Env) -> Machine:
    visible = next((env[n] for n in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES") if n in env), None)
    gpus = len(glob.glob("/dev/nvidia[0-9]*")) if visible is None else len([d for d in visible.split(",") if d.strip()])
    packages = frozenset(p for p in ("libtpu", "mpi4py", "kubernetes") if importlib.util.find_spec(p))
    chips = bool(glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*"))
    return Machine(gpus, chips and "libtpu" in packages, packages)


class Found(NamedTuple):
    """Facts from a cluster's environment. None: JAX finds the fact by `method`."""

    why: str
    num_processes: int | None = None
    process_id: int | None = None
    coordinator: str | None = None  # HOST:PORT of process 0
    devices: tuple[int, ...] | None = None  # ids of this process's devices on the host; None: all
    method: str | None = "deactivate"  # JAX's name for the cluster; None: JAX tries all


def share(tasks: int, task: int, gpus: int, on_node: int | None) -> tuple[int, ...] | None:
    """Ids of the visible GPUs for one of several tasks on a node; None: all visible ones. on_node: number of the job's GPUs on this
    node, if known; a task that sees fewer was assigned its own by the scheduler."""
    if tasks == 1 or gpus == 0 or gpus < (tasks if on_node is None else on_node):
        return None
    if gpus % tasks:
        raise ValueError(
            f"{tasks} processes on this node see {gpus} GPUs, which cannot be shared evenly: start one process a node, one a "
            "GPU, or say which by JAX_LOCAL_DEVICE_IDS"
        )
    each = gpus // tasks
    return tuple(range(task * each, (task + 1) * each))


# ---- the clusters


def number(env: Env, name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise ValueError(f"{name}={env[name]}: must be an integer") from None


def tasks_on_node(text: str, node: int) -> int:
    """Number of tasks on a node, by its index in the step, from Slurm's `2(x3),1`."""
    counts: list[int] = []
    for part in text.split(","):
        count, _, times = part.rstrip(")").partition("(x")
        counts += [int(count)] * int(times or 1)
    return counts[node]


def slurm(env: Env, machine: Machine) -> Found:
    job = f"Slurm job {env['SLURM_JOB_ID']}"
    if "SLURM_STEP_NODELIST" not in env or "SLURM_PROCID" not in env:
        tasks = int(env.get("SLURM_NTASKS", 1))
        hint = f": of its {tasks} tasks one runs; srun starts all" if tasks > 1 else ""
        return Found(f"{job}, not inside srun{hint}", 1, 0)
    n = number(env, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS")
    here = tasks_on_node(env.get("SLURM_STEP_TASKS_PER_NODE", str(n)), int(env.get("SLURM_NODEID", 0)))
    on_node = int(env["SLURM_GPUS_ON_NODE"]) if "SLURM_GPUS_ON_NODE" in env else None
    return Found(
        f"{job}, {here} of the step's {n} tasks on this node",
        n,
        number(env, "SLURM_PROCID"),
        devices=share(here, number(env, "SLURM_LOCALID"), machine.gpus, on_node),
        method="slurm",
    )


def open_mpi(env: Env, machine: Machine) -> Found:
    n, here = number(env, "OMPI_COMM_WORLD_SIZE"), int(env.get("OMPI_COMM_WORLD_LOCAL_SIZE", 1))
    return Found(
        f"Open MPI, {here} of its {n} processes on this node",
        n,
        number(env, "OMPI_COMM_WORLD_RANK"),
        devices=share(here, int(env.get("OMPI_COMM_WORLD_LOCAL_RANK", 0)), machine.gpus, None),
        # Version 5 gives no address; mpi4py can obtain one.
        method="ompi" if "OMPI_MCA_orte_hnp_uri" in env else "mpi4py",
    )


TPU_WORKERS = ("TPU_PROCESS_ADDRESSES_PATH", "TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")


def tpu(env: Env, machine: Machine) -> Found:
    name = next((n for n in TPU_WORKERS if env.get(n)), None)
    slices = int(env.get("MEGASCALE_NUM_SLICES") or 1)
    of_slices = f", slice {env.get('MEGASCALE_SLICE_ID')} of {slices}" if slices > 1 else ""
    if name == "TPU_PROCESS_ADDRESSES_PATH":
        return Found(f"TPU workers of {name}{of_slices}", method="gketpu")
    if name is not None:
        workers = len(env[name].split(","))
        if workers * slices == 1:
            return Found(f"one TPU worker, by {name}", 1, 0)
        return Found(f"TPU worker {env.get('TPU_WORKER_ID')} of {workers} by {name}{of_slices}", method="gketpu")
    if "TPU_SKIP_MDS_QUERY" in env:
        return Found("a TPU without a metadata server", 1, 0)
    return Found("TPU VM, by its metadata", method="gcetpu")


def kubernetes(env: Env, machine: Machine) -> Found:
    if "kubernetes" not in machine.packages:
        raise ValueError(
            f"a pod of an Indexed Job (JOB_COMPLETION_INDEX={env['JOB_COMPLETION_INDEX']}): how many there are is not known. Set "
            "MINITF_NUM_PROCESSES, MINITF_PROCESS_ID and MINITF_COORDINATOR as launch/k8s does, or install `kubernetes` and let "
            "the pod read pods, jobs and services"
        )
    return Found("Kubernetes Job", process_id=number(env, "JOB_COMPLETION_INDEX"), method=None)


class Cluster(NamedTuple):
    present: Callable[[Env, Machine], bool]
    read: Callable[[Env, Machine], Found]


CLUSTERS = {  # the first one present is used
    "open_mpi": Cluster(lambda env, machine: "OMPI_COMM_WORLD_SIZE" in env, open_mpi),
    "slurm": Cluster(lambda env, machine: "SLURM_JOB_ID" in env, slurm),
    "tpu": Cluster(lambda env, machine: machine.tpu and "tpu" in env.get("JAX_PLATFORMS", "tpu"), tpu),
    "kubernetes": Cluster(
        lambda env, machine: "KUBERNETES_SERVICE_HOST" in env and "JOB_COMPLETION_INDEX" in env, kubernetes
    ),
}


# ---- arguments of jax.distributed.initialize

EXPLICIT = {  # argument -> variable
    "coordinator": "MINITF_COORDINATOR",
    "num_processes": "MINITF_NUM_PROCESSES",
    "process_id": "MINITF_PROCESS_ID",
}


class Start(NamedTuple):
    why: str | None  # to print; None: no cluster was detected
    arguments: dict[str, Any] | None  # of jax.distributed.initialize; None: a single process


def detect(env: Env, machine: Machine, **flags: str | int | None) -> Start:
    """How to start. Flags take precedence over MINITF_* variables, and these over the detected cluster. Raises ValueError for missing
    or contradictory values."""
    told: dict[str, Any] = {}
    for name, variable in EXPLICIT.items():
        if flags.get(name) is not None:
            told[name] = (f"--{name}", flags[name])
        elif env.get(variable):
            told[name] = (variable, env[variable] if name == "coordinator" else number(env, variable))
    named = ", ".join(source for source, _ in told.values())
    given = {name: value for name, (_, value) in told.items()}
    if given.get("num_processes") == 1:
        return Start(f"by {named}", None)

    found = Found(f"by {named}")
    cluster = next((c for c in CLUSTERS.values() if c.present(env, machine)), None)
    if cluster is not None and len(given) < len(EXPLICIT):
        found = cluster.read(env, machine)
        found = found._replace(why=found.why + (f", {named}" if named else ""), **given)
    elif given:
        missing = [f"--{name} or {variable}" for name, variable in EXPLICIT.items() if name not in given]
        if missing:
            raise ValueError(f"{named} given; missing: {', '.join(missing)}")
        found = found._replace(**given)
    elif cluster is None:
        return Start(None, None)

    n, i, address = found.num_processes, found.process_id, found.coordinator
    if n is not None and n < 1:
        raise ValueError(f"{n} processes: must be at least 1")
    if n is not None and i is not None and not 0 <= i < n:
        raise ValueError(f"process {i} of {n}: must be from 0 to {n - 1}")
    if address is not None and not re.fullmatch(r"\S+:\d+", address):
        raise ValueError(f"the coordinator's address {address}: must be HOST:PORT")
    if n == 1:
        return Start(found.why, None)
    if address is None and found.method == "mpi4py" and "mpi4py" not in machine.packages:
        raise ValueError(
            "Open MPI 5 tells no address: set MINITF_COORDINATOR=HOST:PORT for all processes (mpirun -x MINITF_COORDINATOR), as "
            "launch/mpi.sh does, or install mpi4py"
        )
    devices = None if "JAX_LOCAL_DEVICE_IDS" in env else found.devices
    if devices is None and found.method in ("slurm", "ompi", "mpi4py") and "JAX_LOCAL_DEVICE_IDS" not in env:
        devices = ()  # all: for None JAX would use a single one
    place = "" if None in (n, i) else f"process {i} of {n}: "
    uses = f"; GPUs {', '.join(map(str, devices))}" if devices else ""
    return Start(
        f"{place}{found.why}{uses}" + (f"; process 0 is at {address}" if address else ""),
        {
            "coordinator_address": address,
            "num_processes": n,
            "process_id": i,
            "local_device_ids": devices if devices is None else list(devices),
            "cluster_detection_method": "deactivate" if None not in (address, n, i) else found.method,
        },
    )
