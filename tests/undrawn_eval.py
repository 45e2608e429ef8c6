"""`sop-eval` without torchvision's random choice of proposals, so that one and two processes can be compared."""

from __future__ import annotations

from typing import Any

import torch

from sop_faiss.cli.eval import main

if __name__ == "__main__":
    torch.randperm = lambda count, device=None, **_: torch.arange(count, device=device)  # type: ignore[assignment]
    made: Any = main()
