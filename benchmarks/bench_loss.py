"""The loss against the paper's formula with its label matrix Y built: seconds and extra peak memory.

    python benchmarks/bench_loss.py [--quick] [--json FILE] [--record]

One task of the [CLS] term: K = 4096 prototypes of S = 9 members, d = 256, 96 student rows (8 images, 12 views) and 16
teacher rows. Memory on the CPU is measured in a separate process for each formula: the highest resident memory during
the work (VmHWM of Linux, reset before it) minus what was resident with the inputs loaded and a small problem solved.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import click
import torch
from report import Row, extra_peak_bytes, finish, interleaved_medians, meets
from torch import Tensor
from torch.nn import functional as F

from sop_faiss.config import TermConfig
from sop_faiss.sop import kernel
from sop_faiss.sop.loss import MemberWeights, assignment_cross_entropy, cls_loss, log_assignment
from sop_faiss.sop.memory import Memory
from sop_faiss.sop.prototypes import PrototypeMaker, contributions

COUNT, SUPPORTS, DIM = 4096, 8, 256
IMAGES, VIEWS, GLOBAL_VIEWS = 8, 12, 2
CAPACITY = 16384
STUDENT_TEMP, TEACHER_TEMP = 0.1, 0.04
FASTER, SMALLER, MORE_TASKS = ">= 8", "<= 0.1", "<= 1.2"
FASTER_ON_CUDA, SMALLER_ON_CUDA = ">= 20", "<= 0.05"
MEBIBYTE = 2**20


class Task(NamedTuple):
    """D, w and the embeddings of one task; D in the memory layout that each formula reads."""

    members: Tensor
    flat_members: Tensor
    contributions: Tensor
    student: Tensor
    teacher: Tensor


def unit(*shape: int, seed: int) -> Tensor:
    return F.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


def make_task(count: int = COUNT, device: str = "cpu") -> Task:
    """Draw supports near their anchors and views near each other, so that similarities are as in training."""
    anchors, images = unit(count, 1, DIM, seed=0), unit(IMAGES, DIM, seed=1)
    members = torch.cat([anchors, F.normalize(anchors + 0.7 * unit(count, SUPPORTS, DIM, seed=2), dim=-1)], dim=1)
    weights = contributions((members[:, 1:] * anchors).sum(-1).unsqueeze(0), "similarity", 0.1)[0]
    student = F.normalize(images + 0.5 * unit(VIEWS, IMAGES, DIM, seed=3), dim=-1).flatten(0, 1)
    teacher = F.normalize(images + 0.5 * unit(GLOBAL_VIEWS, IMAGES, DIM, seed=4), dim=-1).flatten(0, 1)
    as_gathered = members.transpose(0, 1).contiguous().transpose(0, 1)  # as Prototypes.members returns them
    inputs = (as_gathered, members.flatten(0, 1), weights, student, teacher)
    task = Task(*(tensor.to(device) for tensor in inputs))
    task.student.requires_grad_()
    return task


def targets_of(assigned: Tensor) -> Tensor:
    """Return for each student row the mean of its image's teacher rows; the cross-entropy is linear in them."""
    return assigned.view(GLOBAL_VIEWS, IMAGES, -1).mean(0).repeat(VIEWS, 1)


def closed_loss(task: Task) -> Tensor:
    shares = MemberWeights.of(task.members, task.contributions)
    with torch.no_grad():
        targets = targets_of(log_assignment(task.teacher, shares, TEACHER_TEMP).exp())
    row_weights = torch.full((len(task.student),), 1 / len(task.student), device=task.student.device)
    return assignment_cross_entropy(task.student, targets, row_weights, shares, STUDENT_TEMP)


def dense_loss(task: Task) -> Tensor:
    """Compute the paper's formula: Y, P = softmax(<u, D>/temperature) Y, -sum P_teacher log P_student."""
    count, size = task.contributions.shape
    own = torch.arange(count * size, device=task.members.device)
    weights = task.contributions.flatten().unsqueeze(1)
    labels = ((1 - weights) / (count - 1)).expand(-1, count).contiguous()
    labels[own, own // size] = weights.squeeze(1)
    with torch.no_grad():
        targets = targets_of(torch.softmax(task.teacher @ task.flat_members.T / TEACHER_TEMP, dim=1) @ labels)
    assigned = torch.softmax(task.student @ task.flat_members.T / STUDENT_TEMP, dim=1) @ labels
    return -(targets * assigned.log()).sum(1).mean()


def step(loss: Callable[[Task], Tensor], task: Task) -> Tensor:
    """Run forward and backward."""
    task.student.grad = None
    value = loss(task)
    value.backward()
    return value.detach()


def tasks_step(tasks: int) -> Callable[[], object]:
    """Compute the [CLS] loss of several tasks, forward and backward, from a memory and its prototypes."""
    maker = PrototypeMaker(
        Memory(CAPACITY, DIM, torch.Generator().manual_seed(0)),
        TermConfig(num_anchors=COUNT, num_supports=SUPPORTS, tasks=tasks),
        contributions="similarity",
        eps=0.1,
        anchors="random",
        exclude_same_image=False,
        generator=torch.Generator().manual_seed(1),
    )
    prototypes = maker.draw()
    student, teacher = unit(VIEWS, IMAGES, DIM, seed=2).requires_grad_(), unit(GLOBAL_VIEWS, IMAGES, DIM, seed=3)
    return lambda: cls_loss(student, teacher, prototypes, STUDENT_TEMP, TEACHER_TEMP).loss.backward()


def measure(what: str) -> int:
    """Measure the extra peak bytes of one piece of work, in a separate process."""
    for loss in (closed_loss, dense_loss):
        step(loss, make_task(count=64))
    if what.startswith("tasks"):
        work = tasks_step(int(what.removeprefix("tasks")))
    else:
        task = make_task()
        work = {"closed": lambda: step(closed_loss, task), "dense": lambda: step(dense_loss, task)}[what]
    return extra_peak_bytes(work)


def measured_elsewhere(what: str) -> int:
    command = [sys.executable, __file__, "--measure", what]
    return int(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def memory_row(what: str, against: str, target: str, of: str, base: str) -> Row:
    if not Path("/proc/self/clear_refs").exists():
        return Row(what, against, None, target, None, {"not measured": "resident peaks can be reset on Linux only"})
    numerator, denominator = measured_elsewhere(of), measured_elsewhere(base)
    ratio = numerator / denominator
    detail = {f"{of}_MiB": numerator / MEBIBYTE, f"{base}_MiB": denominator / MEBIBYTE}
    return Row(what, against, ratio, target, meets(ratio, target), detail)


def speed_row(repeats: int) -> Row:
    task = make_task()
    difference = abs(float(step(closed_loss, task)) / float(step(dense_loss, task)) - 1)
    functions = {"closed": lambda: step(closed_loss, task), "dense": lambda: step(dense_loss, task)}
    seconds = interleaved_medians(functions, repeats, warm_up=False)
    ratio = seconds["dense"] / seconds["closed"]
    detail = {f"{name}_seconds": value for name, value in seconds.items()}
    detail |= {"relative_difference_of_losses": difference, "repeats": repeats}
    return Row("times faster, forward and backward", "dense Y in PyTorch", ratio, FASTER, meets(ratio, FASTER), detail)


def cuda_peak_bytes(work: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def on_blocks(task: Task) -> Tensor:
    with mock.patch.object(kernel, "kernel_available", lambda device: False):
        return step(closed_loss, task)


def cuda_rows(repeats: int) -> list[Row]:
    """Compare the Triton kernel with the compiled dense formula in time and memory; the details have the blocks."""
    faster = ("CUDA kernel, times faster", "dense Y under torch.compile")
    smaller = ("CUDA kernel, extra peak memory", "dense Y under torch.compile")
    if not torch.cuda.is_available() or not kernel.kernel_available(torch.device("cuda", torch.cuda.current_device())):
        why = {"not measured": "the kernel does not run here" if torch.cuda.is_available() else "no CUDA device here"}
        return [Row(*faster, None, FASTER_ON_CUDA, None, why), Row(*smaller, None, SMALLER_ON_CUDA, None, why)]
    task, compiled = make_task(device="cuda"), torch.compile(dense_loss)
    functions: dict[str, Callable[[], Tensor]] = {
        "kernel": lambda: step(closed_loss, task),
        "blocks": lambda: on_blocks(task),
        "dense": lambda: step(compiled, task),
    }
    difference = abs(float(functions["kernel"]()) / float(functions["dense"]()) - 1)
    seconds = interleaved_medians(functions, 10 * repeats)
    peaks = {name: cuda_peak_bytes(function) for name, function in functions.items()}
    times, share = seconds["dense"] / seconds["kernel"], peaks["kernel"] / peaks["dense"]
    time_detail = {f"{name}_milliseconds": 1000 * value for name, value in seconds.items()}
    time_detail |= {"relative_difference_of_losses": difference, "repeats": 10 * repeats}
    memory_detail = {f"{name}_MiB": value / MEBIBYTE for name, value in peaks.items()}
    return [
        Row(*faster, times, FASTER_ON_CUDA, meets(times, FASTER_ON_CUDA), time_detail),
        Row(*smaller, share, SMALLER_ON_CUDA, meets(share, SMALLER_ON_CUDA), memory_detail),
    ]


@click.command()
@click.option("--quick", is_flag=True, help="Two repeats; within a minute.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the figures here.")
@click.option("--record", is_flag=True, help="Append the figures to benchmarks/RESULTS.md.")
@click.option("--measure", "what", hidden=True, type=click.Choice(["closed", "dense", "tasks1", "tasks4"]))
def main(quick: bool, json_file: Path | None, record: bool, what: str | None) -> None:
    """Measure time and memory of the loss against the paper's formula with Y built."""
    if what is not None:
        print(measure(what))
        return
    repeats = 2 if quick else 7
    rows = [
        memory_row("extra peak memory", "dense Y in PyTorch", SMALLER, "closed", "dense"),
        memory_row("extra peak memory of 4 tasks", "1 task", MORE_TASKS, "tasks4", "tasks1"),
        speed_row(repeats),
        *cuda_rows(repeats),
    ]
    finish("loss", rows, json_file=json_file, record=record)


if __name__ == "__main__":
    main()
