"""All that a run is made of and that survives a restart: networks, optimizer, memories, generators."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from sop_faiss import distributed
from sop_faiss.config import Config, TermConfig
from sop_faiss.errors import CheckpointError, ConfigError, is_out_of_memory
from sop_faiss.model.checkpoint import read_state, read_tensors
from sop_faiss.model.networks import Student, build_student_and_teacher
from sop_faiss.neighbors.approximate import index_pays
from sop_faiss.neighbors.incremental import keeping_pays
from sop_faiss.sop.memory import Memory
from sop_faiss.sop.prototypes import PrototypeMaker
from sop_faiss.train.checkpoints.checkpoint import flat_optimizer_state, load_network, load_optimizer_state
from sop_faiss.train.compile import compile_networks
from sop_faiss.train.log.alarms import Alarms, Rules
from sop_faiss.train.optim import make_optimizer
from sop_faiss.train.parallel import average_gradients, is_sharded, share_student, whole
from sop_faiss.train.schedules import Schedules
from sop_faiss.train.score_history import ScoreHistory

__all__ = ["Level", "RunState", "autocast_dtype", "fit_memory", "keeps_neighbors"]

_log = logging.getLogger(__name__)


@dataclass
class Level:
    """One loss level: its memory, and what draws prototypes from it."""

    memory: Memory
    maker: PrototypeMaker

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The state of memory and maker under `name`."""
        return {
            **{f"{name}.memory.{key}": value for key, value in self.memory.state_dict().items()},
            **{f"{name}.maker.{key}": value for key, value in self.maker.state_dict().items()},
        }

    def load_tensors(self, name: str, tensors: dict[str, Tensor]) -> None:
        """The reverse of `tensors`."""
        for part, prefix in ((self.memory, f"{name}.memory."), (self.maker, f"{name}.maker.")):
            state = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
            if not state:
                raise CheckpointError(f"the checkpoint holds no {name} memory: resume with the same loss weights")
            part.load_state_dict(state)


def fit_memory(config: Config, name: str, images: int) -> tuple[int, bool]:
    """Rows of a level's memory, and whether rows of an anchor's own image are left out of its supports.

    A memory holds no more rows than there are training images: more would be older copies of the same images.

    Args:
        config: of the run.
        name: `cls` or `patch`.
        images: number of training images.

    Raises:
        ConfigError: the memory that is left is too small for the anchors or supports.
    """
    asked: int = getattr(config.memory, f"{name}_capacity")
    level: TermConfig = getattr(config.sop, name)
    capacity = min(asked, images)
    exclude = config.neighbors.exclude_same_image
    exclude_same_image = exclude == "always" or (exclude == "auto" and images < 2 * asked)
    # In a memory of at most one epoch an image has two rows where one epoch ends and the next begins.
    other_rows = capacity - (2 if exclude_same_image else 1)
    for setting, value, most in (
        ("num_anchors", level.num_anchors, capacity),
        ("num_supports", level.num_supports, other_rows),
    ):
        if value > most:
            # the fewest anchors that the configuration takes: 2, and more than 1 / (1 - eps)
            fewest = max(2, math.floor(1 / (1 - config.sop.eps)) + 1) if setting == "num_anchors" else 0
            good = f", and {max(fewest, capacity // 4)} is a good number for few images" if fewest else ""
            remedy = f"wanted at most {most}{good}; lower it or use more images"
            raise ConfigError(
                f"sop.{name}.{setting} = {value} is too much for a memory of {capacity} rows ({images} training "
                f"images, memory.{name}_capacity = {asked}): "
                + (remedy if most >= fewest else f"these are too few for any: use {fewest} images or more")
            )
    if capacity < asked and distributed.is_main():
        _log.info(
            "memory.%s_capacity: %d of the %d rows asked for, since there are only %d training images",
            name,
            capacity,
            asked,
            images,
        )
    return capacity, exclude_same_image


def keeps_neighbors(config: Config, name: str, capacity: int, device: torch.device) -> bool:
    """Whether a level's memory keeps its rows' neighbors from step to step, as `neighbors.refresh` means it.

    Args:
        config: of the run.
        name: `cls` or `patch`.
        capacity: rows of the memory; see `fit_memory`.
        device: where it lies.

    Raises:
        ConfigError: neighbors shall be kept, of anchors that are no rows of the memory.
    """
    level: TermConfig = getattr(config.sop, name)
    refresh = config.neighbors.refresh
    is_exact = config.neighbors.index == "exact" and config.neighbors.precision == "float32"
    if refresh == "full" or level.num_supports == 0 or not is_exact:
        return False
    if config.sop.anchors == "fixed_vectors":
        if refresh == "incremental":
            raise ConfigError(
                "neighbors.refresh = incremental keeps the neighbors of a memory's rows, and sop.anchors = "
                "fixed_vectors are copies outside it: set neighbors.refresh=full or auto, or sop.anchors=fixed_rows"
            )
        return False
    anchors, stored = level.tasks * level.num_anchors, config.train.batch_size
    return refresh == "incremental" or keeping_pays(anchors, stored, capacity, config.model.embedding_dim, device)


def autocast_dtype(config: Config, device: torch.device) -> torch.dtype | None:
    """What `train.precision` makes the backbone run in on a device; None for float32."""
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported()
    use_bf16 = config.train.precision == "bf16" or (config.train.precision == "auto" and has_bf16)
    return torch.bfloat16 if use_bf16 else None


class RunState:
    """Builds a run's parts from its configuration.

    Args:
        config: of the run.
        device: of this rank.
        images: number of training images.
    """

    def __init__(self, config: Config, device: torch.device, images: int) -> None:
        self.config = config
        self.device = device
        self.schedules = Schedules(config, max(1, images // config.train.batch_size))
        self.student, self.teacher = build_student_and_teacher(config)
        self.student.to(device).train()
        self.teacher.to(device).eval()
        self.autocast_dtype = autocast_dtype(config, device)
        compile_networks(config.train.compile, (self.student, self.teacher), device)
        self.all_views, self._averages_by_hand = share_student(
            Student(self.student), config, device, self.autocast_dtype
        )
        self.is_sharded = is_sharded(self.student)
        """Whether this rank holds a part of the student only (FSDP2); then all ranks must ask for `tensors`."""
        self.optimizer = make_optimizer(self.student, config.optim)
        self.cls = self._level("cls", config.sop.cls.weight, images)
        self.patch = self._level("patch", config.sop.patch.weight, images)
        self.patch_generator = torch.Generator().manual_seed(distributed.derive_seed("stored patch", config.train.seed))
        """Draws the patch that each image stores; the same on all ranks."""
        self.step = 0
        self.images_seen = 0
        self.bad_samples = 0
        self.scores = ScoreHistory()
        self.alarms = Alarms(Rules.of(config, self.schedules.steps_per_epoch))
        self.data_digest = ""
        """Which images the run is trained on; see `Batches.digest`."""
        self.init_sha256 = ""
        """Of the weights file that `model.init` started from."""

    def _level(self, name: str, weight: float, images: int) -> Level | None:
        if weight == 0:
            return None
        sop, neighbors = self.config.sop, self.config.neighbors
        level: TermConfig = getattr(sop, name)
        capacity, exclude_same_image = fit_memory(self.config, name, images)
        seed = distributed.derive_seed("memory", name, self.config.train.seed)
        generator = torch.Generator().manual_seed(seed)
        dim, search = self.config.model.embedding_dim, (neighbors.engine, neighbors.precision)
        if self.device.type == "cuda" and level.num_supports == 0:
            search = "torch", "float32"  # never searched: FAISS would hold memory on the device for nothing
        memory = Memory(capacity, dim, generator, self.device, *search)
        maker = PrototypeMaker(
            memory,
            level,
            contributions=sop.contributions,
            eps=sop.eps,
            anchors=sop.anchors,
            exclude_same_image=exclude_same_image,
            generator=generator,
            incremental=keeps_neighbors(self.config, name, capacity, self.device),
        )
        if level.num_supports and neighbors.index != "exact":
            memory.use_index(neighbors, level.num_supports)
        if level.num_supports and distributed.is_main():
            self._tell_of_neighbors(name, maker)
        return Level(memory, maker)

    def _tell_of_neighbors(self, name: str, maker: PrototypeMaker) -> None:
        settings, rows = self.config.neighbors, maker.memory.capacity
        how = "kept from step to step" if maker.incremental else "searched for every step"
        because = f"neighbors.refresh={settings.refresh}, neighbors.index={settings.index}"
        if self.config.sop.anchors == "fixed_vectors":
            because += ", sop.anchors=fixed_vectors are no rows of the memory"
        _log.info("%s neighbors are %s (%s)", name, how, because)
        if settings.index != "exact" and not index_pays(settings, rows):
            _log.info("neighbors.index=%s cannot save time in the %d rows of the %s memory", settings.index, rows, name)

    @property
    def levels(self) -> dict[str, Level]:
        """The levels whose loss has a weight."""
        both = {"cls": self.cls, "patch": self.patch}
        return {name: level for name, level in both.items() if level is not None}

    def draw_stored_patches(self, images: int, patches: int) -> Int64[Tensor, " b"]:
        """Which patch of its second global view each of this rank's images will store; uniform.

        The draw is over the global batch, so that it does not depend on how many ranks share it.
        """
        everywhere = torch.randint(patches, (images * distributed.world_size(),), generator=self.patch_generator)
        return everywhere.view(-1, images)[distributed.rank()].to(self.device)

    def average_gradients(self) -> None:
        """Average the gradients over the ranks, where one backward pass did not make (and average) all of them."""
        if self._averages_by_hand:
            average_gradients(self.student.parameters())

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Everything with a tensor in it, by the file it goes to; whole tensors on the main rank."""
        memories = {"patch_generator": self.patch_generator.get_state()}
        for name, level in self.levels.items():
            memories.update(level.tensors(name))
        return {
            "student": {name: whole(value) for name, value in self.student.state_dict().items()},
            "teacher": self.teacher.state_dict(),
            "optimizer": {n: whole(v) for n, v in flat_optimizer_state(self.optimizer, self.student).items()},
            "memories": memories,
            **self.scores.tensors(),
        }

    def counters(self) -> dict[str, Any]:
        """The rest."""
        return {
            "images_seen": self.images_seen,
            "bad_samples": self.bad_samples,
            **self.scores.counters(),
            "data_digest": self.data_digest,
            "alarms": self.alarms.state_dict(),
            "init_sha256": self.init_sha256,
        }

    def _load_tensors(self, checkpoint: Path) -> None:
        load_network(self.student, checkpoint, "student")
        load_network(self.teacher, checkpoint, "teacher")
        load_optimizer_state(self.optimizer, self.student, read_tensors(checkpoint, "optimizer"))
        memories = read_tensors(checkpoint, "memories")
        self.patch_generator.set_state(memories["patch_generator"])
        for name, level in self.levels.items():
            level.load_tensors(name, memories)

    def resume(self, checkpoint: Path) -> None:
        """Go on from a checkpoint, as if the run had never stopped.

        Raises:
            CheckpointError: it is damaged or of another configuration.
        """
        state = read_state(checkpoint, verify=False)
        if state.get("data_digest") != self.data_digest:
            raise CheckpointError(
                f"checkpoint {checkpoint.name} was trained on other images than data.train names now (some were added, "
                "removed or renamed): resume on the same, or start another run"
            )
        try:
            self._load_tensors(checkpoint)
            measures = distributed.is_main() and self.config.evaluate.every_steps > 0
            self.scores.load(state, checkpoint, self.teacher, measures)
        except torch.AcceleratorError:
            raise
        except (IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:  # tensors missing, or of any kind
            if is_out_of_memory(error):
                raise
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise CheckpointError(
                f"checkpoint {checkpoint} cannot be loaded ({reason}): it was changed; remove it to go on from the one "
                "before it"
            ) from None
        self.step, self.images_seen = int(state["step"]), int(state["images_seen"])
        self.bad_samples = int(state["bad_samples"])
        self.alarms.load_state_dict(state.get("alarms", {}))
        self.init_sha256 = str(state.get("init_sha256", ""))
        _log.info("resuming at step %d from %s", self.step, checkpoint.name)
