"""The mirror's engines and precisions, and how it writes; searches themselves are tested with the memory."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sop_faiss.config import NeighborsConfig
from sop_faiss.errors import ConfigError
from sop_faiss.neighbors.bf16 import RoundedRows
from sop_faiss.neighbors.blocks import search_by_blocks
from sop_faiss.neighbors.engine_trial import EngineTrial
from sop_faiss.neighbors.faiss_gpu import FaissGpu
from sop_faiss.neighbors.mirror import RingMirror, ring_segments
from tests.test_engine_trial import Device

CPU, META = torch.device("cpu"), torch.device("meta")


@given(capacity=st.integers(1, 20), start=st.integers(0, 19), count=st.integers(0, 20))
def test_segments_cover_the_ring_in_order(capacity, start, count):
    start, count = start % capacity, min(count, capacity)
    segments = ring_segments(start, count, capacity)
    assert len(segments) <= 2 and all(part.stop > part.start for _, part in segments)
    rows = [row for ring, _ in segments for row in range(capacity)[ring]]
    parts = [row for _, part in segments for row in range(count)[part]]
    assert rows == [(start + row) % capacity for row in range(count)]
    assert parts == list(range(count))


def test_rows_are_written_round_the_end_in_place():
    mirror = RingMirror(7, 2, CPU)
    storage = mirror.rows.data_ptr()
    new = torch.arange(20, dtype=torch.float64).view(5, 4)[:, ::2].requires_grad_()
    mirror.write(4, new)
    assert torch.equal(mirror.rows[[4, 5, 6, 0, 1]], new.detach().float())
    assert not mirror.rows[2:4].any() and not mirror.rows.requires_grad
    mirror.write(3, new[:0])
    assert mirror.rows.data_ptr() == storage
    assert mirror.search(torch.ones(1, 2), 1).rows.item() == 1


@pytest.mark.parametrize(
    ("asked", "precision", "got"),
    [
        ("auto", "float32", "faiss"),
        ("faiss", "float32", "faiss"),
        ("torch", "float32", "torch"),
        ("auto", "bf16", "torch"),
        ("torch", "bf16", "torch"),
    ],
)
def test_on_a_cpu_the_engine_is_fixed(asked, precision, got):
    mirror = RingMirror(5, 2, CPU, asked, precision)
    assert mirror.engine == got
    mirror.load_state_dict({"neighbor_engine": torch.tensor(1)})  # a GPU's choice
    mirror.search(torch.ones(1, 2), 1)
    assert mirror.engine == got and mirror.state_dict() == {}


def test_what_cannot_be_is_refused():
    for arguments, message in (
        ((CPU, "fast"), "wanted faiss, torch or auto"),
        ((CPU, "auto", "fp16"), "wanted float32 or bf16"),
        ((CPU, "faiss", "bf16"), "set neighbors.precision=float32, or neighbors.engine=torch"),
        ((META, "faiss"), "FAISS cannot search on meta"),
        ((META, "torch", "bf16"), "has no bfloat16"),
    ):
        with pytest.raises(ConfigError, match=message):
            RingMirror(5, 2, *arguments)
    with pytest.raises(ConfigError, match="6 neighbors wanted from a memory of 5 rows"):
        RingMirror(5, 2, CPU).search(torch.ones(1, 2), 6)
    with pytest.raises(ConfigError, match=r"neighbors\.precision"):
        NeighborsConfig(precision="half")
    with pytest.raises(ConfigError, match=r"set neighbors\.refresh=full"):
        NeighborsConfig(precision="bf16", refresh="incremental")


def test_a_device_without_faiss_is_said_once(caplog):
    mirror = RingMirror(5, 2, META)
    assert mirror.engine == "torch"
    assert [record.getMessage() for record in caplog.records] == [
        "FAISS cannot search on meta (FAISS searches on CPUs and CUDA devices only): using exact torch search"
    ]
    caplog.clear()
    assert RingMirror(5, 2, META, "torch").engine == "torch"
    assert not caplog.records


class FakeGpu(FaissGpu):
    """Stands for FAISS on a GPU."""

    def __init__(self) -> None:
        self.asked: list[tuple[torch.dtype, int]] = []

    def search(self, queries, rows, k):
        self.asked.append((rows.dtype, k))
        return search_by_blocks(queries, rows, k)


def gpu_mirror(capacity: int, trial: EngineTrial | None, precision: str = "float32") -> tuple[RingMirror, FakeGpu]:
    """A mirror that takes its rows to lie on a GPU."""
    mirror, gpu = RingMirror(capacity, 2, CPU, "torch", precision), FakeGpu()
    mirror.rows = torch.rand(capacity, 2, generator=torch.Generator().manual_seed(0))  # no index's storage
    mirror._engine, mirror._index, mirror._gpu, mirror._trial = "faiss", None, gpu, trial
    mirror._rounded = RoundedRows(mirror.rows) if precision == "bf16" else None
    return mirror, gpu


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("winner", ["faiss", "torch"])
def test_the_first_search_is_the_trial(caplog, winner, precision):
    faiss, torch_ = (1.0, 2.0) if winner == "faiss" else (2.0, 1.0)
    ticks = itertools.cycle([0.0, faiss, 0.0, torch_])
    mirror, gpu = gpu_mirror(100, EngineTrial(True, lambda: None, lambda: next(ticks)), precision)
    assert mirror.engine == "auto"
    with caplog.at_level(logging.INFO):
        found = mirror.search(mirror.rows[:4], 3)
    assert mirror.engine == winner
    dtype, wanted = (torch.float32, 3) if precision == "float32" else (torch.bfloat16, 38)
    assert set(gpu.asked) == {(dtype, wanted)}
    assert f"4 queries in 100 x 2 {dtype}, top {wanted}" in caplog.text
    tried = len(gpu.asked)
    torch.testing.assert_close(mirror.search(mirror.rows[:4], 3).similarities, found.similarities)
    assert len(gpu.asked) == tried + (winner == "faiss")
    assert mirror.state_dict() == {"neighbor_engine": torch.tensor(("faiss", "torch").index(winner))}


def test_more_neighbors_than_faiss_can_find_are_torchs(caplog):
    device = Device(faiss=1.0, torch=2.0)
    mirror, gpu = gpu_mirror(3000, device.trial())
    for _ in range(2):
        assert mirror.search(mirror.rows[:2], 2049).rows.shape == (2, 2049)
    assert gpu.asked == [] and mirror.engine == "auto"
    assert len(caplog.records) == 1 and "at most 2048 neighbors, 2049 are needed" in caplog.text
    mirror, gpu = gpu_mirror(3000, None)
    mirror.search(mirror.rows[:2], 2049)
    mirror.search(mirror.rows[:2], 2048)
    assert gpu.asked == [(torch.float32, 2048)]
