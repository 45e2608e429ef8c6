"""Where a query and its neighbors match: the figure of sop-index search --explain."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sop_faiss.cli.index import main
from sop_faiss.report.heat_figure import HeatRow
from sop_faiss.verbs.finding import index_explain
from tests.encoders import write_run
from tests.images import write_folder
from tests.messages import command_fails
from tests.test_token_store import invoke


def test_what_is_drawn_and_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image matches itself completely, and others less. Refused are two queries, and an index without tokens."""
    drawn: list[HeatRow] = []
    draw = index_explain.draw_heats
    monkeypatch.setattr(index_explain, "draw_heats", lambda rows, title: drawn.extend(rows) or draw(rows, title))
    write_run(tmp_path / "run")
    write_folder(tmp_path / "photos", classes=0, per_class=3)
    index, query, out = tmp_path / "index", tmp_path / "photos" / "0001.jpg", tmp_path / "heat.png"
    invoke("build", tmp_path / "photos", "--model", tmp_path / "run", "--out", index)
    words = ("search", index, query, "--explain", out)
    assert "no tokens" in command_fails(main, *words)
    assert "no tokens" in command_fails(main, "search", index, tmp_path / "gone.jpg", "--explain", out)  # before work
    invoke("tokens", index)
    invoke(*words, "-k", 2)
    assert out.read_bytes().startswith(b"\x89PNG")
    assert drawn[0].name.split()[1] == "0001"
    for row in drawn:
        assert row.heats[0].shape == (4, 4)
        assert row.heats[1].min() >= 0
    assert np.isclose(drawn[0].heats[0].sum(), 1, atol=5e-3)
    assert drawn[1].heats[0].sum() < drawn[0].heats[0].sum()
    other = tmp_path / "photos" / "0002.jpg"
    assert "--explain draws one query" in command_fails(
        main, "search", index, query, other, "--explain", out, "--force"
    )
    for joined in (
        ("--key", "0001", "--key", "0002", "--together"),
        (query, other, "--together"),
        (query, "--minus", other),
    ):
        assert "--explain draws one image" in command_fails(main, "search", index, *joined, "--explain", out, "--force")
    invoke("search", index, query, "--together", "--explain", out, "--force")
    assert "--box" in command_fails(main, "search", index, "--key", "0001", "--box", "0,0,1,1")
    assert "is not inside" in command_fails(main, "search", index, query, "--box", "0,0,999,999")
    invoke("search", index, query, "--box", "0,0,0.5,1", "-k", 1)
    page = tmp_path / "found.html"
    for order, said in ((), False), (("--rerank", "global"), True):
        invoke("search", index, query, *order, "--html", page, "--force")
        assert ("Re-ranked" in page.read_text()) == said
