"""`upshift doctor --tpu`: nine steps, and what is said of machines that are ready, half ready and not."""

from __future__ import annotations

from pathlib import Path

import pytest

from upshift.debugging.tpu import TPU_VM, TpuFacts, read_tpu_facts, tpu_readiness

HERE = TpuFacts(chips=0, tensorflow="2.21.0", libtpu="0.0.52", jax="0.10.2")
READY = TpuFacts(chips=4, tensorflow_tpu=TPU_VM["tensorflow-tpu"], libtpu=TPU_VM["libtpu"], data="gs://bucket/train")


def severities(facts: TpuFacts) -> list[str]:
    return [finding.severity for finding in tpu_readiness(facts)]


def test_nine_steps_in_order() -> None:
    assert [finding.subject[0] for finding in tpu_readiness(HERE)] == [str(step) for step in range(1, 10)]


@pytest.mark.parametrize(
    ("facts", "step", "severity", "words"),
    [
        (HERE, 2, "ok", "libtpu 0.0.52"),
        (HERE, 4, "hint", "tpu-vm create"),
        (HERE.changed(libtpu=None), 2, "hint", ".[xla-compile]"),
        (HERE.changed(tensorflow=None), 2, "hint", ".[xla]"),
        (HERE.changed(data="no/such/file"), 3, "error", "no/such/file"),
        (HERE.changed(chips=4), 5, "error", "libtpu==0.0.21"),
        (READY, 8, "ok", "0.0.21"),
        (READY, 9, "ok", "--data gs://bucket/train --backend xla"),
        (READY.changed(libtpu="0.0.52"), 8, "error", "libtpu==0.0.21"),
        (READY.changed(tensorflow="2.21.0"), 8, "error", "uninstall"),
    ],
)
def test_what_is_said_of(facts: TpuFacts, step: int, severity: str, words: str) -> None:
    finding = tpu_readiness(facts)[step - 1]
    assert finding.severity == severity
    assert words in f"{finding.evidence} {finding.fix}"


def test_a_ready_machine_has_no_errors() -> None:
    assert not {"error", "warning"} & set(severities(READY))


def test_chips_are_device_files(tmp_path: Path) -> None:
    assert read_tpu_facts(devices=tmp_path).chips == 0
    (tmp_path / "vfio").mkdir()
    for name in ("accel0", "accel1", "vfio/0", "vfio/vfio"):
        (tmp_path / name).touch()
    assert read_tpu_facts(devices=tmp_path).chips == 3
