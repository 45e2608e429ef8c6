"""Does FAISS work on this machine? Its exact search against torch in float64, on one device; used by the doctor."""

from __future__ import annotations

import torch

import faiss  # isort: skip  (after torch: one OpenMP runtime)
from jaxtyping import Float32, Float64
from torch import Tensor

from sop_faiss.errors import ConfigError
from sop_faiss.neighbors.exact import nearest_rows
from sop_faiss.neighbors.mirror import Neighbors, RingMirror

__all__ = ["count_faiss_gpus", "find_problems"]

_TOLERANCE = 1e-5
"""How far a float32 inner product of unit vectors may be from its value in float64."""


def count_faiss_gpus() -> int:
    """How many GPUs FAISS sees; 0 for a build without GPU code."""
    return int(faiss.get_num_gpus()) if hasattr(faiss, "get_num_gpus") else 0


def find_problems(
    device: torch.device, capacity: int = 5000, dim: int = 96, queries: int = 64, k: int = 20
) -> list[str]:
    """What is wrong with FAISS on a device, one sentence each; an empty list if all is well.

    Two searches of a ring mirror are compared with torch in float64, the second after rows were overwritten in place,
    and on the CPU one of a plain gallery too. Some rows are equal, so that ties occur.

    Args:
        device: CPU or a CUDA device.
        capacity: rows.
        dim: columns.
        queries: how many are searched.
        k: neighbours of each.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.nn.functional.normalize(torch.randn(capacity, dim, generator=generator), dim=1)
    rows[capacity // 2 : capacity // 2 + 50] = rows[:50]
    asked = torch.cat([rows[: queries // 2], torch.nn.functional.normalize(rows[-queries // 2 :] + 0.1, dim=1)])
    try:
        mirror = RingMirror(capacity, dim, device, engine="faiss")
    except ConfigError as error:
        return [str(error)]
    mirror.rows.copy_(rows)
    problems = _compare("exact search", mirror.search(asked.to(device), k), asked, rows)
    rows[100:400] = torch.nn.functional.normalize(torch.randn(300, dim, generator=generator), dim=1)
    asked[:10] = rows[100:110]
    mirror.rows[100:400] = rows[100:400].to(device)
    problems += _compare("search of rows overwritten in place", mirror.search(asked.to(device), k), asked, rows)
    if device.type == "cpu":
        similarities, positions = nearest_rows(asked.numpy(), rows.numpy(), k)
        plain = Neighbors(torch.from_numpy(similarities), torch.from_numpy(positions))
        problems += _compare("search of a gallery", plain, asked, rows)
    return problems


def _compare(what: str, found: Neighbors, queries: Float32[Tensor, "q d"], rows: Float32[Tensor, "n d"]) -> list[str]:
    """Compare neighbours with torch's in float64; rows of (nearly) equal similarity may stand for each other."""
    truth: Float64[Tensor, "q n"] = queries.double() @ rows.double().T
    best = truth.topk(found.rows.shape[1], dim=1).values
    got_rows, got = found.rows.cpu(), found.similarities.cpu().double()
    if int(got_rows.min()) < 0 or int(got_rows.max()) >= len(rows):
        return [f"{what}: FAISS returned rows that do not exist"]
    if any(len(set(line)) < len(line) for line in got_rows.tolist()):
        return [f"{what}: FAISS returned a row twice"]
    off_value = float((got - truth.gather(1, got_rows)).abs().max())
    off_choice = float((best - got).abs().max())
    if not max(off_value, off_choice) <= _TOLERANCE:  # NaN fails every comparison
        return [
            f"{what}: FAISS and torch differ by {max(off_value, off_choice):.2g} in similarity, wanted {_TOLERANCE:g}"
        ]
    return []
