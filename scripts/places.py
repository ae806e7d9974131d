"""Which place a process has in a run, found from its environment: torchrun's variables, SLURM's, or none."""
import os
import re
import socket
from typing import NamedTuple

from scripts.flags import UserError

INTERACTIVE = 0xFFFFFFF0  # from here on SLURM numbers its own steps: the batch script, salloc's shell
STEP = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID",
        "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST")


class Place(NamedTuple):
    """Where a process stands in a run. `local_rank` is None for a launcher, which is no rank itself but
    starts the `local_world` ranks of its node; `rank` is their first."""
    rank: int
    local_rank: int | None
    world: int
    local_world: int
    address: str
    port: int

    @property
    def node(self) -> int:
        return self.rank // self.local_world

    @property
    def nodes(self) -> int:
        return self.world // self.local_world

    def environment(self) -> dict[str, str]:
        """What torchrun would tell a rank."""
        return dict(RANK=str(self.rank), LOCAL_RANK=str(self.local_rank), WORLD_SIZE=str(self.world),
                    LOCAL_WORLD_SIZE=str(self.local_world), MASTER_ADDR=self.address,
                    MASTER_PORT=str(self.port))


ALONE = Place(0, 0, 1, 1, "localhost", 0)


def require(env, names) -> None:
    if missing := [name for name in names if name not in env]:
        there = ", ".join(f"{name}={env[name]}" for name in names if name in env)
        raise UserError(f"{there} set, but {', '.join(missing)} not: set all of them, or none")


def numbers(env, names) -> list[int]:
    if wrong := [f"{name}={env[name]}" for name in names if not env[name].isdecimal()]:
        raise UserError(f"{', '.join(wrong)} is no number")
    return [int(env[name]) for name in names]


def agreed(claims: dict):
    """The value of all claims that are made (not None). Raises UserError naming two that contradict."""
    made = [(name, value) for name, value in claims.items() if value is not None]
    for (name, value), (other, another) in zip(made, made[1:]):
        if value != another:
            raise UserError(f"{name} {value}, but {other} {another}: leave out the wrong one")
    return made[0][1] if made else None


def number(env, name: str) -> int | None:
    return numbers(env, [name])[0] if name in env else None


def in_step(env) -> bool:
    """Whether srun started this process. The shells of sbatch and salloc have SLURM's variables as well."""
    step = env.get("SLURM_STEP_ID", "")
    return step.isdecimal() and int(step) < INTERACTIVE


def first_host(nodes: str) -> str:
    """n03 of SLURM's list `n[03-05,9],x1`. Needs no scontrol, which containers lack."""
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", re.match(r"(?:\[[^\]]*\]|[^,\[])*", nodes).group())


def tasks_per_node(text: str) -> list[int]:
    """[2, 2, 1] of SLURM's `2(x2),1`."""
    parts = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in text.split(",")]
    return [int(part[1]) for part in parts if part for _ in range(int(part[2] or 1))]


def variables(env) -> Place | None:
    """The place of a rank by the variables that torchrun, or a person, sets; None where there are none."""
    if "RANK" not in env and "WORLD_SIZE" not in env:
        return None
    require(env, ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    given = {"LOCAL_RANK": env["RANK"], "LOCAL_WORLD_SIZE": env["WORLD_SIZE"]} | dict(env)
    rank, world, local_rank, local_world, port = numbers(
        given, ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"))
    if port > 65535:
        raise UserError(f"MASTER_PORT={port}: ports end at 65535")
    for name, value, limit in (("RANK", rank, world), ("LOCAL_RANK", local_rank, local_world)):
        if value >= limit:
            raise UserError(f"{name}={value} does not fit {name.replace('RANK', 'WORLD_SIZE')}={limit}")
    return Place(rank, local_rank, world, local_world, env["MASTER_ADDR"], port)


def step_place(env, claims: dict, address: str | None, port: int | None, usual: int) -> Place:
    """The place of a task of srun: a rank where a node has several tasks, a launcher where it has one.
    `claims`: what is said of the world size; `usual`: processes on a machine where nothing is said."""
    require(env, STEP)
    job, step, task, local, node, tasks, nodes = numbers(env, STEP[:7])
    each = tasks_per_node(env["SLURM_STEP_TASKS_PER_NODE"])
    shape = f"SLURM_STEP_TASKS_PER_NODE={env['SLURM_STEP_TASKS_PER_NODE']}"
    if len(set(each)) != 1:
        raise UserError(f"{shape}: every node needs as many tasks as the others (srun --ntasks-per-node)")
    if len(each) != nodes or sum(each) != tasks or task != node * each[0] + local or local >= each[0]:
        raise UserError(f"SLURM_PROCID={task}, SLURM_NODEID={node}, SLURM_LOCALID={local}, SLURM_STEP_NUM_"
                        f"TASKS={tasks}, SLURM_STEP_NUM_NODES={nodes} do not fit {shape}: tasks have to be "
                        f"numbered node by node (srun --distribution=block)")
    address = address or (first_host(env["SLURM_STEP_NODELIST"]) if nodes > 1 else "localhost")
    if tasks > nodes or "RANK" in env:
        agreed({"RANK": number(env, "RANK"), "SLURM_PROCID": task})
        agreed(claims | {"SLURM_STEP_NUM_TASKS": tasks})
        return Place(task, local, tasks, each[0], address, port or derived_port(job, step))
    world = agreed(claims) or nodes * (number(env, "SLURM_GPUS_ON_NODE") or usual)
    if world % nodes:
        raise UserError(f"--world_size {world} does not divide into SLURM_STEP_NUM_NODES={nodes} nodes")
    port = port or (derived_port(job, step) if nodes > 1 else 0)
    return Place(node * world // nodes, None, world, world // nodes, address, port)


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def derived_port(job: int, step: int) -> int:
    """A port below those that systems give out themselves; jobs and steps on one node differ in it."""
    return 15000 + (job + 1009 * step) % 15000


def place(env, world_size: int, address: str, port: int, accelerators: int) -> Place:
    """Where this process stands, from its environment, the flags --world_size (-1: not given), --master_addr
    (localhost: not given), --master_port (0: not given), and the accelerators that torch sees here. Raises
    UserError naming what is missing or contradictory."""
    said = world_size if world_size > 0 else None
    usual = accelerators or min(2, cores())
    step = in_step(env)
    if step and not accelerators and (granted := number(env, "SLURM_GPUS_ON_NODE")):
        raise UserError(f"{socket.gethostname()}: SLURM granted {granted} GPU(s) (SLURM_GPUS_ON_NODE), but "
                        f"torch sees none: is it a CPU build, is the driver loaded? (CUDA_VISIBLE_DEVICES="
                        f"{env.get('CUDA_VISIBLE_DEVICES', 'unset')})")
    claims = {"--world_size": said, "WORLD_SIZE": number(env, "WORLD_SIZE")}
    if not step and "RANK" not in env and "WORLD_SIZE" not in env:
        return Place(0, None, said or usual, said or usual, address, port)
    address = agreed({"--master_addr": None if address == "localhost" else address,
                      "MASTER_ADDR": env.get("MASTER_ADDR")})
    port = agreed({"--master_port": port or None, "MASTER_PORT": number(env, "MASTER_PORT")})
    if step and ("RANK" not in env or "LOCAL_RANK" not in env):
        return step_place(env, claims, address, port, usual)
    found = variables(env)
    agreed(claims)
    return found
