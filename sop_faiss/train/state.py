"""The state of a run, which survives a restart: networks, optimizer, memories, generators."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sop_faiss import distributed
from sop_faiss.config import Config
from sop_faiss.errors import CheckpointError, is_out_of_memory
from sop_faiss.model.checkpoint import read_state, read_tensors
from sop_faiss.model.networks import Networks, Student, build_student_and_teacher
from sop_faiss.objectives.choose import choose_objective
from sop_faiss.train.checkpoints.checkpoint import flat_optimizer_state, load_network, load_optimizer_state
from sop_faiss.train.compile import compile_networks
from sop_faiss.train.log.alarms import Alarms, Rules
from sop_faiss.train.optim import make_optimizer
from sop_faiss.train.parallel import average_gradients, is_sharded, share_student, whole
from sop_faiss.train.schedules import Schedules
from sop_faiss.train.score_history import ScoreHistory

_log = logging.getLogger(__name__)


@dataclass
class Elapsed:
    """The time of a run of `train.minutes`, without scores (`train/time_limit.py`)."""

    seconds: float = 0.0
    """Of all steps so far."""
    mark_step: int = 0
    """The step from whose end on speed is measured; 0: not reached yet."""
    mark_seconds: float = 0.0
    """`seconds` at that step."""


def autocast_dtype(config: Config, device: torch.device) -> torch.dtype | None:
    """Return the backbone's precision on a device, according to `train.precision`; None for float32."""
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
        self.objective = choose_objective(config)
        self.student, self.teacher = build_student_and_teacher(config, self.objective.heads)
        self.student.to(device).train()
        self.teacher.to(device).eval()
        dtype = autocast_dtype(config, device)
        compile_networks(config.train.compile, (self.student, self.teacher), device, 1 + len(config.train.phases))
        shared, self._averages_by_hand = share_student(Student(self.student), config, device, dtype)
        self.networks = Networks(self.student, self.teacher, shared, device, dtype, config.views)
        self.is_sharded = is_sharded(self.student)
        """Whether this rank has only a part of the student (FSDP2); then all ranks must call `tensors`."""
        self.optimizer = make_optimizer(self.student, config.optim)
        self.objective.open(device, images)
        self.step = 0
        self.images_seen = 0
        self.elapsed = Elapsed()
        self.bad_samples = 0
        self.scores = ScoreHistory()
        self.alarms = Alarms(Rules.of(config, self.schedules.steps_per_epoch))
        self.data_digest = ""
        """Digest of the images that the run is trained on; see `Batches.digest`."""
        self.init_sha256 = ""
        """sha256 of the weights file that `model.init` names."""

    @property
    def last_step(self) -> int:
        """Return the last step: that of the schedules, or `train.stop_after_steps` if it comes first."""
        total = self.schedules.total_steps
        return min(total, self.config.train.stop_after_steps or total)

    def average_gradients(self) -> None:
        """Average the gradients over the ranks, if several backward passes made them (DDP averages in each)."""
        if self._averages_by_hand:
            average_gradients(self.student.parameters())

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return all tensors, by the file that they go to; complete on the main rank."""
        return {
            "student": {name: whole(value) for name, value in self.student.state_dict().items()},
            "teacher": self.teacher.state_dict(),
            "optimizer": {n: whole(v) for n, v in flat_optimizer_state(self.optimizer, self.student).items()},
            "objective": self.objective.state_dict(),
            **self.scores.tensors(),
        }

    def counters(self) -> dict[str, Any]:
        """Return the rest of the state, as JSON values."""
        return {
            "images_seen": self.images_seen,
            "bad_samples": self.bad_samples,
            **self.scores.counters(),
            "data_digest": self.data_digest,
            "alarms": self.alarms.state_dict(),
            "init_sha256": self.init_sha256,
            **self._length(),
        }

    def _length(self) -> dict[str, Any]:
        """Return what is known of the length of a run of `train.minutes`."""
        if not self.config.train.minutes:
            return {}
        return {"elapsed": asdict(self.elapsed), "decided_steps": self.schedules.decided_steps}

    def _load_tensors(self, checkpoint: Path) -> None:
        load_network(self.student, checkpoint, "student")
        load_network(self.teacher, checkpoint, "teacher")
        load_optimizer_state(self.optimizer, self.student, read_tensors(checkpoint, "optimizer"))
        self.objective.load_state_dict(read_tensors(checkpoint, "objective"))

    def resume(self, checkpoint: Path) -> None:
        """Continue from a checkpoint, as if the run had never stopped.

        Raises:
            CheckpointError: it is damaged, or of another configuration.
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
                f"checkpoint {checkpoint} cannot be loaded ({reason}): it was changed; remove it to use the one "
                "before it"
            ) from None
        self.step, self.images_seen = int(state["step"]), int(state["images_seen"])
        self.bad_samples = int(state["bad_samples"])
        self.alarms.load_state_dict(state.get("alarms", {}))
        self.init_sha256 = str(state.get("init_sha256", ""))
        self.elapsed = Elapsed(**state.get("elapsed", {}))
        self.schedules = replace(self.schedules, decided_steps=state.get("decided_steps"))
        _log.info("resuming at step %d from %s", self.step, checkpoint.name)
