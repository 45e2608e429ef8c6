"""Commands under `torchrun`: several processes share the work of one command."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def ranks_of_torchrun() -> Iterator[bool]:
    """Join the processes that `torchrun` started, if any, for the work inside.

    Yields:
        Whether this process is the one that writes files and prints.
    """
    from sop_faiss.distributed import is_main, join_process_group, leave_process_group

    join_process_group("auto")
    try:
        yield is_main()
    finally:
        leave_process_group()
