"""Looks at the processes of a run before a long one: what each sees, how fast they exchange, who differs.

    sbatch fsdp_multi_node.sh check
    python scripts/launch_check.py [--world_size 2]      # on this machine, or under torchrun or srun

Prints a line per rank, the bandwidth of all-gather and reduce-scatter over all ranks and inside each node,
and what is not the same everywhere. Exit code 1 where something is not the same, bandwidth aside.
"""
import os
import platform
import socket
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from any folder
from scripts.flags import Refused, UserError, run_script

ROOT = Path(__file__).resolve().parents[1]
PART = {"cpu": 2**22}  # bytes each rank contributes to a collective; on accelerators 2**28


def facts(runtime) -> dict:
    """What this rank sees; memory in GiB."""
    import torch
    from scripts import logs
    device, memory = platform.machine(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if torch.accelerator.is_available():
        properties = torch.get_device_module(runtime.device).get_device_properties(runtime.device)
        device, memory = properties.name, properties.total_memory
    return dict(host=socket.gethostname(), device=f"{runtime.device.type} {device}", memory=memory >> 30,
                python=platform.python_version(), commit=logs.git_commit(), cuda=torch.version.cuda,
                **logs.versions())


def seconds(call, group) -> float:
    """The fastest of three calls, by the clock of this rank, each begun together."""
    import torch.distributed as dist
    times = []
    for _ in range(4):
        dist.barrier(group)
        start = time.perf_counter()
        call()[0].item()  # waits for the device
        times.append(time.perf_counter() - start)
    return min(times[1:])  # the first sets connections up


def bandwidth(runtime, group) -> tuple[float, float]:
    """GiB/s that a rank of the group takes in by all-gather, and gives away by reduce-scatter. Collective."""
    import torch
    import torch.distributed as dist
    world, size = dist.get_world_size(group), PART.get(runtime.device.type, 2**28)
    part = torch.zeros(size // 4, device=runtime.device)
    whole = part.new_zeros(world * len(part))

    def gather():
        dist.all_gather_single(whole, part, group=group)
        return whole

    def scatter():
        dist.reduce_scatter_single(part, whole, group=group)
        return part
    amount = size * (world - 1) / 2**30
    return amount / seconds(gather, group), amount / seconds(scatter, group)


def differences(every: list[dict]) -> list[str]:
    """Ranks whose facts, their host aside, are not those of most ranks."""
    lines = []
    for name in every[0]:
        usual = Counter(rank[name] for rank in every).most_common(1)[0][0]
        lines += [f"rank {number} on {rank['host']}: {name} {rank[name]}, elsewhere {usual}"
                  for number, rank in enumerate(every) if name != "host" and rank[name] != usual]
    return lines


def slow(every: list[dict], inside: list[tuple[float, float]]) -> list[str]:
    """Nodes whose ranks exchange data at less than half the usual speed."""
    usual = statistics.median(gathered for gathered, _ in inside)
    nodes = {rank["host"]: gathered for rank, (gathered, _) in zip(every, inside)}
    return [f"{host}: all-gather inside the node {speed:.2f} GiB/s, elsewhere {usual:.2f}"
            for host, speed in nodes.items() if speed < usual / 2]


def report(every: list[dict], overall: tuple[float, float], inside: list[tuple[float, float]]) -> list[str]:
    """Prints all of it. Returns what differs."""
    for number, rank in enumerate(every):
        print(f"rank {number}  " + "  ".join(str(rank[name]) for name in ("host", "device")),
              f" {rank['memory']} GiB")
    print("versions", "  ".join(f"{name} {every[0][name]}" for name in list(every[0])[3:]))
    print(f"all {len(every)} ranks: all-gather {overall[0]:.2f} GiB/s, reduce-scatter {overall[1]:.2f} GiB/s")
    for host, (gathered, scattered) in {r["host"]: speed for r, speed in zip(every, inside)}.items():
        print(f"inside {host}: all-gather {gathered:.2f} GiB/s, reduce-scatter {scattered:.2f} GiB/s")
    differing = differences(every)
    print("\n".join(["DIFFERENT", *differing, *slow(every, inside)]) if differing or slow(every, inside)
          else "all ranks see the same", flush=True)
    return differing


def look(runtime) -> int:
    """On every rank. Returns its exit code."""
    import torch.distributed as dist
    nodes, _ = dist.new_subgroups(runtime.local_world)
    mine = facts(runtime), bandwidth(runtime, dist.group.WORLD), bandwidth(runtime, nodes)
    every: list = [None] * runtime.world
    dist.all_gather_object(every, mine)
    seen, overall, inside = map(list, zip(*every))
    return int(bool(report(seen, overall[0], inside) if runtime.main else differences(seen)))


def main(
    world_size: int = -1,  # processes; -1: one per accelerator, on a CPU 2
    master_addr: str = "localhost",  # address of the first process
    master_port: int = 0,  # its port; 0: found by itself
):
    "Report what each process of a run sees, how fast they exchange data, and which differ."
    from scripts import launcher
    try:
        code = launcher.run_ranks(__file__, look, world_size, master_addr, master_port)
    except UserError as error:
        raise Refused("launch_check.py", error) from None
    sys.exit(code)


if __name__ == "__main__":
    run_script(main)
