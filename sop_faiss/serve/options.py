"""The options of serving an index, and the limits that keep one client from using up the machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sop_faiss.data.images.decode import MAX_PIXELS
from sop_faiss.errors import ConfigError, DataError


@dataclass(frozen=True)
class ServeOptions:
    """Where to listen, and limits."""

    host: str = "127.0.0.1"
    """Address or name to listen at; the default is reachable from this machine only."""
    port: int = 8000
    """0 selects a free port."""
    images_root: Path | None = None
    """Where the index's images are now; None: where they were when it was built."""
    table: Path | None = None
    """More columns for conditions, by key: .csv or .parquet; None: those of the index alone."""
    max_upload_bytes: int = 16_000_000
    """Largest image file that is accepted."""
    max_upload_pixels: int = MAX_PIXELS
    """Largest image that is decoded, width times height."""
    threads: int = 2
    """Searches that run at once; the encoder runs one of them at a time."""
    max_waiting: int = 256
    """Searches that may wait for their turn; further ones are refused with 503."""
    max_buffered_bytes: int = 512_000_000
    """Total size of images that are being received or wait for their turn."""
    upload_seconds: float = 60.0
    """Longest time that an image may take to arrive."""
    header_seconds: float = 20.0
    """Longest time that a connection may take to send a request's headers."""
    thumbnail_cache_bytes: int = 64_000_000
    """Thumbnails kept in memory."""

    def __post_init__(self) -> None:
        if not self.host:
            raise ConfigError("`host` is empty: wanted an address such as 127.0.0.1")
        if not 0 <= self.port <= 65_535:
            raise ConfigError(f"`port` {self.port}: wanted 0 (a free one) to 65535")
        for name, least in (("max_upload_bytes", 1000), ("max_upload_pixels", 1), ("threads", 1), ("max_waiting", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} = {getattr(self, name)}: wanted {least} or more")
        if self.max_buffered_bytes < self.max_upload_bytes:
            raise ConfigError(
                f"max_upload_bytes = {self.max_upload_bytes}: wanted at most {self.max_buffered_bytes}, "
                "the limit (max_buffered_bytes) for all images that wait"
            )
        if self.max_upload_pixels > MAX_PIXELS:
            raise ConfigError(f"max_upload_pixels = {self.max_upload_pixels}: wanted at most {MAX_PIXELS}")
        if not (self.upload_seconds > 0 and self.header_seconds > 0):
            raise ConfigError("upload_seconds and header_seconds: wanted times above 0")
        if self.thumbnail_cache_bytes < 0:
            raise ConfigError(f"thumbnail_cache_bytes = {self.thumbnail_cache_bytes}: wanted 0 or more")
        if self.images_root is not None and not self.images_root.is_dir():
            raise DataError(f"`images_root` {self.images_root} is not a folder: wanted the folder of the images")
