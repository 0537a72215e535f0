"""How much memory this process may still take: the machine's, or its control group's where that is less."""

from pathlib import Path


def available_memory_bytes() -> int:
    available = _meminfo_available()
    limit, used = (
        _read_int(Path("/sys/fs/cgroup/memory.max")),
        _read_int(Path("/sys/fs/cgroup/memory.current")),
    )
    if limit is not None and used is not None:
        available = min(available, max(limit - used, 0))
    return available


def _meminfo_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("/proc/meminfo has no MemAvailable")


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no control group, or "max"
        return None
