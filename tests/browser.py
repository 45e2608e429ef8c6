"""A real browser for tests of pages: Playwright driving the chromium of the system."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

__all__ = ["open_browser"]


def _missing() -> str:
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed"
    return "" if shutil.which("chromium") else "there is no chromium: apt-get install chromium"


@contextlib.contextmanager
def open_browser(**options: Any) -> Iterator[Any]:
    """A page of a headless chromium; without one the test is skipped, but in continuous integration it fails.

    Args:
        options: of the page, as `viewport` or `color_scheme`.
    """
    if missing := _missing():
        if os.environ.get("SOP_NEEDS_BROWSER"):
            pytest.fail(missing)
        pytest.skip(missing)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        try:
            yield browser.new_page(**options)
        finally:
            browser.close()
