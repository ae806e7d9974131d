"""tests/gpu/run.sh, gone through on the CPU with a tiny model; and that it tells a mismatch."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_dry_run():
    env = dict(os.environ, QSHARD_DRY_RUN="1", PYTHON=sys.executable, CUDA_VISIBLE_DEVICES="")
    env.pop("QSHARD_TRL_PYTHON", None)
    done = subprocess.run(["bash", ROOT / "tests/gpu/run.sh"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("ok ")}
    assert parts == {"parity", "quantiser", "memory", "speed", "TRL"} and "MISMATCH" not in done.stdout


def test_mismatches_are_told(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests/gpu"))
    import check

    case = dict(losses=[1.0, 2.0], norms=[1.0, 1.0], right=True)
    other = dict(right=False), dict(losses=[1.0, 2.0001]), dict(norms=[1.0001, 1.0]), dict(losses=[1.0, float("nan")])
    for change in other:
        assert [row[-1] for row in check.parity_rows(dict(a=case | change), dict(a=case))] == [False]
    assert [row[-1] for row in check.parity_rows(dict(a=dict(error="x")), dict(a=case, b=case))] == [False, False]
    assert [row[-1] for row in check.parity_rows(dict(a=case), dict(a=case))] == [True]
    real, plan = [dict(allocated=100, reserved=100)], [dict(allocated=106, reserved=110)]
    assert [row[-1] for row in check.memory_rows(real, plan)] == [False, True]
    assert not any(row[-1] for row in check.quantizer_rows(dict(nf4=dict(same=0.9, errors=[0.09, 0.09]))))
    values = dict(tokens=1.0, share=None, peak=1, loss=float("nan"), norm=1.0)
    assert [row[-1] for row in check.speed_rows(dict(qlora=values))] == [False]
    assert [row[0] for row in check.rows(dict(parity=None, reference=None, quantizers=None, plan=None, speed=None,
                                              memory=[])) if not row[-1]] == [
        "parity", "reference", "quantizers", "plan", "speed"]  # fmt: skip


def test_without_a_card_it_says_so():
    env = dict(os.environ, PYTHON=sys.executable, CUDA_VISIBLE_DEVICES="")
    env.pop("QSHARD_DRY_RUN", None)
    done = subprocess.run(["bash", ROOT / "tests/gpu/run.sh"], env=env, capture_output=True, text=True)
    assert done.returncode == 2 and "no CUDA card" in done.stderr
