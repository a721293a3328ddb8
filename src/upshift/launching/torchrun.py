"""Write the lines of a shell that start the ranks of one host with torchrun, which starts them again when one dies.

If the number of ranks is not given, the host finds it: one for each GPU, or one for each NUMA node, so that a rank computes
where its memory is. A rank takes its share of the cores itself (hardware/cpu_affinity.py): torchrun binds to GPUs only.
"""

from __future__ import annotations

import shlex

from upshift.launching.request import Launch, address

COUNT_GPUS = "ls /dev/nvidia[0-9]* 2>/dev/null | wc -l"
SECONDS_TO_SAVE = 120  # of ranks that are asked to stop, until torchrun ends them; its own default is 30
COUNT_NUMA_NODES = "lscpu --parse=NODE | grep -v '^#' | sort -u | wc -l"


def count_ranks(launch: Launch) -> list[str]:
    """Return the lines that set ``ranks``."""
    if launch.nproc is not None or launch.gpus:
        return [f"ranks={launch.ranks_of_a_node}"]
    return [
        f"ranks=$({COUNT_GPUS})  # one for each GPU",
        f'[ "$ranks" -gt 0 ] || ranks=$({COUNT_NUMA_NODES})  # none: one for each NUMA node (often a socket)',
    ]


def set_environment(launch: Launch) -> list[str]:
    """Return the lines that set variables of the ranks.

    If a plan says nothing of threads, a rank has its share of the cores. nproc counts the cores that the host may use."""
    threads = "export OMP_NUM_THREADS=$(( $(nproc) > ranks ? $(nproc) / ranks : 1 ))  # a rank's share of the cores"
    # Else one store serves every round: ranks that start again may find addresses of those that died in it (gloo: connection
    # refused), and a host that comes back waits for an address that torchrun's first round alone was told (torch 2.13).
    anew = "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    patience = f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={SECONDS_TO_SAVE}  # seconds to save in, once asked to stop"
    return [threads, anew, patience, *(f"export {name}={shlex.quote(value)}" for name, value in launch.environment)]


def torchrun(launch: Launch, *flags: str, ranks: str = '"$ranks"', python: str | None = None) -> str:
    """Return the command of torchrun. ``flags`` are of the shell's language already."""
    words = [
        shlex.quote(python or launch.python), "-m", "torch.distributed.run", f"--nproc-per-node={ranks}",
        f"--max-restarts={launch.max_restarts}", *flags, *(shlex.quote(word) for word in launch.command),
    ]  # fmt: skip
    return " ".join(words)


def of_host(launch: Launch, number: int) -> str:
    """Return the script of host ``number`` of the named ones. The first host holds the store where they meet.

    ``is_host`` and ``local-addr`` are said, not guessed: torchrun compares names, and machines made from one image share
    theirs.
    """
    host, first = launch.hosts[number], launch.hosts[0]
    meeting = (
        f"--nnodes={launch.nodes}", "--rdzv-backend=c10d", f"--rdzv-id={launch.name}",
        f"--rdzv-endpoint={shlex.quote(f'{address(first)}:{launch.port}')}",
        f"--rdzv-conf=is_host={int(number == 0)}", f"--local-addr={shlex.quote(address(host))}",
    )  # fmt: skip
    flags = ("--standalone",) if launch.hosts == ("localhost",) else meeting
    start = [f"cd {shlex.quote(launch.folder)}"] if launch.folder else []
    return "\n".join([*start, *count_ranks(launch), *set_environment(launch), f"exec {torchrun(launch, *flags)}"]) + "\n"
