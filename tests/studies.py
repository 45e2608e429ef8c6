"""Tiny studies for tests: their files, and runs that are made in this process."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import yaml

from sop_faiss.errors import SopError
from sop_faiss.verbs.study.jobs import REQUEUE, Ended, Job
from sop_faiss.verbs.study.one_run import probe_arm, run_one
from tests.runs import tiny_config_file

SMALL = {
    "views.local_count": 0,
    "model.depth": 1,
    "evaluate.every_steps": 2,
    "evaluate.test": "holdout",
    "evaluate.k": 3,
    "data.holdout_share": 0.5,
    "train.batch_size": 4,
}


def study_file(folder: Path, images: Path, **changes: object) -> Path:
    """Write a study of two arms, two seeds and four steps; `changes` replace its keys, None removes one."""
    content: dict[str, object] = {
        "base": str(tiny_config_file(folder)),
        "settings": {**SMALL, "data.train": str(images)},
        "axes": {"sop.cls.tasks": [1, 2]},
        "seeds": [0, 1],
        "budget": {"steps": 4},
        "final": {"tasks": ["knn"], "ks": [3]},
        **changes,
    }
    file = folder / "tiny_study.yaml"
    file.write_text(
        yaml.safe_dump({key: value for key, value in content.items() if value is not None}, sort_keys=False)
    )
    return file


def runs_here(before: Callable[[Job], None] = lambda job: None) -> Callable[..., Generator[Ended, None, None]]:
    """Return a stand-in for `run_on_this_machine` that starts no processes; `before` may raise, as a failing run."""

    def run(
        jobs: Sequence[Job], at_once: int, threads: int, lock: int | None, waiting: object = None
    ) -> Generator[Ended, None, None]:
        for job in jobs:
            root = Path(job.command[job.command.index("--out") + 1])
            job.log.parent.mkdir(parents=True, exist_ok=True)
            try:
                before(job)
                if "--probe" in job.command:
                    probe_arm(root, job.name)
                    yield Ended(job.name, 0, "")
                else:
                    yield Ended(job.name, 0 if run_one(root, job.name) else REQUEUE, "")
            except SopError as error:
                yield Ended(job.name, 1, f"error: {error}")

    return run
