"""Write shell lines that start the ranks of one host with torchrun. It starts them again when one dies.

If the number of ranks is not given, the host counts: one for each GPU, or one for each NUMA node, so that a rank computes
near its memory. A rank binds itself to its share of the cores (hardware/cpu_affinity.py): torchrun binds to GPUs only.
"""

from __future__ import annotations

import shlex

from upshift.launching.request import Launch, address

COUNT_GPUS = "ls /dev/nvidia[0-9]* 2>/dev/null | wc -l"
SAVE_SECONDS = 120  # time for ranks to save after a request to stop, until torchrun kills them; torchrun's default is 30
COUNT_NUMA_NODES = "lscpu --parse=NODE | grep -v '^#' | sort -u | wc -l"


def rank_count_lines(launch: Launch) -> list[str]:
    """Return the lines that set the shell's variable ``ranks``."""
    if launch.has_rank_count:
        return [f"ranks={launch.ranks_per_node}"]
    return [
        f"ranks=$({COUNT_GPUS})  # one for each GPU",
        f'[ "$ranks" -gt 0 ] || ranks=$({COUNT_NUMA_NODES})  # none: one for each NUMA node (often a socket)',
        '[ "$ranks" -gt 0 ] || ranks=1  # a host, or a container, where lscpu sees no node',
    ]


def environment_lines(launch: Launch) -> list[str]:
    """Return the lines that set the ranks' environment variables.

    A rank gets its share of the cores as threads, if its plan sets no number. nproc counts the cores that the host may use."""
    threads = "export OMP_NUM_THREADS=$(( $(nproc) > ranks ? $(nproc) / ranks : 1 ))  # a rank's share of the cores"
    # Without it one store serves all rounds: restarted ranks may find the addresses of dead ranks in it (gloo: connection
    # refused), and a host that comes back waits for an address that only torchrun's first round had (torch 2.13).
    new_store = "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    shutdown_timeout = f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={SAVE_SECONDS}  # seconds to save in, once asked to stop"
    return [threads, new_store, shutdown_timeout, *(f"export {name}={shlex.quote(value)}" for name, value in launch.environment)]


def torchrun_command(launch: Launch, *flags: str, ranks: str = '"$ranks"', python: str | None = None) -> str:
    """Return the command of torchrun. ``flags`` are quoted for the shell already."""
    arguments = [
        shlex.quote(python or launch.python),
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={ranks}",
        f"--max-restarts={launch.max_restarts}",
        *flags,
        *(shlex.quote(word) for word in launch.command),
    ]
    return " ".join(arguments)


def host_script(launch: Launch, number: int) -> str:
    """Return the script of host ``number`` of the named hosts. The first host runs the store where they meet.

    The flags ``is_host`` and ``local-addr`` are explicit, because torchrun would compare host names, and machines made from
    one image share theirs.
    """
    host = launch.hosts[number]
    first = launch.hosts[0]
    rendezvous_flags = (
        f"--nnodes={launch.nodes}",
        "--rdzv-backend=c10d",
        f"--rdzv-id={launch.name}",
        f"--rdzv-endpoint={shlex.quote(f'{address(first)}:{launch.port}')}",
        f"--rdzv-conf=is_host={int(number == 0)}",
        f"--local-addr={shlex.quote(address(host))}",
    )
    flags = ("--standalone",) if launch.hosts == ("localhost",) else rendezvous_flags
    change_folder = [f"cd {shlex.quote(launch.folder)}"] if launch.folder else []
    return (
        "\n".join(
            [*change_folder, *rank_count_lines(launch), *environment_lines(launch), f"exec {torchrun_command(launch, *flags)}"]
        )
        + "\n"
    )
