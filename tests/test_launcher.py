"""Launchers of two nodes, here two processes on one machine, with ranks that only look at their variables."""

import os
import signal
import time
from pathlib import Path

import pytest

from pool import forks, free_port
from scripts import launcher
from scripts.flags import UserError
from scripts.places import Place

RANK = """
import os, pathlib, signal, sys, time
rank, here = int(os.environ["RANK"]), pathlib.Path(__file__).parent
print("rank", rank, os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"])
print("error of", rank, file=sys.stderr)
def save(number, frame):
    time.sleep(rank / 5)
    (here / f"saved-{{rank}}").touch()
    os._exit(75)
{action}
(here / f"ready-{{rank}}").touch()
time.sleep(60)
"""


def launch(folder: Path, port: int, node: int, local: int, problems: tuple) -> None:
    for name, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(folder / f"{name}-{node}", os.O_CREAT | os.O_WRONLY), number)
    place = Place(node * local, None, 2 * local, local, "localhost", port)
    try:
        code = launcher.launch(str(folder / "rank.py"), [], place, problems, str(folder / "errors"))
    except UserError as error:
        code = os.write(2, f"error: {error}".encode()) and 2
    os._exit(code)


class Pair:
    """Two launchers of two ranks each, of a script that does `action`."""

    def __init__(self, folder: Path, action: str, locals=(2, 2), problems=((), ())):
        self.folder, port, context = folder, free_port(), forks()
        (folder / "rank.py").write_text(RANK.format(action=action))
        self.processes = [
            context.Process(target=launch, args=(folder, port, node, locals[node], problems[node]))
            for node in range(2)
        ]
        for process in self.processes:
            process.start()

    def ready(self) -> None:
        deadline = time.monotonic() + 60
        while len(list(self.folder.glob("ready-*"))) < 4:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def end(self) -> tuple[list[int], list[str], list[str]]:
        """Exit codes, outputs, errors of both."""
        for process in self.processes:
            process.join(60)
        said = [[(self.folder / f"{name}-{k}").read_text() for k in range(2)] for name in ("out", "err")]
        return [process.exitcode for process in self.processes], *said


def test_ranks_of_two_nodes(tmp_path):
    codes, output, errors = Pair(tmp_path, "sys.exit(0)").end()
    assert codes == [0, 0] and errors == ["", ""]
    assert output == ["rank 0 0 4 2\n", ""]  # rank 0 alone speaks to all
    for rank in range(4):
        said = (tmp_path / "errors" / f"rank-{rank:05}.err").read_text()
        assert f"error of {rank}\n" in said and (f"rank {rank} {rank % 2} 4 2\n" in said) == (rank > 0)


def test_the_first_failure_ends_both_nodes_and_is_shown_once(tmp_path):
    action = "if rank == 3: raise ZeroDivisionError('the cause')"
    codes, _, errors = Pair(tmp_path, action).end()
    assert codes == [1, 1] and errors[0] == ""
    assert "rank 3 on" in errors[1] and errors[1].rstrip().endswith("ZeroDivisionError: the cause")
    assert "rank-00003.err" in errors[1] and errors[1].count("Traceback") == 1


@pytest.mark.parametrize(
    "locals, problems, texts",
    [
        ((2, 2), (("first",), ("second", "third")), ("first", "second", "third")),
        ((2, 1), ((), ()), ("unequal numbers of processes",)),
    ],
)
def test_problems_of_all_nodes_are_told_by_the_first(tmp_path, locals, problems, texts):
    codes, _, errors = Pair(tmp_path, "pass", locals, problems).end()
    assert codes == [2, 2] and errors[1] == "" and not list(tmp_path.glob("ready-*"))
    assert all(text in errors[0] for text in texts) and errors[0].count("error:") == 1
    assert errors[0].count(os.uname().nodename) >= len(texts)


@pytest.mark.parametrize("action, saved", [("signal.signal(signal.SIGUSR1, save)", 4), ("pass", 0)])
def test_stopped_by_a_signal(tmp_path, action, saved):
    """Also before the ranks take signals. Nobody is ended while it saves; the first node says so, once."""
    pair = Pair(tmp_path, action)
    pair.ready()
    for process in pair.processes:
        os.kill(process.pid, signal.SIGUSR1)
    codes, _, (first, second) = pair.end()
    assert codes == [75, 75] and second == ""
    assert first.startswith("\nSIGUSR1: stopping; ") and first.count("\n") == 2
    assert len(list(tmp_path.glob("saved-*"))) == saved


def test_a_rank_that_a_signal_ended_before_it_could_take_it_has_stopped(tmp_path):
    """SLURM signals every process: a rank may be gone before its launcher has heard of it."""
    action = "if rank == 3: os.kill(os.getpid(), signal.SIGUSR1)\ntime.sleep(0.3)\nos._exit(75)"
    codes, _, errors = Pair(tmp_path, action).end()
    assert codes == [75, 75] and errors == ["", ""]


def test_a_lost_node(tmp_path):
    """The second node's processes vanish, and then the first's ranks fail because of it."""
    action = "while rank == 0 and not (here / 'gone').exists(): time.sleep(0.05)\nif rank == 0: sys.exit(1)"
    pair = Pair(tmp_path, action)
    while len(list(tmp_path.glob("ready-*"))) < 3:
        time.sleep(0.02)
    second = pair.processes[1].pid
    children = Path(f"/proc/{second}/task/{second}/children").read_text().split()
    for pid in (second, *map(int, children)):
        os.kill(pid, signal.SIGKILL)
    (tmp_path / "gone").touch()
    codes, _, errors = pair.end()
    assert codes == [76, -9] and f"lost {os.uname().nodename}" in errors[0]
