"""Downstream tasks against the official code: DAVIS's J and F, and DINO's label propagation, on the same input.

Checkouts are named by the user: github.com/facebookresearch/dino and davisvideochallenge/davis2017-evaluation.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import click
import numpy as np
import torch
from evaluators import load_davis, load_dino_video
from PIL import Image
from report import Row, extra_peak_bytes, finish, interleaved_medians, meets
from torch import Tensor
from torch.nn import functional

from sop_faiss.errors import DataError
from sop_faiss.evaluate.propagation import LabelPropagation
from sop_faiss.evaluate.sets.video_set import FRAMES, LIST, MASKS, list_videos, open_video, read_mask
from sop_faiss.verbs.scoring.eval_video import score_folder

GRID, DIM, CLASSES, PATCH = (30, 52), 384, 3, 16
"""Of ViT-S/16 on 480p frames with two objects."""
KEPT, RADIUS, TOP = 7, 12, 5
EXACT, CLOSE, HALF = "<= 1e-6", "<= 1e-5", "<= 0.5"
METRICS = {"M": "mean", "R": "recall", "D": "decay"}
OSVOS = Path("results") / "semi-supervised" / "osvos"


def largest_difference(evaluation: type[Any], data: Path, masks: Path) -> float:
    """Return the largest difference of any object's six numbers, as shares of 1, on the same masks."""
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bar
        theirs = evaluation(davis_root=str(data), task="semi-supervised", gt_set="val").evaluate(str(masks))
    ours = score_folder(data, masks)[1]["per_object"]
    return max(
        abs(float(row[f"{letter.lower()}_{name}"]) / 100 - float(value))
        for letter in "JF"
        for key, name in METRICS.items()
        for row, value in zip(ours, theirs[letter][key], strict=True)
    )


def write_numbers(data: Path, masks: Path, root: Path) -> tuple[Path, Path]:
    """Copy a set's lists and masks, and masks of others, with 1 for all values where they are 0 and 255.

    The evaluator takes 255 for void; DAVIS-2016, with such masks, has one object where DAVIS-2017 has several.
    """
    copy, results = root / "numbered", root / "masks"
    (copy / LIST).parent.mkdir(parents=True)
    (copy / LIST).write_text((data / LIST).read_text())
    (copy / FRAMES).parent.mkdir(parents=True)
    (copy / FRAMES).symlink_to((data / FRAMES).absolute())
    for name in list_videos(data):
        video = open_video(data, name)
        (copy / MASKS / name).mkdir(parents=True)
        for place, file in enumerate(video.masks):
            Image.fromarray(video.read_mask(place)).save(copy / MASKS / name / file.name)
        (results / name).mkdir(parents=True)
        for file in (masks / name).glob("*.png"):
            Image.fromarray(np.minimum(read_mask(file), video.objects)).save(results / name / file.name)
    return copy, results


def write_hostile(root: Path) -> tuple[Path, Path]:
    """Write sequences of two objects, with void pixels and gaps in the numbers of frames, and hostile masks of each."""
    generator = np.random.default_rng(0)
    height, width = 120, 213
    rows, columns = np.mgrid[:height, :width]
    kinds = ("empty", "full", "pixel", "swapped", "noise", "shifted", "one")
    data, results = root / "data", root / "results"
    (data / LIST).parent.mkdir(parents=True)
    (data / LIST).write_text("\n".join(kinds))
    for kind in kinds:
        folders = data / FRAMES / kind, data / MASKS / kind, results / kind
        for folder in folders:
            folder.mkdir(parents=True)
        for place in (0, 1, 2, 4, 5, 7, 8, 9, 11):
            truth = np.zeros((height, width), np.uint8)
            truth[(rows - 50) ** 2 + (columns - 60 - 3 * place) ** 2 < 900] = 1
            truth[80:110, 120 - 4 * place : 160 - 2 * place] = 2
            truth[truth == 2] *= place != 5  # the second object is hidden
            found = {
                "empty": np.zeros_like(truth),
                "full": np.full_like(truth, 1 + place % 2),
                "pixel": np.where((rows == height - 1) & (columns == place), 2, 0),
                "swapped": np.array([0, 2, 1])[truth],
                "noise": generator.integers(0, 3, truth.shape),
                "shifted": np.roll(truth, (place, -place), (0, 1)),
                "one": np.minimum(truth, 1),
            }[kind]
            if place:
                truth[:3] = 255
            Image.new("RGB", (width, height)).save(folders[0] / f"{place:05d}.jpg")
            Image.fromarray(truth).save(folders[1] / f"{place:05d}.png")
            Image.fromarray(found.astype(np.uint8)).save(folders[2] / f"{place:05d}.png")
    return data, results


def metric_rows(davis: Path | None, data: Path | None) -> list[Row]:
    names = "J and F on hostile masks of two objects", "J and F on its OSVOS masks"
    against = "the evaluator of DAVIS-2017; largest difference of means, recalls, decays"
    if davis is None:
        return [Row(name, against, None, EXACT, None, {"not measured": "no --davis checkout"}) for name in names]
    evaluation, rows = load_davis(davis), []
    with tempfile.TemporaryDirectory() as folder:
        hostile, results = write_hostile(Path(folder))
        difference = largest_difference(evaluation, hostile, results)
        detail = {"where_a_mask_is_missing": missing_mask(evaluation, hostile, results), "objects": 14}
        rows.append(Row(names[0], against, difference, EXACT, meets(difference, EXACT), detail))
        if data is None or not (davis / OSVOS).is_dir():
            why = "no --data" if data is None else f"{OSVOS} is not in the checkout"
            return [*rows, Row(names[1], against, None, EXACT, None, {"not measured": why})]
        numbered, masks = write_numbers(data, davis / OSVOS, Path(folder) / "own")
        difference = largest_difference(evaluation, numbered, masks)
        detail = {
            "sequences": ", ".join(list_videos(data)),
            "J_and_F_percent": score_folder(numbered, masks)[0]["j_and_f"],
        }
        rows.append(Row(names[1], against, difference, EXACT, meets(difference, EXACT), detail))
    return rows


def missing_mask(evaluation: type[Any], data: Path, results: Path) -> str:
    """Return what both do where a frame has no mask; it is put back."""
    file = results / "empty" / "00004.png"
    content = file.read_bytes()
    file.unlink()
    outcomes = []
    for name, ours in (("theirs", False), ("ours", True)):
        try:
            with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
                if ours:
                    score_folder(data, results)
                else:
                    evaluation(davis_root=str(data), task="semi-supervised", gt_set="val").evaluate(str(results))
            outcomes.append(f"{name}: scored")
        except (DataError, SystemExit) as error:
            outcomes.append(f"{name}: {type(error).__name__}")
    file.write_bytes(content)
    return ", ".join(outcomes)


def made_up_tokens(frames: int) -> list[Tensor]:
    """Tokens like those of a video: smooth over the frame, and changing slowly."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.randn(1, DIM, 8, 13, generator=generator)
    found = []
    for _ in range(frames):
        coarse = 0.95 * coarse + 0.3 * torch.randn(coarse.shape, generator=generator)
        smooth = functional.interpolate(coarse, size=GRID, mode="bicubic")[0]
        found.append(smooth.flatten(1).T + 0.3 * torch.randn(GRID[0] * GRID[1], DIM, generator=generator))
    return found


def first_labels() -> Tensor:
    classes = torch.zeros(GRID, dtype=torch.int64)
    classes[8:20, 5:20], classes[10:28, 30:45] = 1, 2
    return functional.one_hot(classes.flatten(), CLASSES).float()


class Stored:
    """Stands for DINO's model: a frame holds the number of the tokens that are returned."""

    patch_embed = argparse.Namespace(patch_size=PATCH)

    def __init__(self, tokens: list[Tensor]) -> None:
        self.tokens = tokens

    def get_intermediate_layers(self, frames: Tensor, n: int) -> list[Tensor]:
        found = self.tokens[int(frames[0, 0, 0, 0])]
        return [torch.cat([found[:1], found])[None]]


class Theirs:
    """DINO's loop over the frames of a video, around its own `label_propagation`."""

    def __init__(self, module: ModuleType, tokens: list[Tensor]) -> None:
        self.module, self.model = module, Stored(tokens)
        self.args = argparse.Namespace(size_mask_neighborhood=RADIUS, topk=TOP, n_last_frames=KEPT)
        module.args = self.args  # type: ignore[attr-defined]
        first = first_labels().T.reshape(1, CLASSES, *GRID)
        self.first = tokens[0].T, first
        self.last: list[tuple[Tensor, Tensor]] = []
        self.mask: Tensor | None = None

    def next_frame(self, place: int) -> Tensor:
        frame = torch.full((3, GRID[0] * PATCH, GRID[1] * PATCH), float(place))
        sources = [self.first, *self.last]
        labels, tokens, self.mask = self.module.label_propagation(
            self.args, self.model, frame, [each[0] for each in sources], [each[1] for each in sources], self.mask
        )
        self.last = [*self.last, (tokens, labels)][-KEPT:]
        found: Tensor = labels.flatten(2)[0].T
        return found


def ours_of(tokens: list[Tensor]) -> LabelPropagation:
    return LabelPropagation(tokens[0], first_labels(), GRID, frames=KEPT, radius=RADIUS, top=TOP)


@contextlib.contextmanager
def on_this_device() -> Iterator[None]:
    """Let DINO's script run where there is no GPU: `cuda` returns the tensor itself."""
    with mock.patch.object(torch.Tensor, "cuda", lambda tensor, *_, **__: tensor):
        yield


def measure_memory(module: ModuleType, whose: str) -> int:
    """Measure the peak bytes of a video, above its tokens and with all that is kept, in a process of its own."""
    tokens = made_up_tokens(KEPT + 4)

    def follow() -> None:
        theirs = Theirs(module, tokens) if whose == "theirs" else None
        ours = ours_of(tokens) if theirs is None else None
        with on_this_device(), torch.no_grad():
            for place in range(1, len(tokens)):
                if theirs is not None:
                    theirs.next_frame(place)
                elif ours is not None:
                    ours.next_frame(tokens[place])

    return extra_peak_bytes(follow)


def propagation_rows(dino: Path | None, repeats: int) -> list[Row]:
    problem = f"{GRID[0]} x {GRID[1]} tokens of {DIM}, first frame and {KEPT} before"
    names = f"labels of tokens: {problem}", "time of a frame", "extra peak memory of a video"
    against, targets = "DINO's label_propagation on the same tokens", (CLOSE, HALF, HALF)
    if dino is None:
        why = {"not measured": "no --dino checkout"}
        return [Row(name, against, None, target, None, why) for name, target in zip(names, targets, strict=True)]
    module, tokens = load_dino_video(dino), made_up_tokens(KEPT + 6)
    theirs, ours = Theirs(module, tokens), ours_of(tokens)
    with on_this_device(), torch.no_grad():
        pairs = [(theirs.next_frame(place), ours.next_frame(tokens[place])) for place in range(1, len(tokens))]
        last = len(tokens) - 1
        seconds = interleaved_medians(
            {"theirs": lambda: theirs.next_frame(last), "ours": lambda: ours.next_frame(tokens[last])}, repeats
        )
    difference = max(float((one - other).abs().max()) for one, other in pairs)
    ratio = seconds["ours"] / seconds["theirs"]
    rows = [
        Row(names[0], against, difference, CLOSE, meets(difference, CLOSE), {"frames": len(pairs)}),
        Row(names[1], against, ratio, HALF, meets(ratio, HALF), {f"{k}_seconds": v for k, v in seconds.items()}),
    ]
    if not Path("/proc/self/clear_refs").exists():
        why = {"not measured": "resident peaks can be reset on Linux only"}
        return [*rows, Row(names[2], against, None, HALF, None, why)]
    extra = {
        whose: int(
            subprocess.run(
                [sys.executable, __file__, "--dino", str(dino), "--measure", whose],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            ).stdout
        )
        for whose in ("theirs", "ours")
    }
    ratio = extra["ours"] / extra["theirs"]
    detail = {f"{whose}_megabytes": size / 1e6 for whose, size in extra.items()}
    return [*rows, Row(names[2], against, ratio, HALF, meets(ratio, HALF), detail)]


@click.command()
@click.option("--dino", type=click.Path(path_type=Path, file_okay=False), help="A checkout of DINO.")
@click.option("--davis", type=click.Path(path_type=Path, file_okay=False), help="A checkout of davis2017-evaluation.")
@click.option("--data", type=click.Path(path_type=Path, file_okay=False), help="DAVIS-2017, or some of its sequences.")
@click.option("--quick", is_flag=True, help="Two timed rounds.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the figures here.")
@click.option("--record", is_flag=True, help="Append the figures to benchmarks/RESULTS.md.")
@click.option("--measure", type=click.Choice(["theirs", "ours"]), hidden=True)
def main(
    dino: Path | None,
    davis: Path | None,
    data: Path | None,
    quick: bool,
    json_file: Path | None,
    record: bool,
    measure: str | None,
) -> None:
    """Check equality with the official code on the same input; measure time and memory."""
    if measure is not None:
        assert dino is not None
        print(measure_memory(load_dino_video(dino), measure))
        return
    rows = [*metric_rows(davis, data), *propagation_rows(dino, 2 if quick else 5)]
    finish("downstream", rows, json_file=json_file, record=record)


if __name__ == "__main__":
    main()
