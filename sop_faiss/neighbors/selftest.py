"""A self-test of searches by FAISS and torch against float64, on one device; used by the doctor."""

from __future__ import annotations

import torch

import faiss  # isort: skip  (after torch: one OpenMP runtime)
from jaxtyping import Float32, Float64
from torch import Tensor

from sop_faiss.errors import ConfigError
from sop_faiss.neighbors.exact import nearest_rows
from sop_faiss.neighbors.mirror import NearestRows, RingMirror, has_bf16

_TOLERANCE = 1e-5
"""How far a float32 inner product of unit vectors may be from the float64 one."""


def count_faiss_gpus() -> int:
    """Return how many GPUs FAISS sees; 0 for a build without GPU code."""
    return int(faiss.get_num_gpus()) if hasattr(faiss, "get_num_gpus") else 0


def find_problems(
    device: torch.device, capacity: int = 5000, dim: int = 96, queries: int = 64, k: int = 20
) -> list[str]:
    """Return what is wrong with searches on a device, one sentence each; an empty list if they work.

    Two searches of a ring mirror by FAISS, by torch, and in bfloat16 if the device has it, are compared with torch in
    float64, the second after rows were overwritten; on the CPU also one of a plain gallery. Some rows are equal, so
    that ties occur, and no others are so close that bfloat16 could confuse them.

    Args:
        device: CPU or a CUDA device.
        capacity: rows.
        dim: columns.
        queries: how many are searched.
        k: neighbors of each.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.nn.functional.normalize(torch.randn(capacity, dim, generator=generator), dim=1)
    rows[capacity // 2 : capacity // 2 + 50] = rows[:50]
    asked = torch.cat([rows[: queries // 2], torch.nn.functional.normalize(rows[-queries // 2 :] + 0.1, dim=1)])
    new = torch.nn.functional.normalize(torch.randn(300, dim, generator=generator), dim=1)
    problems = []
    for engine, precision in _modes(device):
        problems += _problems_of_mirror(engine, precision, device, rows.clone(), new, asked.clone(), k)
    if device.type == "cpu":
        similarities, positions = nearest_rows(asked.numpy(), rows.numpy(), k)
        plain = NearestRows(torch.from_numpy(similarities), torch.from_numpy(positions))
        problems += _compare("search of a gallery by FAISS", plain, asked, rows)
    return problems


def _modes(device: torch.device) -> list[tuple[str, str]]:
    """Return the engines and precisions that should work on a device."""
    if device.type != "cuda":
        return [("faiss", "float32"), ("torch", "float32"), ("torch", "bf16")]
    return [
        (engine, precision)
        for precision in ("float32", *(["bf16"] if has_bf16(device) else []))
        for engine in ("faiss", "torch")
    ]


def _problems_of_mirror(
    engine: str,
    precision: str,
    device: torch.device,
    rows: Float32[Tensor, "n d"],
    new: Float32[Tensor, "b d"],
    asked: Float32[Tensor, "q d"],
    k: int,
) -> list[str]:
    """Search a mirror of `rows`, overwrite some of both by `new`, and search it again."""
    by = f"by {'FAISS' if engine == 'faiss' else engine} in {precision}"
    try:
        mirror = RingMirror(len(rows), rows.shape[1], device, engine, precision)
    except ConfigError as error:
        return [f"search {by}: {error}"]
    mirror.rows.copy_(rows)
    problems = _compare(f"exact search {by}", mirror.search(asked.to(device), k), asked, rows)
    rows[100 : 100 + len(new)] = new
    asked[:10] = new[:10]
    mirror.write(100, new)
    problems += _compare(f"search of overwritten rows {by}", mirror.search(asked.to(device), k), asked, rows)
    return problems


def _compare(what: str, found: NearestRows, queries: Float32[Tensor, "q d"], rows: Float32[Tensor, "n d"]) -> list[str]:
    """Compare neighbors with torch's in float64; rows of (nearly) equal similarity may replace each other."""
    truth: Float64[Tensor, "q n"] = queries.double() @ rows.double().T
    best = truth.topk(found.rows.shape[1], dim=1).values
    got_rows, got = found.rows.cpu(), found.similarities.cpu().double()
    if int(got_rows.min()) < 0 or int(got_rows.max()) >= len(rows):
        return [f"{what}: it returned rows that do not exist"]
    if any(len(set(line)) < len(line) for line in got_rows.tolist()):
        return [f"{what}: it returned a row twice"]
    off_value = float((got - truth.gather(1, got_rows)).abs().max())
    off_choice = float((best - got).abs().max())
    if not max(off_value, off_choice) <= _TOLERANCE:  # NaN fails every comparison
        return [f"{what}: similarities differ by {max(off_value, off_choice):.2g} from float64, wanted {_TOLERANCE:g}"]
    return []
