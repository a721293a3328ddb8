"""Collect all products that can be described, and `describe` the Host that a text such as 8xh100 names.

A name is understood however its words are joined (spelling.py). An unknown product has no figures. The rows are in nvidia.py,
vendors/, tpu.py, apple.py and cpus.py, the links between nodes in network.py.

Find the product that a text names, however its words are joined: rtx-4090, RTX 4090, rtx_4090, rtx4090 and 4090 are one.

A product's words are those of its key in the table, which must all be written, and those of its full name and its memory,
which may be. A text that has only some of a key's words means that product if no other product has them.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from upshift.errors import RequestError
from upshift.hardware.catalog import interconnect, vendors
from upshift.hardware.catalog.apple import APPLE_CHOICES, APPLE_GPUS
from upshift.hardware.catalog.cpus import CPUS
from upshift.hardware.catalog.interconnect import gpu_link, pcie_link
from upshift.hardware.catalog.nvidia import NVIDIA_GPUS
from upshift.hardware.catalog.row import CpuFacts, GpuFacts
from upshift.hardware.catalog.tpu import TPUS
from upshift.hardware.spec import Backend, Cpu, Host
from upshift.units import GIB

LONGEST = 60  # characters of a name that is looked at
MEMORY_TOLERANCE = 0.1  # of the memory that the driver reports: a 48 GB card reports 45.0 GiB


class Product(NamedTuple):
    """The words of a product.

    ``key``: of the table. ``name``: the vendor's. ``memory_gib``: of one device, where a row has it.
    """

    key: str
    name: str
    memory_gib: float | None


class Matches(NamedTuple):
    """The keys that the text names: ``whole`` with all words of the key, ``partial`` with some of them."""

    whole: tuple[str, ...]
    partial: tuple[str, ...]


def join_words(text: str) -> str:
    """Return the letters and digits of a text, in lower case: what stays the same however words are joined."""
    return "".join(_words(text))


def match_products(text: str, products: Mapping[str, Product]) -> Matches:
    """Return the names of ``products`` that ``text`` may mean."""
    joined = join_words(text)
    if not joined or len(joined) > LONGEST:
        return Matches((), ())
    whole = []
    partial = []
    for name, product in products.items():
        needed = _words(name)
        optional = [word for word in _words(f"{product.key} {product.name}") if word not in needed]
        counts = [len(used.intersection(needed)) for used in _used_words(joined, (*needed, *optional), product)]
        most = max(counts, default=0)
        if most == len(needed):
            whole.append(name)
        elif most > 0:
            partial.append(name)
    return Matches(tuple(whole), tuple(partial))


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def _used_words(joined: str, words: tuple[str, ...], product: Product) -> Iterator[frozenset[str]]:
    """Yield every set of words that ``joined`` can be cut into, each word at most once."""
    if not joined:
        yield frozenset()
        return
    for place, word in enumerate(words):
        for spelling in _spellings(word):
            if joined.startswith(spelling):
                others = words[:place] + words[place + 1 :]
                yield from (used | {word} for used in _used_words(joined[len(spelling) :], others, product))
    memory = re.match(r"([0-9]{1,4})(?:gib|gb|g)", joined)
    if memory and _has_memory(product, int(memory[1]), words):
        without = product._replace(memory_gib=None)
        yield from _used_words(joined[memory.end() :], words, without)


def _has_memory(product: Product, gigabytes: int, words: tuple[str, ...]) -> bool:
    """Return whether a product whose own words name no memory has about ``gigabytes``."""
    if product.memory_gib is None or any(re.fullmatch(r"[0-9]+gb", word) for word in words):
        return False
    return abs(gigabytes - product.memory_gib) <= MEMORY_TOLERANCE * product.memory_gib


def _spellings(word: str) -> list[str]:
    """Return the ways to write a word: 80gb, 80gib and 80g; sxm with the number of its generation."""
    if re.fullmatch(r"[0-9]+gb", word):
        return [word, f"{word[:-2]}gib", word[:-1]]
    if re.fullmatch(r"sxm[0-9]?", word):
        return ["sxm", *(f"sxm{generation}" for generation in range(2, 7))]
    return [word]


GPUS: dict[str, GpuFacts] = NVIDIA_GPUS | vendors.chips() | TPUS | APPLE_GPUS
ALIASES = {"h100": "h100-sxm"}
AMBIGUOUS: dict[str, tuple[str, ...]] = {
    "a100": ("a100-40gb", "a100-80gb", "a100-pcie-40gb", "a100-pcie-80gb"),
    "v100": ("v100-16gb", "v100-32gb", "v100-pcie-16gb", "v100-pcie-32gb"),
    **vendors.families(),
    "tpu": tuple(TPUS),
    "tpu-v5": ("tpu-v5e", "tpu-v5p"),
    **APPLE_CHOICES,
    **{family: tuple(key for key in CPUS if key.startswith(family)) for family in ("epyc", "xeon", "graviton")},
}
FORMS = "h100, 8xh100, 2x8xh100, 2x8xh100@ib-ndr, epyc-9654, 4xepyc-9654@ethernet-25 or the path of a Host JSON file"
MEMORY_ORIGIN: dict[Backend, str] = {
    "cuda": "total reported by NVML for this product",
    "rocm": "total reported by rocm-smi for this product",
    "hpu": "total reported by hl-smi for this product",
    "xla": "what XLA leaves to a program",
    "mps": "unified memory, shared with the CPU",
}
MAX_SHOWN = 60  # characters of the user's text in a message


class _Request(NamedTuple):
    text: str
    first: int | None
    second: int | None
    product: str
    port: str | None


def find(name: str) -> GpuFacts | CpuFacts:
    """Return the row of a product's name. Raise RequestError for an ambiguous or unknown name."""
    key = _find_key(name)
    return GPUS[key] if key in GPUS else CPUS[key]


def _find_key(name: str) -> str:
    whole, partial = match_products(name, _named_products())
    keys = _keys_of(whole)
    if not keys:
        families = [AMBIGUOUS[match] for match in whole if match in AMBIGUOUS]
        if families:
            choices = ", ".join(dict.fromkeys(key for family in families for key in family))
            raise RequestError(f"{name[:MAX_SHOWN]!r} does not name one device; use one of {choices}")
        keys = _keys_of(partial)
    if len(keys) == 1:
        return keys[0]
    if keys:
        raise RequestError(f"{name[:MAX_SHOWN]!r} does not name one device; use one of {', '.join(keys)}")
    names = [*GPUS, *ALIASES, *CPUS]
    close = difflib.get_close_matches(name[:MAX_SHOWN], names)
    hint = f"close are {', '.join(close)}; " if close else ""
    listed = ", ".join(sorted(key for key in names if key not in APPLE_GPUS))
    mac = f"a Mac's chip ({', '.join(APPLE_CHOICES)}) with its memory, such as m2-max-64gb"
    what = f"unknown product {name[:MAX_SHOWN]!r}"
    raise RequestError(f"{what}; {hint}use one of {listed}, {mac}, or the path of a Host JSON file")


def _keys_of(matches: tuple[str, ...]) -> list[str]:
    """Return the keys of products, without names of families."""
    return list(dict.fromkeys(ALIASES.get(match, match) for match in matches if match not in AMBIGUOUS))


@cache
def _named_products() -> dict[str, Product]:
    """Return every name that a product, or a family of products, is described by."""
    products = {
        key: Product(key, facts.gpu.name, facts.gpu.memory_bytes / GIB if facts.gpu.memory_bytes else None)
        for key, facts in GPUS.items()
    }
    products |= {key: Product(key, facts.cpu.model_name or "", None) for key, facts in CPUS.items()}
    products |= {alias: products[key] for alias, key in ALIASES.items()}
    return products | {family: Product(family, "", None) for family in AMBIGUOUS}


def describe(text: str) -> Host:
    """Return the Host that `text` names. Raises RequestError.

    - h100, 8xh100, 2x8xa100-80gb: nodes x accelerators x name. A node of tpu-* or gb200 may be a host or all that one fabric
      joins, such as 72xgb200 or 256xtpu-v5e.
    - epyc-9654, 4xepyc-9654, 4x2xepyc-9654: hosts x sockets x name; -768gb behind the name is the memory of a host.
    - @ib-ndr (a port for each accelerator, or for the host) or @4xib-hdr (ports of a node) behind it is the link between
      nodes. Without it they are linked as in the vendor's reference system; `origin` says so. Where there is none the link
      is unknown (None).
    - the path of a Host JSON file.
    """
    stripped = text.strip()
    if stripped.lower().endswith(".json"):
        try:
            return Host.from_file(Path(stripped))
        except RequestError:
            raise
        except ValueError:  # a NUL or a lone surrogate is no path
            raise RequestError(f"{stripped[:MAX_SHOWN]!r} is not a path; give the path of a Host JSON file") from None
    request = _parse(stripped.lower())
    product = request.product
    memory_bytes = None
    with_memory = re.fullmatch(r"(.*[a-z0-9+])[-_ ]([0-9]{1,6}) ?(?:gib|gb|g)", product)
    if with_memory and int(with_memory[2]) and isinstance(_facts_or_none(with_memory[1]), CpuFacts):
        product = with_memory[1]
        memory_bytes = int(with_memory[2]) * GIB
    facts = find(product)
    return _gpu_host(request, facts) if isinstance(facts, GpuFacts) else _cpu_host(request, facts, memory_bytes)


def _facts_or_none(name: str) -> GpuFacts | CpuFacts | None:
    try:
        return find(name)
    except RequestError:
        return None


def _parse(name: str) -> _Request:
    count = r"(?:([0-9]{1,6}) ?[x×] ?)?"
    match = re.fullmatch(rf"{count}{count}([a-z0-9][^@]*)(?:@([^@]+))?", name)
    if match is None:
        raise RequestError(f"host {name[:MAX_SHOWN]!r} is not understood; write {FORMS}")
    first, second, product, port = match.groups()
    counts = [None if count is None else int(count) for count in (first, second)]
    if 0 in counts:
        raise RequestError(f"host {name[:MAX_SHOWN]!r} counts 0 nodes or devices; use 1 or more, such as 8xh100")
    return _Request(name, counts[0], counts[1], product, port)


def _stated(request: _Request, *, num_nodes: int, per_node: int, inside: str) -> interconnect.Connection | None:
    """Return the link that the request states; `inside` is how it counts the devices of a node: 8x."""
    if request.port is None:
        return None
    connection = interconnect.stated(request.port, per_node=per_node)
    if num_nodes == 1:
        two = f"2x{inside}{request.product}@{request.port}"
        raise RequestError(f"host {request.text!r} is one node, which has no link to others; write {two} for two")
    return connection


def _gpu_host(request: _Request, facts: GpuFacts) -> Host:
    gpu = facts.gpu
    largest = facts.max_per_node
    source = f"table: {facts.source}"
    nodes, per_node = (request.first or 1, request.second) if request.second else (1, request.first or 1)
    if largest is not None and per_node > largest:
        fits = f"{math.ceil(nodes * per_node / largest)}x{largest}x{request.product}"
        raise RequestError(f"host {request.text!r} has {per_node} devices in a node of at most {largest}; write {fits}")
    between = _stated(request, num_nodes=nodes, per_node=per_node, inside=f"{per_node}x")
    if between is None and nodes > 1:
        between = interconnect.usual(facts, num_nodes=nodes, per_node=per_node)
    intra_node, intra_origin = _inside(facts, per_node)
    host_link = pcie_link(gpu)
    return Host(
        name=request.text,
        num_nodes=nodes,
        gpus_per_node=per_node,
        gpu=gpu,
        intra_node=intra_node,
        inter_node=between.link if between else None,
        host_to_device=host_link,
        origin={
            "num_nodes": "described",
            "gpus_per_node": "described",
            "gpu": source,
            "gpu.memory_bytes": f"table: {MEMORY_ORIGIN[gpu.backend]}",
            "intra_node": intra_origin,
            "host_to_device": "PCI Express base specification" if host_link else "unknown: not in the table",
            **({"inter_node": between.origin} if between else {}),
        },
    )


def _inside(facts: GpuFacts, per_node: int) -> interconnect.Connection:
    """Return the link between the accelerators of a node."""
    fabric = facts.fabric
    if per_node == 1:
        return interconnect.Connection(None, "none: one device")
    if fabric is None:
        return interconnect.Connection(gpu_link(facts.gpu), "PCI Express base specification")
    if per_node > fabric.largest:
        return interconnect.Connection(None, f"unknown: {fabric.name} joins {fabric.largest} of them, and more of them unevenly")
    return interconnect.Connection(fabric.link(per_node), f"table: {fabric.source}")


def _cpu_host(request: _Request, facts: CpuFacts, memory_bytes: int | None) -> Host:
    hosts = request.first or 1
    sockets = request.second or 1
    if sockets > facts.max_sockets:
        fits = f"{hosts}x{facts.max_sockets}x{request.product}"
        raise RequestError(f"host {request.text!r} has {sockets} sockets of at most {facts.max_sockets}; write {fits}")
    between = _stated(request, num_nodes=hosts, per_node=1, inside=f"{sockets}x" if request.second else "")
    if between is None and hosts > 1:
        between = interconnect.Connection(None, interconnect.UNKNOWN)
    return Host(
        name=request.text,
        num_nodes=hosts,
        cpu=_sockets(facts.cpu, sockets).changed(memory_bytes=memory_bytes, free_memory_bytes=memory_bytes),
        inter_node=between.link if between else None,
        origin={
            "num_nodes": "described",
            "cpu": f"table: {facts.source}; sockets: {sockets}",
            "cpu.memory_bytes": "described" if memory_bytes else "unknown: -768gb behind the name states it",
            **({"inter_node": between.origin} if between else {}),
        },
    )


def _sockets(cpu: Cpu, count: int) -> Cpu:
    """Return `count` sockets of one host together: every total, and every rate, is that many times one socket's."""
    peak = cpu.peak.model_dump() if cpu.peak else {}
    totals = {name: getattr(cpu, name) for name in ("physical_cores", "usable_cores", "l2_total_bytes", "l3_total_bytes")}
    scaled = {name: value and value * count for name, value in totals.items()}
    return cpu.changed(peak={name: rate and rate * count for name, rate in peak.items()}, **scaled)
