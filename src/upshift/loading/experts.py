"""Read from the disk only the experts of a layer that its tokens are routed to.

transformers keeps the experts of a layer in one weight, its first dimension the expert, and says with ``top_k_index`` which ones
compute. The weight rests as the file's pages; before its module runs the pages of the chosen experts are brought in, and let go
after it. Nothing is read ahead: the choice is known when the layer runs. On a GPU all experts are sent.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from upshift.loading.kinds import CHOICE
from upshift.loading.mapped import announce, forget, populate
from upshift.loading.waiting import Weight


class RoutedExperts:
    """The hooks of one module that has experts. ``keep``: leave pages in the page cache after their use."""

    def __init__(self, module: nn.Module, weights: Sequence[Weight], *, keep: bool) -> None:
        self._weights, self._keep = weights, keep
        self._place = list(inspect.signature(type(module).forward).parameters).index(CHOICE) - 1  # after self
        self._number = module.num_experts
        self._chosen: list[tuple[Tensor, Weight]] = []
        self.bytes_read = 0
        module.register_forward_pre_hook(self._enter, with_kwargs=True)
        module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, module: nn.Module, arguments: Any, named: dict[str, Any]) -> None:
        choice: Tensor = named[CHOICE] if CHOICE in named else arguments[self._place]
        experts = [number for number in choice.unique().tolist() if 0 <= number < self._number]
        self._chosen = [(weight.resting[number], weight) for weight in self._weights for number in experts]
        for content, _ in self._chosen:
            announce(content)
        for content, weight in self._chosen:
            populate(content, weight.stored.file)
            self.bytes_read += content.nbytes

    def _leave(self, module: nn.Module, arguments: Any, output: Any) -> None:
        for content, _ in self._chosen:
            forget(content)
        if not self._keep:
            for file in {weight.stored.file for _, weight in self._chosen}:
                descriptor = os.open(file, os.O_RDONLY)
                for content, weight in self._chosen:
                    if weight.stored.file == file:
                        start = weight.stored.offset + content.data_ptr() - weight.resting.data_ptr()
                        os.posix_fadvise(descriptor, start, content.nbytes, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)
        self._chosen = []
