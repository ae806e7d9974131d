"""The notebooks run from top to bottom, on a tiny model, and are kept without outputs."""
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import train

FOLDER = Path(train.__file__).parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def code(path: Path) -> str:
    cells = json.loads(path.read_text())["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def test_there_are_three_and_none_has_outputs():
    assert len(NOTEBOOKS) == 3
    for path in NOTEBOOKS:
        cells = json.loads(path.read_text())["cells"]
        assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells if cell["cell_type"] == "code")
        assert cells[0]["cell_type"] == "markdown" and cells[0]["source"][0].startswith("# ")


@pytest.fixture(scope="module")
def runs(models):
    """The notebooks' runs, two at a time: each waits for one process most of the time."""
    env = dict(os.environ, QSHARD_NOTEBOOK_MODEL=models("llama"), QSHARD_NOTEBOOK_STEPS="2", MPLBACKEND="Agg")

    def run(path: Path) -> subprocess.CompletedProcess:
        command = [sys.executable, "-c", code(path)]
        return subprocess.run(command, capture_output=True, text=True, cwd=FOLDER, env=env)

    with ThreadPoolExecutor(2) as threads:
        yield {path: threads.submit(run, path) for path in NOTEBOOKS}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_run(path, runs):
    done = runs[path].result()
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
