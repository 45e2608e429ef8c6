"""Sources that are addresses (`https://...`, `s3://...`): distinguished from paths and commands, secrets hidden."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

from sop_faiss.errors import DataError

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_SHELL = re.compile(r"[|;<>`]|\$\(|&&")
_FILE = ("file://", "local://")


def is_address(text: str) -> bool:
    """Return whether a source is an address, not a path."""
    return _ADDRESS.match(text) is not None


def is_web(text: str) -> bool:
    """Return whether a source is an http or https address: only there `?` begins a query and `#` a fragment."""
    return text.lower().startswith(("http://", "https://"))


def path_of_file_address(text: str) -> str:
    """Return the path of a `file://` address; any other text is returned unchanged.

    Raises:
        DataError: it names another machine.
    """
    if not text.lower().startswith(_FILE):
        return text
    host, slash, path = text.partition("://")[2].partition("/")
    if host not in ("", "localhost") or not slash:
        raise DataError(f"source {hide_secrets(text)} is a file of another machine: wanted file:///PATH")
    return f"/{unquote(path)}"


def refuse_commands(text: str) -> None:
    """Refuse what webdataset or fsspec would run or unwrap, and what is not a name.

    Raises:
        DataError: a command, an address inside an address, or something with control characters.
    """
    if "\0" in text or not text.strip():
        raise DataError(f"source {text!r} is not a path: wanted shards, a folder of images or a list")
    address = "://" in text
    if text.lstrip().startswith("pipe:"):
        raise DataError(f"source {hide_secrets(text)!r} is a command: commands are never run, name files")
    if address and not text.isprintable():
        raise DataError(f"source {hide_secrets(text)!r} is not an address: it has control characters")
    if address and "::" in text:
        raise DataError(f"source {hide_secrets(text)} is an address inside an address: name the shards themselves")
    if _SHELL.search(text.partition("?")[0] if is_address(text) else text) and not Path(text).exists():
        raise DataError(f"source {hide_secrets(text)} is a command: commands are never run, name files")


def hide_secrets(text: str) -> str:
    """Remove user, password, query and fragment from an address or a text with one, for messages and records.

    Object stores have names with `?` and `#`; these are kept, unless a `=` follows, as in a signature.
    """
    text = re.sub(r"://[^/?#\s]*@", "://", text)
    found = re.search(r"([A-Za-z0-9+.-]*)://", text)
    if found:
        is_name = found[1] and not found[1].lower().endswith(("http", "https"))
        query = re.compile(r"\?(?=.*=)" if is_name else r"[?#]", re.DOTALL).search(text, found.end())
        text = text[: query.start()] if query else text
    host = re.search(r"://([^/\s]*)", text)
    if host and not re.fullmatch(r"(\[[^\]]*\]|[^:\[\]]*)(:\d*)?", host[1]):  # a password with / ? or # in it
        return f"{text[: host.end() - len(host[1])]}..."
    return text


def name_of_address(address: str) -> str:
    """Return the last part of the path of an address, or of a path."""
    return bare_address(address).rstrip("/").rpartition("/")[2]


def bare_address(address: str) -> str:
    """Return an address without a query."""
    return hide_secrets(address) if is_web(address) else address


def folder_of_address(address: str) -> str:
    """Return the folder of a file; a query, which may contain a signature, is kept."""
    path, query = _split_query(address)
    return path.rpartition("/")[0] + query


def address_in(folder: str, name: str) -> str:
    """Return the address of a file in a folder, with the folder's query."""
    path, query = _split_query(folder)
    return f"{path.rstrip('/')}/{name}{query}"


def _split_query(address: str) -> tuple[str, str]:
    mark = re.search(r"[?#]", address) if is_web(address) else None
    return (address[: mark.start()], address[mark.start() :]) if mark else (address, "")
