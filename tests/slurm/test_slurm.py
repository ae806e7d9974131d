"""fsdp_multi_node.sh, changed only where it says so, on a real SLURM of three nodes; and torchrun without SLURM."""

import json
import os
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
STEPS = 8
FLAGS = dict(train_type="qlora", precision="fp32", lora_rank=4, lr=0.01, batch_size=3, max_steps=STEPS,
             save_steps=-1, log_to="stdout")  # fmt: skip


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

    def script(self, name: str, sbatch: list[str], processes: int | str, head: str = "", **flags) -> Path:
        """fsdp_multi_node.sh with another text in its marked place."""
        given = "\n".join(f"  {word}" for word in self.flags(name, **flags))
        lines = [*(f"#SBATCH {option}" for option in sbatch), f"#SBATCH --output={self.folder}/{name}.out"]
        lines += [f"environment() {{ export PATH={PYTHON}:$PATH; {head or ':'}; }}", f"project={ROOT}"]
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
def one_machine(cluster, lab) -> dict[int, float]:
    """Losses of four processes on one machine: plain `python train.py` in the shell of a two-node job."""
    flags = " ".join(lab.flags("one", world_size=4))
    job = cluster.submit("--nodes=2", "--open-mode=append", f"--output={lab.folder}/one.out", "--wrap",
                         f"{sys.executable} {ROOT}/train.py {flags}")  # fmt: skip
    assert cluster.wait(job) == "COMPLETED", lab.text("one")
    assert "4 process(es) on cpu" in lab.text("one")
    found = lab.losses("one")
    assert sorted(found) == list(range(1, STEPS + 1)) and found[STEPS] < found[1]
    return found


def test_two_nodes(cluster, lab, one_machine):
    job = cluster.submit(lab.script("two", ["--nodes=2"], processes=2))
    assert cluster.wait(job) == "COMPLETED", lab.text("two")
    assert "4 process(es) on cpu" in lab.text("two")
    assert lab.losses("two") == pytest.approx(one_machine, rel=1e-5)
