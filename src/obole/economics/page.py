"""The findings of an audit as one HTML page: no scripts, nothing from elsewhere, plots as SVG, light or dark."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

WIDTH, HEIGHT = 760, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 14, 44

Point = tuple[float, float]


def page(found: Mapping[str, Any]) -> str:
    """The whole page. What is quoted of prompts can only become text."""
    plots = {
        "curve_plot": curve_plot(found["prefix"]) if found["prefix"] else "",
        "copy_plot": copy_plot(found["copying"]) if found["copying"] else "",
    }
    return rendered("report.html", found=found, **plots)


def rendered(template: str, **values: Any) -> str:
    """A page from one of the templates beside this file, with the style that all of them have."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"percent": percent, "number": number, "size": size, "milliseconds": milliseconds}
    folder = resources.files("obole.economics")
    style = Markup((folder / "style.css").read_text("utf-8"))
    return environment.from_string((folder / template).read_text("utf-8")).render(style=style, **values)


def curve_plot(prefix: Mapping[str, Any]) -> Markup:
    """Hit ratio over the size of the cache in tokens, on a logarithmic scale; sizes of tiers as dashed lines."""
    points = [(float(tokens), float(ratio)) for tokens, ratio in prefix["points"]]
    if not points:
        return Markup("")
    marks, reach = [], 0.0
    for row in prefix["tiers"]:
        if row["tier"]:
            reach += row["tokens"]
            marks.append((row["tier"], reach))
    low = math.log10(max(1.0, points[0][0]))
    high = math.log10(max([points[-1][0], *(at for _, at in marks), 10 * points[0][0]]))
    top = nice_share(max(ratio for _, ratio in points))

    def x(tokens: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (math.log10(max(tokens, 1.0)) - low) / (high - low)

    def y(ratio: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * ratio / top

    parts = grid(top, y)
    for exponent in range(math.ceil(low), math.floor(high) + 1):
        parts.append(text(x(10**exponent), HEIGHT - BOTTOM + 16, short(10**exponent), "middle"))
    path = [(x(tokens), y(ratio)) for tokens, ratio in points]
    path.append((WIDTH - RIGHT, path[-1][1]))
    parts.append(f'<path class="line" d="{steps(path)}"/>')
    for i, (name, at) in enumerate(marks):
        place = min(x(at), WIDTH - RIGHT)
        parts.append(f'<line class="mark" x1="{place:.1f}" x2="{place:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(text(place - 4, TOP + 12 + 14 * i, name, "end"))
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "tokens in the cache", "middle"))
    return svg(parts, "Share of the tokens of prompts found in a prefix cache, by its size")


def copy_plot(copying: Mapping[str, Any]) -> Markup:
    """For each length of match two bars: tokens that followed one, and those of them that were copyable."""
    seen, right = copying["both"]["seen"], copying["both"]["right"]
    top = nice_share(max([*seen, 0.01]))
    step = (WIDTH - LEFT - RIGHT) / len(seen)

    def y(share: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share / top

    parts = grid(top, y)
    for i, (name, all_, good) in enumerate(zip(copying["lengths"], seen, right, strict=True)):
        at = LEFT + step * (i + 0.5)
        for share, offset, kind in ((all_, -0.36, "seen"), (good, 0.02, "right")):
            height = HEIGHT - BOTTOM - y(share)
            place = f'x="{at + step * offset:.1f}" y="{y(share):.1f}"'
            parts.append(f'<rect class="{kind}" {place} width="{step * 0.34:.1f}" height="{height:.1f}"/>')
        parts.append(text(at, HEIGHT - BOTTOM + 16, name, "middle"))
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "tokens of the match", "middle"))
    return svg(parts, "Tokens of answers by the length of the match that they followed")


def grid(top: float, y: Any) -> list[str]:
    """Four lines over the height, with their shares."""
    parts = []
    for i in range(5):
        share = top * i / 4
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(share):.1f}" y2="{y(share):.1f}"/>')
        parts.append(text(LEFT - 8, y(share) + 4, f"{100 * share:.3g} %", "end"))
    return parts


def steps(points: Sequence[Point]) -> str:
    """A path that keeps its height until the next point: a cache finds no more until it holds one block more."""
    moves = [f"M{points[0][0]:.1f} {points[0][1]:.1f}"]
    moves += [f"H{at:.1f}V{height:.1f}" for at, height in points[1:]]
    return "".join(moves)


def text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{Markup.escape(words)}</text>'


def svg(parts: Sequence[str], about: str) -> Markup:
    label = Markup.escape(about)
    return Markup(f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>')


def nice_share(value: float) -> float:
    """The next of some round shares."""
    return next((share for share in (0.02, 0.04, 0.1, 0.2, 0.4, 0.6, 0.8) if value <= share), 1.0)


def short(count: float) -> str:
    for unit in ("", "k", "M", "G"):
        if count < 1000:
            return f"{count:g}{unit}"
        count /= 1000
    return f"{count:g}T"


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else number(1e3 * seconds)


def size(count: float | None) -> str:
    if count is None:
        return "–"
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{number(count)} {unit}"
        count /= 1000
    return f"{number(count)} GB"
