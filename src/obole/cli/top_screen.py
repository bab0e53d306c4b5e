"""How `obole top` looks: figures as Rich renderables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from obole.cli.top_figures import QUANTILES, Figures, sparkline
from obole.types import Tier

COLOURS = {
    "lookup": "blue",
    "memory": "magenta",
    "prediction": "green",
    "forced": "yellow",
    "draft": "bright_red",
    "mtp": "dark_orange",
}
NAMES = {"first_token": "first token", "between_tokens": "between tokens", "request": "whole request", "queue": "in the queue"}
GAUGE = 20  # columns
BELOW = (Tier.RAM, Tier.SSD)


def screen(url: str, health: str, problem: str, shown: Figures | None, paces: Sequence[float]) -> RenderableType:
    """Everything. `paces`: tokens per second of the last looks."""
    heading = Text.assemble(("obole top", "bold"), f"  {url}  ", (health, "green" if health == "ok" else "bold red"))
    if problem:
        return Group(heading, "", Text(problem, style="red"))
    if shown is None:
        return Group(heading, "", Text("waiting for the second look", style="dim"))
    return Group(heading, "", gauges(shown), "", rates(shown, paces), "", sources(shown), "", latencies(shown))


def gauges(shown: Figures) -> Text:
    full = round(GAUGE * min(1.0, shown.kv_usage))
    kv = Text.assemble(("█" * full, "cyan"), ("░" * (GAUGE - full), "dim"), f" {shown.kv_usage:.0%}")
    return Text.assemble(
        "running ", (f"{shown.running:,}", "bold"), "   waiting ", (f"{shown.waiting:,}", "bold"), "   KV ", kv
    )


def rates(shown: Figures, paces: Sequence[float]) -> Table:
    table = Table.grid(padding=(0, 3))
    pace = Text.assemble((f"{shown.tokens_per_second:,.1f}", "bold"), "  ", (sparkline(paces), "cyan"))
    table.add_row("tokens/s", pace)
    hits = "–" if shown.cache_hit_rate is None else f"{shown.cache_hit_rate:.0%}"
    tiers = ", ".join(f"{share:.0%} {tier}" for tier, share in shown.hits_by_tier.items() if share)
    below = f" ({tiers})" if any(shown.hits_by_tier.get(tier) for tier in BELOW) else ""
    table.add_row("prompts from cache", Text.assemble((hits, "bold"), f" of {shown.prompt_tokens:,} tokens{below}"))
    return table


def sources(shown: Figures) -> Table:
    """A line for each source that has done anything, and for the model."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("source")
    for name in ("tokens/s", "drafted", "accepted"):
        table.add_column(name, justify="right")
    for source, rate in shown.by_source.items():
        drafted = shown.drafted.get(source, 0)
        if source != "model" and not drafted and not rate:
            continue
        share = shown.acceptance.get(source)
        table.add_row(
            Text(source, style=COLOURS.get(source, "")),
            f"{rate:,.1f}",
            f"{drafted:,}" if drafted else "",
            "" if share is None else f"{share:.0%}",
        )
    return table


def latencies(shown: Figures) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("latency")
    for share in QUANTILES:
        table.add_column(f"p{round(100 * share)}", justify="right")
    for name, values in shown.latencies.items():
        table.add_row(NAMES[name], *(seconds(value) for value in values.values()))
    return table


def seconds(value: float | None) -> str:
    """ "12.3 ms", "4.56 s"."""
    if value is None:
        return "–"
    return f"{1000 * value:.3g} ms" if value < 0.9995 else f"{value:.3g} s"
