"""What upshift launch writes, and what it refuses; nothing is started."""

from __future__ import annotations

import ast
import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from upshift.cli.main import app
from upshift.errors import RequestError
from upshift.hardware.cpu_affinity import cores_of
from upshift.launching import hosts
from upshift.launching.request import Launch

TRAIN = ["--", "train", "model dir", "--data", "it's data"]
COMMAND = ["-m", "upshift.cli.main", "train", "model dir", "--data", "it's data", "--resume"]
KUBERNETES = ["--kubernetes", "--image", "example.com/upshift:1", "--cpus", "16", "--memory", "64Gi"]


def written(*options: str) -> str:
    result = CliRunner().invoke(app, ["launch", *options, "--dry-run", *TRAIN], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def check_shell(text: str) -> None:
    subprocess.run(["bash", "-n"], input=text.encode(), check=True)


def test_hosts_meet_on_the_first() -> None:
    text = written("--hosts", "me@a,10.0.0.2,c", "--nproc", "2", "--nodes", "2:3", "--env", "WORD=two words")
    check_shell(text)
    runs = [line for line in text.splitlines() if "torch.distributed.run" in line]
    assert len(runs) == 3 and all('--nproc-per-node="$ranks"' in run and "--nnodes=2:3" in run for run in runs)
    assert all("--rdzv-endpoint=a:29400" in run and run.endswith("'it'\"'\"'s data' --resume") for run in runs)
    assert [run.split("is_host=")[1][0] for run in runs] == ["1", "0", "0"]
    assert [run.split("--local-addr=")[1].split()[0] for run in runs] == ["a", "10.0.0.2", "c"]
    assert text.count("ranks=2\n") == 3 and text.count("export WORD='two words'") == 3 and " me@a 'bash -s'" in text


@pytest.mark.parametrize("before", ["", "lscpu() { return 1; }\n"], ids=["lscpu", "a host where lscpu fails"])
def test_ranks_of_a_host_are_counted_there(before: str) -> None:
    script = written("--hosts", "localhost")
    assert "--standalone" in script and "lscpu" in script
    body = script.split("2>&1 &\n")[1].split("exec ")[0]
    shell = ["bash", "-c", before + body + 'echo "$ranks $OMP_NUM_THREADS"']
    counted = subprocess.run(shell, capture_output=True, text=True, check=True)
    ranks, threads = map(int, counted.stdout.split())
    assert ranks >= 1 and threads >= 1


def test_slurm_file() -> None:
    text = written("--slurm", "--nodes", "2:4", "--cpus", "32", "--memory", "64Gi", "--hours", "1.5", "--gpus", "2")
    check_shell(text)
    said = [line.split()[1] for line in text.splitlines() if line.startswith("#SBATCH")]
    assert {"--nodes=2-4", "--ntasks-per-node=1", "--cpus-per-task=32", "--mem=64G", "--time=01:30:00"} <= set(said)
    assert {"--gpus-per-node=2", "--requeue", "--no-kill"} <= set(said)
    assert "--exclusive" in written("--slurm") and "--nodes=1\n" in written("--slurm")


def test_mpi_script() -> None:
    text = written("--mpi", "--hosts", "a,me@b", "--nproc", "2", "--cpus", "8", "--env", "A=b c")
    check_shell(text)
    assert "-x MASTER_ADDR=a" in text and "-x A='b c'" in text


RECORD_MPIRUN = """#!/bin/bash
echo "$@" >> "$CALLS"
cat "$2" >> "$CALLS"
case "$*" in
  *ppr:1:node*) for counted in $COUNTED; do echo "a word of the login shell"; echo "ranks=$counted"; done ;;
esac
"""


@pytest.mark.parametrize(
    ("options", "counted", "ranks"),
    [
        (["--nproc", "2", "--cpus", "8"], "", 2),
        (["--gpus", "4"], "", 4),
        ([], "8 8", 8),
        (["--cpus", "16"], "2 2", 2),
        ([], "8 4", None),
        ([], "", None),
        ([], "0 0", None),
    ],
)
def test_ranks_of_mpirun_are_those_given_or_counted_on_the_hosts(
    options: list[str], counted: str, ranks: int | None, tmp_path: Path
) -> None:
    """A rank for each GPU or NUMA node of every host; hosts that differ are refused, as mpirun starts equal ones."""
    program = tmp_path / "mpirun"
    program.write_text(RECORD_MPIRUN)
    program.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(tmp_path / "calls"), "COUNTED": counted}
    text = written("--mpi", "--hosts", "a,me@b", *options)
    done = subprocess.run(["bash", "-c", text], env=environment, capture_output=True, text=True, check=False)
    lines = (tmp_path / "calls").read_text().splitlines()
    if ranks is None:
        assert done.returncode == 2 and "write the file again with --nproc N" in done.stderr
        assert not any("upshift.cli.main" in line for line in lines)
        return
    assert done.returncode == 0, done.stderr
    cores = (
        f":PE={int(options[options.index('--cpus') + 1]) // ranks} --bind-to core" if "--cpus" in options else " --bind-to none"
    )
    *_, words, first, second = lines
    assert f"-n {2 * ranks} --map-by ppr:{ranks}:node{cores}" in words
    assert (first, second) == (f"a slots={ranks}", f"b slots={ranks}")


@pytest.mark.parametrize("options", [KUBERNETES, [*KUBERNETES, "--kind", "TrainJob"], ["--ray"]])
def test_ranks_that_nothing_counts_are_asked_for(options: list[str]) -> None:
    """The page says that a host has a rank for each GPU or NUMA node: a file that starts one on eight GPUs is not written."""
    result = CliRunner().invoke(app, ["launch", *options, "--dry-run", *TRAIN])
    assert isinstance(result.exception, RequestError) and "give --gpus N, or --nproc N" in str(result.exception)
    assert "8" in written(*options, "--gpus", "8")


RANK = """#!/bin/bash
words=$*
host=${words##*--local-addr=}
host=${host%% *}
echo $BASHPID > "$STATE/$host.started"
trap 'echo saved > "$STATE/$host.saved"; exit 0' TERM
trap 'echo interrupted > "$STATE/$host.interrupted"; exit 1' INT
ends=$(cat "$STATE/$host.ends")
if [ -n "$ends" ]; then
  while [ "$(ls "$STATE" | grep -c started)" -lt 2 ]; do sleep 0.02; done
  exit "$ends"
fi
for (( i = 0; i < 1000; i++ )); do sleep 0.02; done
"""
SSH = '#!/bin/bash\nwhile [ "$1" = -o ]; do shift 2; done\nshift\nexec setsid --wait sh -c "$*"\n'


@pytest.mark.parametrize(
    ("ends", "nodes", "sent", "code", "saved"),
    [
        ({"a": "0", "b": "0"}, "2", None, 0, []),
        ({"a": "0", "b": "7"}, "2", None, 1, []),
        ({"a": "", "b": "7"}, "2", None, 1, ["a"]),
        ({"a": "0", "b": "7"}, "1:2", None, 0, []),
        ({"a": "9", "b": "7"}, "1:2", None, 1, []),
        ({"a": "", "b": ""}, "2", signal.SIGINT, 130, ["a", "b"]),
        ({"a": "", "b": ""}, "2", signal.SIGTERM, 130, ["a", "b"]),
        ({"a": "", "b": ""}, "2", signal.SIGKILL, -signal.SIGKILL, ["a", "b"]),
    ],
)
def test_a_written_script_ends_as_its_hosts_do(
    ends: dict[str, str], nodes: str, sent: signal.Signals | None, code: int, saved: list[str], tmp_path: Path
) -> None:
    """Its exit code is 1 where too few hosts are left, and no rank outlives it: not after Ctrl-C, and not where it is killed."""
    for name, text in (("python", RANK), ("ssh", SSH)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    for host, end in ends.items():
        (tmp_path / f"{host}.ends").write_text(end)
    launch = Launch(
        train=("train", "m"), hosts=("a", "b"), min_nodes=int(nodes[0]), max_nodes=2, nproc=1, python=str(tmp_path / "python")
    )
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "STATE": str(tmp_path)}
    script = tmp_path / "run.sh"
    script.write_text(hosts.launch_script(launch))
    # As of a terminal: Ctrl-C reaches the script and what is in its group.
    process = subprocess.Popen(["bash", str(script)], env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    if sent is not None:
        wait_until(lambda: all((tmp_path / f"{host}.started").exists() for host in ends))
        time.sleep(0.1)  # the ranks set their traps
        (os.kill if sent is signal.SIGKILL else os.killpg)(process.pid, sent)
    _, words = process.communicate(timeout=60)
    assert process.returncode == code, words
    wait_until(lambda: sorted(path.stem for path in tmp_path.glob("*.saved")) == saved)
    workers = [int((tmp_path / f"{host}.started").read_text()) for host in ends]
    wait_until(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))
    assert not list(tmp_path.glob("*.interrupted"))
    if sent is None:
        assert all((f"{host} failed (exit code {end})" in words) == (end not in ("", "0")) for host, end in ends.items())


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 15
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_ray_file_is_python() -> None:
    tree = ast.parse(written("--ray", "--nodes", "3", "--nproc", "2", "--cpus", "8", "--env", "A=b", "--name", "one"))
    values = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    assert values == {"COMMAND": COMMAND, "ENVIRONMENT": {"A": "b"}}
    keywords = {node.arg: ast.unparse(node.value) for node in ast.walk(tree) if isinstance(node, ast.keyword)}
    assert keywords["num_workers"] == "6" and keywords["resources_per_worker"] == "{'CPU': 4}"


def test_files_are_written(tmp_path: Path) -> None:
    for option in (["--slurm"], [*KUBERNETES, "--nproc", "1"], ["--ray", "--nproc", "1"], ["--hosts", "a,b"], ["--mpi"]):
        path = tmp_path / option[0].strip("-")
        result = CliRunner().invoke(app, ["launch", *option, "--output", str(path), *TRAIN], catch_exceptions=False)
        assert result.exit_code == 0 and "submit it with" in result.stdout
        assert path.read_text() == written(*option)


def launched(path: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["launch", "--slurm", "--output", str(path), *options, *TRAIN])


def test_what_a_user_wrote_is_not_lost(tmp_path: Path) -> None:
    path, link = tmp_path / "job", tmp_path / "link"
    link.symlink_to(path)
    assert launched(path).exit_code == launched(path).exit_code == 0
    path.write_text("edited")
    result = launched(path)
    assert isinstance(result.exception, RequestError) and "--overwrite" in str(result.exception)
    assert path.read_text() == "edited"
    assert launched(link, "--overwrite").exit_code == 0
    assert link.is_symlink() and path.read_text() == written("--slurm")


def test_a_file_of_options_is_written_into_the_command(tmp_path: Path) -> None:
    options = tmp_path / "run.yaml"
    options.write_text("model: m\ndata: d\nseed: 7\n")
    job = tmp_path / "job"
    words = ["launch", "--slurm", "--output", str(job), "--", "train", "--config", str(options)]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert "--seed=7" in job.read_text() and "run.yaml" not in job.read_text()
    options.write_text("model: m\ndata: d\noverwrite: true\n")
    result = CliRunner().invoke(app, [*words, "--overwrite"])
    assert isinstance(result.exception, RequestError) and "would delete what a restart goes on from" in str(result.exception)


def test_a_config_of_axolotl_is_described_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "axolotl.yaml"
    path.write_text("base_model: org/model\ndatasets: [{path: chats.jsonl, type: chat_template}]\n")
    result = CliRunner().invoke(app, ["launch", "--slurm", "--dry-run", "--", "train", "--from-axolotl", str(path)])
    assert result.exit_code == 0, result.exception
    assert result.stderr.count("as options of upshift train:") == 1 and "--from-axolotl" not in result.stdout


def test_a_pipe_is_written_to_and_a_folder_is_left_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    assert launched(tmp_path / "pipe").exit_code == 0
    assert os.read(reader, 2**20).decode() == written("--slurm")
    os.close(reader)
    (tmp_path / "folder").mkdir()
    result = launched(tmp_path / "folder")
    assert isinstance(result.exception, RequestError) and "cannot be written" in str(result.exception)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["folder", "pipe"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "needs a launcher; use one of --hosts"),
        (["--slurm", "--ray"], "--slurm, --ray"),
        (["--slurm", "--hosts", "a"], "leave one of them out"),
        (["--hosts", "a,a"], "names a twice"),
        (["--hosts", "a,"], "empty name"),
        (["--hosts", "-oProxyCommand=x"], "not the name of a host"),
        (["--hosts", "localhost,b"], "cannot reach localhost"),
        (["--hosts", "127.0.0.1,b"], "cannot reach 127.0.0.1"),
        (["--mpi", "--hosts", "b,me@localhost"], "cannot reach me@localhost"),
        (["--hosts", "a,b", "--nodes", "3"], "is not the 2 of --hosts"),
        (["--slurm", "--nodes", "two"], "give N, or MIN:MAX"),
        (["--slurm", "--nodes", "4:2"], "is no range"),
        (["--slurm", "--nodes", "0"], "is no range"),
        (["--slurm", "--name", "A b"], "not a job's name"),
        (["--slurm", "--memory", "64"], "not an amount"),
        (["--slurm", "--env", "A"], "write --env NAME=VALUE"),
        (["--slurm", "--env", "1A=b"], "not the name of a variable"),
        (["--kubernetes"], "needs --image"),
        (["--kubernetes", "--image", "i"], "needs --cpus"),
        (["--kubernetes", "--image", "i", "--cpus", "2"], "needs --memory"),
        ([*KUBERNETES, "--kind", "Job"], "use one of PyTorchJob, TrainJob"),
        ([*KUBERNETES, "--kind", "TrainJob", "--nodes", "1:2"], "--kind PyTorchJob"),
        ([*KUBERNETES, "--node-selector", "a=b c"], "not a label"),
        (["--slurm", "--image", "i"], "--image is of --kubernetes, and --slurm"),
        (["--slurm", "--node-selector", "a=b"], "--node-selector is of --kubernetes"),
        (["--slurm", "--kind", "PyTorchJob"], "--kind is of --kubernetes"),
        (["--ray", "--partition", "p"], "--partition is of --slurm"),
        (["--hosts", "a,b", "--hours", "1"], "--hours is of --slurm"),
        (["--hosts", "a,b", "--cpus", "4"], "--cpus is of --slurm, --kubernetes, --mpi, --ray, and --hosts does not use it"),
        (["--hosts", "a,b", "--memory", "64Gi"], "--memory is of --slurm, --kubernetes, and --hosts"),
        (["--hosts", "localhost", "--port", "29500"], "localhost is one"),
        (["--mpi", "--memory", "64Gi"], "and --mpi does not use it"),
        (["--mpi", "--max-restarts", "2"], "--max-restarts is of --hosts"),
        (["--mpi", "--name", "one"], "--name is of --hosts"),
        (["--mpi", "--nodes", "2"], "use --hosts a,b"),
        (["--mpi", "--hosts", "a,b", "--nodes", "1:2"], "use --nodes 2"),
        (["--ray", "--nodes", "1:2"], "use --nodes 2"),
        (["--ray", "--memory", "64Gi"], "and --ray does not use it"),
        (["--ray", "--port", "29500"], "--port is of --hosts, --slurm, --mpi, and --ray"),
        (["--hosts", "a,b", "--overwrite"], "--overwrite replaces the file of --output"),
        (["--mpi", "--overwrite"], "--overwrite replaces the file of --output"),
        ([*KUBERNETES, "--port", "29500"], "and --kubernetes does not use it"),
    ],
)
def test_what_is_wrong_is_said(options: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["launch", *options, "--dry-run", *TRAIN])
    assert isinstance(result.exception, RequestError) and words in str(result.exception), result.exception
    assert "\n" not in str(result.exception)


@pytest.mark.parametrize("command", [[], ["plan", "m"], ["train", "m", "--overwrite"]])
def test_only_train_is_launched(command: list[str]) -> None:
    result = CliRunner().invoke(app, ["launch", "--slurm", "--dry-run", "--", *command])
    assert isinstance(result.exception, RequestError)


def make_machine(root: Path, *, nodes: int, cores: int, threads: int) -> set[int]:
    """As Linux lists it: the second threads of all cores come after the first ones."""
    total = nodes * cores
    for core in range(total):
        siblings = [core + total * thread for thread in range(threads)]
        for cpu in siblings:
            folder = root / f"sys/devices/system/cpu/cpu{cpu}"
            (folder / "topology").mkdir(parents=True)
            (folder / f"node{core // cores}").mkdir()
            (folder / "topology/thread_siblings_list").write_text(",".join(map(str, siblings)) + "\n")
    return set(range(total * threads))


def test_ranks_take_nodes_then_parts_of_them(tmp_path: Path) -> None:
    cpus = make_machine(tmp_path, nodes=2, cores=4, threads=2)
    assert cores_of(0, 2, cpus, root=tmp_path) == (0, 1, 2, 3, 8, 9, 10, 11)
    assert cores_of(1, 2, cpus, root=tmp_path) == (4, 5, 6, 7, 12, 13, 14, 15)
    assert cores_of(3, 4, cpus, root=tmp_path) == (6, 7, 14, 15)
    shares = [cores_of(rank, 3, cpus, root=tmp_path) or () for rank in range(3)]
    assert sorted(cpu for share in shares for cpu in share) == sorted(cpus)
    assert cores_of(0, 9, cpus, root=tmp_path) is None
    assert cores_of(0, 2, {0, 8, 5}, root=tmp_path) == (0, 8) and cores_of(1, 2, {0, 8, 5}, root=tmp_path) == (5,)


def test_kubernetes_requests_are_limits() -> None:
    text = written(*KUBERNETES, "--gpus", "4", "--env", 'WORD="two" words', "--node-selector", "pool=fast")
    said = [line.split(": ", 1) for line in text.splitlines() if "requests:" in line or "limits:" in line]
    amounts = [json.loads(value.split("  #")[0]) for _, value in said]
    assert amounts == [{"cpu": "16", "memory": "64Gi", "nvidia.com/gpu": "4"}] * 2
    assert 'OMP_NUM_THREADS", value: "4"' in text and '"WORD", value: "\\"two\\" words"' in text and '"pool": "fast"' in text


def served(*options: str, words: tuple[str, ...] = ("serve", "my model", "--port", "9000")) -> Result:
    return CliRunner().invoke(app, ["launch", *options, "--dry-run", "--", *words])


GROUPS = [*KUBERNETES, "--kind", "LeaderWorkerSet"]
EIGHT = ("--engine-set", "tensor_parallel_size=8")


def test_a_model_of_several_hosts_is_a_command_of_vllm_on_each() -> None:
    """The words are those of vLLM 0.32's own parser. A shell reads them as they were given."""
    settings = ("--engine-set", "tensor_parallel_size=8", "--engine-set", "enable_prefix_caching=false")
    words = ("serve", "mine=my model", "--port", "9000", *settings)
    text = served(*GROUPS, "--nodes", "4", "--gpus", "4", words=words).stdout
    commands = [json.loads(line.partition("command: ")[2])[2] for line in text.splitlines() if "command: " in line]
    leader, worker = (shlex.split(command) for command in commands)
    shared = [
        "exec", "vllm", "serve", "my model", "--tensor-parallel-size", "8", "--no-enable-prefix-caching", "--nnodes", "2",
        "--master-port", "29501", "--master-addr", "$LWS_LEADER_ADDRESS", "--node-rank", "$LWS_WORKER_INDEX",
    ]  # fmt: skip
    assert leader == [*shared, "--host", "0.0.0.0", "--port", "9000", "--served-model-name", "mine"]
    assert worker == [*shared, "--headless"] and "replicas: 2 " in text and "size: 2 " in text


def test_servers_on_slurm_and_kubernetes() -> None:
    text = served("--slurm", "--nodes", "3", "--gpus", "4", "--hours", "2", "--env", "WORD=two words").stdout
    check_shell(text)
    assert "--nodes=3" in text and "--gpus-per-node=4" in text and "export WORD='two words'" in text and "$node:9000" in text
    assert text.rstrip().endswith("-m upshift.cli.main serve 'my model' --port 9000 --host 0.0.0.0") and "--requeue" not in text
    own_address = served("--slurm", words=("serve", "m", "--host=10.0.0.1")).stdout
    assert own_address.rstrip().endswith("serve m --host=10.0.0.1")
    encrypted = served(*KUBERNETES, words=("serve", "m", "--ssl-certfile", "cert.pem")).stdout
    assert "kind: Deployment" in encrypted and "kind: Service" in encrypted and "scheme: HTTPS" in encrypted


@pytest.mark.parametrize(
    ("options", "words", "text"),
    [
        (["--mpi"], ("serve", "m"), "--mpi starts trainings"),
        (["--hosts", "a,b"], ("serve", "m"), "--hosts starts trainings"),
        (["--slurm", "--nproc", "2"], ("serve", "m"), "--nproc is for trainings"),
        (["--slurm", "--nodes", "1:3"], ("serve", "m"), "is a range"),
        (["--slurm"], ("serve", "m", "--port", "0"), "--port 0 takes any port"),
        (["--slurm", "--gpus", "4"], ("serve", "m", "--engine-set", "tensor_parallel_size=8"), "takes 8 GPUs of a host"),
        (["--slurm"], ("serve", "m", "--engine-set", "tensor_parallel_size=no"), "tensor_parallel_size"),
        (["--slurm"], ("encode", "m"), "-- serve MODEL"),
        (["--kubernetes", "--image", "i"], ("serve", "m"), "needs --cpus"),
        (
            ["--kubernetes", *GROUPS[-2:], "--gpus", "8"],
            ("serve", "m", *EIGHT),
            "vLLM in it, such as example.com/image:1; and --c",
        ),
        ([*GROUPS], ("serve", "m"), "give --gpus N, of each host"),
        ([*GROUPS, "--gpus", "8"], ("serve", "m"), "does not fill hosts with --gpus 8"),
        ([*GROUPS, "--gpus", "4", "--nodes", "3"], ("serve", "m", *EIGHT), "give --nodes 4"),
        ([*GROUPS, "--gpus", "8"], ("serve", "m", "--port", "0"), "--port 0 takes any port"),
        ([*GROUPS, "--gpus", "8"], ("serve", "m", "n", *EIGHT), "is given 2"),
        ([*GROUPS, "--gpus", "8"], ("encode", "m"), "is for servers"),
        (["--kubernetes", "--kind", "TrainJob"], ("serve", "m"), "is for trainings"),
        (["--ray"], ("serve", "m"), "give --gpus N"),
        (["--ray", "--gpus", "3"], ("serve", "m", *EIGHT), "let it be a multiple"),
        (["--ray", "--cpus", "3"], ("serve", "m"), "--cpus is for trainings"),
        (["--ray", "--gpus", "8"], ("serve", "m", "--concurrency", "2", "--max-ttft-ms", "5"), "--max-ttft-ms, --concurrency"),
        (["--ray", "--gpus", "8"], ("serve", "m", "--engine", "torch"), "--engine torch is for upshift serve"),
        (["--ray", "--gpus", "8"], ("serve", "m", "--engine-set", "data_parallel_size=2"), "further replicas"),
    ],
)
def test_servers_that_cannot_start_are_refused(options: list[str], words: tuple[str, ...], text: str) -> None:
    result = served(*options, words=words)
    assert isinstance(result.exception, RequestError) and text in str(result.exception)
