"""Check whether this machine and its software are ready to train on a TPU, for `upshift doctor --tpu`.

There are nine findings, one for each step of the transformers guide "Training on TPU with TensorFlow", in its order. If Upshift
does a step by itself at every run, the finding says so. Only steps that depend on the machine or on the user can be wrong.
"""

from __future__ import annotations

from pathlib import Path

from upshift.debugging.finding import Finding, error, hint, ok, unknown
from upshift.value import Value
from upshift.versions import install_command, installed_version

TPU_VM = {"tensorflow-tpu": "2.20.0", "libtpu": "0.0.21"}  # with the libtpu that pip chooses it aborts when imported
INSTALL = "pip install " + " ".join(f"{name}=={version}" for name, version in TPU_VM.items())
REHEARSE = "upshift xla compile MODEL --topology v5e-4"
BUCKET = "gs://"


class TpuFacts(Value):
    """Hold the facts of this machine. ``chips``: the number of TPU device files. ``data``: where the user's data is."""

    chips: int
    tensorflow: str | None = None  # version of a wheel that also compiles for this host
    tensorflow_tpu: str | None = None
    libtpu: str | None = None
    jax: str | None = None
    data: str | None = None


def read_tpu_facts(*, data: str | None = None, devices: Path = Path("/dev")) -> TpuFacts:
    chips = [*devices.glob("accel[0-9]*"), *devices.glob("vfio/[0-9]*")]  # up to v4; from v5e on
    host = installed_version("tensorflow") or installed_version("tensorflow-cpu")
    return TpuFacts(
        chips=len(chips),
        tensorflow=host,
        tensorflow_tpu=installed_version("tensorflow-tpu"),
        libtpu=installed_version("libtpu"),
        jax=installed_version("jax"),
        data=data,
    )


def tpu_readiness(facts: TpuFacts) -> list[Finding]:
    """Return one finding for each step."""
    return [
        _rules(facts),
        _rehearsal(facts),
        _data(facts),
        _machine(facts),
        _initializing(facts),
        ok(
            "6 strategy",
            what="TPUStrategy is chosen when a TPU answers, and weights, states and data are made in its scope",
            evidence="upshift train --backend xla does it and says why",
        ),
        ok(
            "7 jit_compile",
            what="it is not asked for on a TPU's host, where all of a step is compiled anyway",
            evidence="upshift train --backend xla leaves it out there, and puts it inside the step elsewhere",
        ),
        _wheels(facts),
        _start(facts),
    ]


def _rules(facts: TpuFacts) -> Finding:
    return unknown(
        "1 rules of XLA",
        what="no branch and no shape may depend on data: checked on the traced program of every run, and no model was given here",
        evidence=f"{REHEARSE} counts dynamic dimensions and custom calls",
    )


def _rehearsal(facts: TpuFacts) -> Finding:
    name = "2 compiled elsewhere first"
    if facts.tensorflow is None:
        return hint(
            name,
            what="no TensorFlow here that compiles for this host",
            fix=f"without a TPU: {install_command('xla')}",
            evidence="tensorflow-tpu alone compiles for TPUs only" if facts.tensorflow_tpu else "none installed",
        )
    if facts.jax is None or facts.libtpu is None:
        return hint(
            name,
            what="XLA compiles for this host; Google's TPU compiler is not here",
            fix=f"{install_command('xla-compile')}, then {REHEARSE}",
            evidence=f"tensorflow {facts.tensorflow}",
        )
    evidence = f"tensorflow {facts.tensorflow}, jax {facts.jax}, libtpu {facts.libtpu}"
    return ok(name, what="XLA compiles here, for this host and for TPUs", evidence=evidence)


def _data(facts: TpuFacts) -> Finding:
    name = "3 data"
    if facts.data is None:
        return unknown(name, what="not said where it is; a TPU VM reads its own disk and gs:// buckets")
    if facts.data.startswith(BUCKET):
        return ok(name, what="in a bucket, which a TPU VM reads", evidence=facts.data)
    if not Path(facts.data).exists():
        fix = "give a file or folder that is there, or a gs:// path"
        return error(name, what="it is not there", evidence=facts.data, fix=fix)
    return ok(name, what="on this machine's disk, which a TPU VM reads, and an old TPU Node does not", evidence=facts.data)


def _machine(facts: TpuFacts) -> Finding:
    name = "4 a TPU VM"
    evidence = f"{facts.chips} device files of TPUs in /dev"
    if facts.chips:
        return ok(name, what="this machine has TPU chips", evidence=evidence)
    return hint(
        name,
        what="there is no TPU here",
        evidence=evidence,
        fix="gcloud compute tpus tpu-vm create NAME --zone ZONE --accelerator-type v5litepod-4 --version v2-alpha-tpuv5-lite",
    )


def _initializing(facts: TpuFacts) -> Finding:
    name = "5 initializing"
    if facts.chips and facts.tensorflow_tpu is None:
        return error(name, what="TensorFlow here cannot reach the TPU", evidence="no tensorflow-tpu", fix=INSTALL)
    return ok(name, what="the TPU is found and initialized before the first tensor", evidence="upshift train --backend xla")


def _wheels(facts: TpuFacts) -> Finding:
    name = "8 wheels that fit"
    if facts.tensorflow_tpu is None:
        return unknown(name, what="tensorflow-tpu is not installed; without a TPU nothing needs it", evidence=f"there: {INSTALL}")
    if facts.tensorflow is not None:
        fix = f"pip uninstall tensorflow tensorflow-cpu tensorflow-tpu, then {INSTALL}"
        return error(name, what="two TensorFlows are installed over each other", evidence=str(facts.tensorflow), fix=fix)
    versions = {"tensorflow-tpu": facts.tensorflow_tpu, "libtpu": facts.libtpu}
    evidence = ", ".join(f"{library} {version}" for library, version in versions.items())
    if versions != TPU_VM:
        problem = "not the combination that is known to import: with another libtpu the process aborts"
        return error(name, what=problem, evidence=evidence, fix=INSTALL)
    return ok(name, what="the combination that imports", evidence=evidence)


def _start(facts: TpuFacts) -> Finding:
    data = facts.data or "PATH"
    is_ready = bool(facts.chips) and facts.tensorflow_tpu is not None
    command = f"upshift train MODEL --data {data} --backend xla"
    if is_ready:
        return ok("9 start", what="type it", evidence=command)
    return hint("9 start", what="rehearse it here on the CPU, then the same command on the TPU VM", fix=command)
