"""The objects of a video's first frame found in all others, by an encoder's patch tokens.

Source: DINO's and iBOT's evaluation on DAVIS-2017. In memory are the tokens and labels of the first frame and of the
last ones, and the masks of one frame.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import cv2
import numpy as np
import torch
from jaxtyping import Float, Float64, UInt8
from PIL import Image
from torch import Tensor
from torch.nn import functional

from sop_faiss.errors import FeatureError
from sop_faiss.evaluate.propagation import LabelPropagation
from sop_faiss.evaluate.region_boundary import boundary_accuracy, region_similarity
from sop_faiss.evaluate.sets.video_set import Video
from sop_faiss.evaluate.video_choices import VideoChoices
from sop_faiss.model.encoders.dense import DenseEncoder


def find_objects(video: Video, dense: DenseEncoder, choices: VideoChoices) -> Iterator[UInt8[np.ndarray, "h w"]]:
    """Yield the mask of each frame: the first as annotated, the others by propagation.

    Raises:
        DataError: a frame cannot be read.
        FeatureError: tokens are not finite.
    """
    height, width = video.first.shape
    size = dense.frame_size(height, width, choices.size)
    tokens, grid = _tokens(video, 0, dense, size)
    small = np.array(Image.fromarray(video.first).resize(grid[::-1], Image.Resampling.NEAREST))
    labels = functional.one_hot(torch.from_numpy(small).long().flatten(), video.objects + 1).float().to(tokens.device)
    propagation = LabelPropagation(tokens, labels, grid, frames=choices.frames, radius=choices.radius, top=choices.top)
    yield video.first
    for place in range(1, len(video.frames)):
        labels = propagation.next_frame(_tokens(video, place, dense, size)[0])
        found = Image.fromarray(mask_of_labels(labels, grid, size).cpu().numpy())
        yield np.array(found.resize((width, height), Image.Resampling.NEAREST))


def _tokens(
    video: Video, place: int, dense: DenseEncoder, size: tuple[int, int]
) -> tuple[Float[Tensor, "n d"], tuple[int, int]]:
    """Tokens of a frame; resized bilinearly without antialiasing, as DINO's script does."""
    frame = cv2.resize(video.read_frame(place), size[::-1], interpolation=cv2.INTER_LINEAR)
    device = next(dense.encoder.parameters()).device
    images = dense.encoder.preprocess.normalize(torch.from_numpy(frame)[None].to(device))
    tokens, grid = dense(images)
    if not bool(torch.isfinite(tokens).all()):
        raise FeatureError(
            f"the tokens of {video.frames[place]} are not finite: the encoder's weights or preprocessing are wrong"
        )
    return tokens[0].float(), grid


def mask_of_labels(labels: Float[Tensor, "n c"], grid: tuple[int, int], size: tuple[int, int]) -> UInt8[Tensor, "h w"]:
    """Return each pixel's class: labels are enlarged, each class is stretched to 0 to 1, and the largest wins.

    A class that is the same everywhere stays as it is; DINO's script divides by zero there, with the same result where
    one class fills the frame.

    Args:
        labels: how much each token is of each class.
        grid: rows and columns of the tokens.
        size: height and width of the mask.
    """
    maps = functional.interpolate(labels.T.unflatten(1, grid)[None], size=size, mode="bilinear", align_corners=False)[0]
    low, high = maps.amin((1, 2), keepdim=True), maps.amax((1, 2), keepdim=True)
    stretched = torch.where(high > low, (maps - low) / (high - low), maps)
    return stretched.max(0).indices.to(torch.uint8)  # of equal ones the first; much faster than argmax


def score_masks(video: Video, masks: Iterable[UInt8[np.ndarray, "h w"]]) -> Float64[np.ndarray, "2 objects frames"]:
    """Return J and F of each object in the frames that count: all but the first and the last, as DAVIS has it.

    Raises:
        DataError: an annotation cannot be read.
    """
    last = len(video.frames) - 1
    scores = np.empty((2, video.objects, last - 1))
    for place, mask in enumerate(masks):
        if not 0 < place < last:
            continue
        truth = video.read_mask(place)
        for number in range(1, video.objects + 1):
            pair = mask == number, truth == number
            scores[:, number - 1, place - 1] = region_similarity(*pair), boundary_accuracy(*pair)
    return scores
