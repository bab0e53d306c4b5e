"""A run of `obole bench serve` as one HTML page, from its document: no scripts, nothing from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from obole.economics.page import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, grid, nice_share, rendered, short, svg, text

NAMES = (("first token", "first_token"), ("between tokens", "between_tokens"), ("whole answer", "whole_answer"))
OBJECTIVES = {"first_token": "ttft", "between_tokens": "itl", "whole_answer": "e2e"}


def page(found: Mapping[str, Any]) -> str:
    """The whole page."""
    rows = [*found["classes"], found["rows"][0]]
    plots = [(name, latency_plot(rows, key, name, found["objectives"][OBJECTIVES[key]]), key) for name, key in NAMES]
    probes = probe_plot(found["probes"], found["objectives"]["share"]) if found["probes"] else ""
    changes = [one for one in found.get("changes", ()) if one["verdict"] in ("better", "worse")]
    compared = len(found.get("changes", ()))
    unsure = sum(one["verdict"] == "unsure" for one in found.get("changes", ()))
    return rendered(
        "goodput.html",
        found=found,
        rows=rows,
        plots=plots,
        probe_plot=probes,
        changes=changes,
        compared=compared,
        unsure=unsure,
    )


def latency_plot(rows: Sequence[Mapping[str, Any]], key: str, name: str, objective: float | None) -> Markup:
    """For each class its median, 90th and 99th percentile in milliseconds, on a logarithmic scale; the objective dashed."""
    points = [[row[f"{key}_{p}_milliseconds"] for p in ("p50", "p90", "p99")] for row in rows]
    values = [value for found in points for value in found if value is not None and value > 0]
    if not values:
        return Markup("")
    marked = [*values, objective] if objective is not None else values
    low, high = math.floor(math.log10(min(marked))), math.ceil(math.log10(max(marked)) + 1e-9)
    high = max(high, low + 1)
    step = (WIDTH - LEFT - RIGHT) / len(rows)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (math.log10(value) - low) / (high - low)

    parts = []
    for exponent in range(low, high + 1):
        at = y(10.0**exponent)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(text(LEFT - 8, at + 4, short(10.0**exponent), "end"))
    for i, (row, found) in enumerate(zip(rows, points, strict=True)):
        x = LEFT + step * (i + 0.5)
        parts.append(text(x, HEIGHT - BOTTOM + 16, str(row["kind"]), "middle"))
        good = [(value, kind) for value, kind in zip(found, ("middle", "seen", "tail"), strict=True) if value]
        if not good:
            continue
        parts.append(f'<line class="band" x1="{x:.1f}" x2="{x:.1f}" y1="{y(good[0][0]):.1f}" y2="{y(good[-1][0]):.1f}"/>')
        parts += [f'<circle class="{kind}" cx="{x:.1f}" cy="{y(value):.1f}" r="5"/>' for value, kind in good]
    if objective is not None:
        parts.append(f'<line class="mark" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(objective):.1f}" y2="{y(objective):.1f}"/>')
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, f"{name}, ms", "middle"))
    return svg(parts, f"Milliseconds, {name}, by class of workload")


def probe_plot(probes: Sequence[Mapping[str, Any]], wanted: float) -> Markup:
    """Share of requests that met the objectives, over the rates that were tried."""
    rates = [one["rate"] for one in probes]
    low, high = math.log10(min(rates)) - 0.1, math.log10(max(rates)) + 0.1
    top = nice_share(max([wanted, *(one["met"] for one in probes)]))

    def x(rate: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (math.log10(rate) - low) / (high - low)

    def y(share: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share / top

    parts = grid(top, y)
    parts.append(f'<line class="mark" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(wanted):.1f}" y2="{y(wanted):.1f}"/>')
    for one in sorted(probes, key=lambda one: one["rate"]):
        kind = "middle" if one["met"] >= wanted else "tail"
        parts.append(f'<circle class="{kind}" cx="{x(one["rate"]):.1f}" cy="{y(one["met"]):.1f}" r="5"/>')
        parts.append(text(x(one["rate"]), HEIGHT - BOTTOM + 16, f"{one['rate']:.3g}", "middle"))
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "requests a second", "middle"))
    return svg(parts, "Share of requests that met the objectives, by rate")
