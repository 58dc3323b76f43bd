"""The files for Kubernetes and SkyPilot, as far as a machine without either can tell: their schemas know each field,
they say what they must, and the commands that they give to two nodes train as two torchruns here, are interrupted, and
go on."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.examples.test_launch_files import LAUNCH, STEPS, steps
from tests.trainer.small import ROOT
from tests.worlds import free_port

yaml = pytest.importorskip("yaml", reason="PyYAML reads the files")

SCRIPT = "from tests.examples.test_launch_files import train; train()"
SCHEMAS = {
    "batch/v1": "IoK8sApiBatchV1",
    "jobset.x-k8s.io/v1alpha2": "JobsetV1alpha2",
    "trainer.kubeflow.org/v1alpha1": "TrainerV1alpha1",
}
MANIFESTS = ["kubernetes.yaml", "jobset.yaml", "trainjob.yaml"]
ENGINES = ["jobset", "trainjob", "skypilot"]


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((LAUNCH / name).read_text()))


def jobs(name: str) -> Iterator[dict[str, Any]]:
    """The specs of the Kubernetes Jobs that a manifest leads to."""
    for document in documents(name):
        if document["kind"] == "Job":
            yield document["spec"]
        elif document["kind"] != "TrainJob":
            spec = document["spec"]
            for job in (spec if document["kind"] == "JobSet" else spec["template"]["spec"])["replicatedJobs"]:
                yield job["template"]["spec"]


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_schemas_of_kubernetes_jobset_and_kubeflow_know_every_field_of_the_manifests(name: str) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="it has the schemas")
    for document in documents(name):
        model = getattr(models, SCHEMAS[document["apiVersion"]] + document["kind"])
        # Unknown fields are dropped, not refused, as the API server does unless asked.
        assert model.from_dict(document).to_dict() == document


@pytest.mark.parametrize("name", MANIFESTS)
def test_each_job_of_a_manifest_bears_evictions_leaves_time_to_save_and_keeps_its_runs(name: str) -> None:
    (spec,) = jobs(name)
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    rules = spec["podFailurePolicy"]["rules"]
    assert rules[0]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert pod["restartPolicy"] == "Never"  # podFailurePolicy demands it
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    assert 30 < int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts["runs"] == f"{container['workingDir']}/runs"
    assert {volume["name"] for volume in pod["volumes"]} == mounts.keys()


def test_the_job_of_one_node_gives_torchrun_arguments_that_it_knows_and_a_process_for_each_gpu() -> None:
    from torch.distributed.run import parse_args

    (job,) = jobs("kubernetes.yaml")
    (container,) = job["template"]["spec"]["containers"]
    assert container["command"][0] == "torchrun"  # itself the first process, which gets SIGTERM
    arguments = parse_args(container["command"][1:])
    assert arguments.standalone
    assert arguments.nproc_per_node == str(container["resources"]["limits"]["nvidia.com/gpu"])
    assert (ROOT / arguments.training_script).exists()


@pytest.mark.skipif(find_spec("sky") is None, reason="SkyPilot reads its file")
def test_skypilot_reads_its_file(tmp_path: Path) -> None:
    # In a process of its own: SkyPilot writes to the home directory, and leaves threads.
    program = (
        "import sky, sys; task = sky.Task.from_yaml(sys.argv[1]); (resources,) = task.resources\n"
        "print(task.num_nodes, resources.accelerators, resources.use_spot, resources.job_recovery, task.volumes)"
    )
    environment = os.environ | {"HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program, str(LAUNCH / "skypilot.yaml")], env=environment, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1:] == [
        "2 {'H100': 8} True {'strategy': 'FAILOVER', 'max_restarts_on_errors': 3} {'/mnt/runs': 'dream-trainer-runs'}"
    ], done.stderr


def node_command(engine: str, node: int, port: int) -> tuple[list[str], dict[str, str]]:
    """What the engine starts on a node, with the environment that it sets there; for one process and localhost."""
    if engine == "skypilot":
        (task,) = documents("skypilot.yaml")
        command = ["bash", "-c", task["run"].replace(":29500", f":{port}").replace("examples/gpt/train.py", "train.py")]
        return command, task["envs"] | {
            "SKYPILOT_NODE_IPS": "127.0.0.1\n192.0.2.2",
            "SKYPILOT_NODE_RANK": str(node),
            "SKYPILOT_NUM_NODES": "2",
            "SKYPILOT_NUM_GPUS_PER_NODE": "1",
            "SKYPILOT_TASK_ID": "sky-managed-2026-01-01-00-00-00-000000_dream-trainer_1-0",
            "DREAM_TRAINER_RUNS": "runs",
        }
    if engine == "trainjob":
        command = documents("trainjob.yaml")[1]["spec"]["trainer"]["command"]
        environment = {
            "PET_NNODES": "2",
            "PET_NPROC_PER_NODE": "1",
            "PET_NODE_RANK": str(node),
            "PET_MASTER_ADDR": "localhost",
            "PET_MASTER_PORT": str(port),
        }
    else:
        (job,) = jobs("jobset.yaml")
        command, environment = job["template"]["spec"]["containers"][0]["command"], {}
    edits = {
        r"\$\((\w+)\)": lambda name: environment[name[1]],  # as Kubernetes does
        r"=dream-trainer-node-0-0\..*": f"=localhost:{port}",
        r"--nproc-per-node=\d+": "--nproc-per-node=1",
        r"examples/gpt/train\.py": "train.py",
    }
    for pattern, replacement in edits.items():
        command = [re.sub(pattern, replacement, part) for part in command]
    return command, environment


@contextmanager
def two_nodes(engine: str, directory: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    port, nodes = free_port(), []
    outer = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    try:
        for node in range(2):
            command, environment = node_command(engine, node, port)
            with (directory / f"node-{node}.txt").open("ab") as output:
                nodes.append(
                    subprocess.Popen(command, cwd=directory, env=outer | environment, stdout=output, stderr=output)
                )
        yield nodes
    finally:
        for process in nodes:
            process.terminate()
        for process in nodes:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:  # a torchrun that waits for the other's end
                process.kill()
                process.wait(timeout=20)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_two_nodes_save_when_one_is_evicted_and_go_on_when_all_are_started_again(engine: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)

    def output() -> str:
        return "".join((tmp_path / f"node-{node}.txt").read_text() for node in range(2))

    with two_nodes(engine, tmp_path) as nodes:
        deadline = time.monotonic() + 90
        while not all((tmp_path / f"trains-{rank}").exists() for rank in range(2)):
            assert time.monotonic() < deadline, output()
            time.sleep(0.05)
        nodes[1].terminate()  # the engine evicts one ...
        assert nodes[1].wait(timeout=60) == 1
        (saved,) = steps(tmp_path)
        assert 0 < saved < STEPS
        while not all((tmp_path / f"ended-{rank}").exists() for rank in range(2)):
            assert time.monotonic() < deadline, output()
            time.sleep(0.05)
        nodes[0].kill()  # ... and, since that one failed, ends the other, whose torchrun may hear no SIGTERM by now
        nodes[0].wait(timeout=60)
    (tmp_path / "hurry").touch()
    with two_nodes(engine, tmp_path) as nodes:
        assert [node.wait(timeout=90) for node in nodes] == [0, 0], output()
    assert [(tmp_path / f"resumed-{rank}").read_text() for rank in range(2)] == [str(saved)] * 2
    assert steps(tmp_path)[-1] == STEPS
