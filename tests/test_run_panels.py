"""Panels of a run: which curve goes where, what is marked in them, and that any name can be drawn."""

from __future__ import annotations

import base64
import math
from xml.etree import ElementTree

import numpy as np
import pytest

from sop_faiss.report.panel_plot import plot_panel
from sop_faiss.report.plots import Curve
from sop_faiss.report.run_panels import Panel, Reference, RunConstants, heading_of, panels_of_run
from tests.pages import HOSTILE

CONSTANTS = RunConstants({"cls": math.log(64), "patch": math.log(16)}, 32)


def curve(*values: float, start: int = 1) -> Curve:
    return Curve(np.arange(start, start + len(values), dtype=np.float64), np.array(values, np.float64))


def panels(*keys: str) -> dict[str, Panel]:
    found, left_out = panels_of_run({key: curve(0.5, 0.6) for key in keys}, CONSTANTS)
    assert left_out == 0
    return {panel.title: panel for panel in found}


def drawing(panel: Panel) -> tuple[str, ElementTree.Element]:
    uri = plot_panel(panel)
    assert uri.startswith("data:image/svg+xml;base64,")
    text = base64.b64decode(uri.partition(",")[2], validate=True).decode()
    return text, ElementTree.fromstring(text)


def words(root: ElementTree.Element) -> list[str]:
    return [text for element in root.iter() if element.tag.endswith("}text") for text in element.itertext()]


def test_every_metric_of_a_run_has_its_panel():
    levels = ("cls", "patch")
    keys = [
        *("step", "epoch", "images", "loss", "gradient_norm", "update_norm", "learning_rate", "weight_decay"),
        *("momentum", "teacher_temp", "images_per_second", "data_wait_share", "memory_peak_bytes", "knn_top1_k20"),
        *("mAP_medium", "map", "view_recall_at_1", "embedding_cosine", "feature_cosine", "embedding_rankme"),
        *("feature_rankme", "view_auc", "backbone_lr_scale", "rankme", "lidar", "alpha_req", "assignment_entropy"),
        *(f"{name}_{level}" for level in levels for name in ("loss", "kl", "memory_fill", "memory_age")),
        *(f"{name}_{level}_over_lnK" for level in levels for name in ("loss", "teacher_entropy")),
        *(f"{name}_cls" for name in ("support_similarity", "distinct_rows", "one_image_share", "neighbor_recall")),
    ]
    found = panels(*keys)
    assert not any(panel.group == "Other" for panel in found.values())
    assert list(found["Loss"].curves) == ["weighted sum", "[CLS]", "patches"]
    assert [panel.title for panel in found.values() if panel.is_score] == [
        "k-NN accuracy",
        "Mean average precision",
        "Recall between two views",
    ]
    assert all(panel.unit for panel in found.values())
    for title in (
        "Recall between two views",
        "Views of one image against those of others",
        "Backbone's rate / projector's",
    ):
        assert [found[title].heading(name) for name in found[title].curves] == [title]
    assert sum(len(panel.curves) for panel in found.values()) == len(keys) - 3
    headings = {panel.heading(name) for panel in found.values() for name in panel.curves}
    assert {heading_of(key) for key in keys[3:]} == headings and heading_of("unknown") == "unknown"


def test_floors_are_those_of_the_run():
    found = panels("loss", "teacher_entropy_cls_over_lnK", "embedding_rankme", "memory_peak_bytes")
    assert [reference.value for reference in found["Loss"].references] == [math.log(64), math.log(16)]
    assert [reference.value for reference in found["Teacher entropy over ln K"].references] == [1.0, 0.0]
    assert [reference.value for reference in found["RankMe: dimensions in use"].references] == [1.0, 32.0]
    np.testing.assert_allclose(found["Memory peak"].curves[""].values, np.array([0.5, 0.6]) / 2**30)
    both, _ = panels_of_run({"loss": curve(1.0)}, RunConstants({"cls": math.log(8), "patch": math.log(8)}, 4))
    assert [reference.label for reference in both[0].references] == ["ln 8 ([CLS], patches): uniform"]


def test_unknown_names_come_last_and_are_bounded():
    keys = {f"mine_{number:03d}": curve(1.0) for number in range(50)} | {"loss": curve(1.0)}
    found, left_out = panels_of_run(keys, CONSTANTS)
    assert [panel.group for panel in found] == ["Loss"] + ["Other"] * 30
    assert left_out == 20


def test_floors_and_units_stand_in_the_drawing():
    panel = Panel("Health", "x", "nats", {"a": curve(0.2, 0.4), "b": curve(0.3, 0.1)}, [Reference(1.0, "1: uniform")])
    text, root = drawing(panel)
    assert {"1: uniform", "nats", "step", "a", "b"} <= set(words(root))
    assert "stroke-dasharray" in text and "prefers-color-scheme:dark" in text and "var(--ink)" in text
    assert "http" not in text.replace("http://www.w3.org/", "")
    assert plot_panel(panel) == plot_panel(panel)


def test_the_first_score_is_what_training_has_to_beat():
    scores = Panel("s", "k-NN", "%", {"top1": curve(41.0, 50.0, 60.0, start=0)}, is_score=True)
    assert "step 0: 41" in words(drawing(scores)[1])
    late = Panel("s", "k-NN", "%", {"top1": curve(41.0, 50.0, start=1)}, is_score=True)
    assert "step 0: 41" not in words(drawing(late)[1])


@pytest.mark.parametrize("name", [*HOSTILE, "$x_{", "_hidden", "--> <!--", "a\x01b"])
def test_any_name_can_be_drawn(name):
    curves = {name: curve(1.0, 2.0), name + " ": curve(2.0, 3.0)}
    _, root = drawing(Panel(name, name, "nats", curves, [Reference(1.0, "floor")]))
    assert not [element for element in root.iter() if element.tag.rpartition("}")[2] in ("script", "image", "a")]


def test_odd_curves_can_be_drawn():
    drawing(Panel("a", "one point", "", {"a": curve(1.0)}))
    drawing(Panel("a", "huge", "", {"a": curve(1e300, -1e300)}))
    drawing(Panel("a", "flat", "log", {"a": curve(1e-30, 1e-30)}, logarithmic=True))
    drawing(Panel("a", "many", "", {str(number): curve(number, 1.0) for number in range(20)}))
    for values, logarithmic in (((0.0, 1.0), True), ((0.0, 0.0), False), ((-1.0, math.nan), False)):
        found, _ = panels_of_run({"gradient_norm": curve(*values)}, CONSTANTS)
        assert found[0].logarithmic == logarithmic
        assert ("L2 norm, log" in words(drawing(found[0])[1])) == logarithmic
