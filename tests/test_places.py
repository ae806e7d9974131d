"""Environment and flags -> the place of a process: a table of launchers, and of what can be wrong with them."""

import pytest

from scripts import places
from scripts.flags import UserError
from scripts.places import Place

TORCHRUN = dict(RANK="3", WORLD_SIZE="4", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2", MASTER_ADDR="a", MASTER_PORT="7")
BY_HAND = dict(RANK="1", WORLD_SIZE="4", MASTER_ADDR="a", MASTER_PORT="7")
SHELL = dict(  # of sbatch; salloc's on a login machine lacks the last four
    SLURM_JOB_ID="70000",
    SLURM_JOB_NODELIST="n[1-2]",
    SLURM_NNODES="2",
    SLURM_GPUS_ON_NODE="8",
    SLURM_NTASKS="2",
    SLURM_PROCID="0",
    SLURM_LOCALID="0",
    SLURM_NODEID="0",
)


def step(task: int, local: int, node: int, tasks: int, nodes: int, each: str, **more) -> dict[str, str]:
    values = dict(PROCID=task, LOCALID=local, NODEID=node, STEP_ID=2, STEP_NUM_TASKS=tasks)
    values |= dict(STEP_NUM_NODES=nodes, STEP_TASKS_PER_NODE=each, STEP_NODELIST="gpu[07-08,11]")
    here = SHELL | {f"SLURM_{name}": str(value) for name, value in values.items()}
    del here["SLURM_GPUS_ON_NODE"]
    return here | more


PORT = 15000 + (70000 + 2 * 1009) % 15000
NODE = step(1, 0, 1, 2, 2, "1(x2)")  # the second of two nodes with one task each
TASK = step(3, 1, 1, 4, 2, "2(x2)")  # the last task of two nodes with two each
ALONE = step(0, 0, 0, 1, 1, "1")
GPUS = dict(SLURM_GPUS_ON_NODE="4")
ANCESTOR = dict(world_size=8, address="gpu07", port=12345)
CASES = {
    "plain": ({}, {}, 0, Place(0, None, 2, 2, "localhost", 0)),
    "plain, accelerators": ({}, {}, 3, Place(0, None, 3, 3, "localhost", 0)),
    "plain, flags": ({}, dict(world_size=5, port=9), 0, Place(0, None, 5, 5, "localhost", 9)),
    "plain, address exported": (dict(MASTER_ADDR="x"), {}, 0, Place(0, None, 2, 2, "localhost", 0)),
    "torchrun": (TORCHRUN, {}, 2, Place(3, 1, 4, 2, "a", 7)),
    "torchrun, same flags": (TORCHRUN, dict(world_size=4, address="a", port=7), 2, Place(3, 1, 4, 2, "a", 7)),
    "torchrun in a step": (NODE | TORCHRUN, {}, 2, Place(3, 1, 4, 2, "a", 7)),
    "by hand": (BY_HAND, {}, 0, Place(1, 1, 4, 4, "a", 7)),
    "by hand, from SLURM's": (TASK | BY_HAND | dict(RANK="3"), {}, 0, Place(3, 1, 4, 2, "a", 7)),
    "by hand, one per node": (NODE | BY_HAND | dict(WORLD_SIZE="2"), {}, 0, Place(1, 0, 2, 1, "a", 7)),
    "batch shell": (SHELL, {}, 0, Place(0, None, 2, 2, "localhost", 0)),
    "interactive step": (SHELL | dict(SLURM_STEP_ID="4294967290"), {}, 0, Place(0, None, 2, 2, "localhost", 0)),
    "task per node, CPUs": (NODE, {}, 0, Place(2, None, 4, 2, "gpu07", PORT)),
    "task per node, GPUs": (NODE | GPUS, {}, 8, Place(4, None, 8, 4, "gpu07", PORT)),
    "task per node, visible": (NODE, {}, 8, Place(8, None, 16, 8, "gpu07", PORT)),
    "task per node, ancestor": (NODE | GPUS, ANCESTOR, 4, Place(4, None, 8, 4, "gpu07", 12345)),
    "task per node, exported": (
        NODE | dict(WORLD_SIZE="6", MASTER_ADDR="z", MASTER_PORT="8"),
        dict(world_size=6),
        0,
        Place(3, None, 6, 3, "z", 8),
    ),
    "task per node, one process": (NODE, dict(world_size=2), 0, Place(1, None, 2, 1, "gpu07", PORT)),
    "task per accelerator": (TASK | GPUS, {}, 4, Place(3, 1, 4, 2, "gpu07", PORT)),
    "task per accelerator, flags": (TASK, dict(world_size=4, port=5), 1, Place(3, 1, 4, 2, "gpu07", 5)),
    "one node, one task": (ALONE | GPUS, {}, 4, Place(0, None, 4, 4, "localhost", 0)),
    "one node, two tasks": (step(1, 1, 0, 2, 1, "2"), {}, 0, Place(1, 1, 2, 2, "localhost", PORT)),
}
WRONG = {
    "half of torchrun": (dict(RANK="1"), {}, "RANK=1 set, but WORLD_SIZE, MASTER_ADDR, MASTER_PORT not"),
    "only a world size": (dict(WORLD_SIZE="1"), {}, "WORLD_SIZE=1 set, but RANK, MASTER_ADDR, MASTER_PORT"),
    "rank too large": (BY_HAND | dict(RANK="4"), {}, "RANK=4 does not fit WORLD_SIZE=4"),
    "local rank too large": (TORCHRUN | dict(LOCAL_RANK="2"), {}, "LOCAL_RANK=2 does not fit LOCAL_WORLD_SIZE=2"),
    "no number": (BY_HAND | dict(RANK="x"), {}, "RANK=x is no number"),
    "world": (TORCHRUN, dict(world_size=3), "--world_size 3, but WORLD_SIZE 4"),
    "address": (TORCHRUN, dict(address="b"), "--master_addr b, but MASTER_ADDR a"),
    "port": (NODE | dict(MASTER_PORT="7"), dict(port=8), "--master_port 8, but MASTER_PORT 7"),
    "tasks": (TASK, dict(world_size=8), "--world_size 8, but SLURM_STEP_NUM_TASKS 4"),
    "exported world": (TASK | dict(WORLD_SIZE="8"), {}, "WORLD_SIZE 8, but SLURM_STEP_NUM_TASKS 4"),
    "another rank": (TASK | BY_HAND, {}, "RANK 1, but SLURM_PROCID 3"),
    "does not divide": (NODE, dict(world_size=5), "--world_size 5 does not divide into SLURM_STEP_NUM_NODES=2"),
    "uneven": (step(0, 0, 0, 4, 2, "3,1"), {}, "SLURM_STEP_TASKS_PER_NODE=3,1: every node needs"),
    "cyclic": (step(1, 0, 1, 4, 2, "2(x2)"), {}, "SLURM_PROCID=1, SLURM_NODEID=1, SLURM_LOCALID=0"),
    "nodes": (step(0, 0, 0, 2, 3, "1(x2)"), {}, "SLURM_STEP_NUM_NODES=3 do not fit"),
    "missing": (
        {name: NODE[name] for name in NODE if name not in ("SLURM_NODEID", "SLURM_STEP_NODELIST")},
        {},
        "SLURM_NODEID, SLURM_STEP_NODELIST not",
    ),
    "no GPUs": (NODE | GPUS, {}, "SLURM granted 4 GPU(s) (SLURM_GPUS_ON_NODE), but torch sees none"),
    "no GPUs, a task each": (TASK | GPUS, {}, "SLURM granted 4 GPU(s)"),
}


def find(env, accelerators=0, world_size=-1, address="localhost", port=0) -> Place:
    return places.place(env, world_size, address, port, accelerators)


@pytest.mark.parametrize("name", CASES)
def test_places(name, monkeypatch):
    monkeypatch.setattr(places, "cores", lambda: 64)
    env, flags, accelerators, wanted = CASES[name]
    assert find(env, accelerators, **flags) == wanted


@pytest.mark.parametrize("name", WRONG)
def test_what_is_missing_or_contradictory_is_named(name):
    env, flags, message = WRONG[name]
    with pytest.raises(UserError) as error:
        find(env, **flags)
    assert message in str(error.value)


def test_all_places_of_a_step_fit_together():
    """Three nodes with four ranks each, started either way."""
    tasks = [find(step(t, t % 4, t // 4, 12, 3, "4(x3)"), 4) for t in range(12)]
    assert [place.rank for place in tasks] == list(range(12))
    nodes = [find(step(n, 0, n, 3, 3, "1(x3)"), 4) for n in range(3)]
    assert [(place.rank, place.node, place.nodes) for place in nodes] == [(0, 0, 3), (4, 1, 3), (8, 2, 3)]
    assert len({(p.world, p.local_world, p.address, p.port) for p in tasks + nodes}) == 1


def test_ports_of_jobs_and_steps_differ():
    jobs = range(7_000_000, 7_000_030)
    ports = {places.derived_port(job, number) for job in jobs for number in range(9)}
    assert len(ports) == 30 * 9 and min(ports) >= 15000 and max(ports) < 30000


@pytest.mark.parametrize(
    "nodes, first",
    {
        "n1": "n1",
        "n1,n2": "n1",
        "n[1-2]": "n1",
        "node[01-03,07]": "node01",
        "node[007,9-12],x[1-2]": "node007",
        "a-b.c,n[1-2]": "a-b.c",
        "rack[1-2]n[3-4]": "rack1n3",
        "gpu[1-2]-ib,login": "gpu1-ib",
    }.items(),
)
def test_first_host(nodes, first):
    assert places.first_host(nodes) == first


def test_tasks_per_node():
    assert places.tasks_per_node("2(x3),1") == [2, 2, 2, 1] and places.tasks_per_node("4") == [4]
