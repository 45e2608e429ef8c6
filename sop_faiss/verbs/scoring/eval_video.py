"""The objects of DAVIS-2017 followed through its videos by an encoder's patch tokens: J&F."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64, UInt8

from sop_faiss.bootstrap import bootstrap_interval
from sop_faiss.distributed import decide, gather_objects, is_main, on_all_ranks, rank, world_size
from sop_faiss.errors import DataError, SopError
from sop_faiss.evaluate.propagation import TEMPERATURE
from sop_faiss.evaluate.region_boundary import frame_statistics
from sop_faiss.evaluate.sets.video_set import Video, list_videos, open_video, palette_image, read_mask
from sop_faiss.evaluate.video_choices import VideoChoices
from sop_faiss.evaluate.video_task import find_objects, score_masks
from sop_faiss.files import atomic_directory, read_json, write_json
from sop_faiss.model.encoders.dense import DenseEncoder, require_dense
from sop_faiss.model.encoders.forward import exact_inference
from sop_faiss.model.encoders.load import encoder_of_spec
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.output_checks import refuse_occupied
from sop_faiss.progress import ProgressCallback
from sop_faiss.verbs.scoring.task_result import TaskResult

SETTINGS_FILE = "sop_eval_video.json"
"""In the directory of masks: how they were made. A folder of masks beside it is complete."""

Scores = dict[str, Float64[np.ndarray, "2 objects frames"]]
"""J and F in each frame that counts, by sequence."""
Summary = tuple[dict[str, float], dict[str, Any]]
"""Metrics, in percent; and their interval, and the numbers of each object."""


@dataclass(frozen=True)
class VideoOptions:
    """How to follow objects, and where to keep their masks."""

    choices: VideoChoices = field(default_factory=VideoChoices)
    """Size of the frames and the like."""
    out: Path | None = None
    """Directory for the masks, laid out as DAVIS's evaluator reads them; finished sequences in it are kept."""


def evaluate_video(
    data: Path, encoder: EncoderSpec, options: VideoOptions | None = None, *, progress: ProgressCallback | None = None
) -> TaskResult:
    """Follow the objects of each video's first frame, and compare their masks with the annotated ones.

    Under `torchrun` each process takes its share of the sequences.

    Args:
        data: a folder laid out as DAVIS-2017.
        encoder: which encoder; `size` is not its own but of the frames, in `options`.

    Raises:
        ConfigError: a choice is impossible or does not apply.
        DataError: lists, frames or masks are missing, damaged or of several sizes.
        SopError: `out` has something else, or masks of other settings.
    """
    options = options or VideoOptions()
    choices = options.choices
    choices.check()
    require_dense(encoder, "videos, where patch tokens are compared")
    started = time.perf_counter()
    videos = [open_video(data, name, choices.most_frames) for name in list_videos(data)]
    made = encoder_of_spec(replace(encoder, size=None))
    dense = DenseEncoder(made, choices.stride)
    for video in videos:
        height, width = video.first.shape
        dense.frame_size(height, width, choices.size)  # that it can be taken is known before any work
    seen = {"mean": list(made.preprocess.mean), "std": list(made.preprocess.std)}
    protocol = {**asdict(choices), "stride": dense.stride, "temperature": TEMPERATURE, "preprocess": seen}
    named = {"name": made.name, "fingerprint": made.fingerprint}
    if options.out is not None:
        out, settings = options.out, {"command": "sop-eval video", "encoder": named["fingerprint"], **protocol}
        decide(lambda: _open_out(out, settings))

    def masks_of(video: Video) -> Iterator[UInt8[np.ndarray, "h w"]]:
        if options.out is None:
            return find_objects(video, dense, choices)
        return _kept(video, options.out, lambda: find_objects(video, dense, choices))

    with exact_inference(made):
        scores = _scores_of_ranks(videos, masks_of, progress)
    protocol |= {
        "sequences": len(videos),
        "objects": sum(video.objects for video in videos),
        "frames_counted": sum(len(video.frames) - 2 for video in videos),
        "kept_in_memory": f"tokens and labels of the first frame and {choices.frames} others, one sequence at a time",
    }
    still = _scores(videos, lambda video: iter([video.first] * len(video.frames)))
    metrics, details = _summary(scores)
    details["first_mask_kept"] = _summary(still)[0]
    return TaskResult("sop-eval video", str(data), protocol, metrics, named, time.perf_counter() - started, details)


def score_folder(data: Path, masks: Path) -> Summary:
    """Compare masks that any program has written with the annotated ones, as the evaluator of DAVIS does.

    Args:
        data: a folder laid out as DAVIS-2017.
        masks: folder of a folder for each sequence, with an indexed PNG for each frame.

    Returns:
        The metrics and details of `evaluate_video`.

    Raises:
        DataError: something is missing, damaged, of another size, or has more objects than are annotated.
    """
    videos = [open_video(data, name) for name in list_videos(data)]
    return _summary(_scores(videos, lambda video: _read_masks(video, masks / video.name)))


def _scores(
    videos: Sequence[Video],
    masks_of: Callable[[Video], Iterator[UInt8[np.ndarray, "h w"]]],
    progress: ProgressCallback | None = None,
) -> Scores:
    done, total = 0, sum(len(video.frames) for video in videos)

    def counted(masks: Iterator[UInt8[np.ndarray, "h w"]]) -> Iterator[UInt8[np.ndarray, "h w"]]:
        nonlocal done
        for mask in masks:
            yield mask
            done += 1
            if progress is not None:
                progress(done, total)

    return {video.name: score_masks(video, counted(masks_of(video))) for video in videos}


def _scores_of_ranks(
    videos: Sequence[Video],
    masks_of: Callable[[Video], Iterator[UInt8[np.ndarray, "h w"]]],
    progress: ProgressCallback | None,
) -> Scores:
    """Share the sequences among the ranks; an error of one is raised on all."""
    own = on_all_ranks(lambda: _scores(videos[rank() :: world_size()], masks_of, progress if is_main() else None))
    together: Scores = {}
    for scores in gather_objects(own):
        together |= scores
    return {video.name: together[video.name] for video in videos}


def _open_out(out: Path, settings: dict[str, Any]) -> None:
    """Start a directory of masks, or check that the masks in it are of the same settings."""
    file = out / SETTINGS_FILE
    if not file.exists():
        refuse_occupied(out)
        write_json(file, settings)
        return
    known = read_json(file)
    if known != settings:
        known = known if isinstance(known, dict) else {}
        other = next((name for name in settings if known.get(name) != settings[name]), "content")
        raise SopError(f"`out={out}` has masks of other settings ({other}): name another directory, or remove it")


def _kept(
    video: Video, out: Path, find: Callable[[], Iterator[UInt8[np.ndarray, "h w"]]]
) -> Iterator[UInt8[np.ndarray, "h w"]]:
    """Yield a sequence's masks: read where they were written before, else found, and written when all are."""
    folder = out / video.name
    if folder.exists():
        yield from _read_masks(video, folder)
        return
    with atomic_directory(folder) as temporary:
        for frame, mask in zip(video.frames, find(), strict=True):
            palette_image(mask).save(temporary / f"{frame.stem}.png")
            yield mask


def _read_masks(video: Video, folder: Path) -> Iterator[UInt8[np.ndarray, "h w"]]:
    for place, frame in enumerate(video.frames):
        if place in (0, len(video.frames) - 1):
            yield video.first  # not counted, and often not written
            continue
        file = folder / f"{frame.stem}.png"
        mask = read_mask(file)
        if mask.shape != video.first.shape or int(mask.max()) > video.objects:
            raise DataError(
                f"mask {file} is of {mask.shape[1]} x {mask.shape[0]} pixels with values to {mask.max()}: wanted "
                f"{video.first.shape[1]} x {video.first.shape[0]} and at most {video.objects} objects; remove {folder}"
            )
        yield mask


def _summary(scores: Scores) -> Summary:
    """Return the metrics, means over all objects of all sequences in percent, and the numbers of each object."""
    objects: list[dict[str, Any]] = []
    for name, of_video in scores.items():
        for number in range(of_video.shape[1]):
            row: dict[str, Any] = {"sequence": name, "object": number + 1}
            for letter, values in zip("jf", of_video[:, number], strict=True):
                found = frame_statistics(values)._asdict()
                row |= {f"{letter}_{key}": 100.0 * value for key, value in found.items()}
            objects.append({**row, "j_and_f": (row["j_mean"] + row["f_mean"]) / 2})
    names = ["j_and_f", *(key for key in objects[0] if key[:2] in ("j_", "f_") and key != "j_and_f")]
    metrics = {name: float(np.mean([each[name] for each in objects])) for name in names}
    interval = bootstrap_interval(np.array([each["j_and_f"] for each in objects]))
    return metrics, {"j_and_f_interval": [interval.low, interval.high], "per_object": objects}
