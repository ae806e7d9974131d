"""Rank processes for the tests, fed with cases: functions (runtime, *args) of tests/cases.py. `Pool.run` calls one
on `world` ranks and returns one result per rank.

Each number of ranks has processes of its own, forks of one process that has imported everything, and their
process group stays from case to case: to import, or to start and stop a group, takes longer than most cases. It
starts anew where the nodes change, and after a case that made groups of its own. A rank that raises, dies or does
not answer ends the ranks of its group; new ones start with the next case.
"""

import gc
import io
import multiprocessing
import os
import socket
import time
import traceback
from multiprocessing import connection, forkserver
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
IMPORTS = ["bitsandbytes", "peft", "pytest", "torch.distributed.fsdp", "torch.distributed.tensor", "cases"]


class RankError(AssertionError):
    """A case did not end well on some rank; carries its traceback, or what became of it."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def forks():
    """The context for processes that are forks of one with all imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTS)
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, paths)), OMP_NUM_THREADS="1"):
        forkserver.ensure_running()
    return context


def packed(value) -> bytes:
    """Tensors by value: multiprocessing would make a file and open a socket for each."""
    import torch

    torch.save(value, buffer := io.BytesIO())
    return buffer.getvalue()


def unpacked(content: bytes):
    import torch

    return torch.load(io.BytesIO(content), weights_only=False)


def serve(pipe) -> None:
    """One rank process: takes (environment of a new process group or None, function name, args), sends
    ("ok", result, whether the group is as it was) or ("error", traceback, time)."""
    import torch
    import torch.distributed as dist

    import cases
    import train

    torch.set_num_threads(1)
    runtime = None
    while True:
        gc.freeze()  # what is imported is not searched for garbage after each case: that took 0.2 s
        environment, name, args = pipe.recv()
        try:
            if environment:
                if runtime:
                    train.stop_runtime()
                os.environ.update(environment)
                runtime = train.start_runtime()
            result = packed(vars(cases)[name](runtime, *args))
            gc.collect()  # as in stop_runtime: models and what else holds communicators
            dist.barrier()  # all ranks made the same collectives
            pipe.send(("ok", result, len(dist.distributed_c10d._world.pg_map) == 1))
        except BaseException:
            pipe.send(("error", traceback.format_exc(), time.monotonic()))
            os._exit(1)  # the peers of a failed rank then fail at once instead of waiting for it


class Group:
    """`world` ranks."""

    def __init__(self, world: int):
        self.place, self.ranks, context = {}, [], forks()
        for _ in range(world):
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()  # so that the process's end is the pipe's
            self.ranks.append((process, mine))

    def stop(self) -> None:
        for process, _ in self.ranks:
            process.kill()
            process.join()

    def start(self, local_world: int, name: str, args: tuple) -> None:
        world, place = len(self.ranks), dict(LOCAL_WORLD_SIZE=str(local_world))
        new, self.place = self.place != place, place
        place = place | dict(WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
        for rank, (_, pipe) in enumerate(self.ranks):
            own = place | dict(RANK=str(rank), LOCAL_RANK=str(rank % local_world))
            pipe.send((own if new else None, name, args))

    def answer(self, rank: int) -> tuple:
        process, pipe = self.ranks[rank]
        try:
            return pipe.recv()
        except (EOFError, ConnectionResetError):
            process.join()
            return "error", f"has ended without a word, with exit code {process.exitcode}", time.monotonic()

    def answers(self, seconds: float) -> dict[int, tuple]:
        """What the ranks say, until all have spoken, one has failed, or the time is over."""
        found, waiting = {}, {pipe: rank for rank, (_, pipe) in enumerate(self.ranks)}
        deadline = time.monotonic() + seconds
        while waiting and (ready := connection.wait(waiting, max(0, deadline - time.monotonic()))):
            for pipe in ready:
                rank = waiting.pop(pipe)
                kind, *_ = found[rank] = self.answer(rank)
                if kind == "error":  # others fail because of it, perhaps before it
                    deadline = min(deadline, time.monotonic() + 1)
        return found

    def results(self, seconds: float) -> list:
        found, world = self.answers(seconds), len(self.ranks)
        if errors := [(rank, text, when) for rank, (kind, text, when) in found.items() if kind == "error"]:
            rank, text, _ = min(errors, key=lambda error: ("by peer" in error[1], error[2]))
            raise RankError(f"rank {rank} of {world}:\n{text}")
        if len(found) < world:
            raise RankError(f"ranks {sorted(set(range(world)) - set(found))} of {world} gave no answer")
        if not all(as_it_was for _, _, as_it_was in found.values()):
            self.place = {}
        return [unpacked(found[rank][1]) for rank in range(world)]


class Pool:
    """Groups of ranks, by their number."""

    def __init__(self):
        self.groups: dict[int, Group] = {}

    def stop(self) -> None:
        while self.groups:
            self.groups.popitem()[1].stop()

    def run(self, world: int, name: str, *args, local_world: int | None = None, timeout: float = 240) -> list:
        """Results of the case `name` from ranks 0..world-1. Raises RankError with the traceback of the rank that
        failed first."""
        if world not in self.groups:
            self.groups[world] = Group(world)
        try:
            self.groups[world].start(local_world or world, name, args)
            return self.groups[world].results(timeout)
        except BaseException:
            self.groups.pop(world).stop()
            raise
