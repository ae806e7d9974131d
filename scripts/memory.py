"""How much memory a process uses: of the host, and for --profile_memory of its device at named moments."""
import dataclasses
import os
import resource
from pathlib import Path

import torch

from scripts import profiling


def peak() -> int:
    """Bytes: the largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def host() -> int:
    """Bytes of private host memory in use now; memory-mapped files (the checkpoint) are not counted."""
    pages = Path("/proc/self/statm")
    if not pages.exists():
        return peak()
    resident, shared = (int(n) for n in pages.read_text().split()[1:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def host_free(processes: int) -> int:
    """Bytes of host memory that are free, page cache included, for each of so many processes."""
    info = Path("/proc/meminfo")
    lines = info.read_text().splitlines() if info.exists() else []
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
    return found[0] // processes if found else 2**62


class Memory:
    """Memory in use at named moments (`Runtime.phase`) up to the end of the third step, for --profile_memory:
    on an accelerator what is allocated and reserved, on a CPU the process's private memory. Only counters of
    the host are read."""

    def __init__(self, device):
        self.moments: dict[str, int] = {}
        self.steps = 3
        self.kinds, self.peaks = dict(allocated=host), dict(allocated=peak)
        if device.type != "cpu":
            now, most = torch.accelerator.memory_allocated, torch.accelerator.max_memory_allocated
            self.kinds = dict(allocated=now, reserved=torch.accelerator.memory_reserved)
            self.peaks = dict(allocated=most, reserved=torch.accelerator.max_memory_reserved)
        if memory := profiling.recordable(device):  # the newest allocations, for profiling.explained
            memory._record_memory_history(enabled="all", max_entries=100_000)

    def __call__(self, moment: str, kinds: dict | None = None) -> None:
        """Of a moment that comes several times (micro-batches) the largest value is kept."""
        for kind, read in (kinds or self.kinds).items() if self.steps else ():
            name = f"memory/{kind}_{moment}"
            self.moments[name] = max(read(), self.moments.get(name, 0))

    def take(self, runtime) -> dict[str, int]:
        """The moments of a step, and of what came before the first, in bytes: of each the largest of all
        ranks."""
        if not self.steps:
            return {}
        self("peak", self.peaks)
        names, values = zip(*self.moments.items())
        self.moments, self.steps = {}, self.steps - 1
        return dict(zip(names, map(int, runtime.gather(*values).amax(0).tolist())))


def watch(config, runtime):
    """The runtime, noting memory where --profile_memory is on."""
    return dataclasses.replace(runtime, phase=Memory(runtime.device)) if config.profile_memory else runtime
