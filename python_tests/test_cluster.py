"""Launchers of examples/cluster, as far as one machine without their engines can try them."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

CLUSTER = Path(__file__).parents[1] / "examples" / "cluster"
BIN = Path(sys.executable).parent
SHOW = 'import os; open(os.environ["RANK"] + " of " + os.environ["WORLD_SIZE"] + ".seen", "x")\n'
"""Says in files who ran: what two ranks print may be mixed within a line."""
STUBS = {
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"',
    "scontrol": 'case $1 in show) echo localhost ;; requeue) echo "$2" >requeued ;; esac',
}
"""SLURM on one node: srun runs the command itself."""


def seen(folder: Path) -> list[str]:
    return sorted(file.stem for file in folder.glob("*.seen"))


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    for name, script in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{BIN}:{os.environ['PATH']}")
    job = {"SLURM_JOB_NODELIST": "node", "SLURM_NNODES": "1", "SLURM_GPUS_ON_NODE": "2", "OMP_NUM_THREADS": "1"}
    for name, value in {**job, "SLURM_JOB_ID": str(os.getpid())}.items():
        monkeypatch.setenv(name, value)
    return tmp_path


@pytest.mark.long
def test_slurm_starts_one_torchrun_per_node(slurm):
    file = CLUSTER / "slurm.sbatch"
    subprocess.run(["bash", "-n", str(file)], check=True)
    given = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", file.read_text(), re.MULTILINE))
    assert given["ntasks-per-node"] == "1"
    (slurm / "show.py").write_text(SHOW)
    done = subprocess.run(["bash", str(file), "show.py"], cwd=slurm, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert seen(slurm) == ["0 of 2", "1 of 2"]
    assert not (slurm / "requeued").exists()


@pytest.mark.long
def test_slurm_passes_the_signal_on_and_queues_the_job_again(slurm):
    (slurm / "save.py").write_text(
        "import os, signal, sys, time\n"
        "def save(*_):\n"
        "    open('saved ' + os.environ['RANK'], 'w').close()\n"
        "    sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "open('started ' + os.environ['RANK'], 'w').close()\n"
        "time.sleep(100)\n"
    )
    job = subprocess.Popen(["bash", str(CLUSTER / "slurm.sbatch"), "save.py"], cwd=slurm, stderr=subprocess.DEVNULL)
    while len(list(slurm.glob("started *"))) < 2:
        assert job.poll() is None
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    job.wait(60)
    assert len(list(slurm.glob("saved *"))) == 2
    assert (slurm / "requeued").read_text().strip() == str(os.getpid())


def test_kubernetes_manifest_has_what_the_operator_requires():
    job = yaml.safe_load((CLUSTER / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", job["metadata"]["name"])
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert set(replicas) == {"Master", "Worker"}
    assert replicas["Master"]["replicas"] == 1
    for each in replicas.values():
        assert each["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
        (container,) = each["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"
        assert job["spec"]["nprocPerNode"] == str(container["resources"]["limits"]["nvidia.com/gpu"])
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in each["template"]["spec"]["volumes"]}


@pytest.mark.long
def test_torchrun_takes_what_the_operator_sets(tmp_path):
    job = yaml.safe_load((CLUSTER / "pytorchjob.yaml").read_text())
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"]
    launcher, script = container["command"]
    assert (
        CLUSTER.parents[1] / Path(script).relative_to("/oases")
    ).is_file()  # where the Dockerfile puts the sources
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    set_by_operator = {
        "PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "2", "PET_MASTER_ADDR": "localhost",
        "PET_MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    (tmp_path / "show.py").write_text(SHOW)
    done = subprocess.run(
        [str(BIN / launcher), str(tmp_path / "show.py")],
        cwd=tmp_path,
        env=os.environ | set_by_operator,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert seen(tmp_path) == ["0 of 2", "1 of 2"]


@pytest.mark.slow  # a minute, most of it Ray's own start; ray is in the group slow
@pytest.mark.timeout(300)
def test_ray_trains_over_two_workers_and_keeps_the_model(tmp_path):
    from transformers import LlamaForCausalLM

    command = [sys.executable, str(CLUSTER / "ray_train.py"), "--storage", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"loss (\S+); the model is in (\S+)", done.stdout)
    assert found, done.stdout
    assert float(found[1]) < 5.6  # of a model that has learned nothing: log(256) = 5.55
    assert LlamaForCausalLM.from_pretrained(found[2]).config.num_hidden_layers == 2
