"""Tokens beside an index, mapped and read as they are needed; `token_files` has their layout."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Int64, UInt8
from safetensors.numpy import load_file, save_file

from sop_faiss.errors import ConfigError, IndexMismatchError
from sop_faiss.features.feature_space import FeatureSpace
from sop_faiss.files import atomic_directory, locked_directory, sha256_file, write_json
from sop_faiss.index.images import IndexImages
from sop_faiss.index.rerank.settings import TokenSettings
from sop_faiss.index.rerank.token_codes import TokenCodes
from sop_faiss.index.rerank.token_files import (
    FOLDER,
    FORMAT,
    IMAGES,
    MANIFEST,
    WHITENING,
    content_file,
    damage_named,
    has_tokens,
    how_to_make,
    read_manifest,
)
from sop_faiss.index.rerank.tokens import Tokenizer, TokenWhitening, learn_tokenizer, token_preprocess
from sop_faiss.index.search import FeatureIndex
from sop_faiss.index.store import read_states
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.neighbors.product_codes import ProductCodes
from sop_faiss.output_checks import require_replaceable
from sop_faiss.progress import Stage, silent_stage


@dataclass(frozen=True)
class TokenStore:
    """The tokens of an index's images; only what is asked for is read."""

    directory: Path
    manifest: dict[str, Any]
    settings: TokenSettings
    keys: list[str]
    digests: list[str]
    starts: Int64[np.ndarray, " n"]
    counts: Int64[np.ndarray, " n"]
    whitening: TokenWhitening
    codes: TokenCodes
    data: UInt8[np.ndarray, "tokens b"]
    """As `codes` packs them, mapped."""
    checksums: Int64[np.ndarray, " n"] | None
    """The crc32 of each image's stored tokens; None in folders from before they were kept."""
    places: Int64[np.ndarray, " rows"]
    """Of each row of the index, its image among `keys`; -1 for one without tokens, or with those of other content."""

    @classmethod
    def open(cls, index: FeatureIndex) -> TokenStore:
        """Open the tokens of an index; they stay in their file. Their number is verified, their bytes as they are read.

        Raises:
            ConfigError: there are none.
            IndexMismatchError: they are damaged, or of another encoder.
        """
        directory = index.directory / FOLDER
        if not directory.is_dir():
            raise ConfigError(f"{index.directory} has no tokens: {how_to_make(index.directory)}")
        manifest, settings = read_manifest(index.directory)
        with damage_named(index.directory):
            table = pq.read_table(directory / IMAGES)
            keys, digests = (table[name].to_pylist() for name in ("key", "sha256"))
            starts, counts = (table[name].to_numpy().astype(np.int64) for name in ("start", "count"))
            checksums = table["crc32"].to_numpy().astype(np.int64) if "crc32" in table.column_names else None
            tensors = load_file(directory / WHITENING)
            whitening = TokenWhitening(tensors["mean"], tensors["matrix"])
            quantizer = ProductCodes(tensors["centroids"]) if "centroids" in tensors else None
            if (0 if quantizer is None else len(quantizer.centroids)) != settings.code_bytes:
                raise ValueError(f"codes are not {settings.codes}")
            codes = TokenCodes(whitening.matrix.shape[1], quantizer)
            mapped = np.memmap(directory / content_file(settings), np.uint8, "r")
            data = np.asarray(mapped).reshape(-1, codes.token_bytes)
            if len(counts) and (min(starts.min(), counts.min() - 1) < 0 or (starts + counts).max() > len(data)):
                raise ValueError("images have more tokens than there are")
        if manifest["encoder"] != index.manifest.encoder["fingerprint"]:
            raise IndexMismatchError(
                f"{directory} has tokens of another encoder than the index: remove it, and "
                f"{how_to_make(index.directory)}"
            )
        by_key = {key: place for place, key in enumerate(keys)}
        places = np.array([by_key.get(key, -1) for key in index.ids.keys], np.int64)
        known = read_states(index.directory, index.manifest).digests
        for row in np.flatnonzero(places >= 0).tolist():
            if known[row] and known[row].hex() != digests[places[row]]:
                places[row] = -1
        return cls(
            directory, manifest, settings, keys, digests, starts, counts, whitening, codes, data, checksums, places
        )

    def require_complete(self, index: FeatureIndex) -> None:
        """Check that every image of the index has tokens.

        Raises:
            IndexMismatchError: some have none, such as those that were added since.
        """
        missing = np.flatnonzero(self.places < 0)
        if len(missing):
            keys, known = [index.ids.keys[row] for row in missing.tolist()], set(self.keys)
            changed = sum(key in known for key in keys)
            of_others = f"; there are tokens of {changed:,} with another content" if changed else ""
            raise IndexMismatchError(
                f"{len(missing):,} of {len(index):,} images of {index.directory} have no tokens (first {keys[0]!r}"
                f"{of_others}): {how_to_make(index.directory)}"
            )

    def of(self, rows: Sequence[int]) -> list[np.ndarray]:
        """Read the tokens of rows of the index.

        Raises:
            IndexMismatchError: their bytes have changed, or they are not finite.
        """
        if not len(rows):
            return []
        places = self.places[np.asarray(rows, np.int64)]
        spans = self._spans(places)
        packed = np.concatenate(spans)
        known = None if self.checksums is None else self.checksums[places].tolist()
        changed = known is not None and known != [zlib.crc32(each.data) for each in spans]
        if changed or not self.codes.are_finite(packed):
            raise IndexMismatchError(
                f"{self.directory / content_file(self.settings)} is damaged: remove {self.directory}, and "
                f"{how_to_make(self.directory.parent)}"
            )
        return np.split(self.codes.tokens(packed), np.cumsum(self.counts[places])[:-1])

    def _spans(self, places: Int64[np.ndarray, " m"]) -> list[UInt8[np.ndarray, "t b"]]:
        """Return the tokens of some images as they are stored, mapped."""
        spans = zip(self.starts[places].tolist(), self.counts[places].tolist(), strict=True)
        return [self.data[start : start + count] for start, count in spans]

    def tokenizer(self, encoder: Encoder) -> Tokenizer:
        """Return what makes tokens of queries.

        Raises:
            IndexMismatchError: the encoder is another one, or prepares images in another way.
        """
        preprocess = token_preprocess(encoder, self.settings)
        own = FeatureSpace(self.manifest["encoder"], self.manifest["preprocess"], "tokens", 0)
        difference = FeatureSpace(encoder.fingerprint, preprocess.to_dict(), "tokens", 0).difference(own)
        if difference is not None:
            of_encoder = "" if difference.what == "encoder" else "that of "
            raise IndexMismatchError(
                f"{self.directory} has tokens of another {difference.what} than {of_encoder}{encoder.name} "
                f"({difference.values}): remove it, and {how_to_make(self.directory.parent)}"
            )
        return Tokenizer(encoder, preprocess, self.whitening, self.settings.most, self.codes)


def write_tokens(
    index: FeatureIndex,
    encoder: Encoder,
    images: IndexImages,
    settings: TokenSettings | None = None,
    stage: Stage = silent_stage,
) -> int:
    """Make the tokens of all images of an index that have none, and write them beside it.

    Args:
        index: whose images.
        encoder: the index's.
        images: where they are now.
        settings: how tokens are made; others than before make all again. None: as before, or the defaults.
        stage: announces learning the whitening, if none is there, and making the tokens.

    Returns:
        The number of images that were read.

    Raises:
        DataError: an image is missing, cannot be read, or has changed since it was indexed.
        SopError: as `learn_tokenizer`, another process is changing the index, or its directory cannot be written.
    """
    index.check_encoder(encoder)
    require_replaceable(index.directory / FOLDER)
    old = TokenStore.open(index) if has_tokens(index.directory) else None
    settings = settings or (TokenSettings() if old is None else old.settings)
    if old is not None and old.settings != settings:
        old = None
    keys = index.ids.keys
    if old is None:
        with stage("learning tokens", "images") as progress:
            tokenizer = learn_tokenizer(encoder, settings, len(index), images.read, keys, progress=progress)
    else:
        tokenizer = old.tokenizer(encoder)
    missing = list(range(len(index))) if old is None else np.flatnonzero(old.places < 0).tolist()
    if not missing:
        return 0
    if old is not None:
        read_manifest(index.directory, every_byte=True)  # else what is damaged would get a new checksum
    digests: dict[int, str] = {}
    known = read_states(index.directory, index.manifest).digests

    def read(position: int) -> bytes:
        encoded, digest = images.read_unchanged(missing[position], known[missing[position]])
        digests[position] = digest.hex()
        return encoded

    with locked_directory(index.directory), atomic_directory(index.directory / FOLDER, overwrite=True) as folder:
        lines: list[tuple[str, str, int, int, int]] = []
        done = 0
        with (folder / content_file(settings)).open("wb") as stream:
            for row in [] if old is None else np.flatnonzero(old.places >= 0).tolist():
                assert old is not None
                packed = old._spans(old.places[row : row + 1])[0]
                lines.append((keys[row], old.digests[old.places[row]], done, len(packed), zlib.crc32(packed.data)))
                stream.write(packed.data)
                done += len(packed)
            names = [keys[row] for row in missing]
            with stage("tokens", "images") as progress:
                for position, made in tokenizer.tokens(len(missing), read, names, progress):
                    packed = tokenizer.codes.packed(made)
                    lines.append((names[position], digests[position], done, len(made), zlib.crc32(packed.data)))
                    stream.write(packed.data)
                    done += len(made)
        _finish(folder, lines, tokenizer, settings)
    return len(missing)


def _finish(
    folder: Path, lines: list[tuple[str, str, int, int, int]], tokenizer: Tokenizer, settings: TokenSettings
) -> None:
    """Write the files besides the tokens."""
    columns = zip(("key", "sha256", "start", "count", "crc32"), zip(*lines, strict=True), strict=True)
    pq.write_table(pa.table({name: list(values) for name, values in columns}), folder / IMAGES)
    whitening = {"mean": tokenizer.whitening.mean, "matrix": np.ascontiguousarray(tokenizer.whitening.matrix)}
    if tokenizer.codes.quantizer is not None:
        whitening["centroids"] = tokenizer.codes.quantizer.centroids
    save_file(whitening, folder / WHITENING)
    paths = [folder / name for name in (content_file(settings), IMAGES, WHITENING)]
    manifest = FORMAT | {
        "encoder": tokenizer.encoder.fingerprint,
        "preprocess": tokenizer.preprocess.to_dict(),
        "settings": asdict(settings),
        "files": {path.name: {"sha256": sha256_file(path), "bytes": path.stat().st_size} for path in paths},
    }
    write_json(folder / MANIFEST, manifest)
