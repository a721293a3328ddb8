"""Keep memory for a rank's part of a weight alone."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor


def of_its_size(parameter: nn.Parameter | None) -> nn.Parameter:
    """Return ``parameter`` itself, or a copy if its part is a view of the whole weight, which the part would keep."""
    assert parameter is not None
    if not isinstance(parameter, DTensor):
        return parameter
    local = parameter.to_local().detach()
    if local.untyped_storage().nbytes() <= local.nbytes:
        return parameter
    part = DTensor.from_local(
        local.clone(), parameter.device_mesh, parameter.placements,
        run_check=False, shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip
    return nn.Parameter(part, requires_grad=parameter.requires_grad)
