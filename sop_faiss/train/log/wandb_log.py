"""Weights & Biases in addition to `metrics.jsonl` (`train.wandb_project`): imported only if asked for."""

from __future__ import annotations

import importlib
import importlib.util
import uuid
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sop_faiss.config import Config
from sop_faiss.errors import ConfigError

_ID_FILE = "wandb_id"
"""Name of a file in the run directory with the id under which a resumed run continues there."""


def require_wandb(config: Config) -> None:
    """Check, before anything is written, that the package is installed if it is asked for.

    Raises:
        ConfigError: the package is missing.
    """
    project = config.train.wandb_project
    if not project:
        return
    found = importlib.util.find_spec("wandb")
    if found is None or found.origin is None:  # without an origin it is a folder of that name, which the package makes
        raise ConfigError(
            f"train.wandb_project = {project} needs the package wandb: pip install 'sop-faiss[wandb]', or set "
            "train.wandb_project=''"
        )


class WandbLog:
    """One run at Weights & Biases, which reads WANDB_MODE, WANDB_API_KEY and so on from the environment.

    Steps that a killed run makes again are logged again, next to the earlier points.

    Args:
        project: the project that the run belongs to.
        run: the run directory; the package keeps its own files in `wandb/` there.
        config: shown with the run.

    Raises:
        ConfigError: it cannot be started, as without a login.
    """

    def __init__(self, project: str, run: Path, config: Config) -> None:
        file = run / _ID_FILE
        if not file.is_file():
            file.write_text(uuid.uuid4().hex + "\n", encoding="utf-8")
        name = run.absolute().name
        try:
            wandb: Any = importlib.import_module("wandb")
            self._run: Any = wandb.init(
                project=project,
                id=file.read_text(encoding="utf-8").strip(),
                name=name,
                dir=str(run),
                config=asdict(config),
                resume="allow",
            )
            # Scores may come after later steps, which their own step axis refuses.
            self._run.define_metric("step")
            self._run.define_metric("*", step_metric="step")
        except Exception as error:  # their errors have no other common base
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConfigError(
                f"train.wandb_project = {project}: Weights & Biases cannot be started ({reason}): wandb login, or "
                "WANDB_MODE=offline, and the same command with `resume`; or train.wandb_project=''"
            ) from error

    def log(self, line: Mapping[str, float | int | None]) -> None:
        """Log one line of `metrics.jsonl`, without the numbers that are null."""
        self._run.log({key: value for key, value in line.items() if value is not None})

    def close(self) -> None:
        """Send what is left, and end."""
        self._run.finish()
