"""The GPU check keeps a row of every part, however the part ends, goes on where it stopped, and packs no secret and no path."""

from __future__ import annotations

import ast
import getpass
import sys
import tarfile
from pathlib import Path

import gpu_check
import psutil
import pytest
from gpu_archive import ARCHIVE, CONTENT, PARTIAL, hidden_texts, hide
from gpu_layouts import judge, loss_difference
from gpu_parts import MINUTES, PARTS, Part
from gpu_process import Answer, PartRequest, run_part
from gpu_rows import PartRow, compare_speed, verdict_table

from upshift.benchmarking.environment import environment
from upshift.hardware import detect

FOLDER = Path(gpu_check.__file__).parent
SECRET = 'hf_"quoted\\secret'
PLANTED = """
import os, signal, subprocess, sys, time
from gpu_rows import Answer


def count(request):
    with (request.folder / "work").open("a") as file:
        file.write(request.part + "\\n")


def works(request):
    count(request)
    print(os.environ["HF_TOKEN"], request.folder)
    return Answer(reason="it works", details={"token": os.environ["HF_TOKEN"]})


def slow(request):
    count(request)
    return Answer(reason="late", slower=True)


def raises(request):
    count(request)
    sys.stderr.write(str(request.folder) + "\\n")
    raise MemoryError("CUDA out of memory in " + str(request.folder) + "\\n\\nSet PYTORCH_ALLOC_CONF")


def is_killed(request):
    count(request)
    print("loading", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def leaves(request):
    os._exit(0)


def interrupts(request):
    (request.folder / "parts" / "pid").write_text(str(os.getpid()))
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(600)


def hangs(request):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    (request.folder / "child").write_text(str(child.pid))
    print("waiting for the other rank", flush=True)
    time.sleep(600)
"""


def planted(name: str, function: str, *needs: str, gpus: int = 1) -> Part:
    return Part(name, "", 60, f"made_parts:{function}", needs, gpus)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An output folder of a check whose parts may be functions of the module made_parts."""
    (tmp_path / "made_parts.py").write_text(PLANTED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", SECRET)
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def check_of(folder: Path, *options: str) -> gpu_check.Check:
    return gpu_check.Check(gpu_check.parse(["--output", str(folder), *options]), gpu_check.Gpus(("NVIDIA H100",), 2**36))


def test_the_limits_are_ten_minutes_and_a_part_follows_what_it_needs() -> None:
    assert sum(part.seconds for part in PARTS) <= 60 * MINUTES
    earlier: set[str] = set()
    for part in PARTS:
        assert set(part.needs) <= earlier
        earlier.add(part.name)
        module, function = part.function.split(":")
        tree = ast.parse((FOLDER / f"{module}.py").read_text(encoding="utf-8"))
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_end_of_a_part_is_a_row_and_a_second_run_goes_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = (
        planted("facts", "works"), planted("probe", "slow"), planted("tests", "raises"), planted("data", "is_killed"),
        planted("train", "works", "data"), planted("layout-one", "works", gpus=2),
    )  # fmt: skip
    first = check_of(folder)
    first.run(parts)
    assert first.report() == 1
    ends = {name: (row.status, row.reason) for name, row in check_of(folder).rows.items()}
    assert ends == {
        "facts": ("works", "it works"),
        "probe": ("slower", "late"),
        "tests": ("failed", "exit code 1: MemoryError: CUDA out of memory in [output]"),
        "data": ("failed", "was killed by SIGKILL: loading"),
        "train": ("skipped", "uses the results of data, which is failed"),
        "layout-one": ("skipped", "needs 2 GPUs, and there is 1"),
    }
    table = capsys.readouterr().out
    assert "1 work, 1 slower, 2 failed, 2 skipped" in table and ARCHIVE in table
    second = check_of(folder)
    second.run((parts[0], parts[1], planted("tests", "works"), planted("data", "works")))
    assert (folder / "work").read_text().split() == ["facts", "probe", "tests", "data", "tests", "data"]
    assert {second.rows[name].status for name in ("tests", "data")} == {"works"}
    assert second.report() == 0
    assert packed_secrets(folder) == []


def test_paths_of_python_and_caches_and_the_login_name_are_hidden(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", "/data/envs/of-alice")
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    monkeypatch.setenv("HF_HOME", "/scratch/alice/hub")
    monkeypatch.setattr(getpass, "getuser", lambda: "alice.miller")
    text = "/data/envs/of-alice/bin/python /usr/lib/libc.so /scratch/alice/hub/x owner alice.miller"
    shown = hide(text, hidden_texts(folder, folder / "clone"))
    assert shown == "[python]/bin/python /usr/lib/libc.so [cache]/x owner [user]"


def test_a_check_that_was_ended_while_it_packed_may_be_repeated(folder: Path) -> None:
    (folder / PARTIAL).write_bytes(b"half")
    gpu_check.check_output(folder)


def test_what_is_printed_about_the_file_stands_on_the_page() -> None:
    page = " ".join((FOLDER.parents[1] / "docs" / "gpu_check.md").read_text(encoding="utf-8").replace("`", "").split())
    for sentence in CONTENT.removesuffix(".").split(". ")[1:]:
        assert sentence in page


def packed_secrets(folder: Path) -> list[str]:
    """Return the files of the archive in which a path or the secret is, after a check that the archive has the logs."""
    with tarfile.open(folder / ARCHIVE) as archive:
        texts = {member.name: archive.extractfile(member).read().decode() for member in archive}  # type: ignore[union-attr]
    assert {"rows.jsonl", "packages.txt", "parts/facts/log.txt", "parts/facts/answer.json"} <= set(texts)
    assert "[secret] [output]" in texts["parts/facts/log.txt"]
    hidden = (str(folder), str(Path.home()) + "/", SECRET, "quoted")
    return [name for name, text in texts.items() if any(words in text for words in hidden)]


def test_a_part_that_hangs_is_ended_with_its_children(folder: Path) -> None:
    part = planted("facts", "hangs")
    check = check_of(folder, "--minutes", "1")
    check.run([part])
    row = check.rows["facts"]
    assert row.status == "failed"
    limit = f"{part.seconds / MINUTES:.0f} s"
    assert row.reason == f"took longer than its {limit}: waiting for the other rank; --minutes 2 gives it twice the time"
    assert has_ended(int((folder / "child").read_text()))


def has_ended(pid: int) -> bool:
    """Return whether a process is gone, or a zombie that nobody waits for, as in a container without an init process."""
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_ctrl_c_keeps_what_is_done(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    parts = (planted("facts", "works"), planted("probe", "interrupts"), planted("tests", "works"))
    monkeypatch.setattr(gpu_check, "choose_parts", lambda names: parts)
    monkeypatch.setattr(gpu_check, "find_gpus", lambda: gpu_check.Gpus(("NVIDIA H100",), 2**36))
    assert gpu_check.main(["--output", str(folder)]) == 130
    assert set(check_of(folder).rows) == {"facts"} and (folder / ARCHIVE).is_file()
    assert has_ended(int((folder / "parts" / "pid").read_text()))
    assert capsys.readouterr().err == "gpu_check: interrupted; the same command goes on from here\n"


def test_a_process_without_an_answer_failed(folder: Path, tmp_path: Path) -> None:
    request = {
        "part": "facts", "function": "made_parts:leaves", "folder": str(folder), "quick": True, "names": [], "free_bytes": 0,
    }  # fmt: skip
    stale = folder / "facts" / "answer.json"
    stale.parent.mkdir()
    stale.write_text(Answer(reason="of an earlier run").to_json())
    variables = {"PYTHONPATH": f"{FOLDER}:{tmp_path}:{FOLDER.parents[1] / 'src'}"}
    answer = run_part(request, limit_seconds=60, folder=stale.parent, variables=variables)
    assert (answer.status, answer.reason) == ("failed", "ended without an answer: it printed nothing")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--only", "train,trian"], "--only has no part 'trian'; the parts are facts, "),
        (["--only", ""], "--only has no part ''"),
        (["--minutes", "0"], "--minutes 0 must be above 0"),
        (["--minutes", "nan"], "--minutes nan must be above 0"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
        (["--output", "file"], "--output file cannot be written"),
        (["--output", "full"], "--output full holds other files, such as thesis.tex"),
    ],
)
def test_a_wrong_request_is_one_line(
    options: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    try:
        code = gpu_check.main(options)
    except SystemExit as end:
        code = int(end.code or 0)
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2 and line.startswith("gpu_check: ") and words in line


def row_of(**fields: object) -> PartRow:
    values: dict[str, object] = {"part": "train", "status": "works", "seconds": 1.0, "reason": "", "quick": False}
    return PartRow.model_validate({**values, "environment": environment(detect()), **fields})


def test_results_of_another_machine_or_size_are_not_mixed(folder: Path) -> None:
    for row in (row_of(quick=True), row_of(environment=environment(detect()).changed(host_fingerprint="of another"))):
        (folder / "rows.jsonl").write_text(row.to_json() + "\n")
        with pytest.raises(ValueError, match="holds results of .*; give another folder"):
            check_of(folder)


def test_the_verdict_has_eighty_columns() -> None:
    long_row = row_of(part="trainer-careful", status="skipped", seconds=599.4, reason="x" * 300)
    table = verdict_table([row_of(reason="word " * 60), long_row])
    assert max(map(len, table.splitlines())) <= 80
    assert table.count("word") == 60 and table.count("x") == 300


def test_slower_is_beyond_the_goal_of_predictions() -> None:
    assert compare_speed(100.0, 110.0, "tokens/s") == (False, "100 tokens/s, predicted 110")
    assert compare_speed(100.0, 210.0, "tokens/s") == (True, "100 tokens/s, predicted 210: slower by 2.10")
    assert compare_speed(0.0, 210.0, "tokens/s")[0]
    assert not compare_speed(100.0, None, "tokens/s")[0]


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ([9.0, 8.0], None),
        ([9.0, 8.0001], None),
        ([9.0, 8.08], "its loss of step 2 is 8.08, and one GPU's is 8.0"),
        ([9.0, None], "its loss of step 2 is None, and one GPU's is 8.0"),
        ([float("nan"), 8.0], "its loss of step 1 is nan, and one GPU's is 9.0"),
        ([9.0], "it has 1 losses, and one GPU has 2"),
    ],
)
def test_a_layout_with_other_losses_is_wrong(losses: list[float | None], words: str | None) -> None:
    assert loss_difference(losses, [9.0, 8.0]) == words


@pytest.mark.parametrize(
    ("measured", "predicted", "losses", "status"),
    [(100.0, 100.0, [9.0, 8.0], "works"), (50.0, 100.0, [9.0, 8.0], "slower"), (50.0, 100.0, [9.0, 7.0], "failed")],
)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_layout_is_judged_by_its_losses_and_its_speed(
    processes: int, measured: float, predicted: float, losses: list[float], status: str, tmp_path: Path
) -> None:
    request = PartRequest(part="layout", function="", folder=tmp_path, quick=True, names=("GPU",) * processes, free_bytes=0)
    alone = tmp_path / "parts" / "layout-one"
    alone.mkdir(parents=True)
    (alone / "answer.json").write_text(Answer(reason="", details={"losses": [9.0, 8.0]}).to_json())
    answer = judge(request, measured, predicted, processes, list(losses))
    assert answer.status == ("slower" if processes == 1 and status == "failed" else status)
