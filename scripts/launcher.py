"""Processes of a run: how they start on one machine or on many, how signals and failures stop them.

On many machines a launcher runs on each (a task of srun, see fsdp_multi_node.sh). They talk through the store
in which the ranks find each other: who cannot start, who failed first, who is still there.

Exit codes: 0 done; 1 a failure, with its traceback; 2 something the person can mend, in one message; 75
(EX_TEMPFAIL) stopped by a signal, everything saved: `--resume auto` goes on; 76 a node was lost: likewise,
from the last checkpoint; 130 a second Ctrl-C; 128 + n a process was ended by signal n.

SIGUSR2 ends nothing: every rank writes to stderr where each of its threads stands. The launcher asks for it
before it ends ranks that have files for their errors.
"""
import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Callable

from scripts import places
from scripts.flags import UserError, refuse
from scripts.places import Place

# The process that has looked at flags, files and devices for the ranks that it has started: its number.
CHECKED = "QSHARD_CHECKED"
STOPPED, NODE_LOST, AT_ONCE = 75, 76, 130
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
# How a launcher passes a Ctrl-C on. Not as SIGINT: where all processes get one (srun), a rank would take the
# launcher's for a second Ctrl-C; and one that still imports would end in a traceback.
INTERRUPT = signal.SIGVTALRM


def handle(action) -> None:
    """`action` for every signal that stops a run; a hang-up that is ignored (nohup) stays ignored."""
    for number in SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, action)


def name_of(number: int) -> str:
    """What the person did, or which signal came."""
    return "Ctrl-C" if number in (signal.SIGINT, INTERRUPT) else signal.Signals(number).name


# ----------------------------------------------------------------------------------------------- in each rank

class Stops:
    """Signals that ask this rank to stop. While `at_once` they end the process where it is, since nothing is
    trained yet; afterwards they are only noted in `asked` (a signal's number), for the ranks to agree at the
    next step. A SIGINT after another signal ends the process where it is. SIGUSR2 is answered with stacks."""

    def __init__(self):
        self.asked, self.at_once = 0, True
        handle(self.take)
        signal.signal(INTERRUPT, self.take)
        faulthandler.register(signal.SIGUSR2, all_threads=True)

    def take(self, number: int, frame) -> None:
        if self.at_once or (number == signal.SIGINT and self.asked):
            os._exit(STOPPED if self.at_once else AT_ONCE)
        self.asked = signal.SIGINT if number == INTERRUPT else number


def record_collectives(error_dir: str | None) -> None:
    """Has NCCL write, on a timeout, in which collectives each rank was: to nccl_<rank> in `error_dir`, or
    where torch does. Before the process group is made."""
    wanted = dict(TORCH_FR_BUFFER_SIZE="2000", TORCH_NCCL_DUMP_ON_TIMEOUT="1")
    wanted |= dict(TORCH_FR_DUMP_TEMP_FILE=f"{error_dir}/nccl_") if error_dir else {}
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


def end_with_parent() -> None:
    """Ends this process when the one that started it is gone, however that ended."""
    parent = int(os.environ[CHECKED])

    def watch():
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)
    threading.Thread(target=watch, daemon=True).start()


# --------------------------------------------------------------------------------- between launchers of nodes

class Nodes:
    """What the launchers of a run, one per node, tell each other. The store lives in the first one's process:
    so its port cannot be taken by another between being found free and being used."""

    def __init__(self, place: Place):
        import torch.distributed as dist
        self.node, self.count, self.local_world = place.node, place.nodes, place.local_world
        self.hosts, self.told, self.broken = [socket.gethostname()], 0.0, (dist.DistError, RuntimeError)
        self.silent: set[int] = set()
        try:
            if self.node == 0:  # the store would try for five minutes
                socket.getaddrinfo(place.address, None)
        except OSError as error:
            raise UserError(f"--master_addr {place.address}: no such host ({error.strerror}); leave it out "
                            f"on one machine") from error
        try:
            self.store = dist.TCPStore(place.address, place.port, is_master=self.node == 0,
                                       wait_for_workers=False)
        except self.broken as error:
            problem = "cannot be reached" if self.node else "cannot listen there"
            raise UserError(f"--master_addr {place.address} --master_port {place.port}: {problem} "
                            f"({str(error).splitlines()[0]})") from error

    def each(self, what: str) -> list[str]:
        return [f"{what}/{node}" for node in range(self.count)]

    def agree(self, problems: list[str], asked: list[int], seconds: float = 300) -> None:
        """Waits for the others. Raises UserError with the problems of all nodes."""
        mine = [self.hosts[0], self.local_world, problems]
        self.store.set(f"here/{self.node}", json.dumps(mine))
        deadline = time.monotonic() + seconds
        while not self.store.check(self.each("here")):
            if asked or time.monotonic() > deadline:
                raise UserError("" if asked else f"waited {seconds:.0f} s for {self.count} nodes in vain")
            time.sleep(0.05)
        every = [json.loads(self.store.get(name)) for name in self.each("here")]
        self.hosts = [host for host, _, _ in every]
        lines = [f"{host}: {text}" for host, _, texts in every for text in texts]
        if len({local for _, local, _ in every}) > 1:
            sizes = ", ".join(f"{host} {local}" for host, local, _ in every)
            lines.append(f"the nodes have unequal numbers of processes ({sizes}): use --gpus-per-node")
        refuse(lines)

    def ended(self) -> int | None:
        """The exit code of the run once another node has ended it. Tells, too, that this node is there."""
        if self.count == 1 or time.monotonic() < self.told + 0.5:
            return None
        self.told = time.monotonic()
        try:
            self.store.add(f"alive/{self.node}", 1)
            return int(self.store.get("end").split()[0]) if self.store.check(["end"]) else None
        except self.broken:
            return 1

    def lost(self, seconds: float = 5) -> list[str]:
        """Hosts that have told nothing for so long, while this waits for them."""
        if self.count == 1:
            return []
        try:
            silent, deadline = set(range(self.count)), time.monotonic() + seconds
            first = [self.store.add(name, 0) for name in self.each("alive")]
            while silent and time.monotonic() < deadline and self.ended() is None:
                silent = {node for node in silent if self.store.add(f"alive/{node}", 0) == first[node]}
                time.sleep(0.1)
            self.silent = silent if time.monotonic() >= deadline else set()
            return [self.hosts[node] for node in self.silent]
        except self.broken:
            return self.hosts[:1]

    def end(self, code: int) -> bool:
        """Ends the run on all nodes. Returns whether this one is the first to do so."""
        text = f"{code} {self.node}"
        try:
            return self.count == 1 or self.store.compare_set("end", "", text).decode() == text
        except self.broken:
            return False

    def leave(self, seconds: float = 10) -> None:
        """The first node goes last: the others still need the store."""
        deadline = time.monotonic() + seconds
        others = [name for node, name in enumerate(self.each("left")) if node not in self.silent]
        try:
            self.store.set(f"left/{self.node}", "")
            while not self.node and not self.store.check(others) and time.monotonic() < deadline:
                time.sleep(0.05)
        except self.broken:
            pass


# ------------------------------------------------------------------------------ the process that starts ranks

class Ranks:
    """The processes of this node's ranks. With `error_dir`, each writes its errors into a file there, and all
    but rank 0 what they print as well."""

    def __init__(self, script: str, argv: list[str], place: Place, port: int, error_dir: str | None):
        self.first, self.logs, self.processes = place.rank, [], []
        threads = max(1, places.cores() // place.local_world)  # more threads than cores stall
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        common = dict(TORCHELASTIC_USE_AGENT_STORE="True", **{CHECKED: str(os.getpid())})
        for local in range(place.local_world):
            here = place._replace(rank=self.first + local, local_rank=local, port=port)
            output = self.open(error_dir, here.rank)
            self.processes.append(subprocess.Popen(
                [sys.executable, "-u", script, *argv], start_new_session=True, stderr=output,
                stdout=output if here.rank else None, env=os.environ | common | here.environment()))

    def open(self, error_dir: str | None, rank: int):
        """The file for a rank's errors, and where in it those of this start begin."""
        if error_dir is None:
            return None
        Path(error_dir).mkdir(parents=True, exist_ok=True)
        file = open(Path(error_dir) / f"rank-{rank:05}.err", "ab")
        self.logs.append((Path(file.name), file.tell()))
        return file

    def signal(self, number: int) -> None:
        for process in self.processes:
            process.send_signal(number)

    def end(self, seconds: float) -> None:
        """Gives the processes `seconds` to end by themselves."""
        deadline = time.monotonic() + seconds
        while any(p.poll() is None for p in self.processes) and time.monotonic() < deadline:
            time.sleep(0.02)
        for process in self.processes:
            process.kill()
            process.wait()

    def explain(self, local: int, code: int, host: str) -> None:
        """Says on this process's stderr why rank `local` of this node has ended the run."""
        rank = self.first + local
        if code < 0:
            print(f"train.py: error: rank {rank} on {host} was ended by {signal.Signals(-code).name} (out of "
                  f"memory?); --resume auto goes on from the last checkpoint", file=sys.stderr)
        if self.logs:
            path, start = self.logs[local]
            lines = path.read_bytes()[start:].decode(errors="replace").splitlines()
            said = "\n".join(lines[-40:])
            print(f"rank {rank} on {host} was the first to fail; the end of {path}:\n{said}", file=sys.stderr)


def wait(ranks: Ranks, nodes: Nodes, asked: list[int]) -> int:
    """Waits for all ranks, or for the first that fails, which ends the others, on all nodes. Returns the exit
    code of the run."""
    failed = code = None
    while code is None:
        codes = [process.poll() for process in ranks.processes]
        if all(c == 0 for c in codes):
            return 0
        failed = next((local for local, c in enumerate(codes) if c), None)
        code = nodes.ended() if failed is None else codes[failed]
        time.sleep(0.05)
    stopped = code == STOPPED or code < 0 and (bool(asked) or -code in SIGNALS)  # or before it took signals
    lost = [] if failed is None or stopped or code == 2 else nodes.lost()
    result = STOPPED if stopped else NODE_LOST if lost else code if code >= 0 else 128 - code
    first = failed is not None and nodes.end(result)
    if ranks.logs and not stopped and code != 2:
        ranks.signal(signal.SIGUSR2)  # the file of each ends in where it stood
    # A rank that a signal ended did not train yet; others may wait for it where they take no signal.
    ranks.end(30 if code >= 0 and (stopped or asked) else 0.5)
    if first and lost:
        print(f"train.py: error: lost {', '.join(lost)}; --resume auto goes on from the last checkpoint",
              file=sys.stderr)
    elif first and not stopped:
        ranks.explain(failed, code, nodes.hosts[nodes.node])
    return result


def launch(script: str, argv: list[str], place: Place, problems=(), error_dir: str | None = None) -> int:
    """Runs this node's ranks of `script`. Returns the exit code of the run. Signals are passed on, and a
    Ctrl-C after another signal ends all at once. Raises UserError for `problems`, on the first node those of
    all."""
    refuse(problems if place.nodes == 1 else ())
    ranks, asked = None, []

    def pass_on(number, frame):
        if number == signal.SIGINT and asked:
            if ranks:
                ranks.signal(signal.SIGKILL)
            os._exit(AT_ONCE)
        asked.append(number)
        if ranks:
            ranks.signal(INTERRUPT if number == signal.SIGINT else number)
        if place.node == 0:
            os.write(2, f"\n{name_of(number)}: stopping; a step that has begun is ended and saved (a Ctrl-C "
                        "now stops at once)\n".encode())  # print is not safe inside a handler
    handle(pass_on)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # ranks inherit that, until they can answer it
    nodes = Nodes(place)
    try:
        nodes.agree(list(problems), asked)
        if sys.stdout.isatty():  # they import for seconds before they say anything
            print(f"start   {place.local_world} process{'es' * (place.local_world > 1)}", flush=True)
        ranks = Ranks(script, argv, place, nodes.store.port, error_dir)
        signal.signal(signal.SIGUSR2, lambda number, frame: ranks.signal(number))
        if asked:  # while they were being started
            ranks.end(0)
            nodes.end(STOPPED)
        return STOPPED if asked else wait(ranks, nodes, asked)
    except UserError:
        if asked or place.node:  # the first node tells
            return STOPPED if asked else 2
        raise
    finally:
        nodes.leave()


def run_ranks(script: str, work: Callable, world_size: int = -1, address: str = "localhost",
              port: int = 0) -> int:
    """For scripts that measure or look: starts `script`, with this process's arguments, as ranks; in a rank
    it calls work(runtime), whose result is the exit code (None: 0)."""
    import train
    if not 0 <= port <= 65535:
        raise UserError(f"--master_port {port}: ports go from 0 (a free one) to 65535")
    if world_size < 1 and world_size != -1:
        raise UserError(f"--world_size {world_size}: must be at least 1 (or -1 for the default)")
    place = places.place(os.environ, world_size, address, port, train.accelerator_count())
    if place.local_rank is None:
        return launch(script, sys.argv[1:], place)
    os.environ.update(place.environment())
    try:
        runtime = train.start_runtime(timeout_minutes=5)
        code = work(runtime)
        train.stop_runtime()
    except BaseException as error:
        train.fail(error, place.rank)
    return code or 0
