"""Define units, and format numbers with them. Memory is counted in bytes and shown in GiB (2**30); GB (10**9) is for rates."""

from __future__ import annotations

KIB = 2**10
MIB = 2**20
GIB = 2**30

GIGA = 10**9
TERA = 10**12

FLOP_CONVENTION = (
    "matrix products and attention, one multiply-add = 2 FLOPs, causal attention counted as half, "
    "embedding look-ups free, backward = the products that its gradients need (2 x forward where every weight is "
    "trained, none for a frozen weight's own gradient), recomputation not counted"
)


def gib(num_bytes: float) -> float:
    """Convert bytes to GiB."""
    return num_bytes / GIB


def format_bytes(num_bytes: float) -> str:
    """Return a human-readable binary size: ``1.50 GiB``, ``320 MiB``, ``12 KiB``."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(num_bytes) >= unit:
            value = num_bytes / unit
            if value < 10:
                return f"{value:.2f} {name}"
            return f"{value:.1f} {name}" if value < 100 else f"{value:.0f} {name}"
    return f"{num_bytes:.0f} B"


def format_count(count: float) -> str:
    """Return a human-readable decimal count: ``29.4 M``, ``8.03 B``, ``512``."""
    for unit, name in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if abs(count) >= unit:
            value = count / unit
            return f"{value:.2f} {name}" if value < 10 else f"{value:.1f} {name}"
    return f"{count:.0f}"


def format_seconds(seconds: float) -> str:
    """Return a human-readable duration: ``85 ms``, ``3.2 s``, ``2 min 05 s``, ``3 h 20 min``."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds_left = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {seconds_left:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
