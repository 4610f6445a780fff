# SPDX-License-Identifier: Apache-2.0
"""The picture for the README: what one image's entry costs, and what a long video's."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot
from matplotlib.axes import Axes

from benchmarks.bench.result import Row, mb

_NAMES = ("load_cpu", "save", "disk_get", "disk_put", "fetch_to_live", "save_to_written")
_PARTIES = (("ours", "#1f6f8b"), ("peer", "#c98b3c"), ("example", "#9a9a9a"), ("floor", "#d9d9d9"))
_LABELS = {
    "ours": "lmcache_ec",
    "peer": "LMCache's encoder cache (reads mended)",
    "example": "vLLM's ECExampleConnector",
    "floor": "floor: the bare system calls or memcpy",
}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Bars of medians with their quartiles, one panel for an image of 2.75 MB and one for the largest size."""
    sizes = sorted({row.size_bytes for row in rows if row.size_bytes})
    pyplot.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "lmcache-ec", "font.size": 9})
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4))
    for panel, size in zip(panels, (sizes[min(1, len(sizes) - 1)], sizes[-1]), strict=True):
        shown = {row.name: row for row in rows if row.size_bytes == size and row.name in _NAMES}
        for index, (whose, colour) in enumerate(_PARTIES):
            _bars(panel, [shown.get(name) for name in _NAMES], index, whose, colour)
        panel.set_yscale("log")
        panel.set_xticks([position + 0.3 for position in range(len(_NAMES))], _NAMES, rotation=20, ha="right")
        panel.set_ylabel("ms (median; lines: quartiles)")
        panel.set_title(f"an entry of {mb(size)}")
        panel.spines[["top", "right"]].set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=4, frameon=False)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _bars(panel: Axes, rows: Sequence[Row | None], index: int, whose: str, colour: str) -> None:
    places, heights, below, above = [], [], [], []
    for position, row in enumerate(rows):
        height = getattr(row, f"{whose}_ms", None)
        if row is not None and height is not None:
            first, third = row.quartiles_ms[whose]
            places.append(position + 0.2 * index)
            heights.append(height)
            below.append(max(0.0, height - first))
            above.append(max(0.0, third - height))
    panel.bar(places, heights, 0.18, yerr=(below, above), color=colour, label=_LABELS[whose], error_kw={"lw": 0.8})
