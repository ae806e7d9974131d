"""Fixtures: the pool of rank processes, commands in forks, tiny models."""

import os
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["WANDB_MODE"] = "offline"
CACHE = tempfile.TemporaryDirectory(prefix="qshard-tests-")  # tokens made by the tests are not the user's
os.environ["XDG_CACHE_HOME"] = CACHE.name
os.environ["HF_MODULES_CACHE"] = str(Path(CACHE.name) / "modules")  # code that comes with models


@pytest.fixture(scope="session")
def pool():
    from pool import Pool

    pool = Pool()
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def nursery(tmp_path_factory):
    from forked import Nursery

    nursery = Nursery(tmp_path_factory.mktemp("nursery"))
    yield nursery
    nursery.stop()


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """(name, train type) -> folder of a tiny random model, made when first asked for; with added blocks for
    Llama-Pro."""
    import tiny
    import train

    made = {}

    def folder(name: str, train_type: str = "full") -> str:
        name += "+pro" if train.TRAIN_TYPES[train_type].new_blocks else ""
        if name not in made:
            made[name] = str(tmp_path_factory.mktemp(name))
            if name.endswith("+pro"):
                tiny.save_expanded(folder(name.removesuffix("+pro")), made[name])
            else:
                tiny.save_model(name, made[name])
        return made[name]

    return folder
