"""Rank processes for the tests: started once per test run (their imports cost more than all cases), then fed
with cases.

A case is a function (runtime, *args) of tests/cases.py; `Pool.run` calls it on `world` ranks with a process
group of that size and returns one result per rank. A rank that raises ends all of them; new ones start with
the next case.
"""

import gc
import importlib
import multiprocessing
import os
import socket
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


class RankError(AssertionError):
    """A case raised on some rank; carries its traceback."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def serve(pipe) -> None:
    """One rank process: takes (environment, function name, args), sends ("ok", result) or ("error",
    traceback)."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import torch

    torch.set_num_threads(1)
    import bitsandbytes  # noqa: F401
    import peft  # noqa: F401
    import train
    import cases

    while True:
        gc.freeze()  # what is imported is not searched for garbage after each case: that took 0.2 s
        environment, name, args = pipe.recv()
        os.environ.update(environment)
        try:
            case = importlib.import_module("cases").__dict__[name]
            runtime = train.start_runtime()
            result = case(runtime, *args)
            train.stop_runtime()
            pipe.send(("ok", result))
        except BaseException:
            pipe.send(("error", traceback.format_exc()))
            os._exit(1)  # the peers of a failed rank then fail at once instead of waiting for it
        assert cases


class Pool:
    """Up to `size` ranks."""

    def __init__(self, size: int = 4):
        self.size, self.ranks = size, []

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        os.environ["OMP_NUM_THREADS"] = "1"
        for _ in range(self.size):
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs,), daemon=True)
            process.start()
            self.ranks.append((process, mine))

    def stop(self) -> None:
        for process, _ in self.ranks:
            process.kill()
            process.join()
        self.ranks = []

    def run(self, world: int, name: str, *args, local_world: int | None = None, timeout: float = 240) -> list:
        """Results of the case `name` from ranks 0..world-1. Raises RankError with the first rank's traceback.
        """
        if not self.ranks:
            self.start()
        place = dict(
            WORLD_SIZE=str(world),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(free_port()),
            LOCAL_WORLD_SIZE=str(local_world or world),
        )
        for rank, (_, pipe) in enumerate(self.ranks[:world]):
            local = rank % (local_world or world)
            pipe.send((place | dict(RANK=str(rank), LOCAL_RANK=str(local)), name, args))
        return self._collect(world, time.monotonic() + timeout)

    def _collect(self, world: int, deadline: float) -> list:
        answers: dict[int, object] = {}
        while len(answers) < world:
            for rank, (_, pipe) in enumerate(self.ranks[:world]):
                if rank not in answers and pipe.poll(0.002):
                    kind, value = pipe.recv()
                    if kind == "error":
                        self.stop()
                        raise RankError(f"rank {rank} of {world}:\n{value}")
                    answers[rank] = value
            if time.monotonic() > deadline:
                self.stop()
                raise RankError(f"ranks {sorted(set(range(world)) - set(answers))} of {world} gave no answer")
        return [answers[rank] for rank in range(world)]
