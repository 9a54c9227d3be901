"""What stands in launch/: checked by the tools of its languages, and run with stand-ins for what starts processes elsewhere."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from common import ROOT, arguments, steps_of, text_config
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

from minitf.runtime import cluster
from minitf.runtime.cluster import Machine
from minitf.workdir import has_checkpoint, resolve

LAUNCH = ROOT / "launch"
SCRIPTS = [*sorted(LAUNCH.glob("*.sh")), LAUNCH / "slurm.sbatch"]
JOBSETS = sorted((LAUNCH / "k8s").glob("*.yaml"))


def tool(name):
    """A program that a package of the tests brings."""
    return shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_shellcheck_finds_nothing(script):
    done = subprocess.run([tool("shellcheck"), script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    assert os.access(script, os.X_OK) == (script.suffix == ".sh")


def test_hadolint_finds_nothing():
    done = subprocess.run([tool("hadolint"), LAUNCH / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("file", [*SCRIPTS, *JOBSETS, LAUNCH / "Dockerfile"], ids=lambda p: p.name)
def test_each_file_says_what_to_edit_how_to_watch_and_how_to_resume(file):
    text = file.read_text()
    for word in ("Edit:", "Watch:", "Resume:"):
        assert re.search(rf"^# {word} ", text, re.MULTILINE), word


# ---- Kubernetes


@pytest.mark.parametrize("file", JOBSETS, ids=lambda p: p.name)
def test_jobsets_have_the_fields_of_their_schema_and_no_others(file):
    found = yaml.safe_load(file.read_text())
    # What the schema does not know, from_dict leaves out.
    assert JobsetV1alpha2JobSet.from_dict(found).to_dict() == found
    assert (found["apiVersion"], found["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")


def test_the_schema_refuses_what_it_does_not_know():
    found = yaml.safe_load(JOBSETS[0].read_text())
    found["spec"]["replicatedJobs"][0]["template"]["spec"]["completionmode"] = "Indexed"
    assert JobsetV1alpha2JobSet.from_dict(found).to_dict() != found


def pods(file):
    """(the jobs' spec, the container) of a JobSet's only replicated job."""
    (job,) = yaml.safe_load(file.read_text())["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    return job["template"]["spec"], container


def test_a_pod_of_the_gpu_jobset_finds_the_others():
    job, container = pods(LAUNCH / "k8s/jobset_gpu.yaml")
    annotations = {
        "jobset.sigs.k8s.io/coordinator": "minitf-workers-0-0.minitf",
        "batch.kubernetes.io/job-completion-index": "1",
    }
    env = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}
    for variable in container["env"]:
        if "value" in variable:
            value = re.sub(r"\$\((\w+)\)", lambda m: env[m[1]], variable["value"])
        else:
            value = annotations[re.search(r"'(.+)'", variable["valueFrom"]["fieldRef"]["fieldPath"])[1]]
        env[variable["name"]] = value
    _, arguments = cluster.detect(env, Machine(8, False, frozenset()))
    assert arguments["num_processes"] == job["parallelism"] == job["completions"]
    assert arguments["process_id"] == 1
    assert arguments["coordinator_address"] == "minitf-workers-0-0.minitf:8476"
    assert arguments["local_device_ids"] is None  # all GPUs of the pod


@pytest.mark.parametrize("file", JOBSETS, ids=lambda p: p.name)
def test_a_jobset_starts_again_after_a_loss_and_not_after_a_mistake(file):
    found = yaml.safe_load(file.read_text())
    job, container = pods(file)
    assert job["parallelism"] == job["completions"]
    assert job["backoffLimit"] == 0  # one lost pod ends the job: all start again together
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"] == {"containerName": container["name"], "operator": "In", "values": [2, 4]}
    assert found["spec"]["failurePolicy"]["maxRestarts"] > 0
    assert found["spec"]["failurePolicy"]["rules"] == [
        {"name": "mistake", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    ]


# ---- scripts that start processes

STAND_INS = {
    # What srun sets for one node; the id of each process to a file, its status as srun's.
    "srun": """
import os, subprocess, sys
n = int(os.environ["SLURM_NTASKS"])
base = os.environ | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(n), "SLURM_STEP_NODELIST": "localhost",
    "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": str(n), "SLURM_NODEID": "0"}
tasks = [subprocess.Popen(sys.argv[1:], env=base | {"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)}) for i in range(n)]
with open(os.environ["STAND_IN_LOG"], "w") as f:
    print(*(t.pid for t in tasks), file=f)
statuses = [t.wait() for t in tasks]
sys.exit(max(s if s >= 0 else 128 - s for s in statuses))
""",
    "scontrol": """
import os, sys
with open(os.environ["STAND_IN_LOG"] + ".requeue", "a") as f:
    print(*sys.argv[1:], file=f)
""",
    # Open MPI 5 sets no address.
    "mpirun": """
import os, subprocess, sys
_, np, n, x, variable, *command = sys.argv
assert (np, x) == ("-np", "-x"), sys.argv
base = os.environ | dict([variable.split("=")]) | {"OMPI_COMM_WORLD_SIZE": n, "OMPI_COMM_WORLD_LOCAL_SIZE": n, "OMPI_VERSION": "5.0.3"}
ranks = [{"OMPI_COMM_WORLD_RANK": str(i), "OMPI_COMM_WORLD_LOCAL_RANK": str(i)} for i in range(int(n))]
sys.exit(max(p.wait() for p in [subprocess.Popen(command, env=base | r) for r in ranks]))
""",
    "gcloud": """
import json, sys
print(json.dumps(sys.argv[1:]))
""",
}


@pytest.fixture
def environment(tmp_path):
    """Variables for a script: stand-ins on its path, this Python, one device a process."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in STAND_INS.items():
        (folder / name).write_text(f"#!{sys.executable}{text}")
        (folder / name).chmod(0o755)
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "OMPI_", "MINITF_"))},
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "JAX_NUM_CPU_DEVICES": "1",
        "STAND_IN_LOG": str(tmp_path / "tasks"),
    }


def config_of(corpus, **changes):
    return text_config(corpus, steps=6, batch_size=8, mesh__fsdp=-1, eval_every=None, checkpoint__every=2, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["local.sh", "mpi.sh"])
def test_a_script_trains_in_several_processes(script, corpus, environment, tmp_path):
    port = str(random.randint(20000, 30000))
    command = [LAUNCH / script, "2", *arguments(config_of(corpus), tmp_path / "w")]
    done = subprocess.run(command, env=environment | {"PORT": port}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "devices: 2 x cpu in 2 processes" in done.stdout
    assert ("Open MPI, 2 of its 2 processes on this node" in done.stdout) == (script == "mpi.sh")
    assert steps_of(tmp_path / "w") == list(range(1, 7))
    again = subprocess.run(command, env=environment | {"PORT": port}, capture_output=True, text=True, check=False)
    assert again.returncode == 0
    assert "step 6 of 6 is already done" in again.stdout


@pytest.mark.slow
def test_local_sh_hands_a_signal_on_and_ends_with_the_runs_status(corpus, environment, tmp_path):
    cfg = config_of(corpus, model__dropout=0.1)
    command = [LAUNCH / "local.sh", "2", *arguments(cfg, tmp_path / "w"), "--config.steps=100000"]
    with open(tmp_path / "out", "w+") as out:
        script = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
        while not steps_of(tmp_path / "w"):
            assert script.poll() is None
        script.send_signal(signal.SIGTERM)
        assert script.wait(60) == 3
        out.seek(0)
        assert "stopped by SIGTERM after step" in out.read()


@pytest.mark.slow
def test_a_slurm_job_that_loses_a_process_is_queued_again_and_goes_on(corpus, environment, tmp_path):
    job = {"SLURM_JOB_ID": str(random.randint(1, 10**6)), "SLURM_NTASKS": "2"}
    log, requeued = tmp_path / "tasks", tmp_path / "tasks.requeue"
    command = ["bash", LAUNCH / "slurm.sbatch", *arguments(config_of(corpus), tmp_path / "w")]
    longer = [*command, "--config.steps=100000"]
    with open(tmp_path / "out", "w") as out:
        script = subprocess.Popen(longer, env=environment | job, stdout=out, stderr=subprocess.STDOUT)
        while not has_checkpoint(resolve(str(tmp_path / "w"))):  # they are written behind the steps
            assert script.poll() is None
        os.kill(int(log.read_text().split()[0]), signal.SIGKILL)
        assert script.wait(60) not in (0, 2, 3, 4)
    assert requeued.read_text() == f"requeue {job['SLURM_JOB_ID']}\n"
    # Slurm starts the job again; that it is the same one takes the dead one's lock over.
    last = max(int(p.name) for p in (tmp_path / "w/checkpoints").iterdir() if p.name.isdigit())
    end = [*command, f"--config.steps={last + 2}"]
    done = subprocess.run(
        end, env=environment | job | {"SLURM_RESTART_COUNT": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"resuming after step {last} of {last + 2}" in done.stdout
    assert "process 1 of 2: Slurm job" in done.stdout
    assert steps_of(tmp_path / "w") == list(range(1, last + 3))
    assert len(requeued.read_text().splitlines()) == 1  # and not once more


def test_a_slurm_job_is_not_queued_again_for_a_mistake(environment, tmp_path):
    job = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1"}
    command = ["bash", LAUNCH / "slurm.sbatch", "--config", str(tmp_path / "none.py")]
    done = subprocess.run(command, env=environment | job, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no such file" in done.stderr
    assert not (tmp_path / "tasks.requeue").exists()


def test_tpu_pod_sh_gives_the_command_to_all_workers(environment):
    command = [LAUNCH / "tpu_pod.sh", "--config", "configs/tiny.py", "--config.data.path=/a b/c"]
    done = subprocess.run(
        command, env=environment | {"TPU": "pod", "ZONE": "z"}, capture_output=True, text=True, check=True
    )
    *words, last = yaml.safe_load(done.stdout)
    assert words == ["compute", "tpus", "tpu-vm", "ssh", "pod", "--zone=z", "--worker=all"]
    assert last == (
        r"--command=cd minitf && .venv/bin/python -m minitf.train --config configs/tiny.py --config.data.path=/a\ b/c"
    )
    refused = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "TPU: the name of the TPU VM" in refused.stderr
