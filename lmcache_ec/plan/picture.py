# SPDX-License-Identifier: Apache-2.0
"""A chart of the outcome: one bar per scenario, divided by what answered, in encoder seconds. Plain SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from lmcache_ec.plan.simulate import Outcome

_COLOURS = {
    "gpu": "#1f6f8b",
    "cpu": "#5b9fb5",
    "disk": "#8cb369",
    "redis": "#c98b3c",
    "s3": "#e0b878",
    "encoder": "#bbbbbb",
}
_LEFT, _WIDE, _ROW, _TOP = 300, 560, 26, 44


def draw(labels: Sequence[str], outcomes: Sequence[Outcome]) -> str:
    """The SVG's text. Each bar represents all encoder seconds of the trace; the grey part was encoded."""
    height = _TOP + _ROW * len(outcomes) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDE + 40}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="100%" height="{height}" fill="#ffffff"/>',
    ]
    used = [name for name in _COLOURS if name == "encoder" or any(name in each.by_tier for each in outcomes)]
    for number, name in enumerate(used):
        parts.append(f'<rect x="{_LEFT + 90 * number}" y="14" width="12" height="12" fill="{_COLOURS[name]}"/>')
        parts.append(f'<text x="{_LEFT + 90 * number + 17}" y="24">{name}</text>')
    for number, (label, outcome) in enumerate(zip(labels, outcomes, strict=True)):
        top, left = _TOP + _ROW * number, float(_LEFT)
        whole = outcome.saved_s + outcome.encoder.encode_s or 1.0
        parts.append(f'<text x="{_LEFT - 8}" y="{top + 14}" text-anchor="end">{escape(label)}</text>')
        for name, served in [*outcome.by_tier.items(), ("encoder", outcome.encoder)]:
            wide = _WIDE * served.encode_s / whole
            title = f"<title>{name}: {100 * served.encode_s / whole:.1f} % of encoder seconds</title>"
            parts.append(
                f'<rect x="{left:.1f}" y="{top}" width="{wide:.1f}" height="{_ROW - 8}" fill="{_COLOURS[name]}">'
                f"{title}</rect>"
            )
            left += wide
        parts.append(f'<text x="{_LEFT + _WIDE + 4}" y="{top + 14}">{100 * outcome.saved_share:.0f} %</text>')
    parts.append(
        f'<text x="{_LEFT}" y="{height - 10}">share of encoder seconds, by who answered; saved at the right</text>'
    )
    return "\n".join([*parts, "</svg>", ""])
