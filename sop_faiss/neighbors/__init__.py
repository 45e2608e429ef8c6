"""k nearest rows: the only package that imports FAISS.

torch comes first here, before any module below loads FAISS, so that one OpenMP runtime (torch's) serves both.
"""

import torch  # noqa: F401
