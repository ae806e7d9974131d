"""Commands in forks of tests/nursery.py, which start in a tenth of a second."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path


class Nursery:
    """tests/nursery.py, started with the first command, and the run that it has under way."""

    def __init__(self, folder: Path):
        folder.mkdir(exist_ok=True)
        self.log, self.out, self.err = (folder / name for name in ("log", "out", "err"))
        self.log.touch()
        self.process = None

    def order(self, freezing: bool, **what) -> None:
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).parent / "nursery.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd="/",
                env=os.environ | dict(NURSERY_LOG=str(self.log), OMP_NUM_THREADS="1"),
            )
        print(json.dumps(dict(what, freezing=freezing)), file=self.process.stdin, flush=True)

    def start(self, flags: list[str], freezing: bool = False) -> list[int]:
        """Starts a run of two ranks. Returns the process ids of its launcher and its ranks. `freezing`: see there."""
        self.order(freezing, flags=flags)
        return self.started()

    def started(self) -> list[int]:
        word, *pids = self.process.stdout.readline().split()
        assert word == "start", self.log.read_text()[-3000:]
        return [int(pid) for pid in pids]

    def end(self, seconds: float = 60) -> int:
        """Waits for the end of what is under way. Returns its exit code; what does not end fails the test."""
        alarm = threading.Timer(seconds, self.process.kill)
        alarm.start()
        while (answer := self.process.stdout.readline().split() or ["nothing"])[0] == "start":
            pass
        alarm.cancel()
        assert answer[0] == "end", f"still running after {seconds} s:\n{self.log.read_text()[-3000:]}"
        return int(answer[1])

    def run(self, script: Path, *argv: str, cwd: Path = Path("/"), **env: str) -> subprocess.CompletedProcess:
        """A script of any kind, with its output, as subprocess.run gives it."""
        files = dict(out=str(self.out), err=str(self.err))
        self.order(False, script=str(script), argv=argv, cwd=str(cwd), env=env, **files)
        return subprocess.CompletedProcess(argv, self.end(120), self.out.read_text(), self.err.read_text())

    def stop(self) -> None:
        if self.process:
            self.process.stdin.close()
            self.process.wait(20)
