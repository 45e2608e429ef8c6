"""One self-contained HTML page of a training run: facts, curves, prototypes and neighbors as images."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sop_faiss.progress import ProgressCallback
from sop_faiss.report.contact_sheet import Commands, SheetTable, Strip, show_strips
from sop_faiss.report.page import write_page
from sop_faiss.report.panel_plot import panel_chart
from sop_faiss.report.run_panels import Panel

TEMPLATE = "run_report.html"


@dataclass(frozen=True)
class ImageSection:
    """Images under a heading, or a line that says why there are none."""

    title: str
    text: str
    """What is shown and how to read it."""
    strips: Sequence[Strip] = ()
    problem: str = ""
    """Why there are no images."""


@dataclass(frozen=True)
class RunPage:
    """What the page shows, from top to bottom."""

    title: str
    subtitle: str
    verdict: str = ""
    """Whether the run got better, in a sentence: the first thing on the page."""
    notices: Sequence[str] = ()
    """What a reader should know first, one line each."""
    facts: Sequence[SheetTable] = ()
    panels: Sequence[Panel] = ()
    panels_left_out: int = 0
    images: Sequence[ImageSection] = ()
    settings: SheetTable = field(default_factory=lambda: SheetTable((), ()))
    """The settings that are not the defaults."""
    footer: str = ""


def write_run_report(path: Path, page: RunPage, progress: ProgressCallback | None = None) -> None:
    """Write the page, atomically.

    Args:
        path: the HTML file; its folder is created.
        page: its contents; texts may be anything.
        progress: called with the number of images read and their total.

    Raises:
        OSError: the place cannot be written.
    """
    strips = show_strips([strip for section in page.images for strip in section.strips], progress)
    shown = iter(strips)
    values = {
        "title": page.title,
        "subtitle": page.subtitle,
        "verdict": page.verdict,
        "commands": Commands(),
        "notices": page.notices,
        "facts": page.facts,
        "groups": _show_panels(page.panels),
        "values": _show_values(page.panels),
        "left_out": page.panels_left_out,
        "sections": [
            {
                "title": section.title,
                "text": section.text,
                "problem": section.problem,
                "strips": list(itertools.islice(shown, len(section.strips))),
            }
            for section in page.images
        ],
        "settings": page.settings,
        "footer": page.footer,
    }
    write_page(path, TEMPLATE, values)


def _show_panels(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    """Group the charts, in the order of the panels."""
    return [
        {"title": title, "charts": [panel_chart(panel) for panel in members]}
        for title, members in itertools.groupby(panels, key=lambda panel: panel.group)
    ]


def _show_values(panels: Sequence[Panel]) -> SheetTable:
    """Tabulate each curve."""
    rows = [
        [
            panel.heading(name),
            panel.unit.removesuffix(", log"),
            *(f"{value:,.4g}" for value in (curve.values[0], curve.values[-1], curve.values.min(), curve.values.max())),
            f"{curve.steps[-1]:,.0f}",
            "; ".join(reference.label for reference in panel.references),
        ]
        for panel in panels
        for name, curve in panel.curves.items()
    ]
    return SheetTable(
        ("metric", "unit", "first", "last", "lowest", "highest", "last at step", "what to compare with"), rows
    )
