"""Let rank 0 make a decision for all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from upshift import errors
from upshift.errors import JobFailed, RequestError, UpshiftError
from upshift.training.checkpoint.rng import undisturbed_rng

T = TypeVar("T")


def chosen_by_rank_0(choose: Callable[[], T]) -> T:
    """Return what ``choose`` returns on rank 0. All ranks call this function together.

    Raise on each rank the error that ``choose`` raised. Random numbers stay the same on all ranks.
    """
    said: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            with undisturbed_rng():
                said = [choose()]
        except UpshiftError as error:
            kind = type(error) if type(error) in (RequestError, errors.NothingFits) else JobFailed
            said = [kind(str(error))]
        except Exception as error:  # whatever it is, the others must not wait for what does not come
            dist.broadcast_object_list([JobFailed(f"rank 0: {type(error).__name__}: {error}")])
            raise
    dist.broadcast_object_list(said)
    if isinstance(said[0], UpshiftError):
        raise said[0]
    return said[0]  # type: ignore[no-any-return]
