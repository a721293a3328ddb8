"""Let the ranks that a launcher started meet before there is a plan: in a key-value store at MASTER_ADDR.

torchrun keeps one store over restarts, and hosts that come or go do not change what it tells the ranks: old keys look like new
ones. So ranks greet each other with fresh names first, and all later keys begin with rank 0's.
"""

from __future__ import annotations

import json
import secrets
import time
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

from upshift.errors import JobFailed, RequestError
from upshift.settings import Ranks

POLL_SECONDS = 0.05
MAX_ARRIVAL_SECONDS = 600.0  # of the last rank after the first
MAX_PLANNING_SECONDS = 24 * 3600.0


def meet(ranks: Ranks) -> Store:
    """Return a store of these ranks' own. All ranks call it."""
    if ranks.address is None or ranks.port is None:
        raise RequestError(
            f"this is rank {ranks.rank} of {ranks.size}, and nothing says where they meet; set MASTER_ADDR to the host of rank 0 "
            "and MASTER_PORT to a port that is free there, for all ranks"
        )
    try:
        store = TCPStore(
            ranks.address, ranks.port, is_master=ranks.rank == 0 and not ranks.store_is_there, wait_for_workers=False,
            timeout=timedelta(seconds=MAX_ARRIVAL_SECONDS),
        )  # fmt: skip
    except RuntimeError as error:  # torch's errors of connections
        reason = str(error).splitlines()[0]
        raise JobFailed(f"rank {ranks.rank} cannot reach {ranks.address}:{ranks.port}, where ranks meet: {reason}") from None
    name = secrets.token_hex(8)
    store.set(f"upshift/hello/{ranks.rank}", name)
    first = _greet_others(store, ranks, name) if ranks.rank == 0 else _await_greeting(store, ranks, name)
    own = PrefixStore(f"upshift/{first}", store)
    own.set_timeout(timedelta(seconds=MAX_PLANNING_SECONDS))
    return own


def _greet_others(store: Store, ranks: Ranks, name: str) -> str:
    others, greeted, until = range(1, ranks.size), [""], time.monotonic() + MAX_ARRIVAL_SECONDS
    while not store.check([f"upshift/{name}/seen/{rank}" for rank in others]):
        come = [rank for rank in others if store.check([f"upshift/hello/{rank}"])]
        names = {str(rank): store.get(f"upshift/hello/{rank}").decode() for rank in come}
        if (said := json.dumps([name, names])) != greeted[0]:
            greeted[0] = said
            store.set("upshift/welcome", said)
        _wait_until(until, f"{ranks.size - 1} other ranks")
    return name


def _await_greeting(store: Store, ranks: Ranks, name: str) -> str:
    until = time.monotonic() + MAX_ARRIVAL_SECONDS
    while True:
        if store.check(["upshift/welcome"]):
            first, names = json.loads(store.get("upshift/welcome"))
            if names.get(str(ranks.rank)) == name:
                store.set(f"upshift/{first}/seen/{ranks.rank}", name)
                return str(first)
        _wait_until(until, "rank 0")


def _wait_until(until: float, who: str) -> None:
    if time.monotonic() > until:
        raise JobFailed(f"{who} did not come in {MAX_ARRIVAL_SECONDS:.0f} s; see what the launcher says of them")
    time.sleep(POLL_SECONDS)
