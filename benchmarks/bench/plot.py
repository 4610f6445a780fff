# SPDX-License-Identifier: Apache-2.0
"""The picture for the README: the cost of one image's entry, and of a long video's."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter

from benchmarks.bench.result import Row, mb

_NAMES = ("load_cpu", "save", "disk_get", "disk_put", "fetch_to_live", "save_to_written")
_PARTIES = (("ours", "#1f6f8b"), ("peer", "#c98b3c"), ("example", "#9a9a9a"), ("floor", "#000000"))
_LABELS = {
    "ours": "lmcache_ec",
    "peer": "LMCache's encoder cache (reads patched)",
    "example": "vLLM's ECExampleConnector",
    "floor": "floor: the bare system calls or memcpy",
}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Medians with quartiles: one panel for an image of 2.75 MB, one for the largest size."""
    sizes = sorted({row.size_bytes for row in rows if row.size_bytes})
    pyplot.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "lmcache-ec", "font.size": 9})
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4))
    for panel, size in zip(panels, (sizes[min(1, len(sizes) - 1)], sizes[-1]), strict=True):
        shown = {row.name: row for row in rows if row.size_bytes == size and row.name in _NAMES}
        for index, (whose, colour) in enumerate(_PARTIES):
            _points(panel, [shown.get(name) for name in _NAMES], 0.18 * (index - 1.5), whose, colour)
        panel.set_yscale("log")
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter(NullFormatter())
        panel.set_xticks(range(len(_NAMES)), _NAMES, rotation=20, ha="right")
        panel.set_ylabel("ms: median and quartiles")
        panel.set_title(f"an entry of {mb(size)}")
        panel.grid(axis="y", which="both", color="#eeeeee")
        panel.spines[["top", "right"]].set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=4, frameon=False)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _points(panel: Axes, rows: Sequence[Row | None], shift: float, whose: str, colour: str) -> None:
    places, medians, below, above = [], [], [], []
    for position, row in enumerate(rows):
        median = getattr(row, f"{whose}_ms", None)
        if row is not None and median is not None:
            first, third = row.quartiles_ms[whose]
            places.append(position + shift)
            medians.append(median)
            below.append(max(0.0, median - first))
            above.append(max(0.0, third - median))
    panel.errorbar(places, medians, (below, above), fmt="o", color=colour, label=_LABELS[whose], elinewidth=2)
