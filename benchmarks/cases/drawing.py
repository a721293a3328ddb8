"""Drawings for docs, as SVG without a program: two axes, lines with names, points with words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import log10

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 820, 460, 70, 60, 20, 110
COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700")
GREY, FAINT = "#57606a", "#eaeef2"
Point = tuple[float, float]


@dataclass
class Drawing:
    title: str
    note: str
    x_ticks: Sequence[float]
    x_ends: Point
    top: float  # of the y axis, which begins at 0
    x_text: Callable[[float], str]
    y_text: Callable[[float], str]
    logarithmic: bool = False
    named: int = field(default=0, init=False)
    parts: list[str] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.parts += [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="13">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
            f'<text x="{LEFT}" y="22" font-size="16">{self.title}</text>',
            f'<text x="{LEFT}" y="42" fill="{GREY}">{self.note}</text>',
        ]
        for tick in self.x_ticks:
            x = self.x(tick)
            self.parts.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}" stroke="{FAINT}"/>')
            self.parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{self.x_text(tick)}</text>')
        for step in range(5):
            value = self.top * step / 4
            y = self.y(value)
            self.parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="{FAINT}"/>')
            self.parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{self.y_text(value)}</text>')

    def x(self, value: float) -> float:
        least, most, place = *self.x_ends, value
        if self.logarithmic:
            least, most, place = log10(least), log10(most), log10(value)
        return LEFT + (WIDTH - LEFT - RIGHT) * (place - least) / (most - least)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / self.top

    def line(self, name: str, points: Iterable[Point]) -> None:
        colour = COLOURS[self.named]
        path = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        column, row = LEFT + 360 * (self.named % 2), HEIGHT - 48 + 22 * (self.named // 2)
        ends = f'x1="{column}" y1="{row - 4}" x2="{column + 24}" y2="{row - 4}"'
        self.parts.append(f'<line {ends} stroke="{colour}" stroke-width="2.5"/>')
        self.parts.append(f'<text x="{column + 32}" y="{row}">{name}</text>')
        self.named += 1

    def point(self, at: Point, words: str) -> None:
        """In the colour of the line that was drawn last."""
        x, y = self.x(at[0]), self.y(at[1])
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{COLOURS[self.named - 1]}"/>')
        end = x > (LEFT + WIDTH - RIGHT) / 2
        anchor = ' text-anchor="end"' if end else ""
        self.parts.append(f'<text x="{x + (-8 if end else 8):.1f}" y="{y - 8:.1f}" font-size="11"{anchor}>{words}</text>')

    def svg(self) -> str:
        return "\n".join([*self.parts, "</svg>\n"])
