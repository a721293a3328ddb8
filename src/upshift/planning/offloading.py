"""Plans whose frozen weights are not in the memory of the device: where they may wait, looked at when nothing else fits."""

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
    """With the rate of the disk that holds the model's weights; as it is where there are none on this machine."""
    if source.directory is None or host.disk_bytes_per_second is not None:
        return host
    rate = disk_rate(sorted(source.directory.glob("*.safetensors")))
    origin = host.origin | {ORIGIN: "measured on the model's files"}
    return host if rate is None else host.changed(disk_bytes_per_second=rate, origin=origin)


def has_frozen_layers(profile: ModelProfile) -> bool:
    """In the dtype that they are computed in: what is stored in 4 bits is not read from elsewhere."""
    parameters = profile.parameters
    return not parameters.quantized and parameters.layers > parameters.trainable_layers


def unasked(host: Host) -> list[WeightOffload]:
    """Of ``places``, those that a plan takes where nothing else fits. On a GPU they are planned when asked for, as other offloads
    that have not run on one."""
    return places(host)[1:] if host.device == "cpu" else []


def places(host: Host) -> list[WeightOffload]:
    """Where weights may wait on this host, nearest first."""
    link, disk = host_link(host) if host.device == "cuda" else None, host.disk_bytes_per_second
    found: list[WeightOffload] = ["none"]
    if host.num_devices == 1 and link is not None:
        found.append("host")
    if host.num_devices == 1 and disk is not None and (host.device == "cpu" or link is not None):
        found.append("disk")
    return found
