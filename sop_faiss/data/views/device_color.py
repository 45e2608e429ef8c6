"""The last steps from views to a network's input: colors on the device (`views.color: device`), and normalization.

The workers made the draws (`color.draw_colors`); the formulas are those of the uint8 path, in float32 on levels of 0 to
255, truncated or rounded to integer levels where that path does so.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float32, UInt8
from torch import Tensor

from sop_faiss.config import ViewsConfig
from sop_faiss.data.views.color import COLUMNS, UNCHANGED, blur_reach

Pixels = Float32[Tensor, "n s s2 3"]
Table = Float32[Tensor, "n c"]


def colors_on_device(config: ViewsConfig, device: torch.device) -> bool:
    """Return whether the device changes the colors: as `views.color` says; `auto` means on CUDA devices only.

    On a CPU the batched form takes about ten times as long as OpenCV's uint8.
    """
    return device.type == "cuda" if config.color == "auto" else config.color == "device"


def normalize(
    views: UInt8[Tensor, "v b s s2 3"], colors: Float32[Tensor, "v b c"], config: ViewsConfig, device: torch.device
) -> Float32[Tensor, "v b 3 s s2"]:
    """Make a network's input: move views to the device in uint8, change their colors if necessary, and normalize.

    Args:
        views: levels of 0 to 255.
        colors: a row of `Colors` for each view, on the CPU; no columns if the colors are already changed.
        config: mean and standard deviation of the channels.
        device: where the networks are.
    """
    pixels = views.to(device, non_blocking=True).float()
    if colors.shape[-1]:
        pixels = augment_colors_on_device(pixels.flatten(0, 1), colors.flatten(0, 1)).view(pixels.shape)
    mean = torch.tensor(config.mean, device=device) * 255
    std = torch.tensor(config.std, device=device) * 255
    return ((pixels - mean) / std).movedim(-1, 2)


def augment_colors_on_device(pixels: Pixels, table: Table) -> Pixels:
    """Apply each step to the views that drew it, in the order that each view drew, which is known on the CPU."""
    columns = dict(zip(COLUMNS, table.unbind(1), strict=True))
    steps: list[tuple[Callable[[Pixels, Table], Pixels], Tensor]] = []
    for place in ("first", "second", "third", "fourth"):
        for number, (name, step) in enumerate(_JITTER.items()):
            steps.append((step, (columns[place] == number) & (columns[name] != UNCHANGED[COLUMNS[name]])))
    reach = blur_reach(float(columns["blur_sigma"].max())) if len(table) else 0
    steps.append((_drop_color, columns["gray"] > 0))
    steps.append((lambda part, drawn: _blur(part, drawn[:, COLUMNS["blur_sigma"]], reach), columns["blur_sigma"] > 0))
    steps.append((_solarize, columns["solarize"] > 0))
    chosen = [rows.nonzero().squeeze(1) for _, rows in steps]
    on_device = torch.cat(chosen).to(pixels.device, non_blocking=True).split([len(rows) for rows in chosen])
    drawn = table.to(pixels.device, non_blocking=True)
    for (step, _), rows in zip(steps, on_device, strict=True):
        if len(rows):
            pixels.index_copy_(0, rows, step(pixels[rows], drawn[rows]))
    return pixels


def _factor(drawn: Table, name: str) -> Float32[Tensor, "n 1 1 1"]:
    return drawn[:, COLUMNS[name], None, None, None]


def _gray(pixels: Pixels) -> Float32[Tensor, "n s s2 1"]:
    """Return luma of ITU-R BT.601 in integer levels, as PIL's mode L."""
    red, green, blue = pixels.unbind(-1)
    return (0.299 * red + 0.587 * green + 0.114 * blue).round_().unsqueeze(-1)


def _brighten(pixels: Pixels, drawn: Table) -> Pixels:
    return (pixels * _factor(drawn, "brightness")).clamp_(0, 255).floor_()


def _contrast(pixels: Pixels, drawn: Table) -> Pixels:
    mean = _gray(pixels).mean((1, 2), keepdim=True).round_()
    return torch.lerp(mean, pixels, _factor(drawn, "contrast")).clamp_(0, 255).floor_()


def _saturate(pixels: Pixels, drawn: Table) -> Pixels:
    return torch.lerp(_gray(pixels), pixels, _factor(drawn, "saturation")).clamp_(0, 255).floor_()


def _shift_hue(pixels: Pixels, drawn: Table) -> Pixels:
    """Turn hue, in HSV; back to RGB by f(n) = V - C clamp(min(k, 4 - k), 0, 1), k = (n + 6 H) mod 6."""
    red, green, blue = pixels.unbind(-1)
    value, smallest = pixels.amax(-1), pixels.amin(-1)
    chroma = value - smallest
    divisor = chroma.clamp(min=1e-6)  # where chroma is 0 so are the differences, and any hue gives the same gray
    sixths = torch.where(
        value == red,
        (green - blue) / divisor,
        torch.where(value == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor),
    )
    sixths += 6 * torch.trunc(255 * drawn[:, COLUMNS["hue"], None, None]) / 255  # PIL turns by whole 255ths
    turned = []
    for n in (5, 3, 1):
        k = (sixths + n).remainder_(6)
        turned.append(value - chroma * torch.minimum(k, 4 - k).clamp_(0, 1))
    return torch.stack(turned, dim=-1).round_()


def _drop_color(pixels: Pixels, drawn: Table) -> Pixels:
    return _gray(pixels).expand_as(pixels)


def _solarize(pixels: Pixels, drawn: Table) -> Pixels:
    return torch.where(pixels >= 128, 255 - pixels, pixels)


def _blur(pixels: Pixels, sigma: Float32[Tensor, " n"], reach: int) -> Pixels:
    """Blur each view by its own Gaussian, cut off at its `blur_reach`; the border pixels are repeated, as in PIL."""
    offsets = torch.arange(reach + 1, device=pixels.device)
    width = torch.round(6 * sigma + 1).long() | 1
    weights = torch.exp(-(offsets**2) / (2 * sigma.unsqueeze(1) ** 2)) * (offsets <= width.unsqueeze(1) // 2)
    weights /= 2 * weights.sum(1, keepdim=True) - weights[:, :1]
    for axis in (1, 2):
        pixels = _blur_axis(pixels, weights, axis)
    return pixels


def _blur_axis(pixels: Pixels, weights: Float32[Tensor, "n k"], axis: int) -> Pixels:
    """Blur by a sum of shifted copies: exact float32, whatever precision is allowed for matrix products."""
    reach, side = weights.shape[1] - 1, pixels.shape[axis]
    padded = pixels.index_select(axis, torch.arange(-reach, side + reach, device=pixels.device).clamp_(0, side - 1))
    blurred = weights[:, 0, None, None, None] * pixels
    for offset in range(1, reach + 1):
        both = padded.narrow(axis, reach - offset, side) + padded.narrow(axis, reach + offset, side)
        blurred.addcmul_(weights[:, offset, None, None, None], both)
    return blurred


_JITTER: dict[str, Callable[[Pixels, Table], Pixels]] = {
    "brightness": _brighten,
    "contrast": _contrast,
    "saturation": _saturate,
    "hue": _shift_hue,
}
