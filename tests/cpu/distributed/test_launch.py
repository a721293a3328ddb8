"""What upshift launch starts, started: torchrun here and by ssh, mpirun, sbatch; and its files against their makers' schemas."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from upshift.errors import JobFailed
from upshift.hardware.exchange_probe import free_port
from upshift.launching import hosts, kubeflow, mpi, slurm, torchrun
from upshift.launching.request import Launch
from upshift.launching.upshift_server import ServerJob
from upshift.launching.upshift_server import deployment as server_deployment
from upshift.launching.vllm_server import VllmJob, leader_worker_set, serve_config

HELPERS = Path(__file__).parents[1] / "helpers"

RANKS = HELPERS / "launching_ranks"
SECONDS = 120.0  # a rank imports torch before it begins, beside whatever else runs


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., Launch]:
    """A launch whose interpreter runs the stand-in of the ranks where upshift train stands."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/bash\nexec {sys.executable} "${{@/upshift.cli.main/ranks_of_launch}}"\n')
    python.chmod(0o755)

    def make(*flags: str, **fields: Any) -> Launch:
        environment = (("SEEN", str(tmp_path)), ("PYTHONPATH", str(RANKS)), ("GIVEN", "two words; $HOME"))
        fixed = {"python": str(python), "environment": environment, "folder": str(tmp_path), "port": free_port()}
        return Launch(**{"train": ("train", "it's a model", *flags), **fixed, **fields})

    return make


def seen(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]


def check(ranks: list[dict[str, Any]], folder: Path, size: int, *, attempt: int = 0) -> None:
    assert [rank["rank"] for rank in ranks] == list(range(size))
    for rank in ranks:
        assert (rank["size"], rank["sum"], rank["attempt"]) == (size, size * (size + 1) / 2, attempt)
        assert rank["argv"][:2] == ["train", "it's a model"] and rank["argv"][-1] == "--resume"
        assert (rank["given"], rank["folder"]) == ("two words; $HOME", str(folder))


def test_here(launch: Callable[..., Launch], tmp_path: Path) -> None:
    hosts.run(launch(hosts=("localhost",), nproc=2, max_nodes=1))
    check(seen(tmp_path), tmp_path, 2)
    assert {rank["threads"] for rank in seen(tmp_path)} == {str(max(len(os.sched_getaffinity(0)) // 2, 1))}


def test_a_rank_that_dies_is_started_again(launch: Callable[..., Launch], tmp_path: Path) -> None:
    hosts.run(launch("--die", hosts=("localhost",), nproc=2))
    check(seen(tmp_path), tmp_path, 2, attempt=1)


def test_a_failed_host_is_named(launch: Callable[..., Launch]) -> None:
    with pytest.raises(JobFailed, match=r"localhost \(exit code 1\)"):
        hosts.run(launch("--fail", hosts=("localhost",), nproc=2, max_restarts=0))


def test_ranks_here_end_when_the_terminal_is_closed(launch: Callable[..., Launch], tmp_path: Path) -> None:
    check_that_they_end(launch("--wait", hosts=("localhost",), nproc=1), tmp_path, signal.SIGHUP)


def test_ranks_have_the_time_to_save_that_we_say(
    launch: Callable[..., Launch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchrun, "SAVE_SECONDS", 1)
    seconds = check_that_they_end(launch("--deaf", hosts=("localhost",), nproc=1), tmp_path, signal.SIGINT)
    assert seconds < 30  # torchrun's own patience


@pytest.fixture(params=["stand-in", "sshd"])
def ssh(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`ssh` that goes to this machine: by a shell with what ssh would give to it, or by a real server on a port of its own."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "ssh"
    server = None
    if request.param == "stand-in":  # as ssh: options, the host, then words for the user's shell, in a session of its own
        program.write_text('#!/bin/bash\nwhile [ "$1" = -o ]; do shift 2; done\nshift\nexec setsid --wait sh -c "$*"\n')
    else:
        server = start_sshd(folder)
        program.write_text(f'#!/bin/bash\nexec {shutil.which("ssh")} -F {folder}/config "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    yield
    if server is not None:
        server.terminate()
        server.wait()


def start_sshd(folder: Path) -> subprocess.Popen[bytes]:
    program = shutil.which("sshd", path="/usr/sbin:/usr/bin")
    if program is None or shutil.which("ssh") is None:
        pytest.skip("no ssh server here (Debian: openssh-server)")
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    port, mine = free_port(), folder / "config"
    mine.write_text(
        f"Host *\n Port {port}\n IdentityFile {folder}/user\n IdentitiesOnly yes\n StrictHostKeyChecking no\n"
        f" UserKnownHostsFile {folder}/known\n LogLevel ERROR\n"
    )
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nListenAddress 127.0.0.2\nListenAddress 127.0.0.3\nHostKey {folder}/host\n"
        f"AuthorizedKeysFile {folder}/user.pub\nStrictModes no\nUsePAM no\nPidFile none\nPermitRootLogin yes\n"
    )
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # the server, started by root, wants it
    server = subprocess.Popen([program, "-D", "-f", str(folder / "sshd_config")], stderr=subprocess.PIPE)
    for _ in range(100):
        if server.poll() is not None:
            pytest.skip(f"the ssh server does not run here: {(server.stderr.read() if server.stderr else b'').decode()[:200]}")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return server
        time.sleep(0.05)
    server.kill()
    pytest.skip("the ssh server did not open its port in 5 seconds")


def test_two_hosts_by_ssh(ssh: None, launch: Callable[..., Launch], tmp_path: Path) -> None:
    hosts.run(launch(hosts=("127.0.0.2", "127.0.0.3"), min_nodes=2, max_nodes=2, nproc=1))
    check(seen(tmp_path), tmp_path, 2)


def test_a_host_ends_what_it_started_when_its_ssh_is_gone(ssh: None, launch: Callable[..., Launch], tmp_path: Path) -> None:
    check_that_they_end(launch("--wait", hosts=("127.0.0.2",), nproc=1), tmp_path, signal.SIGINT)


def check_that_they_end(request: Launch, folder: Path, number: signal.Signals) -> float:
    """Ranks, once the process that launched them has got the signal. Return the seconds from then until it ended."""
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
            hosts.run(request)
        finally:
            os._exit(0)
    started = folder / "started-0"
    wait_for(lambda: started.exists() and started.read_text() != "")
    sent = time.monotonic()
    os.kill(child, number)
    os.waitpid(child, 0)
    seconds = time.monotonic() - sent
    worker = int(started.read_text())
    wait_for(lambda: not Path(f"/proc/{worker}").exists())
    return seconds


def wait_for(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_mpirun(launch: Callable[..., Launch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun here (Debian: openmpi-bin)")
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):  # of containers
        monkeypatch.setenv(name, "1")
    bound = len(os.sched_getaffinity(0)) >= 2
    mpi.run(launch(nproc=2, cpus=2 if bound else None))
    check(seen(tmp_path), tmp_path, 2)
    if bound:
        first, second = (set(rank["cpus"]) for rank in seen(tmp_path))
        assert first.isdisjoint(second)


def test_sbatch_takes_the_file(launch: Callable[..., Launch], tmp_path: Path) -> None:
    if shutil.which("sbatch") is None or subprocess.run(["sinfo"], capture_output=True, check=False).returncode:
        pytest.skip("no Slurm that answers here")
    file = tmp_path / "upshift.sbatch"
    file.write_text(slurm.sbatch_file(launch(nproc=2), hours=0.1))
    subprocess.run(["sbatch", "--test-only", str(file)], check=True, timeout=SECONDS)
    subprocess.run(["sbatch", "--wait", str(file)], check=True, timeout=SECONDS, cwd=tmp_path)
    check(seen(tmp_path), tmp_path, 2)


def manifest(launch: Callable[..., Launch], kind: str, **fields: Any) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    size = {"cpus": 16, "memory": "64Gi", "gpus": 2, "image": "example.com/upshift:1", "node_selector": (("pool", "fast"),)}
    document = yaml.safe_load(kubeflow.manifest(launch(**size, **fields), kind))
    assert isinstance(document, dict)
    return document


def test_train_job_is_what_kubeflow_takes(launch: Callable[..., Launch]) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="no kubeflow-trainer-api here")
    document = manifest(launch, "TrainJob", min_nodes=3, max_nodes=3)
    assert models.TrainerV1alpha1TrainJob.from_dict(document).to_dict() == document  # unknown keys would be gone
    document["spec"]["trainer"]["nodes"] = 3
    assert models.TrainerV1alpha1TrainJob.from_dict(document).to_dict() != document


def test_pytorch_job_is_what_kubeflow_takes(launch: Callable[..., Launch]) -> None:
    models = pytest.importorskip("kubeflow.training.models", reason="no kubeflow-training here")
    document = manifest(launch, "PyTorchJob", min_nodes=1, max_nodes=4)
    check_object(document, "KubeflowOrgV1PyTorchJob", models)
    document["spec"]["elasticPolicy"]["minNodes"] = 1
    with pytest.raises(AssertionError, match="minNodes"):
        check_object(document, "KubeflowOrgV1PyTorchJob", models)


def test_a_server_is_what_kubernetes_takes() -> None:
    yaml = pytest.importorskip("yaml")
    models = pytest.importorskip("kubernetes.client", reason="no kubernetes client here").models
    size: dict[str, Any] = {"cpus": 16, "memory": "64Gi", "gpus": 2, "image": "example.com/upshift:1"}
    job = ServerJob(
        serve=("serve", "m"), port=8000, nodes=3, node_selector=(("pool", "fast"),), environment=(("A", "b c"),), **size
    )
    deployment, service = yaml.safe_load_all(server_deployment(job))
    check_object(deployment, "V1Deployment", models)
    check_object(service, "V1Service", models)
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert container["command"][-4:] == ["serve", "m", "--host", "0.0.0.0"] and deployment["spec"]["replicas"] == 3
    labels = deployment["spec"]["selector"]["matchLabels"]
    assert labels == pod["metadata"]["labels"] == service["spec"]["selector"]
    assert container["ports"] == [{"name": service["spec"]["ports"][0]["targetPort"], "containerPort": 8000}]
    container["startupProbe"]["path"] = "/"
    with pytest.raises(AssertionError, match="path"):
        check_object(deployment, "V1Deployment", models)


def test_a_leader_worker_set_is_what_its_controller_takes() -> None:
    """Its own fields are those of LeaderWorkerSetSpec and LeaderWorkerTemplate; the pods are those of Kubernetes."""
    yaml = pytest.importorskip("yaml")
    models = pytest.importorskip("kubernetes.client", reason="no kubernetes client here").models
    job = VllmJob(
        model="m", served_name="m", port=8000, ranks=16, nodes=4, gpus=8, cpus=16, memory="64Gi", image="i",
        environment=(("A", "b c"),), node_selector=(("pool", "fast"),), arguments=(("tensor_parallel_size", 16),),
    )  # fmt: skip
    groups, service = yaml.safe_load_all(leader_worker_set(job))
    assert (groups["apiVersion"], groups["kind"]) == ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet")
    template = groups["spec"].pop("leaderWorkerTemplate")
    assert groups["spec"] == {"replicas": 2} and set(groups) == {"apiVersion", "kind", "metadata", "spec"}
    pods = [template.pop("leaderTemplate"), template.pop("workerTemplate")]
    assert template == {"size": 2, "restartPolicy": "RecreateGroupOnPodRestart"}
    for pod in pods:
        check_object(pod, "V1PodTemplateSpec", models)
    check_object(service, "V1Service", models)
    assert service["spec"]["selector"] == pods[0]["metadata"]["labels"] != pods[1]["metadata"]["labels"]


def test_an_application_of_ray_serve_is_what_ray_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    yaml = pytest.importorskip("yaml")
    pytest.importorskip("ray", reason="no ray here")
    for name in ("grpc_reflection", "grpc_reflection.v1alpha", "grpc_reflection.v1alpha.reflection"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))  # of servers: the schema does not use it
    sys.modules["grpc_reflection.v1alpha"].reflection = ModuleType("reflection")  # type: ignore[attr-defined]
    from ray.llm._internal.serve.core.configs.llm_config import LLMConfig
    from ray.serve.schema import ServeDeploySchema

    job = VllmJob(
        model="org/m", served_name="m", port=9000, ranks=4, nodes=2, gpus=8, environment=(("A", "b c"),),
        arguments=(("tensor_parallel_size", 4), ("dtype", "bfloat16")),
    )  # fmt: skip
    document = yaml.safe_load(serve_config(job))
    (application,) = ServeDeploySchema.model_validate(document).applications
    assert application.import_path == "ray.serve.llm:build_openai_app" and list(application.args) == ["llm_configs"]
    (config,) = (LLMConfig.model_validate(fields) for fields in application.args["llm_configs"])
    assert config.model_id == "m" and config.engine_kwargs == {"tensor_parallel_size": 4, "dtype": "bfloat16"}
    assert config.deployment_config["num_replicas"] == 4 and config.runtime_env == {"env_vars": {"A": "b c"}}
    with pytest.raises(ValueError, match="engine_words"):
        LLMConfig.model_validate({**application.args["llm_configs"][0], "engine_words": "x"})


def check_object(value: Any, kind: str, models: Any) -> None:
    """Against the types of an OpenAPI client: keys that it has, and values of their type, all the way down."""
    inner = kind.partition("[")[2].rpartition("]")[0]
    if kind.startswith("list["):
        assert isinstance(value, list), kind
        for one in value:
            check_object(one, inner, models)
    elif kind.startswith("dict("):
        assert isinstance(value, dict), kind
        for one in value.values():
            check_object(one, kind[5:-1].split(", ")[1], models)
    elif kind in {"str", "int", "bool", "object"}:  # object: a number or a text
        types = {"str": str, "int": int, "bool": bool, "object": (int, str)}
        assert isinstance(value, types[kind]), (kind, value)
    else:
        model = getattr(models, kind, None) or getattr(__import__("kubernetes.client", fromlist=["models"]).models, kind)
        names = {model.attribute_map[name]: type_ for name, type_ in model.openapi_types.items()}
        assert set(value) <= set(names), f"{kind}: {set(value) - set(names)}"
        for key, one in value.items():
            check_object(one, names[key], models)
