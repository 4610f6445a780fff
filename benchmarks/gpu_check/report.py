# SPDX-License-Identifier: Apache-2.0
"""Results of a run: checks that are right or wrong, and figures, compared with a bar if there is one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class Check:
    """One check, with every byte compared. `wrong` describes the error; empty if there is none."""

    name: str
    wrong: str
    seconds: float


@dataclass(frozen=True)
class Figure:
    """`limit` is the maximum for `value`, None if nothing is promised. `of`: what it measures, and relative to what."""

    name: str
    value: float | None
    unit: str
    limit: float | None = None
    of: str = ""

    @property
    def met(self) -> bool | None:
        return None if self.value is None or self.limit is None else self.value <= self.limit


@dataclass
class Report:
    facts: dict[str, str]
    checks: list[Check] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    model: dict[str, dict[str, object]] = field(default_factory=dict)
    """Results of a real engine, by model runner."""

    @property
    def right(self) -> bool:
        return not any(check.wrong for check in self.checks)

    def json(self) -> str:
        figures = [{**asdict(figure), "met": figure.met} for figure in self.figures]
        checks = [asdict(check) for check in self.checks]
        return json.dumps(
            {**self.facts, "right": self.right, "checks": checks, "figures": figures, "model": self.model}
        )

    def table(self) -> str:
        facts = ", ".join(f"{name} {value}" for name, value in self.facts.items())
        checks = [(check.name, check.wrong or "right", f"{check.seconds:.1f} s") for check in self.checks]
        figures = [(each.name, _value(each), _bar(each), each.of) for each in self.figures]
        return "\n".join(
            [
                facts,
                "",
                *columns([("every byte compared", "", ""), *checks]),
                "",
                *columns([("measured", "value", "bar", "of"), *figures]),
            ]
        )


def _value(figure: Figure) -> str:
    return "not measured" if figure.value is None else f"{figure.value:.4g} {figure.unit}".strip()


def _bar(figure: Figure) -> str:
    if figure.limit is None:
        return "-"
    return f"<= {figure.limit:g}: {'not measured' if figure.met is None else 'yes' if figure.met else 'NO'}"


def columns(rows: Sequence[Iterable[str]]) -> list[str]:
    """The lines of a table without ruling."""
    table = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
