"""Let the ranks that a launcher started meet in a key-value store at MASTER_ADDR, before there is a plan.

torchrun keeps one store over restarts, and ranks cannot tell old keys from new ones there. Therefore ranks first greet each
other with new random names, and all later keys begin with the name of rank 0.
"""

from __future__ import annotations

import json
import secrets
import time
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

from upshift.errors import JobFailed
from upshift.settings import Ranks

POLL_SECONDS = 0.05
MAX_ARRIVAL_SECONDS = 600.0  # from the first rank to the last
MAX_PLANNING_SECONDS = 24 * 3600.0


def meet(ranks: Ranks) -> Store:
    """Return a store for these ranks alone. All ranks call this function."""
    address, port = ranks.meeting_point()
    try:
        store = TCPStore(
            address,
            port,
            is_master=ranks.rank == 0 and not ranks.store_is_there,
            wait_for_workers=False,
            timeout=timedelta(seconds=MAX_ARRIVAL_SECONDS),
        )
    except RuntimeError as error:  # torch raises it if the connection fails
        reason = str(error).splitlines()[0]
        raise JobFailed(f"rank {ranks.rank} cannot reach {address}:{port}, where ranks meet: {reason}") from None
    name = secrets.token_hex(8)
    store.set(f"upshift/hello/{ranks.rank}", name)
    rank_0_name = _greet_others(store, ranks, name) if ranks.rank == 0 else _await_greeting(store, ranks, name)
    job_store = PrefixStore(f"upshift/{rank_0_name}", store)
    job_store.set_timeout(timedelta(seconds=MAX_PLANNING_SECONDS))
    return job_store


def _greet_others(store: Store, ranks: Ranks, name: str) -> str:
    """Publish the names of rank 0 and of the ranks that have come, until all have seen them. Return rank 0's name."""
    others = range(1, ranks.size)
    published = ""
    deadline = time.monotonic() + MAX_ARRIVAL_SECONDS
    while not store.check([f"upshift/{name}/seen/{rank}" for rank in others]):
        arrived = [rank for rank in others if store.check([f"upshift/hello/{rank}"])]
        names = {str(rank): store.get(f"upshift/hello/{rank}").decode() for rank in arrived}
        welcome = json.dumps([name, names])
        if welcome != published:
            published = welcome
            store.set("upshift/welcome", welcome)
        _sleep_before(deadline, f"{ranks.size - 1} other ranks")
    return name


def _await_greeting(store: Store, ranks: Ranks, name: str) -> str:
    """Wait until rank 0 has published this rank's name. Return rank 0's name."""
    deadline = time.monotonic() + MAX_ARRIVAL_SECONDS
    while True:
        if store.check(["upshift/welcome"]):
            rank_0_name, names = json.loads(store.get("upshift/welcome"))
            if names.get(str(ranks.rank)) == name:
                store.set(f"upshift/{rank_0_name}/seen/{ranks.rank}", name)
                return str(rank_0_name)
        _sleep_before(deadline, "rank 0")


def _sleep_before(deadline: float, missing: str) -> None:
    """Sleep for a moment. Raise JobFailed after the deadline."""
    if time.monotonic() > deadline:
        raise JobFailed(f"{missing} did not come in {MAX_ARRIVAL_SECONDS:.0f} s; see what the launcher says of them")
    time.sleep(POLL_SECONDS)
