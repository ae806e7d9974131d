"""Processes of a run: which place each has, how they start on one machine, how signals stop them.

Exit codes: 0 done; 1 a failure, with its traceback; 2 something the person can mend, in one message; 75
(EX_TEMPFAIL) stopped by a signal, everything saved: `--resume auto` goes on; 130 a second Ctrl-C; 128 + n a
process was ended by signal n.
"""
import os
import signal
import subprocess
import sys
import threading
import time

from scripts.flags import UserError

CHECKED = "QSHARD_CHECKED"  # set by the process that has looked at flags, files and devices for the others
STOPPED, AT_ONCE = 75, 130
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


def variables(env) -> dict[str, int] | None:
    """Rank variables set by torchrun (or by hand); None where this process has to start the others itself."""
    if "RANK" not in env and "WORLD_SIZE" not in env:
        return None
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in env]
    if missing:
        raise UserError(f"RANK/WORLD_SIZE are set but {', '.join(missing)} not: set all four, or none")
    names = dict(rank="RANK", world="WORLD_SIZE", local_rank="LOCAL_RANK", local_world="LOCAL_WORLD_SIZE")
    given = {"LOCAL_RANK": env["RANK"], "LOCAL_WORLD_SIZE": env["WORLD_SIZE"]} | dict(env)
    if wrong := [f"{name}={given[name]}" for name in names.values() if not given[name].isdecimal()]:
        raise UserError(f"{', '.join(wrong)} is no number")
    place = {key: int(given[name]) for key, name in names.items()}
    if place["rank"] >= place["world"]:
        raise UserError(f"RANK={place['rank']} does not fit WORLD_SIZE={place['world']}")
    return place


def handle(action) -> None:
    """`action` for every signal that stops a run; a hang-up that is ignored (nohup) stays ignored."""
    for number in SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, action)


# ----------------------------------------------------------------------------------------------- in each rank

class Stops:
    """Signals that ask this rank to stop. While `at_once` they end the process where it is, since nothing is
    trained yet; afterwards they are only noted in `asked` (a signal's number), for the ranks to agree at the
    next step. A SIGINT after another signal ends the process where it is."""

    def __init__(self):
        self.asked, self.at_once = 0, True
        handle(self.take)

    def take(self, number: int, frame) -> None:
        if self.at_once or (number == signal.SIGINT and self.asked):
            os._exit(STOPPED if self.at_once else AT_ONCE)
        self.asked = number


def end_with_parent() -> None:
    """Ends this process when the one that started it is gone, however that ended."""
    parent = os.getppid()

    def watch():
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)
    threading.Thread(target=watch, daemon=True).start()


# ----------------------------------------------------------------------------- the process that starts them

def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def start(script: str, argv: list[str], world: int, address: str, port: int):
    """Starts `world` ranks of `script`. Returns them, and the store through which they find each other, which
    lives in this process: so its port cannot be taken by another between being found free and being used."""
    import torch.distributed as dist
    try:
        store = dist.TCPStore(address, port, is_master=True, wait_for_workers=False)
    except (dist.DistError, RuntimeError) as error:
        raise UserError(f"--master_addr {address} --master_port {port}: cannot listen there "
                        f"({str(error).splitlines()[0]})") from error
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // world)))  # more threads than cores stall
    common = dict(MASTER_ADDR=address, MASTER_PORT=str(store.port), TORCHELASTIC_USE_AGENT_STORE="True",
                  WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), **{CHECKED: "1"})
    return [subprocess.Popen([sys.executable, "-u", script, *argv], start_new_session=True,
                             env=os.environ | common | dict(RANK=str(rank), LOCAL_RANK=str(rank)))
            for rank in range(world)], store


def end(processes: list[subprocess.Popen], seconds: float) -> None:
    """Gives the processes `seconds` to end by themselves."""
    deadline = time.monotonic() + seconds
    while any(p.poll() is None for p in processes) and time.monotonic() < deadline:
        time.sleep(0.02)
    for process in processes:
        process.kill()
        process.wait()


def wait(processes: list[subprocess.Popen], asked: list[int]) -> int:
    """Waits for all, or for the first that fails, which ends the others. Returns the exit code of the run."""
    while all(not p.poll() for p in processes):
        if all(p.returncode == 0 for p in processes):
            return 0
        time.sleep(0.05)
    rank, code = next((rank, p.returncode) for rank, p in enumerate(processes) if p.returncode)
    end(processes, 30 if code == STOPPED or asked else 0.5)
    if code >= 0:
        return code
    if asked:  # before it could take signals itself
        return STOPPED
    print(f"train.py: error: rank {rank} was ended by {signal.Signals(-code).name} (out of memory?); "
          f"--resume auto goes on from the last checkpoint", file=sys.stderr)
    return 128 - code


def launch(script: str, argv: list[str], world: int, address: str, port: int) -> int:
    """Runs `script` as `world` ranks on this machine. Returns the exit code. Signals are passed on, and a
    Ctrl-C after another signal ends all at once."""
    processes, asked, store = [], [], None

    def pass_on(number, frame):
        if number == signal.SIGINT and asked:
            for process in processes:
                process.kill()
            os._exit(AT_ONCE)
        asked.append(number)
        for process in processes:
            process.send_signal(signal.SIGTERM)
    handle(pass_on)
    processes, store = start(script, argv, world, address, port)
    if asked:  # while they were being started
        end(processes, 0)
    code = STOPPED if asked else wait(processes, asked)
    del store
    return code
