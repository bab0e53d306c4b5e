"""The picture in docs/multi-token.md, from documents of `obole bench mtp` (needs matplotlib).

obole bench mtp several --json several.json; obole bench mtp ground-truth --concurrency 1 --json ground-truth.json
python benchmarks/plot_mtp.py several.json --ablation ground-truth.json --out docs/images/multi-token.svg
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

Row = dict[str, Any]
POINTS = {"plain": "s", "lookup": "^", "verify": "D"}
CURVES = {"confadapt": ("τ", "tab:blue"), "static": ("k", "tab:orange")}
SETTING = dict(textcoords="offset points", xytext=(4, 4), fontsize=7)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("document", type=Path)
    parser.add_argument("--ablation", type=Path, help="of a model that was taught by the text's own words")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = json.loads(options.document.read_text())["rows"]
    several = list(dict.fromkeys(row["sequences"] for row in rows))
    figure, axes = plt.subplots(1, 1 + len(several), figsize=(4.6 * (1 + len(several)), 3.8), layout="constrained", sharey=True)
    first = [row for row in rows if row["sequences"] == several[0]]
    draw(axes[0], first, "tokens_per_pass")
    axes[0].set(xlabel="tokens of a pass", ylabel="% of problems solved", title="What a pass yields")
    if options.ablation:
        others = [row for row in json.loads(options.ablation.read_text())["rows"] if row["sequences"] == several[0]]
        curve(axes[0], others, "confadapt", "tokens_per_pass", "confadapt, taught by the text", "tab:red")
    for axis, count in zip(axes[1:], several, strict=True):
        draw(axis, [row for row in rows if row["sequences"] == count], "speed_up")
        axis.set(xlabel="times faster than plain", title=f"Time, {count} at once")
    axes[0].legend(fontsize=8)
    figure.savefig(options.out)


def draw(axis: Axes, rows: Sequence[Row], x: str) -> None:
    for name, marker in POINTS.items():
        points(axis, [row for row in rows if row["side"] == name], x, fmt=marker, label=name, color="black", fillstyle="none")
    for name, (symbol, color) in CURVES.items():
        curve(axis, rows, name, x, f"{name}, by {symbol}", color)


def curve(axis: Axes, rows: Sequence[Row], side: str, x: str, label: str, color: str) -> None:
    chosen = sorted((row for row in rows if row["side"] == side), key=lambda row: row[x])
    points(axis, chosen, x, fmt="o-", label=label, color=color, markersize=4)
    for row in chosen:
        axis.annotate(f"{row['setting']:g}", (row[x], 100 * row["accuracy"]), color=color, **SETTING)


def points(axis: Axes, rows: Sequence[Row], x: str, **style: Any) -> None:
    """With the 95 % interval of each."""
    middle = [100 * row["accuracy"] for row in rows]
    below = [100 * (row["accuracy"] - row["accuracy_low"]) for row in rows]
    above = [100 * (row["accuracy_high"] - row["accuracy"]) for row in rows]
    axis.errorbar([row[x] for row in rows], middle, yerr=[below, above], elinewidth=0.6, capsize=2, **style)


if __name__ == "__main__":
    main()
