"""DINO, iBOT and MaSSL against their official code: are losses, centers, memory and gradients equal, at what cost?

    python benchmarks/bench_rivals.py --dino CHECKOUT --ibot CHECKOUT --massl CHECKOUT [--quick] [--json FILE]
        [--record]

Equality: three steps of each objective with a small ViT, two global and three local views, in float32. The official
head, loss and memory get the features of the same backbone and the weights of our head, which learn between the steps;
centers and memory are their own. The ratio is the largest difference of any tensor over the tensor's largest number.

Cost: DINO's loss of 12 views of 8 images and 65,536 prototypes from the same logits, forward and backward.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import click
import torch
import torch.distributed as dist
from report import Row, extra_peak_bytes, finish, interleaved_medians, meets
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

from sop_faiss.config import Config, load_config
from sop_faiss.data.batch import Batch
from sop_faiss.model.networks import Network, Networks, Student, build_student_and_teacher, update_teacher
from sop_faiss.objectives.centering import Center, targets_of, views_loss
from sop_faiss.objectives.choose import choose_objective
from sop_faiss.objectives.massl import MasslObjective
from sop_faiss.objectives.objective import StepSettings

EQUAL, AS_FAST, AS_SMALL = "<= 1e-5", ">= 1", "<= 1"
GLOBAL_VIEWS, LOCAL_VIEWS, IMAGES, STEPS = 2, 3, 8, 3
STUDENT_TEMP, TEACHER_TEMP = 0.1, 0.04
CPU = torch.device("cpu")
REPOSITORIES = {"dino": "facebookresearch/dino", "ibot": "bytedance/ibot", "massl": "sthalles/MaSSL"}
# what main_ibot.py imports beside its head and loss; nothing of it is run here
UNUSED = ("tensorboardX", "evaluation", "evaluation.unsupervised", "evaluation.unsupervised.unsup_cls")
COMMON = (
    "model.depth=2", f"views.local_count={LOCAL_VIEWS}", "views.local_size=16", f"train.batch_size={IMAGES}",
    f"loss.teacher_temp_start={TEACHER_TEMP}", f"loss.teacher_temp={TEACHER_TEMP}", "train.epochs=1",
)  # fmt: skip
LEARNED = ("norm_last_layer=false", "freeze_last_layer_epochs=0")
CASES = {
    "dino": ("dino", ("dino.prototypes=4096", *(f"dino.{each}" for each in LEARNED))),
    "ibot, one head": ("ibot", tuple(f"ibot.{each}" for each in LEARNED)),
    "ibot, two heads": (
        "ibot",
        ("ibot.shared_head=false", "ibot.patch.prototypes=512", *(f"ibot.{each}" for each in LEARNED)),
    ),
    "massl": ("massl", ("massl.capacity=1024", "massl.block_size=256", "massl.koleo_weight=0.1", "massl.fill=random")),
}


def load(kind: str, checkout: Path, *names: str) -> list[Any]:
    """Import modules of a checkout, unchanged, and forget their names, which the checkouts share."""
    for name in names:
        if not (checkout / f"{name.replace('.', '/')}.py").is_file():
            wanted = f"wanted a checkout of github.com/{REPOSITORIES[kind]}"
            raise SystemExit(f"--{kind} {checkout} has no {name}.py: {wanted}")
    sys.path.insert(0, str(checkout))
    sys.modules.update({name: mock.MagicMock() for name in UNUSED})
    before = set(sys.modules)
    try:
        return [importlib.import_module(name) for name in names]
    finally:
        sys.path.remove(str(checkout))
        for name in {*UNUSED, *(set(sys.modules) - before)}:
            if name in UNUSED or str(checkout) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]


class Ours:
    """A run's networks and objective, and what the official side needs of them."""

    def __init__(self, kind: str, overrides: tuple[str, ...]) -> None:
        self.config: Config = load_config(f"cifar10_{kind}", [*COMMON, *overrides])
        self.objective = choose_objective(self.config)
        self.student, self.teacher = build_student_and_teacher(self.config, self.objective.heads)
        with torch.no_grad():  # another network, so that nothing is equal by chance
            for parameter in self.teacher.backbone.parameters():
                parameter.mul_(1 + 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        self.networks = Networks(self.student, self.teacher, Student(self.student), CPU, None, self.config.views)
        self.objective.open(CPU, 1024)

    def batch(self, step: int) -> Batch:
        """Draw a batch of noise; of the masks of its views, one hides nothing."""
        generator = torch.Generator().manual_seed(step)
        sides = ((GLOBAL_VIEWS, 32), (LOCAL_VIEWS, 16))
        views = [torch.randint(256, (n, IMAGES, s, s, 3), dtype=torch.uint8, generator=generator) for n, s in sides]
        colors = [torch.empty(n, IMAGES, 0) for n, _ in sides]
        masks = torch.rand(GLOBAL_VIEWS, IMAGES, 16, generator=generator) < 0.3
        masks[0, 3] = False
        if self.config.masks.kind == "none":
            masks[:] = False
        ids = torch.arange(IMAGES) + step * IMAGES
        return Batch(views[0], views[1], colors[0], colors[1], masks, ids, [])

    def step(self, batch: Batch) -> dict[str, Tensor]:
        """Learn from a batch, and return the loss and all gradients; weights are updated by `follow`."""
        settings = StepSettings(0.0, 0.0, 0.9, TEACHER_TEMP)
        self.student.zero_grad()
        learned = [self.objective.learn(self.networks, part, settings, 0.5) for part in batch.split(2)]
        gradients = {f"gradient {name}": p.grad.clone() for name, p in named(self.student) if p.grad is not None}
        metrics = self.objective.end_step(learned, batch.image_ids)
        return {"loss": metrics["loss"], **gradients}

    def tokens(self, network: Network, views: Tensor, masks: Tensor | None = None) -> Tensor:
        """Return [CLS] and patches of some views (v, b) as official networks return them."""
        masks = None if masks is None else masks.flatten(0, 1)
        tokens = network.backbone(views.flatten(0, 1), masks)
        return torch.cat([tokens.cls.unsqueeze(1), tokens.patches], 1)

    @torch.no_grad()
    def follow(self) -> None:
        """Move the student along its gradients, and the teacher after it."""
        for parameter in self.student.parameters():
            if parameter.grad is not None:
                parameter.sub_(0.05 * parameter.grad / (parameter.grad.norm() + 1e-6))
        update_teacher(self.teacher, self.student, 0.9)


def named(network: Network) -> list[tuple[str, nn.Parameter]]:
    return list(network.named_parameters())


def copy_head(official: Any, heads: nn.ModuleDict) -> dict[str, nn.Parameter]:
    """Copy our weights into an official head, and return its parameters by our names."""
    names = {f"shared.mlp.{name}": p for name, p in official.mlp.named_parameters()}
    layers = {"last": "last_layer"} if "last" in heads else {"cls": "last_layer", "patch": "last_layer2"}
    for ours, theirs in layers.items():
        if hasattr(official, theirs):
            layer = getattr(official, theirs)
            names |= {f"{ours}.direction": layer.weight_v, f"{ours}.norm": layer.weight_g}
    mine = dict(heads.named_parameters())
    with torch.no_grad():
        for name, parameter in names.items():
            parameter.copy_(mine[name])
    return {f"heads.{name}": parameter for name, parameter in names.items()}


def gradients_of(ours: Ours, head: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    parameters = {name: p for name, p in named(ours.student) if name.startswith("backbone.")} | dict(head)
    return {f"gradient {name}": p.grad.clone() for name, p in parameters.items() if p.grad is not None}


def clear(ours: Ours, head: nn.Module) -> None:
    ours.student.zero_grad()
    head.zero_grad()


def official_dino(checkout: Path, ours: Ours) -> Callable[[Tensor, Tensor, Tensor], dict[str, Tensor]]:
    main, networks = load("dino", checkout, "main_dino", "vision_transformer")
    model, count = ours.config.model, ours.config.dino.prototypes
    sizes = {"norm_last_layer": False, "hidden_dim": model.projector_hidden, "bottleneck_dim": model.embedding_dim}
    student, teacher = (networks.DINOHead(model.embed_dim, count, **sizes) for _ in range(2))
    loss_of = main.DINOLoss(count, GLOBAL_VIEWS + LOCAL_VIEWS, TEACHER_TEMP, TEACHER_TEMP, 0, 1, STUDENT_TEMP)

    def step(global_views: Tensor, local_views: Tensor, masks: Tensor) -> dict[str, Tensor]:
        head = copy_head(student, ours.student.heads)
        copy_head(teacher, ours.teacher.heads)
        clear(ours, student)
        with torch.no_grad():
            targets = teacher(ours.tokens(ours.teacher, global_views)[:, 0])
        features = [ours.tokens(ours.student, views)[:, 0] for views in (global_views, local_views)]
        loss = loss_of(student(torch.cat(features)), targets, 0)
        loss.backward()
        return {"loss": loss.detach(), "center": loss_of.center[0].clone(), **gradients_of(ours, head)}

    return step


def official_ibot(checkout: Path, ours: Ours) -> Callable[[Tensor, Tensor, Tensor], dict[str, Tensor]]:
    (main,) = load("ibot", checkout, "main_ibot")
    model, settings = ours.config.model, ours.config.ibot
    counts = settings.cls.prototypes, settings.patch.prototypes
    sizes = {"norm_last_layer": False, "hidden_dim": model.projector_hidden, "bottleneck_dim": model.embedding_dim}
    sizes |= {"patch_out_dim": counts[1], "shared_head": settings.shared_head}
    student, teacher = (main.iBOTHead(model.embed_dim, counts[0], **sizes) for _ in range(2))
    temperatures = [TEACHER_TEMP] * 4
    loss_of = main.iBOTLoss(*counts, GLOBAL_VIEWS, LOCAL_VIEWS, *temperatures, 0, 1, STUDENT_TEMP)

    def step(global_views: Tensor, local_views: Tensor, masks: Tensor) -> dict[str, Tensor]:
        head = copy_head(student, ours.student.heads)
        copy_head(teacher, ours.teacher.heads)
        clear(ours, student)
        with torch.no_grad():
            targets = teacher(ours.tokens(ours.teacher, global_views))
        seen = student(ours.tokens(ours.student, global_views, masks))
        local = student(ours.tokens(ours.student, local_views))[0]
        losses = loss_of(seen, targets, local, list(masks.unflatten(2, (4, 4))), 0)
        losses["loss"].backward()
        centers = {"cls.center": loss_of.center[0].clone(), "patch.center": loss_of.center2[0, 0].clone()}
        return {"loss": losses["loss"].detach(), **centers, **gradients_of(ours, head)}

    return step


def official_massl(checkout: Path, ours: Ours) -> Callable[[Tensor, Tensor, Tensor], dict[str, Tensor]]:
    names = "criterion", "memory_bank", "random_partition", "head", "koleo"
    criterion, memory_bank, random_partition, heads, koleo = load("massl", checkout, *names)
    model, settings, crops = ours.config.model, ours.config.massl, GLOBAL_VIEWS + LOCAL_VIEWS
    sizes = {"hidden_dim": model.projector_hidden, "bottleneck_dim": model.embedding_dim}
    student, teacher = (heads.ProjectionHead(model.embed_dim, **sizes) for _ in range(2))
    bank = memory_bank.MemoryBank(crops, settings.capacity, model.embedding_dim)
    objective = ours.objective
    assert isinstance(objective, MasslObjective)
    bank.queue = objective.memory.embeddings.T.clone()
    partition = random_partition.RandomPartition(SimpleNamespace(ncrops=crops, out_dim=settings.capacity))
    loss_of, koleo_of = criterion.Criterion(), koleo.KoLeoLoss()

    def step(global_views: Tensor, local_views: Tensor, masks: Tensor) -> dict[str, Tensor]:
        head = copy_head(student, ours.student.heads)
        copy_head(teacher, ours.teacher.heads)
        clear(ours, student)
        rows = objective._blocks.anchor_rows.flatten()  # the official code would draw its own
        features = [ours.tokens(ours.student, views)[:, 0] for views in (global_views, local_views)]
        embeddings = student(torch.cat(features))
        # per part of 4 images, as the benchmark's parts are; the official code takes a rank's batch
        views = embeddings.unflatten(0, (crops, 2, IMAGES // 2))[:GLOBAL_VIEWS]
        spread = torch.stack([koleo_of(part) for view in views for part in view]).mean()
        with torch.no_grad():
            targets = teacher(ours.tokens(ours.teacher, global_views)[:, 0])
        with (
            mock.patch.object(torch.Tensor, "cuda", lambda tensor: tensor),
            mock.patch.object(torch, "multinomial", lambda *_, **__: rows),
        ):
            seen = bank(embeddings) / STUDENT_TEMP
            wanted = bank(targets, update=True) / TEACHER_TEMP
            loss = loss_of(*partition(seen, wanted, settings.block_size)) + settings.koleo_weight * spread
        loss.backward()
        return {"loss": loss.detach(), "cls.memory.embeddings": bank.queue.T.clone(), **gradients_of(ours, head)}

    return step


OFFICIAL = {"dino": official_dino, "ibot": official_ibot, "massl": official_massl}


def equality_row(case: str, checkout: Path | None) -> Row:
    kind, overrides = CASES[case]
    what = f"{case}: largest relative difference in {STEPS} steps"
    if checkout is None:
        return Row(what, "official code", None, EQUAL, None, {"not measured": f"no --{kind} checkout"})
    ours = Ours(kind, overrides)
    official = OFFICIAL[kind](checkout, ours)
    differences: dict[str, float] = {}
    losses = []
    for number in range(STEPS):
        batch = ours.batch(number)
        ours.objective.begin_step(StepSettings(0.0, 0.0, 0.9, TEACHER_TEMP), IMAGES, 16)
        views = ours.networks.normalized(batch.global_views, batch.global_colors)
        theirs = official(views, ours.networks.normalized(batch.local_views, batch.local_colors), batch.masks)
        mine = ours.step(batch) | ours.objective.state_dict()
        losses.append(float(theirs["loss"]))
        for name, value in theirs.items():
            difference = float((mine[name] - value).abs().max() / value.abs().max().clamp_min(1e-12))
            differences[name.split(" ")[0]] = max(differences.get(name.split(" ")[0], 0.0), difference)
        ours.follow()
    detail = {f"largest of {name}": value for name, value in differences.items()} | {"losses": losses}
    largest = max(differences.values())
    return Row(what, f"official code of {REPOSITORIES[kind]}", largest, EQUAL, meets(largest, EQUAL), detail)


def dino_cost(checkout: Path, images: int = 8, count: int = 65_536) -> dict[str, Callable[[], object]]:
    """Return DINO's loss of 12 views from the same logits, forward and backward, by both codes."""
    (main,) = load("dino", checkout, "main_dino")
    generator = torch.Generator().manual_seed(0)
    student = torch.rand(12, images, count, generator=generator).requires_grad_()
    teacher = torch.rand(2 * images, count, generator=generator)
    official, center = main.DINOLoss(count, 12, TEACHER_TEMP, TEACHER_TEMP, 0, 1), Center(count, 0.9, CPU)

    def ours() -> None:
        student.grad = None
        views_loss(student, targets_of(teacher, center, TEACHER_TEMP), STUDENT_TEMP, 0, 12).loss.backward()
        center.follow(teacher.mean(0, keepdim=True))

    def theirs() -> None:
        student.grad = None
        official(student.flatten(0, 1), teacher, 0).backward()

    return {"ours": ours, "official": theirs}


def measure(side: str, checkout: Path) -> int:
    """Measure the extra peak bytes of one side, in this process."""
    dino_cost(checkout, 1, 64)[side]()
    return extra_peak_bytes(dino_cost(checkout)[side])


def cost_rows(checkout: Path | None, repeats: int) -> list[Row]:
    faster = ("DINO's loss, 12 views, K = 65,536: times faster", "official DINOLoss")
    smaller = ("DINO's loss, 12 views, K = 65,536: extra peak memory", "official DINOLoss")
    if checkout is None:
        why = {"not measured": "no --dino checkout"}
        return [Row(*faster, None, AS_FAST, None, why), Row(*smaller, None, AS_SMALL, None, why)]
    seconds = interleaved_medians(dino_cost(checkout), repeats)
    times = seconds["official"] / seconds["ours"]
    rows = [Row(*faster, times, AS_FAST, meets(times, AS_FAST), {f"{n}_seconds": s for n, s in seconds.items()})]
    if not Path("/proc/self/clear_refs").exists():
        why = {"not measured": "resident peaks can be reset on Linux only"}
        return [*rows, Row(*smaller, None, AS_SMALL, None, why)]
    words = [sys.executable, __file__, "--dino", str(checkout), "--measure"]
    said = {s: subprocess.run([*words, s], stdout=subprocess.PIPE, text=True, check=True).stdout for s in seconds}
    peaks = {side: int(text) / 2**20 for side, text in said.items()}
    share = peaks["ours"] / peaks["official"]
    detail = {f"{side}_MiB": peak for side, peak in peaks.items()}
    return [*rows, Row(*smaller, share, AS_SMALL, meets(share, AS_SMALL), detail)]


@click.command()
@click.option("--dino", type=click.Path(path_type=Path, file_okay=False, exists=True), help="Checkout of DINO.")
@click.option("--ibot", type=click.Path(path_type=Path, file_okay=False, exists=True), help="Checkout of iBOT.")
@click.option("--massl", type=click.Path(path_type=Path, file_okay=False, exists=True), help="Checkout of MaSSL.")
@click.option("--quick", is_flag=True, help="Two repeats; within a minute.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the figures here.")
@click.option("--record", is_flag=True, help="Append the figures to benchmarks/RESULTS.md.")
@click.option("--measure", "side", hidden=True, type=click.Choice(["ours", "official"]))
def main(
    dino: Path | None,
    ibot: Path | None,
    massl: Path | None,
    quick: bool,
    json_file: Path | None,
    record: bool,
    side: str | None,
) -> None:
    """Compare the rivals with their official code: equality in three steps, time and memory of DINO's loss."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)  # which the official codes call
    if side is not None and dino is not None:
        print(measure(side, dino))
        return
    checkouts = {"dino": dino, "ibot": ibot, "massl": massl}
    rows = [equality_row(case, checkouts[kind]) for case, (kind, _) in CASES.items()]
    rows += cost_rows(dino, 2 if quick else 7)
    dist.destroy_process_group()
    finish("rivals", rows, json_file=json_file, record=record)


if __name__ == "__main__":
    main()
