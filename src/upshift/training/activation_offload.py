"""Keep in host memory the tensors that the forward pass saves for the backward pass.

torch.autograd.graph.save_on_cpu would send the weights too, which autograd keeps beside the activations.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

SMALLEST_BYTES = 2**16  # below it a copy costs more than it frees
Packed = tuple[torch.device, Tensor]


def activations_on_host(model: nn.Module) -> AbstractContextManager[object]:
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor: Tensor) -> Packed:
        if tensor.nbytes < SMALLEST_BYTES or tensor.untyped_storage().data_ptr() in weights:
            return tensor.device, tensor
        # Copies are queued behind what wrote the tensor, and read back on the same queue.
        host = torch.empty(tensor.size(), dtype=tensor.dtype, layout=tensor.layout, pin_memory=tensor.is_cuda)
        return tensor.device, host.copy_(tensor, non_blocking=True)

    def unpack(packed: Packed) -> Tensor:
        device, tensor = packed
        return tensor.to(device, non_blocking=True)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
