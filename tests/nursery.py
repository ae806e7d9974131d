"""Runs of train.py that start in a tenth of a second: this process has imported everything, and forks what
the launcher would start as new interpreters. All else (launcher, ranks, signals, files) is the real thing.

Reads one JSON object per line from stdin, and writes "start <pid of the launcher> <pid of each rank>" and "end
<exit code>" to stdout. `flags` are those of a run of two ranks; else it is a command with an environment of its
own: `script`, `argv`, `cwd`, `env`, `out` and `err` (files for what it prints). Unless `freezing`, ranks set no
objects aside for their steps: they would take the libraries' objects back at the end, which this process has set
aside, and to go through all of them in a fork, which copies them, takes longer than a short run.
"""

import ctypes
import gc
import json
import os
import runpy
import signal
import sys
import traceback
import types
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402

torch.set_num_threads(1)
import bitsandbytes  # noqa: E402, F401
import peft  # noqa: E402, F401

import train  # noqa: E402
from scripts import launcher  # noqa: E402

WORLD, TRAIN = 2, train.__file__


def keep_stores() -> None:
    """A fork has its parent's store without the threads of it: it must never be taken down here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # some of torch's objects do not want to be looked at
        found = [thing for thing in gc.get_objects() if isinstance(thing, launcher.Nodes)]
    for thing in found:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing.store))


class Forked:
    """A forked rank, in place of subprocess.Popen."""

    def __init__(self, command: list[str], env: dict[str, str], **rest):
        signal.pthread_sigmask(signal.SIG_BLOCK, launcher.SIGNALS)  # none may meet the parent's handlers here
        self.returncode, self.pid = None, os.fork()
        if self.pid == 0:
            for number in launcher.SIGNALS:
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, launcher.SIGNALS)
        if self.pid == 0:
            torch.set_num_threads(1)  # renews torch's thread pool; two threads at once, as first users, find none
            keep_stores()
            os.setsid()
            for number, file in ((1, rest["stdout"]), (2, rest["stderr"])):
                if file:
                    os.dup2(file.fileno(), number)
            os.environ.update(env)
            sys.exit(called(*command[2:]))  # not os._exit: what dies badly in an interpreter's end must show
        started.append(self.pid)
        if len(started) == WORLD:
            print("start", os.getpid(), *started, file=reports, flush=True)

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


def called(script: str, *argv: str) -> int | None:
    sys.argv = [script, *argv]
    if script == TRAIN:
        return train.main(list(argv))
    runpy.run_path(script, run_name="__main__")


def command(script: str, argv: list[str], cwd: str, env: dict[str, str], out: str, err: str) -> int:
    """The exit code of a script run in this process, as an interpreter would."""
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ.update(env)
    os.chdir(cwd)
    torch.set_num_threads(1)  # as in Forked
    try:
        code = called(script, *argv)
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else 0 if code is None else 1


def serve() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup would be respected
    launcher.subprocess = types.SimpleNamespace(Popen=Forked)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0 and not order.pop("freezing"):
            train.gc = types.SimpleNamespace(collect=gc.collect, freeze=lambda: None, unfreeze=lambda: None)
        if pid == 0 and "script" in order:
            os._exit(command(**order))
        if pid == 0:  # the launcher; its ranks end as interpreters do, it does not
            log = os.open(os.environ["NURSERY_LOG"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os._exit(train.main([*order["flags"], "--world_size", str(WORLD)]))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print("end", code, file=reports, flush=True)


if __name__ == "__main__":
    started: list[int] = []
    reports = os.fdopen(os.dup(1), "w")
    serve()
