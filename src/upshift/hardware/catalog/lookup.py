"""Find the product that a text names, and `describe` the Host that a text such as 8xh100 names.

Words of a name may be joined in any way: rtx-4090, RTX 4090, rtx_4090, rtx4090 and 4090 are the same product. A text must have
all words of a product's key, and may have words of its full name and its memory. A text with only some words of a key means that
product if no other product matches. A product's whole name with the memory of another one is refused.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from upshift.errors import RequestError
from upshift.hardware.catalog import interconnect, vendors
from upshift.hardware.catalog.apple import APPLE_CHOICES, APPLE_GPUS
from upshift.hardware.catalog.cpus import CPUS
from upshift.hardware.catalog.interconnect import gpu_link, pcie_link
from upshift.hardware.catalog.nvidia import NVIDIA_GPUS
from upshift.hardware.catalog.nvidia_rtx import RTX_FAMILIES
from upshift.hardware.catalog.row import CpuFacts, GpuFacts
from upshift.hardware.catalog.tpu import TPUS
from upshift.hardware.spec import Backend, Cpu, Host
from upshift.units import GIB

GPUS: dict[str, GpuFacts] = NVIDIA_GPUS | vendors.chips() | TPUS | APPLE_GPUS
# Cards are called by their numbers: 4090 is the desktop's card, and not the laptop's.
RTX_NUMBERS = {key.removeprefix("rtx-"): key for key in NVIDIA_GPUS if re.match(r"rtx-[0-9]{4}", key)}
ALIASES = {"h100": "h100-sxm", "dgx-spark": "gb10"} | RTX_NUMBERS
# NVIDIA sold cards of this name as Quadro RTX, and sells others as RTX PRO.
WORKSTATION_FAMILIES = {
    key.removesuffix("-ada"): tuple(other for other in NVIDIA_GPUS if key.removesuffix("-ada")[3:] in other)
    for key in NVIDIA_GPUS
    if re.fullmatch(r"rtx-[0-9]000-ada|rtx-[0-9]500-ada", key)
}
AMBIGUOUS: dict[str, tuple[str, ...]] = {
    "a100": ("a100-40gb", "a100-80gb", "a100-pcie-40gb", "a100-pcie-80gb"),
    "v100": ("v100-16gb", "v100-32gb", "v100-pcie-16gb", "v100-pcie-32gb"),
    "gh200": ("gh200-96gb", "gh200-144gb"),
    **RTX_FAMILIES,
    **WORKSTATION_FAMILIES,
    **{family.removeprefix("rtx-"): keys for family, keys in WORKSTATION_FAMILIES.items()},
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
ALL_NAMES = "list"  # near no product's name
LISTED_BY_FAMILY = ("rtx", "epyc", "xeon", "graviton")  # families of many products: their own names list them
SLICE = re.compile(r"\bmig\b|[0-9]g[.][0-9]+gb")  # NVIDIA's names of a part of a GPU
COUNT_LAST = re.compile(r"([a-z][^@]*) ?[x×*:] ?([0-9]{1,6})(@.+)?")
MAX_SHOWN = 60  # characters of the user's text in a message
MAX_NEAREST = 3  # names that a message suggests
MAX_WORDS = 6  # of an unknown name that are compared with products: each more of them doubles the work
MAX_NAME_LENGTH = 60  # longer texts name no product
MEMORY_TOLERANCE = 0.1  # as a share of the memory that the driver reports: a 48 GB card reports 45.0 GiB
LEADING_MEMORY = re.compile(r"([1-9][0-9]{0,3})(?:gib|gb|g)")


class Product(NamedTuple):
    """Hold what a product is named by: the key of its row, the vendor's name, and the GiB of one device if the row has them."""

    key: str
    name: str
    memory_gib: float | None


class Matches(NamedTuple):
    """Hold the names that match a text: ``exact`` with all words of the name, ``partial`` with some of them."""

    exact: tuple[str, ...]
    partial: tuple[str, ...]


class _Request(NamedTuple):
    """Hold the parts of a described host: [first x] [second x] product [@ port]."""

    text: str
    first: int | None
    second: int | None
    product: str
    port: str | None


def describe(text: str) -> Host:
    """Return the Host that a text names. Raise RequestError if the text is not understood. These forms are possible:

    - h100, 8xh100, 2x8xa100-80gb: nodes x accelerators x name. A node of tpu-* or gb200 may be a single host or everything that
      one fabric joins, such as 72xgb200 or 256xtpu-v5e.
    - epyc-9654, 4xepyc-9654, 4x2xepyc-9654: hosts x sockets x name. -768gb after the name is the memory of a host.
    - @ib-ndr (a port for each accelerator, or for the host) or @4xib-hdr (ports of a node) at the end is the link between nodes.
      Without it the nodes are linked as in the vendor's reference system, and `origin` says so. If there is no reference system,
      the link is unknown (None).
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
    name = stripped.lower()
    _check_one_kind(name)
    request = _parse(_with_count_first(name))
    rack = re.fullmatch(r"([a-z0-9]+?)[-_ ]?nvl[-_ ]?72", request.product)
    if rack is not None:
        return _gpu_host(_whole_rack(request, rack[1]), NVIDIA_GPUS[rack[1]])
    product = request.product
    memory_bytes = None
    with_memory = re.fullmatch(r"(.*[a-z0-9+])[-_ ]([0-9]{1,6}) ?(?:gib|gb|g)", product)
    if with_memory and int(with_memory[2]) and isinstance(_facts_or_none(with_memory[1]), CpuFacts):
        product = with_memory[1]
        memory_bytes = int(with_memory[2]) * GIB
    facts = find_product(product)
    if isinstance(facts, GpuFacts):
        return _gpu_host(request, facts)
    return _cpu_host(request, facts, memory_bytes)


def _whole_rack(request: _Request, product: str) -> _Request:
    """Return the request for racks such as gb200-nvl72, whose GPUs one NVLink domain joins.

    A count before the name counts racks."""
    racks = [key for key, facts in NVIDIA_GPUS.items() if facts.fabric is not None and facts.fabric.spans_nodes]
    if product not in racks or request.second is not None:
        forms = ", ".join(f"{key}-nvl72, 2x{key}-nvl72" for key in racks)
        raise RequestError(f"host {request.text[:MAX_SHOWN]!r} is no number of NVL72 racks; write {forms}, or 18x4x{racks[0]}")
    fabric = NVIDIA_GPUS[product].fabric
    assert fabric is not None
    if request.first in (None, 1):
        return request._replace(first=fabric.largest, second=None, product=product)
    return request._replace(second=fabric.largest, product=product)


def _facts_or_none(name: str) -> GpuFacts | CpuFacts | None:
    try:
        return find_product(name)
    except RequestError:
        return None


def _check_one_kind(name: str) -> None:
    """Raise RequestError for a host of several kinds of devices, and for a part of a device."""
    kinds = [part for part in re.split(r"[,+;]| and ", name) if part.strip()]
    if len(kinds) > 1:
        compared = ",".join(part.strip() for part in kinds)[:MAX_SHOWN]
        problem = f"host {name[:MAX_SHOWN]!r} has several kinds of devices, and a plan is for equal ones"
        raise RequestError(f"{problem}; describe one kind, such as {kinds[0].strip()[:MAX_SHOWN]}, or use --compare {compared}")
    if SLICE.search(name):
        problem = f"host {name[:MAX_SHOWN]!r} names a MIG slice of a GPU, whose rates nobody listed"
        raise RequestError(f"{problem}; name the whole GPU, such as h100, or the path of a Host JSON file with the slice's rates")


def _with_count_first(name: str) -> str:
    """Return h100x8, h100:8 and h100*8 as 8xh100. A name that is a product's as it stands is left alone."""
    match = COUNT_LAST.fullmatch(name)
    if match is None or _facts_or_none(name) is not None or _facts_or_none(match[1]) is None:
        return name
    return f"{match[2]}x{match[1].rstrip()}{match[3] or ''}"


def _parse(name: str) -> _Request:
    count = r"(?:([0-9]{1,6}) ?[x×*] ?)?"
    match = re.fullmatch(rf"{count}{count}([a-z0-9][^@]*)(?:@([^@]+))?", name)
    if match is None:
        raise RequestError(f"host {name[:MAX_SHOWN]!r} is not understood; write {FORMS}")
    first, second, product, port = match.groups()
    counts = [None if count is None else int(count) for count in (first, second)]
    if 0 in counts:
        raise RequestError(f"host {name[:MAX_SHOWN]!r} counts 0 nodes or devices; use 1 or more, such as 8xh100")
    return _Request(name, counts[0], counts[1], product, port)


def _stated_connection(
    request: _Request, *, num_nodes: int, per_node: int, devices_prefix: str
) -> interconnect.Connection | None:
    """Return the link that the request states, or None. `devices_prefix`: how it counts the devices of a node, such as 8x."""
    if request.port is None:
        return None
    connection = interconnect.stated_connection(request.port, per_node=per_node)
    if num_nodes == 1:
        two_nodes = f"2x{devices_prefix}{request.product}@{request.port}"
        raise RequestError(f"host {request.text!r} is one node, which has no link to others; write {two_nodes} for two")
    return connection


def _gpu_host(request: _Request, facts: GpuFacts) -> Host:
    gpu = facts.gpu
    max_per_node = facts.max_per_node
    source = f"table: {facts.source}"
    nodes = 1
    per_node = request.first or 1
    if request.second:
        nodes = request.first or 1
        per_node = request.second
    if max_per_node is not None and per_node > max_per_node:
        suggestion = f"{math.ceil(nodes * per_node / max_per_node)}x{max_per_node}x{request.product}"
        raise RequestError(
            f"host {request.text!r} has {per_node} devices in a node of at most {max_per_node}; write {suggestion}"
        )
    inter_node = _stated_connection(request, num_nodes=nodes, per_node=per_node, devices_prefix=f"{per_node}x")
    counted = "described"
    if inter_node is None and (domains := _fabric_domains(facts, nodes, per_node)) < nodes:
        counted = f"{facts.fabric.name if facts.fabric else 'a link'} joins {nodes // domains} nodes of {per_node} devices to one"
        nodes, per_node = domains, per_node * nodes // domains
    if inter_node is None and nodes > 1:
        inter_node = interconnect.default_connection(facts, num_nodes=nodes, per_node=per_node)
    intra_node, intra_origin = _intra_node_connection(facts, per_node)
    host_link = pcie_link(gpu)
    return Host(
        name=request.text,
        num_nodes=nodes,
        gpus_per_node=per_node,
        gpu=gpu,
        intra_node=intra_node,
        inter_node=inter_node.link if inter_node else None,
        host_to_device=host_link,
        origin={
            "num_nodes": counted,
            "gpus_per_node": counted,
            "gpu": source,
            "gpu.memory_bytes": f"table: {MEMORY_ORIGIN[gpu.backend]}",
            "intra_node": intra_origin,
            "host_to_device": "PCI Express base specification" if host_link else "unknown: not in the table",
            **({"inter_node": inter_node.origin} if inter_node else {}),
        },
    )


def _fabric_domains(facts: GpuFacts, nodes: int, per_node: int) -> int:
    """Return into how many equal domains a fabric that joins nodes divides them. All nodes in one domain stay nodes."""
    fabric = facts.fabric
    if fabric is None or not fabric.spans_nodes or facts.gpu.backend != "cuda" or nodes * per_node <= fabric.largest:
        return nodes
    fewest = math.ceil(nodes * per_node / fabric.largest)
    return next(count for count in range(fewest, nodes + 1) if nodes % count == 0)


def _intra_node_connection(facts: GpuFacts, per_node: int) -> interconnect.Connection:
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
        suggestion = f"{hosts}x{facts.max_sockets}x{request.product}"
        raise RequestError(f"host {request.text!r} has {sockets} sockets of at most {facts.max_sockets}; write {suggestion}")
    inter_node = _stated_connection(request, num_nodes=hosts, per_node=1, devices_prefix=f"{sockets}x" if request.second else "")
    if inter_node is None and hosts > 1:
        inter_node = interconnect.Connection(None, interconnect.UNKNOWN)
    return Host(
        name=request.text,
        num_nodes=hosts,
        cpu=_join_sockets(facts.cpu, sockets).changed(memory_bytes=memory_bytes, free_memory_bytes=memory_bytes),
        inter_node=inter_node.link if inter_node else None,
        origin={
            "num_nodes": "described",
            "cpu": f"table: {facts.source}; sockets: {sockets}",
            "cpu.memory_bytes": "described" if memory_bytes else "unknown: -768gb behind the name states it",
            **({"inter_node": inter_node.origin} if inter_node else {}),
        },
    )


def _join_sockets(cpu: Cpu, count: int) -> Cpu:
    """Return `count` sockets of a host as one Cpu: each total and each rate is multiplied by the number of sockets."""
    peak = cpu.peak.model_dump() if cpu.peak else {}
    totals = {name: getattr(cpu, name) for name in ("physical_cores", "usable_cores", "l2_total_bytes", "l3_total_bytes")}
    scaled = {name: value and value * count for name, value in totals.items()}
    return cpu.changed(peak={name: rate and rate * count for name, rate in peak.items()}, **scaled)


def names_with_more(host: Host) -> list[str]:
    """Return the names of hosts with two to eight times as many accelerators in one node. Some of them may not exist."""
    if host.device == "cpu" or host.num_nodes > 1:
        return []
    product = re.sub(r"^([0-9]+ ?[x×*] ?)+", "", host.name)
    return [f"{count * host.num_devices}x{product}" for count in (2, 3, 4, 6, 8)]


def find_product(name: str) -> GpuFacts | CpuFacts:
    """Return the row of the product with this name. Raise RequestError for an ambiguous or unknown name."""
    key = _find_key(name)
    return GPUS[key] if key in GPUS else CPUS[key]


def _find_key(name: str) -> str:
    exact, partial = match_products(name, _named_products())
    keys = _keys_of(exact)
    if not keys:
        families = [AMBIGUOUS[match] for match in exact if match in AMBIGUOUS]
        if families:
            raise RequestError(_describe_choices(name, [key for family in families for key in family]))
        keys = _keys_of(partial)
        _check_memory(name, keys)
    if len(keys) == 1:
        return keys[0]
    if keys:
        raise RequestError(_describe_choices(name, keys))
    raise RequestError(_describe_unknown(name))


def _describe_unknown(name: str) -> str:
    """Return the message for a name that is not in the tables: the nearest names, or where all names are shown."""
    if name == ALL_NAMES:
        return _describe_all_names()
    problem = f"unknown product {name[:MAX_SHOWN]!r}"
    nearest = _nearest_names(name)
    if nearest:
        verb = "is" if len(nearest) == 1 else "are"
        return f"{problem}; the nearest {verb} {', '.join(nearest)}; --on {ALL_NAMES} shows all names"
    instead = "leave out --on to plan for this machine, or give the path of a Host JSON file"
    return f"{problem}; {instead}; --on {ALL_NAMES} shows all names"


def _describe_all_names() -> str:
    names = [*GPUS, *(alias for alias in ALIASES if alias not in RTX_NUMBERS), *CPUS]
    listed = ", ".join(sorted(key for key in names if key not in APPLE_GPUS and not key.startswith(LISTED_BY_FAMILY)))
    other_names = f"one that {', '.join(LISTED_BY_FAMILY[:-1])} or {LISTED_BY_FAMILY[-1]} lists"
    mac = "a Mac's chip with its memory, such as m2-max-64gb"
    return f"{ALL_NAMES} is no product; use one of {listed}, {other_names}, {mac}, or the path of a Host JSON file"


def _nearest_names(name: str) -> list[str]:
    """Return at most three products that an unknown name may mean.

    Some words of the name may be a product's name (Colab T4). Otherwise a word has a slip in it (rtx-409)."""
    words = _split_words(name[:MAX_SHOWN])[:MAX_WORDS]
    some = (subset for size in range(1, len(words) + 1) for subset in combinations(words, size))
    names = [*GPUS, *(alias for alias in ALIASES if alias not in RTX_NUMBERS), *CPUS]
    similar = difflib.get_close_matches(name[:MAX_SHOWN], names, n=len(names))
    parts = re.findall("[a-z]+|[0-9]+", " ".join(words))
    runs = (parts[first:last] for first, last in combinations(range(len(parts) + 1), 2))
    nearest = _longest_named(map("".join, some)) or [key for key in similar if _is_slip_of(words, key)]
    nearest = nearest or _longest_named(map("".join, runs))
    return sorted(nearest, key=lambda key: -difflib.SequenceMatcher(None, name[:MAX_SHOWN], key).ratio())[:MAX_NEAREST]


def _longest_named(texts: Iterable[str]) -> list[str]:
    """Return the products that the longest text names. If several are as long, one with the words of a key in order counts."""
    named = [(text, keys) for text in dict.fromkeys(texts) if (keys := _keys_or_members(text))]
    if not named:
        return []
    return max(named, key=lambda found: (len(found[0]), join_words(found[1][0]).startswith(found[0])))[1]


def _keys_or_members(text: str) -> list[str]:
    """Return the products of this name, and those with more words in their names; for the name of a family its members."""
    exact, _ = match_products(text, _named_products())
    members = [key for match in exact for key in AMBIGUOUS.get(match, ())]
    keys = _keys_of(exact)
    return list(dict.fromkeys((*keys, *members, *(key for key in GPUS for first in keys if key.startswith(f"{first}-")))))


def _is_slip_of(words: list[str], key: str) -> bool:
    """Return whether each word with a digit differs from the key's by one slip.

    Products differ by one character: a GTX 1080 is no RTX 5080, and a P100 is no H100."""
    parts = [*_split_words(key), join_words(key)]
    return all(any(_is_one_slip(word, part) for part in parts) for word in words if re.search("[0-9]", word))


def _is_one_slip(typed: str, meant: str) -> bool:
    """Return whether a word is another one, but for one character too few or too many, or two that changed places."""
    shorter, longer = sorted((typed, meant), key=len)
    if len(longer) == len(shorter):
        differing = [index for index in range(len(longer)) if shorter[index] != longer[index]]
        return len(differing) <= 2 and sorted(shorter) == sorted(longer)
    return shorter in {longer[:index] + longer[index + 1 :] for index in range(len(longer))}


def _describe_choices(name: str, keys: Iterable[str]) -> str:
    choices = list(dict.fromkeys(keys))
    advice = f"one of {', '.join(choices)}" if len(choices) > 1 else f"{choices[0]} if you mean that one"
    return f"{name[:MAX_SHOWN]!r} does not name one device; use {advice}"


def _check_memory(name: str, partly_named: list[str]) -> None:
    """Raise RequestError if the name is that of a product, with a memory that this product does not have.

    Another product with this memory, whose name has more words, is not meant: the RTX 3060 was sold with 8 GB, too, and is no
    RTX 3060 Ti. The name of a family (h100) with a memory means the member that has it."""
    for gigabytes, rest in _without_memory(name):
        exact, _ = match_products(rest, _named_products())
        keys = _keys_of(tuple(match for match in exact if match in RTX_NUMBERS or match not in ALIASES))
        for key in keys:
            memory_bytes = GPUS[key].gpu.memory_bytes if key in GPUS else None
            if memory_bytes is None:
                continue
            has = f"{key} has {memory_bytes / GIB:.0f} GiB here, not {gigabytes}"
            others = f", or another product with {gigabytes} GiB: {', '.join(partly_named)}" if partly_named else ""
            raise RequestError(f"{name[:MAX_SHOWN]!r} is not listed: {has}; use {key}{others}")


def _without_memory(name: str) -> Iterator[tuple[int, str]]:
    """Yield (gigabytes, the other words) for each way to read a part of the name, which may be joined to a word, as a memory."""
    for memory in re.finditer(r"([0-9]+)[^a-z0-9]?(?:gib|gb|g)(?![a-z0-9])", name[:MAX_NAME_LENGTH].lower()):
        digits = memory[1]
        for length in range(min(len(digits), 4), 0, -1):
            start = memory.end(1) - length
            if name[start] != "0":
                yield int(digits[-length:]), f"{name[:start]} {name[memory.end() :]}"


def _keys_of(matches: tuple[str, ...]) -> list[str]:
    """Return the keys of the matching products. Names of families are left out."""
    return list(dict.fromkeys(ALIASES.get(match, match) for match in matches if match not in AMBIGUOUS))


def all_products() -> list[Product]:
    """Return every product, accelerators first, in the order of the tables."""
    products = []
    for key, facts in GPUS.items():
        memory_gib = facts.gpu.memory_bytes / GIB if facts.gpu.memory_bytes else None
        products.append(Product(key, facts.gpu.name, memory_gib))
    return products + [Product(key, cpu_facts.cpu.model_name or "", None) for key, cpu_facts in CPUS.items()]


@cache
def _named_products() -> dict[str, Product]:
    """Return the products and families of products, by every name that they have."""
    products = {product.key: product for product in all_products()}
    products |= {alias: products[key] for alias, key in ALIASES.items()}
    return products | {family: Product(family, "", None) for family in AMBIGUOUS}


def match_products(text: str, products: Mapping[str, Product]) -> Matches:
    """Return the names of ``products`` that a text may mean."""
    joined = join_words(text)
    if not joined or len(joined) > MAX_NAME_LENGTH:
        return Matches((), ())
    exact = []
    partial = []
    for name, product in products.items():
        needed, optional = _product_words(name, product)
        word_sets = _used_word_sets(joined, (*needed, *optional), product)
        best = max((len(used.intersection(needed)) for used in word_sets), default=0)
        if best == len(needed):
            exact.append(name)
        elif best > 0:
            partial.append(name)
    return Matches(tuple(exact), tuple(partial))


@cache
def _product_words(name: str, product: Product) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the words of one of a product's names, and the other words that it may be called by."""
    needed = tuple(_split_words(name))
    all_words = _split_words(f"{product.key} {product.name}")
    return needed, tuple(word for word in all_words if word not in needed)


def _split_words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def _used_word_sets(joined: str, words: tuple[str, ...], product: Product) -> Iterator[frozenset[str]]:
    """Yield every set of words that a joined text can be split into. Each word is used at most once."""
    if not joined:
        yield frozenset()
        return
    for index, word in enumerate(words):
        for spelling in _spellings(word):
            if joined.startswith(spelling):
                remaining = words[:index] + words[index + 1 :]
                yield from (used | {word} for used in _used_word_sets(joined[len(spelling) :], remaining, product))
    memory = LEADING_MEMORY.match(joined)
    if memory and _memory_matches(product, int(memory[1]), words):
        memory_used = product._replace(memory_gib=None)
        yield from _used_word_sets(joined[memory.end() :], words, memory_used)


def _memory_matches(product: Product, gigabytes: int, words: tuple[str, ...]) -> bool:
    """Return whether the product has about this much memory. It is False if the product's own words state a memory."""
    if product.memory_gib is None or any(re.fullmatch(r"[0-9]+gb", word) for word in words):
        return False
    return abs(gigabytes - product.memory_gib) <= MEMORY_TOLERANCE * product.memory_gib


@cache
def _spellings(word: str) -> tuple[str, ...]:
    """Return the spellings of a product's word: 80gb, 80gib and 80g; sxm with or without the number of its generation; laptop
    and mobile."""
    if re.fullmatch(r"[0-9]+gb", word):
        return word, f"{word[:-2]}gib", word[:-1]
    if re.fullmatch(r"sxm[0-9]?", word):
        return "sxm", *(f"sxm{generation}" for generation in range(2, 7))
    if word == "laptop":
        return word, "mobile", "notebook"
    return (word,)


def join_words(text: str) -> str:
    """Return the letters and digits of a text in lower case. They do not depend on how words are joined."""
    return "".join(_split_words(text))
