"""Find where frozen weights may wait outside the memory of the device. The planner looks there when nothing else fits."""

from __future__ import annotations

from upshift.hardware.disk import disk_rate
from upshift.hardware.spec import Host
from upshift.models.profile import ModelProfile
from upshift.models.source import ModelSource
from upshift.planning.cost.rates import host_link
from upshift.planning.plan import WeightOffload

WEIGHT_OFFLOAD = "weight_offload"
ORIGIN = "disk_bytes_per_second"


def asks_where_weights_wait(fixed: tuple[str, ...]) -> bool:
    return any(assignment.partition("=")[0].strip() == WEIGHT_OFFLOAD for assignment in fixed)


def with_disk_rate(host: Host, source: ModelSource) -> Host:
    """Return the host with the rate of the disk that holds the model's weights.

    Return the host unchanged where this machine has no weights of the model, or the rate is known.
    """
    if source.directory is None or host.disk_bytes_per_second is not None:
        return host
    rate = disk_rate(sorted(source.directory.glob("*.safetensors")))
    origin = host.origin | {ORIGIN: "measured on the model's files"}
    return host if rate is None else host.changed(disk_bytes_per_second=rate, origin=origin)


def has_frozen_layers(profile: ModelProfile) -> bool:
    """Return whether layers have frozen weights that can be read from elsewhere.

    They must be stored in the dtype that they are computed in: weights stored in 4 bits are not read from elsewhere.
    """
    parameters = profile.parameters
    return not parameters.quantized and parameters.layers > parameters.trainable_layers


def unasked(host: Host) -> list[WeightOffload]:
    """Return the ``places`` that a plan takes without being asked, where nothing else fits.

    On a GPU a user must ask for them, as for other offloads that have not run on a GPU.
    """
    return places(host)[1:] if host.device == "cpu" else []


def places(host: Host) -> list[WeightOffload]:
    """Return where weights may wait on this host, nearest first."""
    link, disk = host_link(host) if host.device == "cuda" else None, host.disk_bytes_per_second
    found: list[WeightOffload] = ["none"]
    if host.num_devices == 1 and link is not None:
        found.append("host")
    if host.num_devices == 1 and disk is not None and (host.device == "cpu" or link is not None):
        found.append("disk")
    return found
