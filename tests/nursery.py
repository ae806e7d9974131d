"""Runs of train.py that start in a tenth of a second: this process has imported everything, and forks what
launcher.start would start as new interpreters. All else (launcher, ranks, signals, files) is the real thing.

Reads one JSON list of flags per line from stdin, and writes "start <pid of the launcher> <pid of each rank>" and
"end <exit code>" to stdout.
"""

import json
import os
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402

torch.set_num_threads(1)
import bitsandbytes  # noqa: E402, F401
import peft  # noqa: E402, F401

import train  # noqa: E402
from scripts import launcher  # noqa: E402

WORLD = 2


class Forked:
    """A forked rank, with the methods of subprocess.Popen that the launcher uses."""

    def __init__(self, argv: list[str]):
        inlet, self.outlet = os.pipe()
        self.returncode, self.pid = None, os.fork()
        if self.pid == 0:
            os.close(self.outlet)
            os.setsid()
            for number in launcher.SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            os.environ.update(json.loads(os.fdopen(inlet).readline()))
            sys.exit(train.work(argv))  # not os._exit: what dies badly in an interpreter's end must show
        os.close(inlet)

    def begin(self, variables: dict[str, str]):
        os.write(self.outlet, json.dumps(variables).encode() + b"\n")
        os.close(self.outlet)

    def poll(self):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self):
        while self.poll() is None:
            pass

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def start(script, argv, world, address, port):
    """The ranks are forked before there is a store, whose threads a fork would not take along."""
    ranks = [Forked(argv) for _ in range(world)]
    store = torch.distributed.TCPStore(address, 0, is_master=True, wait_for_workers=False)
    common = dict(MASTER_ADDR=address, MASTER_PORT=str(store.port), TORCHELASTIC_USE_AGENT_STORE="True")
    common |= dict(WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), **{launcher.CHECKED: "1"})
    for number, rank in enumerate(ranks):
        rank.begin(common | dict(RANK=str(number), LOCAL_RANK=str(number)))
    print("start", os.getpid(), *(rank.pid for rank in ranks), file=reports, flush=True)
    return ranks, store


def serve() -> None:
    launcher.start = start
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:  # the launcher; its ranks end as interpreters do, it does not
            log = os.open(os.environ["NURSERY_LOG"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os._exit(launcher.launch("", json.loads(line), WORLD, "localhost", 0))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print("end", code, file=reports, flush=True)


if __name__ == "__main__":
    reports = os.fdopen(os.dup(1), "w")
    serve()
