"""What a process finds out about its cluster from its environment. The environments are what each launcher sets."""

import re

import pytest
from jax._src import clusters  # what JAX makes of what it gets

from minitf.runtime import cluster
from minitf.runtime.cluster import Machine, detect, share, tasks_on_node

PLAIN = Machine(gpus=0, tpu=False, packages=frozenset())
GPUS = PLAIN._replace(gpus=4)
TPU = PLAIN._replace(tpu=True, packages=frozenset({"libtpu"}))

SLURM = {  # task 5 of `srun --nodes=2 --ntasks-per-node=4`
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_GPUS_ON_NODE": "4",
}
NODES = SLURM | {  # task 1 of `srun --nodes=2 --ntasks-per-node=1`
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
BATCH = {"SLURM_JOB_ID": "123456", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}
OPEN_MPI_4 = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
OPEN_MPI_5 = {k: v for k, v in OPEN_MPI_4.items() if k != "OMPI_MCA_orte_hnp_uri"} | {"OMPI_VERSION": "5.0.3"}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "2", "HOSTNAME": "train-workers-0-2"}
JOBSET = POD | {
    "MINITF_COORDINATOR": "train-workers-0-0.train:8476",
    "MINITF_NUM_PROCESSES": "4",
    "MINITF_PROCESS_ID": "2",
}
GKE = {"TPU_WORKER_HOSTNAMES": "t-0.svc,t-1.svc,t-2.svc,t-3.svc", "TPU_WORKER_ID": "2"}
SLICES = GKE | {
    "MEGASCALE_NUM_SLICES": "2",
    "MEGASCALE_SLICE_ID": "1",
    "MEGASCALE_COORDINATOR_ADDRESS": "t-s0-0.svc:8081",
}
EXPLICIT = {"MINITF_COORDINATOR": "10.0.0.1:1234", "MINITF_NUM_PROCESSES": "2", "MINITF_PROCESS_ID": "1"}


@pytest.mark.parametrize(
    "env", [{}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0,1"}]
)
def test_without_a_cluster_a_process_starts_alone_and_silently(env):
    assert detect(env, GPUS) == (None, None)


CASES = {  # name -> (environment, machine, coordinator, processes, this one, devices, JAX's method, words of the line)
    "slurm, a task a node": (NODES, GPUS, None, 2, 1, [], "slurm", "Slurm job 123456, 1 of the step's 2 tasks"),
    "slurm, a task a GPU": (SLURM, GPUS, None, 8, 5, [1], "slurm", "process 5 of 8: Slurm job 123456, 4 of"),
    "slurm, a task sees its own GPU only": (SLURM, GPUS._replace(gpus=1), None, 8, 5, [], "slurm", "Slurm"),
    "slurm, a task sees its own two of four": (SLURM, GPUS._replace(gpus=2), None, 8, 5, [], "slurm", "Slurm"),
    "slurm, two GPUs a task": (
        SLURM | {"SLURM_GPUS_ON_NODE": "8"},
        GPUS._replace(gpus=8),
        *(None, 8, 5, [2, 3], "slurm", "GPUs 2, 3"),
    ),
    "slurm on CPUs": (SLURM, PLAIN, None, 8, 5, [], "slurm", "Slurm"),
    "slurm, devices by JAX's variable": (
        SLURM | {"JAX_LOCAL_DEVICE_IDS": "3"},
        *(GPUS, None, 8, 5, None, "slurm", "Slurm"),
    ),
    "slurm with an address": (
        SLURM | {"MINITF_COORDINATOR": "gpu07:99"},
        *(GPUS, "gpu07:99", 8, 5, [1], "deactivate", "MINITF_COORDINATOR; GPUs 1; process 0 is at gpu07:99"),
    ),
    "open mpi 4": (OPEN_MPI_4, GPUS, None, 4, 3, [2, 3], "ompi", "process 3 of 4: Open MPI, 2 of its 4 processes"),
    "open mpi 5 with mpi4py": (
        OPEN_MPI_5,
        PLAIN._replace(packages=frozenset({"mpi4py"})),
        *(None, 4, 3, [], "mpi4py", "Open MPI"),
    ),
    "open mpi 5 with an address": (
        OPEN_MPI_5 | {"MINITF_COORDINATOR": "10.96.0.1:4000"},
        *(PLAIN, "10.96.0.1:4000", 4, 3, [], "deactivate", "Open MPI"),
    ),
    "jobset": (JOBSET, PLAIN, "train-workers-0-0.train:8476", 4, 2, None, "deactivate", "by MINITF_COORDINATOR"),
    "kubernetes with its package": (
        POD,
        PLAIN._replace(packages=frozenset({"kubernetes"})),
        *(None, None, 2, None, None, "Kubernetes Job"),
    ),
    "tpu on gke": (GKE, TPU, None, None, None, None, "gketpu", "TPU worker 2 of 4 by TPU_WORKER_HOSTNAMES"),
    "tpu slices on gke": (SLICES, TPU, None, None, None, None, "gketpu", "TPU worker 2 of 4 .*, slice 1 of 2"),
    "tpu pod on gce": ({}, TPU, None, None, None, None, "gcetpu", "TPU VM"),
    "explicit": (EXPLICIT, PLAIN, "10.0.0.1:1234", 2, 1, None, "deactivate", "MINITF_NUM_PROCESSES"),
    "explicit inside slurm": (
        SLURM | EXPLICIT,
        GPUS,
        "10.0.0.1:1234",
        2,
        1,
        None,
        "deactivate",
        "^process 1 of 2: by M",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_jax_distributed_initialize_gets(name):
    env, machine, coordinator, n, i, devices, method, words = CASES[name]
    why, arguments = detect(env, machine)
    assert arguments == {
        "coordinator_address": coordinator,
        "num_processes": n,
        "process_id": i,
        "local_device_ids": devices,
        "cluster_detection_method": method,
    }
    assert re.search(words, why)
    assert "\n" not in why


ALONE = {
    "one task": (NODES | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, GPUS, "Slurm job 123456"),
    "sbatch without srun": (BATCH, GPUS, "not inside srun: of its 8 tasks one runs; srun starts all"),
    "salloc": ({"SLURM_JOB_ID": "7"}, GPUS, "Slurm job 7, not inside srun"),
    "one TPU worker": ({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, TPU, "one TPU worker"),
    "a TPU elsewhere": ({"TPU_SKIP_MDS_QUERY": "1"}, TPU, "without a metadata server"),
    "asked for": (SLURM | {"MINITF_NUM_PROCESSES": "1"}, GPUS, "by MINITF_NUM_PROCESSES"),
}


@pytest.mark.parametrize("name", ALONE)
def test_a_process_that_is_alone_in_its_cluster_says_why(name):
    env, machine, words = ALONE[name]
    why, arguments = detect(env, machine)
    assert arguments is None
    assert words in why


def test_a_TPU_that_is_not_to_be_used_is_no_cluster():
    assert detect(GKE | {"JAX_PLATFORMS": "cpu"}, TPU) == (None, None)


def test_flags_go_before_variables():
    why, arguments = detect(EXPLICIT, PLAIN, coordinator="h:1", num_processes=3, process_id=2)
    assert (arguments["coordinator_address"], arguments["num_processes"], arguments["process_id"]) == ("h:1", 3, 2)
    assert why == "process 2 of 3: by --coordinator, --num_processes, --process_id; process 0 is at h:1"


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"MINITF_COORDINATOR": "h:1"}, "missing: --num_processes or MINITF_NUM_PROCESSES, --process_id"),
        ({"MINITF_NUM_PROCESSES": "2"}, "MINITF_NUM_PROCESSES given; missing: --coordinator or MINITF_COORDINATOR"),
        (EXPLICIT | {"MINITF_PROCESS_ID": "2"}, "process 2 of 2: must be from 0 to 1"),
        (EXPLICIT | {"MINITF_NUM_PROCESSES": "0"}, "0 processes: must be at least 1"),
        (EXPLICIT | {"MINITF_NUM_PROCESSES": "two"}, "MINITF_NUM_PROCESSES=two: must be an integer"),
        (EXPLICIT | {"MINITF_COORDINATOR": "10.0.0.1"}, "the coordinator's address 10.0.0.1: must be HOST:PORT"),
        (OPEN_MPI_5, "Open MPI 5 tells no address: set MINITF_COORDINATOR=HOST:PORT"),
        (POD, r"a pod of an Indexed Job \(JOB_COMPLETION_INDEX=2\).*MINITF_NUM_PROCESSES"),
        (SLURM | {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5"}, "4 processes on this node see 6 GPUs"),
    ],
)
def test_what_does_not_fit_together_is_refused(env, words):
    with pytest.raises(ValueError, match=words):
        detect(env, cluster.this_machine(env))


@pytest.mark.parametrize("name", ["slurm, a task a node", "slurm, a task a GPU", "open mpi 4"])
def test_JAX_finds_the_coordinator_and_leaves_our_devices_alone(name, monkeypatch):
    env, machine, _, n, i, devices, method, _ = CASES[name]
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    _, arguments = detect(env, machine)
    address, *rest = clusters.ClusterEnv.auto_detect_unset_distributed_params(
        *(arguments["coordinator_address"], n, i, arguments["local_device_ids"], method, 1)
    )
    assert rest == [n, i, devices]
    host, port = address.split(":")
    assert host == ("10.96.0.1" if method == "ompi" else "gpu07")
    assert 61440 <= int(port) <= 65535


@pytest.mark.parametrize(
    ("text", "counts"), [("4(x2)", [4, 4]), ("2(x3),1", [2, 2, 2, 1]), ("8", [8]), ("1,3", [1, 3])]
)
def test_tasks_on_a_node(text, counts):
    assert [tasks_on_node(text, i) for i in range(len(counts))] == counts


def test_tasks_of_a_node_share_its_GPUs_without_overlap():
    for tasks in (1, 2, 4, 8):
        shares = [share(tasks, i, 8, 8) or tuple(range(8)) for i in range(tasks)]
        assert sorted(d for s in shares for d in s) == list(range(8))


def test_every_name_of_JAXs_clusters_that_we_use_is_one():
    names = {c.name for c in clusters.ClusterEnv._cluster_types}
    used = {case[6] for case in CASES.values()} - {"deactivate", None}
    assert used <= names
