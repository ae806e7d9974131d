"""fsdp_multi_node.sh, changed only where it says so, on a real SLURM of three nodes; and torchrun without SLURM."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tiny
import train

ROOT = Path(train.__file__).parent
PYTHON = str(Path(sys.executable).parent)
EDIT = re.compile(r"(# ---- edit from here.*?\n)(.*?)(# ---- to here)", re.S)
STEPS, FEW = 40, 8  # of the disturbed run and its reference, which has time to be disturbed; of the others
FLAGS = dict(
    train_type="qlora",
    precision="fp32",
    lora_rank=4,
    lr=0.01,
    lr_scheduler="constant",
    batch_size=3,
    max_steps=FEW,
    log_to="stdout",
)


class Lab:
    """Folder, model, data and job script of these tests."""

    def __init__(self, cluster, folder: Path):
        self.cluster, self.folder = cluster, folder
        self.model, self.data = folder / "model", folder / "rows.jsonl"
        tiny.save_model("llama", str(self.model))
        tiny.write_alpaca(self.data, 12 * STEPS)

    def flags(self, name: str, **flags) -> list[str]:
        given = dict(model_name=self.model, dataset=self.data, output_dir=self.folder / name) | FLAGS | flags
        return [word for flag, value in given.items() for word in (f"--{flag}", str(value))]

    def script(self, name: str, *sbatch: str, processes: int | str = 2, **flags) -> Path:
        """fsdp_multi_node.sh with another text in its marked place."""
        given = "\n".join(f"  {word}" for word in self.flags(name, **flags))
        lines = [*(f"#SBATCH {option}" for option in sbatch), f"#SBATCH --output={self.folder}/{name}.out"]
        lines += [f"environment() {{ export PATH={PYTHON}:$PATH; }}", f"project={ROOT}"]
        lines += [f"errors={self.folder}/{name}-errors", f"processes_per_node={processes}", "restarts=9"]
        text = (ROOT / "fsdp_multi_node.sh").read_text()
        assert len(EDIT.findall(text)) == 1
        text = EDIT.sub(lambda m: m[1] + "\n".join([*lines, f"flags=(\n{given}\n)", m[3]]), text)
        path = self.folder / f"{name}.sh"
        path.write_text(text)
        return path

    def text(self, name: str) -> str:
        path = self.folder / f"{name}.out"
        return path.read_text() if path.exists() else ""

    def until(self, name: str, pattern: str, timeout: float = 120) -> None:
        """Waits for a line of a job's output."""
        deadline = time.monotonic() + timeout
        while not re.search(pattern, self.text(name)):
            assert time.monotonic() < deadline, f"no {pattern} in:\n{self.text(name)}"
            time.sleep(0.05)

    def losses(self, name: str) -> dict[int, float]:
        lines = (self.folder / name / "metrics.jsonl").read_text().splitlines()
        return {row["step"]: row["loss"] for row in map(json.loads, lines)}


@pytest.fixture(scope="module")
def lab(cluster, tmp_path_factory):
    return Lab(cluster, tmp_path_factory.mktemp("lab"))


@pytest.fixture(scope="module")
def jobs(cluster, lab) -> dict[str, str]:
    """Jobs, two of which run at a time: each waits half of the time, for SLURM or for another process."""
    one = " ".join(lab.flags("one", world_size=4, max_steps=STEPS))
    hybrid = " ".join(lab.flags("hybrid", sharding_strategy="hybrid_full_shard", save_steps=FEW))
    own = cluster.folder / "disk" / "model"
    cluster.run("n1", "cp", "-r", str(lab.model), str(own))
    wanted = {
        "one": ["--nodes=2", "--wrap", f"{sys.executable} {ROOT}/train.py {one}"],
        "two": [lab.script("two", "--nodes=2")],
        "three": [lab.script("three", "--nodes=3", processes=1, batch_size=4)],
        "hybrid": ["--nodes=2", "--ntasks-per-node=2"]
        + ["--wrap", f"srun --ntasks-per-node=2 {sys.executable} {ROOT}/train.py {hybrid}"],
        "gpus": [lab.script("gpus", "--nodes=2", "--gpus-per-node=2", processes="")],
        "lacking": [lab.script("lacking", "--nodes=2", model_name=own)],
        "check": [lab.script("check", "--nodes=2"), "check"],
    }
    numbers: dict[str, str] = {}
    for name, words in wanted.items():
        before = [f"--dependency=afterany:{number}" for number in list(numbers.values())[-2:-1]]
        numbers[name] = cluster.submit(*before, f"--output={lab.folder}/{name}.out", *words)
    return numbers


@pytest.fixture(scope="module")
def one_machine(cluster, lab, jobs) -> dict[int, float]:
    """Losses of four processes on one machine: plain `python train.py` in the shell of a two-node job."""
    assert cluster.wait(jobs["one"]) == "COMPLETED", lab.text("one")
    assert "4 processes on cpu" in lab.text("one")
    found = lab.losses("one")
    assert sorted(found) == list(range(1, STEPS + 1)) and found[STEPS] < 0.7 * found[1]
    return found


def same(found: dict[int, float], wanted: dict[int, float]) -> bool:
    return len(found) > 1 and found == pytest.approx({step: wanted[step] for step in found}, rel=1e-5)


def test_two_nodes(cluster, lab, jobs, one_machine):
    assert cluster.wait(jobs["two"]) == "COMPLETED", lab.text("two")
    assert "4 processes on cpu" in lab.text("two")
    assert same(lab.losses("two"), one_machine) and len(lab.losses("two")) == FEW


def test_three_nodes_with_one_process_each(cluster, lab, jobs, one_machine):
    assert cluster.wait(jobs["three"]) == "COMPLETED", lab.text("three")
    assert "3 processes on cpu" in lab.text("three") and same(lab.losses("three"), one_machine)


def test_hybrid_with_one_task_per_process(cluster, lab, jobs, one_machine):
    """Without the script and train.py's launcher. The node is the inner group: ranks of the second node hold
    copies, of which a checkpoint has nothing."""
    assert cluster.wait(jobs["hybrid"]) == "COMPLETED", lab.text("hybrid")
    assert "4 processes on cpu, hybrid_full_shard" in lab.text("hybrid")
    assert same(lab.losses("hybrid"), one_machine)
    files = sorted((lab.folder / "hybrid" / f"checkpoint-{FEW}").glob("*.safetensors"))
    assert [path.stat().st_size > 10_000 for path in files] == [True, True, False, False]


def test_torchrun_without_slurm(cluster, lab, one_machine):
    words = "-m torch.distributed.run --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-id=7"
    command = [sys.executable, *words.split(), "--rdzv-endpoint=n1:29400", str(ROOT / "train.py")]
    nodes = [
        subprocess.Popen(
            cluster.enter(node, *command, *lab.flags("torchrun")),
            env=cluster.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd="/",
        )
        for node in ("n1", "n2")
    ]
    said = [node.communicate(timeout=180)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert same(lab.losses("torchrun"), one_machine)


def test_granted_gpus_that_are_not_there(cluster, lab, jobs):
    job = jobs["gpus"]
    assert cluster.wait(job) == "FAILED" and cluster.job(job)["ExitCode"] == "2:0", lab.text("gpus")
    for node in ("n1", "n2"):
        assert f"{node}: SLURM granted 2 GPU(s) (SLURM_GPUS_ON_NODE), but torch sees none" in lab.text("gpus")
    assert "CUDA_VISIBLE_DEVICES=0,1" in lab.text("gpus") and "Traceback" not in lab.text("gpus")


def test_a_node_that_lacks_the_model_is_named(cluster, lab, jobs):
    job, own = jobs["lacking"], cluster.folder / "disk" / "model"
    assert cluster.wait(job) == "FAILED" and cluster.job(job)["ExitCode"] == "2:0", lab.text("lacking")
    assert f"n2: --model_name {own}: no such folder" in lab.text("lacking")
    assert "n1: --model" not in lab.text("lacking") and "Traceback" not in lab.text("lacking")


def test_launch_check(cluster, lab, jobs):
    assert cluster.wait(jobs["check"]) == "COMPLETED", lab.text("check")
    for line in ("rank 0  n1", "rank 3  n2", "inside n1: all-gather", "inside n2", "all 4 ranks: all-gather"):
        assert line in lab.text("check")
    assert "all ranks see the same" in lab.text("check") or "DIFFERENT\nn" in lab.text("check")


def test_a_failing_rank_is_the_first_thing_to_read(cluster, lab):
    """A rank of the second node is killed."""
    job = cluster.submit(lab.script("killed", "--nodes=2", processes=1, max_steps=STEPS))
    lab.until("killed", "step 1/")
    cluster.run("n2", "sh", "-c", "kill -9 $(pgrep -f '[p]ython -u')")
    assert cluster.wait(job) == "FAILED" and cluster.job(job)["ExitCode"] == "137:0", lab.text("killed")
    assert "rank 1 on n2 was ended by SIGKILL" in lab.text("killed")
    assert {path.name for path in (lab.folder / "killed-errors").iterdir()} == {
        "rank-00000.err",
        "rank-00001.err",
    }


def test_a_cancelled_job_is_saved_and_not_requeued(cluster, lab):
    job = cluster.submit(lab.script("cancelled", "--nodes=2", processes=1, max_steps=STEPS, save_steps=-1))
    lab.until("cancelled", "step 1/")
    cluster.run("login", "scancel", job)
    assert cluster.wait(job) == "CANCELLED", lab.text("cancelled")
    lab.until("cancelled", "stopped after step", timeout=20)
    assert list((lab.folder / "cancelled").glob("checkpoint-*")) and cluster.job(job)["Restarts"] == "0"


def test_stopped_lost_a_node_and_went_on(cluster, lab, one_machine):
    """One job, four times: USR1 before there is anything that could take it; USR1 while it trains; a node
    whose power is cut; the end, on another node. All losses are those of the undisturbed run."""
    job = cluster.submit(lab.script("stopped", "--nodes=2", max_steps=STEPS, save_steps=5))

    def warn():
        cluster.run("login", "scancel", "--signal=USR1", "--batch", job)

    cluster.wait(job, {"RUNNING"})
    warn()
    lab.until("stopped", r"back into the queue \(restart 1\)")
    assert "step 1/" not in lab.text("stopped")
    lab.until("stopped", "step 3/")
    warn()
    lab.until("stopped", r"back into the queue \(restart 2\)")
    stopped = int(re.search(r"SIGUSR1: stopped after step (\d+)", lab.text("stopped"))[1])
    lab.until("stopped", f"checkpoint-{stopped}, {stopped} steps done")
    lab.until("stopped", f"step {stopped + 8}/")
    cluster.kill("n2")
    assert cluster.wait(job) == "COMPLETED", lab.text("stopped")
    assert cluster.job(job)["Restarts"] == "3" and cluster.job(job)["NodeList"] == "n[1,3]"
    begun = [int(step) for step in re.findall(r"checkpoint-\d+, (\d+) steps done", lab.text("stopped"))]
    assert len(begun) == 2 and begun[0] == stopped < begun[1] and begun[1] % 5 == 0
    said = re.findall(rf"step (\d+)/{STEPS}  loss (\S+)", lab.text("stopped"))
    assert {int(step) for step, _ in said} == set(range(1, STEPS + 1))
    assert all(abs(float(loss) - one_machine[int(step)]) < 1e-4 for step, loss in said)
    assert same(lab.losses("stopped"), one_machine)
