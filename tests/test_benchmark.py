"""The comparison with TRL: what its table is made of, and that both sides are given the same work. TRL itself is not
needed here."""

import dataclasses
import json
import subprocess
import sys
import tempfile

import pytest
import torch

import tiny
import train
from scripts import benchmark, flops, hf_train, packing
from scripts.flags import UserError


def row(seconds: float, tokens: int, cpu: float, loss: float = 1.0, peak: int = 100) -> dict:
    return dict(tokens=tokens, supervised_tokens=tokens // 2, tokens_per_second=tokens / seconds, cpu=cpu,
                supervised_tokens_per_second=tokens / 2 / seconds, peak_memory_bytes=peak, loss=loss)


def test_medians_leave_warm_up_out_but_for_memory():
    rows = [row(50, 100, 7, peak=900), row(1, 100, 8), row(4, 100, 18), row(2, 100, 21)]
    found = benchmark.side(benchmark.Run(rows, 60.0, {}), warmup=1)
    assert found == benchmark.Side(2, 3, 50, 25, 900, 60)


def test_ratios_are_taken_pair_by_pair():
    """A machine that slows down after the first pair changes no ratio; a median of all runs would show one."""
    ours = [benchmark.Side(*[x] * 6) for x in (1.0, 10.0, 12.0)]
    theirs = [benchmark.Side(*[x] * 6) for x in (2.0, 20.0, 16.0)]
    assert set(benchmark.ratios(list(zip(ours, theirs))).values()) == {0.5}


def test_loss_gap():
    first, second = ([row(1, 2, 0, loss) for loss in losses] for losses in ([1, 2, 3], [1.001, 2.5, 3]))
    assert benchmark.loss_gap(first, second) == 0.5
    with pytest.raises(ValueError):
        benchmark.loss_gap(first, second[:2])


@pytest.mark.parametrize("train_type", ["full", "custom_lora"])
def test_floor_counts_what_a_step_needs(models, train_type):
    """Without recomputing: the FLOPs of scripts/flops.py, attention's causal half taken off."""
    config = train.Config(model_name=models("llama"), train_type=train_type, lora_rank=4)
    model = train.empty_model(train.Path(models("llama")), torch.float32)
    blocks = train.blocks_of(model)
    model.requires_grad_(train_type == "full")
    if train_type != "full":
        train.adapters.ADAPTERS["custom"](model, config, ["q_proj", "down_proj"])
    per, (tokens, supervised, length) = flops.per_token(model, blocks), (96, 31, 24)
    found = benchmark.products(model, blocks, tokens, supervised, length, recompute=False)
    wanted = flops.of_step(per | dict(attention=per["attention"] / 2), tokens, supervised, length)
    assert sum(p.flops for p in found) == pytest.approx(wanted, rel=1e-12)
    again = benchmark.products(model, blocks, tokens, supervised, length, recompute=True)
    head = 2 * model.lm_head.weight.numel() * supervised * (3 if train_type == "full" else 2)
    forward = (wanted - head) / 3 if train_type == "full" else None
    assert forward is None or sum(p.flops for p in again) == pytest.approx(wanted + forward, rel=1e-12)
    assert benchmark.time_products(found[:4], torch.float32, "cpu") > 0


def test_a_run_is_watched(tmp_path):
    """Rows as they appear, processor time with them; a failure tells what was said."""
    text = ("import json, sys, time; f = open(sys.argv[2] + '/metrics.jsonl', 'a', buffering=1)\n"
            "for i in range(3): f.write(json.dumps(dict(loss=i)) + '\\n'); time.sleep(0.1)\n"
            "sum(range(10**6)); open(sys.argv[2] + '/run.json', 'w').write('{\"world_size\": 2}')")
    found = benchmark.run([sys.executable, "-c", text], tmp_path)
    assert [r["loss"] for r in found.rows] == [0, 1, 2] and found.facts == {"world_size": 2}
    assert 0 < found.first and found.rows[-1]["cpu"] >= found.rows[0]["cpu"] >= 0
    with pytest.raises(RuntimeError, match="no such luck"):
        benchmark.run([sys.executable, "-c", "raise SystemExit('no such luck')"], tmp_path)


STUB = """
import json, pathlib, sys, time
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
out = pathlib.Path(flags["--output_dir"])
out.mkdir(exist_ok=True)
(out / "run.json").write_text('{"world_size": 1}')
numbers = json.loads((pathlib.Path(__file__).parent / "numbers.json").read_text())
with open(out / "metrics.jsonl", "w", buffering=1) as file:
    for step in range(1, int(flags["--max_steps"]) + 1):
        row = dict(step=step, loss=numbers[step], grad_norm=numbers[0], tokens=8, tokens_per_second=4.0)
        file.write(json.dumps(row | dict(supervised_tokens_per_second=2.0, peak_memory_bytes=100)) + "\\n")
        end = time.process_time() + 0.05  # of which a few ticks are seen
        while time.process_time() < end: pass
        time.sleep(0.05)
time.sleep(0.1)
"""


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with a train.py that only writes down the numbers of a file, which differ between commits. Files
    are edited, staged and new; a hook waits for every checkout."""
    root = tmp_path / "repository"
    root.mkdir()

    def git(*words):
        who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")
        return subprocess.run(["git", "-C", str(root), *who, *words], capture_output=True, text=True, check=True).stdout

    git("init")
    (root / "train.py").write_text(STUB)
    (root / "edited").write_text("1")
    for tag, numbers in (("norm", [0.25, 3, 2, 1]), ("loss", [0.5, 3, 2.5, 1]), ("same", [0.5, 3, 2, 1])):
        (root / "numbers.json").write_text(json.dumps(numbers))
        git("add", ".")
        git("commit", "-m", tag)
        git("tag", tag)
    (root / "edited").write_text("2")
    git("add", "edited")
    (root / "edited").write_text("3")
    (root / "new").write_text("4")
    (root / ".git" / "hooks" / "post-checkout").write_text(f"#!/bin/sh\ntouch {tmp_path}/hooked\n")
    (root / ".git" / "hooks" / "post-checkout").chmod(0o755)
    monkeypatch.setattr(benchmark, "ROOT", root)
    monkeypatch.setattr(benchmark, "measure_floor", lambda *args: dict(flops=1e9, seconds=1.0))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    return git


@pytest.mark.parametrize(
    "commit, found",
    [("same", "none"), ("loss", "step 2: loss 2 and 2.5"), ("norm", "step 1: grad_norm 0.5 and 0.25")],
)
def test_another_commit(repository, tmp_path, capsys, monkeypatch, commit, found):
    """The first step whose numbers differ is named, and fails the command if they should not; nothing is left behind,
    and the user's files and index are as they were, also where a hook's variables point elsewhere."""
    look = lambda: [repository(*words) for words in (("status", "--porcelain=v2", "--branch"), ("diff",), ("worktree", "list"))]
    before = look()
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "another"))
    for equal in (False, True):
        try:
            benchmark.main(against_commit=commit, equal=equal, steps=3, warmup=1, rounds=1)
            code = 0
        except SystemExit as ended:
            code = ended.code
        said = capsys.readouterr().out
        assert code == int(equal and found != "none") and said.endswith(f"first difference: {found}\n")
        assert f"| | train.py | {commit} | ratio |" in said and "| tokens/s | 4.00 | 4.00 | 1.00 |" in said
    monkeypatch.delenv("GIT_DIR")
    assert look() == before and before[2].count("\n") == 1 and before[0].count("edited") == 1
    assert not list((tmp_path / "temporary").iterdir()) and not (tmp_path / "hooked").exists()


def test_a_commit_that_is_none_and_a_run_that_fails(repository, tmp_path, capsys):
    with pytest.raises(SystemExit):
        benchmark.main(against_commit="nowhere")
    assert "benchmark.py: error: --against_commit nowhere: " in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="IndexError"):  # there is no number of a fourth step
        benchmark.main(against_commit="same", steps=4, rounds=1)
    assert repository("worktree", "list").count("\n") == 1 and not list((tmp_path / "temporary").iterdir())


def test_the_first_difference():
    rows = [dict(step=n, loss=1.0, grad_norm=2.0) for n in (1, 2, 3)]
    assert benchmark.first_difference(rows, [dict(row) for row in rows]) == ""
    other = [rows[0], rows[1] | dict(grad_norm=2.0000000000000004), rows[2] | dict(loss=5.0)]
    assert benchmark.first_difference(rows, other) == "step 2: grad_norm 2.0 and 2.0000000000000004"
    with pytest.raises(ValueError):
        benchmark.first_difference(rows, rows[:2])


def test_commands_parse_on_both_sides():
    flags = "--train_type lora --max_steps 3 --precision bf16"
    ours, theirs = benchmark.commands(flags, "trl", "there/python", "--trl_data true")
    assert train.parse(ours[2:]).train_type == "lora"
    config = hf_train.parse(theirs[2:])
    assert theirs[0] == "there/python" and config.trl_data and config.lr_scheduler == "constant"
    _, other = benchmark.commands(flags, "--train_type qlora", "", "")
    assert train.parse(other[2:]).train_type == "qlora"
    mine, theirs = benchmark.commands(flags, "trl", "", "", tree=train.Path("/elsewhere"))
    assert theirs[1] == "/elsewhere/train.py" and theirs[2:] == mine[2:]
    *_, theirs = benchmark.commands(flags, "--train_type full", "", "", tree=train.Path("/elsewhere"))
    assert train.parse(theirs[2:]).train_type == "full" and theirs[1] == "/elsewhere/train.py"


def test_what_trl_lacks_is_refused_by_name():
    with pytest.raises(UserError) as error:
        hf_train.parse("--train_type hqq_lora --neftune_alpha 5 --optimizer lion --precision bf16".split())
    for part in ("hqq_lora", "neftune_alpha", "--optimizer lion", "--max_steps"):
        assert part in str(error.value)


@pytest.mark.parametrize("packed", [False, True])
def test_both_sides_train_on_the_same_rows(packed):
    """TRL's sampler hands the rows of its dataset to the processes batch by batch: those of train.py's plan."""
    samples = tiny.samples(40, seed=2)
    held = train.data.Held.__new__(train.data.Held)
    held.train, held.lengths, held.pad = samples, [len(s.ids) for s in samples], 0
    config = hf_train.Config(batch_size=2, gradient_accumulation_steps=2, max_steps=2, world_size=2, seed=7,
                             packing=packed, context_length=64, train_type="lora")
    plans = [packing.plan(held.lengths, config, epoch=0, rank=rank, world=2)[:2] for rank in (0, 1)]
    wanted = [r for step in zip(*plans) for micro in zip(*step) for rows in micro for r in rows]
    assert wanted and hf_train.in_order(held, config)[:len(wanted)] == wanted
    columns = hf_train.make_dataset(held, config)
    assert columns[0]["input_ids"] == [i for n in wanted[0] for i in samples[n].ids]
    assert columns[0]["labels"] == [i for n in wanted[0] for i in samples[n].labels]
    assert ("seq_lengths" in columns.column_names) == packed
    untouched = hf_train.make_dataset(held, dataclasses.replace(config, trl_data=True))
    assert len(untouched) == 40 and json.dumps(untouched[3]["input_ids"]) == json.dumps(list(samples[3].ids))
