"""Check for `upshift doctor --tpu` whether this machine, and what is installed, is ready to train on a TPU.

There are nine steps, in the order of the transformers guide "Training on TPU with TensorFlow", each with what was read here. A
step that Upshift does by itself at every run says so. Only what depends on the machine or on the user can be wrong.
"""

from __future__ import annotations

from pathlib import Path

from upshift.debugging.finding import Finding, error, hint, ok, unknown
from upshift.value import Value
from upshift.versions import installed_version

TPU_VM = {"tensorflow-tpu": "2.20.0", "libtpu": "0.0.21"}  # with the libtpu that pip takes by itself it aborts at import
INSTALL = "pip install " + " ".join(f"{name}=={version}" for name, version in TPU_VM.items())
REHEARSE = "upshift xla compile MODEL --topology v5e-4"
BUCKET = "gs://"


class TpuFacts(Value):
    """The facts of this machine. ``chips``: device files of TPUs. ``data``: where the training data is, as the user says."""

    chips: int
    tensorflow: str | None = None  # version of a wheel that also compiles for this host
    tensorflow_tpu: str | None = None
    libtpu: str | None = None
    jax: str | None = None
    data: str | None = None


def read_tpu_facts(*, data: str | None = None, devices: Path = Path("/dev")) -> TpuFacts:
    chips = [*devices.glob("accel[0-9]*"), *devices.glob("vfio/[0-9]*")]  # up to v4, and from v5e on
    host = installed_version("tensorflow") or installed_version("tensorflow-cpu")
    return TpuFacts(
        chips=len(chips), tensorflow=host, tensorflow_tpu=installed_version("tensorflow-tpu"), libtpu=installed_version("libtpu"),
        jax=installed_version("jax"), data=data,
    )  # fmt: skip


def tpu_readiness(facts: TpuFacts) -> list[Finding]:
    """Return one finding for each step."""
    return [
        _rules(facts), _rehearsal(facts), _data(facts), _machine(facts), _initializing(facts),
        ok("6 strategy", what="TPUStrategy is chosen when a TPU answers, and weights, states and data are made in its scope",
           evidence="upshift train --backend xla does it and says why"),
        ok("7 jit_compile", what="it is not asked for on a TPU's host, where all of a step is compiled anyway",
           evidence="upshift train --backend xla leaves it out there, and puts it inside the step elsewhere"),
        _wheels(facts), _start(facts),
    ]  # fmt: skip


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
            name, what="no TensorFlow here that compiles for this host", fix="without a TPU: pip install 'upshift[xla]'",
            evidence="tensorflow-tpu alone compiles for TPUs only" if facts.tensorflow_tpu else "none installed",
        )  # fmt: skip
    if facts.jax is None or facts.libtpu is None:
        return hint(
            name, what="XLA compiles for this host; Google's TPU compiler is not here",
            fix=f"pip install 'upshift[xla-compile]', then {REHEARSE}", evidence=f"tensorflow {facts.tensorflow}",
        )  # fmt: skip
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
        name, what="there is no TPU here", evidence=evidence,
        fix="gcloud compute tpus tpu-vm create NAME --zone ZONE --accelerator-type v5litepod-4 --version v2-alpha-tpuv5-lite",
    )  # fmt: skip


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
    found = {"tensorflow-tpu": facts.tensorflow_tpu, "libtpu": facts.libtpu}
    evidence = ", ".join(f"{library} {version}" for library, version in found.items())
    if found != TPU_VM:
        what = "not the combination that is known to import: with another libtpu the process aborts"
        return error(name, what=what, evidence=evidence, fix=INSTALL)
    return ok(name, what="the combination that imports", evidence=evidence)


def _start(facts: TpuFacts) -> Finding:
    where = facts.data or "PATH"
    ready = bool(facts.chips) and facts.tensorflow_tpu is not None
    command = f"upshift train MODEL --data {where} --backend xla"
    if ready:
        return ok("9 start", what="type it", evidence=command)
    return hint("9 start", what="rehearse it here on the CPU, then the same command on the TPU VM", fix=command)
