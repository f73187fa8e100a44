"""How much memory and how many processors are this process's: of the machine, within its control
groups. No torch, and nothing imported: the package asks before the program handles Ctrl-C.
"""

import os

_NO_LIMIT = 1 << 60  # bytes; without a limit, version 1 has the last page below 2^63


def free_memory(root: str | os.PathLike[str] = "/") -> int | None:
    """Bytes available for allocations: MemAvailable, within the limits of control groups.

    None if unknown (outside Linux). `root` is for tests.
    """
    free = [limit - used for limit, used in _memory(root)]
    for name, *rest in _lines(root, "proc/meminfo"):
        if name == "MemAvailable:" and rest[0].isdigit():
            free.append(int(rest[0]) * 1024)
    return max(0, min(free)) if free else None


def memory_limit(root: str | os.PathLike[str] = "/") -> int | None:
    """The smallest limit of the control groups in bytes; None without a limit."""
    return min((limit for limit, _ in _memory(root)), default=None)


def processors(root: str | os.PathLike[str] = "/") -> int:
    """Number of threads that can run at once: logical processors, within control group quotas.

    A quota is rounded down, to at least one: more threads would make all others wait.
    """
    count = len(processor_numbers())
    for group in _groups(root, "cpu"):
        words = _words(root, group, "cpu.max") or [
            *_words(root, group, "cpu.cfs_quota_us"),
            *_words(root, group, "cpu.cfs_period_us"),
        ]
        if len(words) == 2 and all(map(str.isdigit, words)) and int(words[1]):  # not max, not -1
            count = min(count, max(1, int(words[0]) // int(words[1])))
    return count


def processor_numbers() -> list[int]:
    """The numbers of the logical processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):  # includes limits of control groups
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def system_text(*path: str | os.PathLike[str]) -> str:
    """What the system says in a file such as `/proc/cpuinfo`; empty where it has none."""
    try:
        with open(os.path.join(*path), encoding="utf-8", errors="replace") as file:
            return file.read()
    except (OSError, ValueError):
        return ""


def _memory(root: str | os.PathLike[str]) -> list[tuple[int, int]]:
    """Limit and use of each control group of this process.

    Reclaimable file cache is not counted as used.
    """
    found = []
    for group in _groups(root, "memory"):
        # per version: limit, use, and the prefix of hierarchical counters
        for most, used, prefix in (
            ("memory.max", "memory.current", ""),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ):
            limit, now = _words(root, group, most), _words(root, group, used)
            if not (limit and now and limit[0].isdigit() and now[0].isdigit()):  # "max": no limit
                continue
            if int(limit[0]) < _NO_LIMIT:
                lines = _lines(root, group, "memory.stat")
                stat = {words[0]: words[1] for words in lines if words[1:]}
                kept = sum(int(stat.get(f"{prefix}{a}active_file", 0)) for a in ("", "in"))
                found.append((int(limit[0]), max(0, int(now[0]) - kept)))
    return found


def _groups(root: str | os.PathLike[str], controller: str) -> list[str]:
    """Directories of this process's control groups, nested ones and both versions."""
    paths = {""}
    for line in system_text(root, "proc/self/cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        path = path.strip("/")
        while path and (not controllers or controller in controllers.split(",")):
            paths.add(path)
            path = os.path.dirname(path)
    folders = ("sys/fs/cgroup", f"sys/fs/cgroup/{controller}")
    every = [os.path.join(folder, path) for folder in folders for path in sorted(paths)]
    return [group for group in every if os.path.isdir(os.path.join(root, group))]


def _words(*path: str | os.PathLike[str]) -> list[str]:
    return system_text(*path).split()


def _lines(*path: str | os.PathLike[str]) -> list[list[str]]:
    """The words of each non-empty line."""
    return [line.split() for line in system_text(*path).splitlines() if line.split()]
