"""Memory in huge pages where the system gives them.

In pages of 4 KiB a long read waits for address translation, and prefetchers stop at every page
(docs/adr/0009).
"""

import mmap

import torch
from torch import Tensor


def allocate_in_huge_pages(num_bytes: int) -> Tensor:
    """[num_bytes] uint8, zeros, of private memory that lives as long as the tensor."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)  # keeps the memory alive
