"""The picture in docs/speculation.md, from documents of `obole bench` (needs matplotlib).

obole bench lookup --json lookup.json; obole bench specbench ... --json spec.json; obole bench edit ... --json edit.json
python benchmarks/plot_speculation.py --lookup lookup.json --drafts spec.json edit.json --out docs/images/speculation.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib.pyplot as plt

CROWDED = 1.25  # below this speed-up there is no room for names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lookup", type=Path, required=True)
    parser.add_argument("--drafts", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    figure, (cost, gain) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    rows = json.loads(options.lookup.read_text())["rows"]
    for name, label in (("scan_microseconds", "scan of the text"), ("step_microseconds", "index: a token more, and a draft")):
        cost.plot([row["context"] for row in rows], [row[name] for row in rows], marker="o", label=label)
    cost.set(xscale="log", yscale="log", xlabel="tokens of context", ylabel="µs a token", title="What finding a draft costs")
    cost.legend()
    for path in options.drafts:
        document = json.loads(path.read_text())
        rows = [row for row in document["rows"] if row["kind"] != "all"]
        drafted = [100 * (1 - row["sources"].get("model", 0)) for row in rows]
        gain.scatter(drafted, [row["speed_up"] for row in rows], label=document["benchmark"])
        for x, row in zip(drafted, rows, strict=True):
            if row["speed_up"] < CROWDED:
                continue
            gain.annotate(row["kind"], (x, row["speed_up"]), textcoords="offset points", xytext=(4, 3), fontsize=7)
    gain.axhline(1, color="grey", linewidth=0.8)
    gain.set(xlabel="% of the answer's tokens that were drafted", ylabel="times faster than plain", title="What drafts gain")
    gain.legend()
    figure.savefig(options.out)


if __name__ == "__main__":
    main()
