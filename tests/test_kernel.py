"""When the loss takes its Triton kernel, and the kernel itself under Triton's interpreter (`kernel_cases.py`)."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from sop_faiss.sop import kernel
from sop_faiss.sop.loss import MemberWeights, assignment_cross_entropy, log_assignment

ROOT = Path(__file__).resolve().parent.parent
HAS_TRITON = importlib.util.find_spec("triton") is not None


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not made for this platform")
def test_the_kernel_equals_the_oracle_under_tritons_interpreter():
    of_this_run = ("PYTEST_", "COV_")  # what this run, or its worker, has put there
    environment = {name: value for name, value in os.environ.items() if not name.startswith(of_this_run)}
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", "tests/kernel_cases.py"],
        cwd=ROOT,
        env={**environment, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert finished.returncode == 0, finished.stdout[-8000:] + finished.stderr[-2000:]


def compiled(name: str, capability: int, warps: int, constants: dict[str, int | None]):
    """One pass as the launch in kernel.py compiles it, for a device that need not be there."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sop_faiss.sop import kernel_passes

    program = getattr(kernel_passes, name)
    kinds = dict.fromkeys(program.arg_names, "*fp32")
    kinds |= {name: "i32" for name in ("n", "count", "size", "dim", "tiles", "splits") if name in kinds}
    kinds |= {name: "fp32" for name in ("temperature",) if name in kinds}
    kinds |= dict.fromkeys(constants, "constexpr")
    aligned = [kind == "*fp32" or (kind == "i32" and name in ("count", "dim")) for name, kind in kinds.items()]
    attributes = {(index,): [["tt.divisibility", 16]] for index, is_aligned in enumerate(aligned) if is_aligned}
    return triton.compile(
        ASTSource(program, kinds, constants, attributes),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps, "num_stages": 2},
    )


@pytest.mark.skipif(not HAS_TRITON or os.environ.get("TRITON_INTERPRET") == "1", reason="needs Triton, compiling")
@pytest.mark.parametrize(
    ("capability", "sizes"),
    [
        pytest.param(80, ({}, {"size": 1}), marks=pytest.mark.slow),  # Triton makes a constant of an argument that is 1
        pytest.param(90, ({},), marks=pytest.mark.slow),
        (90, ({"size": 1},)),
    ],
)
def test_the_passes_compile_for_a_gpu_that_need_not_be_there(capability, sizes, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    tile = {"BLOCK_N": kernel._BLOCK_N, "BLOCK_K": kernel._BLOCK_K, "BLOCK_D": kernel._BLOCK_D}
    for size in sizes:
        programs = [
            compiled("lse_pass", capability, 4, {**tile, **size}),
            compiled("gradient_pass", capability, 8, {**tile, **size, "BLOCK_OUT": kernel._BLOCK_OUT}),
        ]
        assert max(program.metadata.shared for program in programs) <= 99 * 1024  # the least of compute capability 8
    for targets in ({}, {"targets": None}):
        compiled("assignment_pass", capability, 4, {**targets, "BLOCK_SPLITS": 64, "BLOCK_A": kernel._BLOCK_A})


@pytest.fixture
def asked_anew():
    kernel.kernel_available.cache_clear()
    yield
    kernel.kernel_available.cache_clear()


@pytest.mark.usefixtures("asked_anew")
def test_a_device_without_the_kernel_is_told_once_and_why(monkeypatch, caplog):
    monkeypatch.setattr(kernel, "why_unavailable", lambda device: "No module named 'triton'")
    device = torch.device("cuda", 0)
    assert not kernel.kernel_available(device)
    assert not kernel.kernel_available(device)
    assert [record.getMessage() for record in caplog.records] == [
        "the Triton kernel of the loss is not used on cuda:0 (No module named 'triton'): using PyTorch blocks"
    ]


@pytest.mark.usefixtures("asked_anew")
def test_the_cpu_takes_the_blocks_without_a_word(caplog):
    assert not kernel.kernel_available(torch.device("cpu"))
    assert not caplog.records


@pytest.mark.usefixtures("asked_anew")
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("out of resource: shared memory\nmore"), "out of resource: shared memory"),
        (KeyError(), "KeyError"),
    ],
)
def test_why_a_cuda_device_cannot_use_it(monkeypatch, error, reason):
    def fail(device: torch.device) -> float:
        raise error

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(kernel, "self_test_error", fail)
    assert kernel.why_unavailable(torch.device("cuda", 0)) == reason
    monkeypatch.setattr(kernel, "self_test_error", lambda device: float("nan"))
    assert "self-test is off by nan" in (kernel.why_unavailable(torch.device("cuda", 0)) or "")
    monkeypatch.setattr(kernel, "self_test_error", lambda device: 1e-6)
    assert kernel.why_unavailable(torch.device("cuda", 0)) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert kernel.why_unavailable(torch.device("cuda", 0)) == "compute capability 7.5, wanted 8.0 or newer"


def test_the_loss_takes_the_kernel_for_float32_alone(monkeypatch):
    taken = []

    def fake_cross_entropy(embeddings, targets, row_weights, member_weights, temperature, needs_gradient):
        taken.append("cross_entropy")
        return embeddings.sum(), torch.full_like(embeddings, 2.0) if needs_gradient else None

    def fake_log_assignment(embeddings, member_weights, temperature):
        taken.append("log_assignment")
        return embeddings.new_zeros(len(embeddings), member_weights.count)

    monkeypatch.setattr(kernel, "kernel_available", lambda device: True)
    monkeypatch.setattr(kernel, "cross_entropy", fake_cross_entropy)
    monkeypatch.setattr(kernel, "log_assignment", fake_log_assignment)
    member_weights = MemberWeights.of(F.normalize(torch.ones(4, 2, 3), dim=-1), torch.full((4, 2), 0.9))
    targets, row_weights = torch.full((5, 4), 0.25), torch.ones(5)

    u = torch.ones(5, 3, requires_grad=True)
    (3.0 * assignment_cross_entropy(u, targets, row_weights, member_weights, 0.1)).backward()
    assert torch.equal(u.grad, torch.full((5, 3), 6.0))
    log_assignment(u.detach(), member_weights, 0.1)
    assert taken == ["cross_entropy", "log_assignment"]

    log_assignment(u, member_weights, 0.1)  # to be differentiated by autograd
    assignment_cross_entropy(u.double(), targets, row_weights, member_weights, 0.1)
    assignment_cross_entropy(u[:0], targets[:0], row_weights[:0], member_weights, 0.1)
    assert taken == ["cross_entropy", "log_assignment"]
