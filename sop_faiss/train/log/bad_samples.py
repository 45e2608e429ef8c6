"""Bad images of a run: all of them in `bad_samples.jsonl`, some in the log, and an error if there are too many."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path

from sop_faiss.data.batch import BadSample
from sop_faiss.errors import DataError, one_line
from sop_faiss.train.log.json_lines import keep_lines_until, read_lines

_log = logging.getLogger(__name__)

BAD_SAMPLES_FILE = "bad_samples.jsonl"
_SHOWN_PER_REASON = 5  # enough to see what is wrong


class BadSampleLog:
    """Writes `bad_samples.jsonl` and a bounded part of it to the log; only the main rank has one.

    The log shows the first five of each reason, and then the counts each time their sum has doubled: a run with a
    million bad images logs some forty lines, and loses no time by it.

    Args:
        run: the run directory.
        resumed_step: lines of later steps are dropped, since these steps will be made again; 0: all.
    """

    def __init__(self, run: Path, resumed_step: int) -> None:
        self._path = run / BAD_SAMPLES_FILE
        keep_lines_until(self._path, resumed_step)
        self._counts = Counter(str(line.get("reason")) for line in read_lines(self._path))
        self._counted = self._counts.total()  # total of the last counts in the log

    def add(self, bad: list[BadSample], step: int) -> None:
        """Record images that a step could not read: which, where, why, and which image took their place."""
        with self._path.open("a", encoding="utf-8") as stream:
            for sample in bad:
                stream.write(json.dumps({"step": step, **vars(sample)}) + "\n")
        for sample in bad:
            self._counts[sample.reason] += 1
            if self._counts[sample.reason] <= _SHOWN_PER_REASON:
                where = f" in {sample.shard} at offset {sample.offset}" if sample.shard else ""
                text = f"bad image {sample.key}{where}: {sample.message}; {sample.replacement} took its place"
                _log.warning("%s", one_line(text))
        total = self._counts.total()
        if total >= 2 * self._counted and max(self._counts.values()) > _SHOWN_PER_REASON:
            counts = ", ".join(f"{reason} {count:,}" for reason, count in self._counts.most_common())
            _log.warning("%d bad images so far (%s), all listed in %s", total, counts, BAD_SAMPLES_FILE)
            self._counted = total


def check_bad_share(bad: int, asked: int, images: int, limit: float) -> None:
    """Raise DataError if too many images cannot be read.

    Args:
        bad: images that could not be read so far.
        asked: images that were needed so far, each of which was read or replaced.
        images: images in the data set; the fraction is of at least this many attempts.
        limit: `data.max_bad_fraction`.

    Raises:
        DataError: the fraction exceeds the limit.
    """
    tried = asked + bad  # another image took the place of each bad one, and may have been bad itself
    if bad / max(tried, images) > limit:
        raise DataError(
            f"{bad} of {tried} attempts to read an image failed, more than data.max_bad_fraction = {limit}: see "
            f"{BAD_SAMPLES_FILE}, repair the data (sop-data check), or raise the limit"
        )
