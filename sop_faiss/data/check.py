"""Check a data set: every shard is walked, every image decoded, and all compared with the manifest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from sop_faiss.data.images.class_numbers import whole_numbers
from sop_faiss.data.images.decode import MAX_PIXELS, drop_reason
from sop_faiss.data.images.deep_grayscale import DeepImage, DeepTally, require_top_value
from sop_faiss.data.images.keys import is_hidden
from sop_faiss.data.images.near_duplicates import Duplicates, Signature, image_signature
from sop_faiss.data.images.source import ImageSource, find_shards, open_source
from sop_faiss.data.images.verified_image import image_name, read_whole
from sop_faiss.data.ordered_map import MAX_WORKERS, default_workers, map_ordered
from sop_faiss.data.shards.shard_source import MANIFEST_NAME, ShardSource, common_folder, open_shards
from sop_faiss.errors import ConfigError, DataError, SopError
from sop_faiss.files import read_json, sha256_file
from sop_faiss.progress import ProgressCallback


@dataclass(frozen=True)
class BadImage:
    """An image that cannot be used, and why."""

    shard: str
    member: str
    reason: str


@dataclass(frozen=True)
class SideLengths:
    """Shorter sides of the good images, in pixels."""

    smallest: int
    median: int
    largest: int


@dataclass
class CheckReport:
    """What `check` found; `problems` has one line for each problem, and is empty if there are none."""

    source: str
    shards: int = 0
    samples: int = 0
    good: int = 0
    bytes: int = 0
    labeled: int = 0
    label_counts: dict[int, int] = field(default_factory=dict)
    formats: dict[str, int] = field(default_factory=dict)
    shorter_side: SideLengths | None = None
    bad_by_reason: dict[str, int] = field(default_factory=dict)
    bad: list[BadImage] = field(default_factory=list)
    ignored_members: dict[str, int] = field(default_factory=dict)
    repeated_keys: int = 0  # in more than one shard; not a problem: they are prefixed with the shard's name when read
    has_manifest: bool = False
    duplicates: dict[str, Any] | None = None  # `Duplicates.report`, if requested; not a problem in itself
    deep_grayscale: DeepTally = field(default_factory=DeepTally)
    problems: list[str] = field(default_factory=list)

    @property
    def notices(self) -> list[str]:
        """Notes on grayscale images of more than 8 bits; not problems in themselves."""
        return self.deep_grayscale.notices()

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON types; `ok` is true if there are no problems."""
        content = asdict(self)
        content["label_counts"] = {str(label): count for label, count in self.label_counts.items()}
        content["deep_grayscale"] = self.deep_grayscale.to_dict()
        return {"ok": not self.problems, **content, "notices": self.notices}


def check(
    src: str | Path,
    *,
    workers: int | None = None,
    max_pixels: int = MAX_PIXELS,
    top_value: float = 0.0,
    find_duplicates: bool = False,
    progress: ProgressCallback | None = None,
) -> CheckReport:
    """Verify shards (or a folder or list of images): headers, keys, labels, every image, and the manifest.

    All problems are found, not only the first; members other than images and labels are counted, never read.

    Args:
        src: anything `open_source` takes.
        workers: threads; None for one per processor, 8 at most.
        max_pixels: images with more are bad.
        top_value: white in grayscale of more than 8 bits; 0: what the file states, else the largest value of its type.
        find_duplicates: report exact and near duplicates.
        progress: called with the number of images checked and their total.

    Raises:
        DataError: there is nothing to check.
    """
    if workers is not None and not 1 <= workers <= MAX_WORKERS:
        raise ConfigError(f"workers is {workers}, wanted 1 to {MAX_WORKERS:,}")
    require_top_value(top_value)
    report = CheckReport(str(src))
    try:
        paths = find_shards(src)
    except DataError:
        if not Path(src).is_dir():
            raise
        found = sorted(Path(src).glob("*.tar"))  # the manifest names more, which is reported below
        paths = [path for path in found if not is_hidden(path.name)]
    sources = _open_each(paths, report) if paths else [open_source(src)]
    total = sum(len(source) for source in sources)
    done = 0
    sides: Counter[int] = Counter()
    duplicates = Duplicates() if find_duplicates else None
    for source in sources:
        results = map_ordered(
            partial(_check_image, source, max_pixels, top_value, find_duplicates),
            range(len(source)),
            workers or default_workers(),
        )
        for position, result in enumerate(results):
            _count(report, sides, duplicates, source, position, result)
            done += 1
            if progress is not None:
                progress(done, total)
    report.shorter_side = _side_lengths(sides)
    report.duplicates = None if duplicates is None else duplicates.report()
    keys = Counter(key for source in sources for key in source.keys)
    report.repeated_keys = sum(count > 1 for count in keys.values())
    if paths:
        _check_manifest(common_folder([path.absolute().parent for path in paths]), paths, sources, report)
    report.problems += [f"{count} images are bad: {reason}" for reason, count in report.bad_by_reason.items()]
    return report


def _open_each(paths: Sequence[Path], report: CheckReport) -> list[ImageSource]:
    """Walk every shard; those that cannot be walked become problems."""
    sources: list[ImageSource] = []
    for path in paths:
        report.shards += 1
        try:
            source = open_shards(str(path), [path], ignore_sidecars=True)
        except DataError as error:
            report.problems.append(str(error))
            continue
        report.bytes += source.identities[0][0]
        for kind, count in source.ignored.items():
            report.ignored_members[kind] = report.ignored_members.get(kind, 0) + count
        if source.stray_labels:
            report.problems.append(source.stray_labels)
        sources.append(source)
    return sources


class _Good(NamedTuple):
    """Facts about a good image."""

    format: str
    shorter_side: int  # pixels
    signature: Signature | None
    deep: DeepImage | None


def _check_image(
    source: ImageSource, max_pixels: int, top_value: float, signed: bool, position: int
) -> _Good | DataError:
    """Return the facts about one image (with a signature if `signed`), or what is wrong with it."""
    whole = read_whole(source, position, max_pixels, top_value)
    if isinstance(whole, DataError):
        return whole
    signature = image_signature(whole.encoded, whole.image) if signed else None
    return _Good(whole.format or "unknown", min(whole.image.size), signature, whole.deep)


def _count(
    report: CheckReport,
    sides: Counter[int],
    duplicates: Duplicates | None,
    source: ImageSource,
    position: int,
    result: _Good | DataError,
) -> None:
    report.samples += 1
    label = -1 if source.labels is None else int(source.labels[position])
    if label >= 0:
        report.labeled += 1
        report.label_counts[label] = report.label_counts.get(label, 0) + 1
    if isinstance(result, DataError):
        reason = drop_reason(result)
        report.bad_by_reason[reason] = report.bad_by_reason.get(reason, 0) + 1
        report.bad.append(BadImage(source.source_of(position), source.member_of(position), str(result)))
        return
    report.good += 1
    report.formats[result.format] = report.formats.get(result.format, 0) + 1
    sides[result.shorter_side] += 1
    report.deep_grayscale.add(result.deep)
    if duplicates is not None and result.signature is not None:
        duplicates.add(image_name(source, position), label, result.signature)


def _side_lengths(sides: Counter[int]) -> SideLengths | None:
    ordered = sorted(sides.elements())
    return SideLengths(ordered[0], ordered[len(ordered) // 2], ordered[-1]) if ordered else None


def _check_manifest(folder: Path, paths: Sequence[Path], sources: Sequence[ImageSource], report: CheckReport) -> None:
    """Compare the shards with `manifest.json`: names, sample counts, bytes, sha256, class names."""
    if not (folder / MANIFEST_NAME).is_file():
        return
    try:
        manifest = read_json(folder / MANIFEST_NAME)
    except SopError as error:
        report.problems.append(str(error))
        return
    try:
        entries = {str(entry["name"]): entry for entry in manifest["shards"]}
        expected = {name: (int(e["samples"]), int(e["bytes"]), str(e["sha256"])) for name, e in entries.items()}
    except (KeyError, TypeError, ValueError):
        report.problems.append(f"{folder / MANIFEST_NAME} is damaged or not a manifest of shards")
        return
    report.has_manifest = True
    samples = {source.shards[0]: len(source) for source in sources if isinstance(source, ShardSource)}
    for path in paths:
        if path.name not in expected:
            report.problems.append(f"shard {path} is not in the manifest")
            continue
        want_samples, want_bytes, want_sha256 = expected[path.name]
        got_bytes = path.stat().st_size
        if got_bytes != want_bytes:
            report.problems.append(f"shard {path} has {got_bytes} bytes, the manifest says {want_bytes}")
        elif sha256_file(path) != want_sha256:
            report.problems.append(f"shard {path} has another sha256 than the manifest says")
        got_samples = samples.get(path.absolute(), want_samples)
        if got_samples != want_samples:
            report.problems.append(f"shard {path} has {got_samples} samples, the manifest says {want_samples}")
    here = {path.name for path in folder.glob("*.tar")}
    report.problems += [f"shard {name} is in the manifest but missing" for name in expected if name not in here]
    classes = manifest.get("classes")
    if not isinstance(classes, list):
        return
    numbers = whole_numbers(map(str, classes))
    named = range(len(classes)) if numbers is None else numbers.values()
    if any(label not in named for label in report.label_counts):
        report.problems.append(f"labels go up to {max(report.label_counts)}, the manifest names {len(classes)} classes")
