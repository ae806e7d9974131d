"""A real SLURM on this one machine: a login machine and compute nodes, each a set of namespaces of its own (net,
uts, ipc, pid, mount), on a bridge that lives in the login machine's network. Needs root and install.sh's packages.

Every node claims 64 CPUs and 8 GPUs; the GPUs are device files with nothing behind them. Nothing is written
outside a temporary folder, and no process stays when this process ends, however it ends.
"""

import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
NETWORK = "10.77.0"
# cred_expire: a requeued job waits that long before it starts again (default 120 s; below 5 it is
# ignored).
# SlurmdTimeout: a node silent for that long is down. KillWait: from TERM to KILL when a job is ended.
SETTINGS = """
ClusterName=test
SlurmctldHost=login({net}.254)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={dir}/munge.sock,cred_expire=5
CredType=cred/munge
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/spool/%n
SlurmctldPidFile={dir}/slurmctld.pid
SlurmdPidFile={dir}/slurmd.%n.pid
SlurmctldLogFile={dir}/log/slurmctld
SlurmdLogFile={dir}/log/slurmd.%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0,defer_batch=0
KillWait=20
MinJobAge=3600
SlurmdTimeout=10
ReturnToService=2
NodeName=n[1-{nodes}] NodeAddr={net}.[1-{nodes}] CPUs=64 RealMemory=256000 Gres=gpu:8 State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=10 State=UP
"""
FINAL = {"COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL"}
NEEDED = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "unshare", "nsenter", "setpriv")


def lacking() -> str | None:
    """Why no cluster can be started here."""
    if missing := [name for name in NEEDED if shutil.which(name) is None]:
        return f"{', '.join(missing)} not installed (tests/slurm/install.sh)"
    if os.geteuid():
        return "needs root"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--ipc", "--pid", "--mount", "--fork", "mount", "--make-rprivate", "/"],
        capture_output=True,
        text=True,
    )
    return f"no namespaces: {tried.stderr.strip()}" if tried.returncode else None


class Cluster:
    """Nodes n1, n2, ... and a machine `login`, up when made. Each has a disk of its own at `folder`/disk."""

    def __init__(self, nodes: int = 3):
        folder = Path(tempfile.mkdtemp(prefix="qshard-slurm-"))  # munged wants every folder above it readable
        self.folder, self.names, self.machines, self.pids = folder, ["login"], {}, {}
        self.names += [f"n{k}" for k in range(1, nodes + 1)]
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH"))}
        self.environment["SLURM_CONF"] = str(folder / "slurm.conf")
        self._configure(nodes)
        try:
            for name in self.names:
                self._boot(name)
            self._connect()
            self._ready()
        except BaseException:
            self.stop()
            raise

    def _configure(self, nodes: int) -> None:
        folder = self.folder
        for part in ("log", "state", "disk", "dev", *(f"spool/{name}" for name in self.names)):
            (folder / part).mkdir(parents=True)
        folder.chmod(0o755)
        (folder / "munge.key").touch(0o600)
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "slurm.conf").write_text(SETTINGS.format(net=NETWORK, dir=folder, nodes=nodes))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")  # loaded, not used
        for k in range(8):
            os.mknod(folder / f"dev/nvidia{k}", 0o020666, os.makedev(1, 3))  # as /dev/null
        gpus = f"AutoDetect=off\nNodeName=n[1-{nodes}] Name=gpu File={folder}/dev/nvidia[0-7]\n"
        (folder / "gres.conf").write_text(gpus)
        hosts = [f"{NETWORK}.{k or 254} {name}" for k, name in enumerate(self.names)]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts, ""]))
        (folder / "resolv.conf").touch()

    def _boot(self, name: str) -> None:
        """setpriv and --kill-child: the machine ends when this process does."""
        kinds = ("--net", "--uts", "--ipc", "--pid", "--mount", "--mount-proc")
        log = open(self.folder / "log" / f"machine.{name}", "w")
        self.machines[name] = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", *kinds, "--fork", "--kill-child"]
            + [str(HERE / "machine.sh"), name, str(self.folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        log.close()

    def _pid(self, name: str) -> str:
        """The machine's PID 1, as seen from here."""
        parent = self.machines[name].pid
        for _ in range(500):
            found = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
            if found and os.readlink(f"/proc/{found[0]}/ns/net") != os.readlink("/proc/self/ns/net"):
                return found[0]
            time.sleep(0.01)
        raise RuntimeError((self.folder / "log" / f"machine.{name}").read_text())

    def _connect(self) -> None:
        self.pids = {name: self._pid(name) for name in self.names}

        def link(machine: str, *words: str):
            subprocess.run(["nsenter", "-t", self.pids[machine], "-n", "ip", *words], check=True)

        link("login", "link", "add", "br0", "type", "bridge")
        link("login", "addr", "add", f"{NETWORK}.254/24", "dev", "br0")
        link("login", "link", "set", "br0", "up")
        for k, name in enumerate(self.names[1:], 1):
            link("login", *f"link add {name} type veth peer name eth0 netns {self.pids[name]}".split())
            link("login", "link", "set", name, "master", "br0", "up")
            link(name, "addr", "add", f"{NETWORK}.{k}/24", "dev", "eth0")
            link(name, "link", "set", "eth0", "up")
        (self.folder / "network.up").touch()

    def _ready(self) -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and all(m.poll() is None for m in self.machines.values()):
            idle = self.run("login", "sinfo", "-h", "-N", "-t", "idle", "-o", "%N", check=False)
            if len(idle.stdout.split()) == len(self.names) - 1:
                return
            time.sleep(0.1)
        logs = [path.read_text()[-1500:] for path in (self.folder / "log").iterdir()]
        raise RuntimeError("the nodes are not idle:\n" + "\n".join(logs))

    def enter(self, machine: str, *command: str) -> list[str]:
        """The command line that runs `command` on a machine."""
        return ["nsenter", "-t", self.pids[machine], "-n", "-u", "-i", "-p", "-m", "--", *command]

    def run(self, machine: str, *command: str, check=True, timeout=60, cwd="/", **env):
        done = subprocess.run(
            self.enter(machine, "/bin/sh", "-c", 'cd "$0" && exec "$@"', str(cwd), *command),
            capture_output=True,
            text=True,
            timeout=timeout,
            env=self.environment | env,
        )
        assert not check or done.returncode == 0, (command, done.stdout, done.stderr)
        return done

    def submit(self, *words: str, **env) -> str:
        """sbatch; returns the job's number."""
        return self.run("login", "sbatch", "--parsable", *map(str, words), **env).stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        shown = self.run("login", "scontrol", "-o", "show", "job", number).stdout
        return dict(re.findall(r"(\w+)=(\S*)", shown))

    def wait(self, number: str, states=FINAL, timeout: float = 240) -> str:
        """The job's state once it is one of `states`."""
        deadline = time.monotonic() + timeout
        while (state := self.job(number)["JobState"]) not in states:
            assert time.monotonic() < deadline, f"job {number} is still {state}"
            time.sleep(0.2)
        return state

    def kill(self, machine: str) -> None:
        """As if its power were cut."""
        self.machines[machine].kill()
        self.machines[machine].wait()

    def stop(self) -> None:
        for name in self.machines:  # login first: a controller that is gone requeues nothing
            self.kill(name)
        deadline = time.monotonic() + 10
        while any(Path(f"/proc/{pid}/ns/net").exists() for pid in self.pids.values()):
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        shutil.rmtree(self.folder, ignore_errors=True)
