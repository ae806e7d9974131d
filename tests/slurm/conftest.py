"""One cluster for all tests of this folder; each node's own disk is `cluster.folder`/disk."""

import os

import pytest

import cluster as cluster_module


@pytest.fixture(scope="session")
def cluster():
    if reason := cluster_module.lacking():
        if os.environ.get("QSHARD_SLURM") == "required":
            pytest.fail(f"no SLURM: {reason}")
        pytest.skip(f"no SLURM: {reason}")
    made = cluster_module.Cluster()
    yield made
    made.stop()
