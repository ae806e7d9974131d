"""Runs that are stopped and go on: the same bits as a run that was never stopped; and everything that can happen
to a checkpoint."""

import dataclasses
import errno
import json
import os
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch

import tiny
import train
from scripts import state

HALF, TOTAL = 3, 6


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    return tiny.write_alpaca(tmp_path_factory.mktemp("data") / "rows.jsonl")


@pytest.fixture(scope="module")
def given(models, dataset):
    """Flags of a run of two epochs of three steps, which stops and goes on inside the first or the second."""

    def flags(output: Path, train_type: str = "qlora", model: str = "llama", **extra) -> dict:
        kind = train.TRAIN_TYPES[train_type]
        base = dict(
            model_name=models(model),
            dataset=str(dataset),
            output_dir=str(output),
            train_type=train_type,
            precision="fp32",
            lora_rank=4,
            lr=1e-2,
            lr_scheduler="cosine",
            wd=0.01,
            apply_gradient_clipping=True,
            num_epochs=2,
            save_steps=HALF,
            log_to="stdout",
        )
        if kind.adapter:
            base["lora_dropout"] = 0.1
        if kind.new_blocks:
            base["llama_pro_path"] = models(model, train_type)
        return base | extra

    return flags


def sums(folder: Path) -> list:
    """The check sums of a checkpoint's files: equal where every bit of every shard is."""
    return [json.loads(path.read_text())["crc32"] for path in sorted(folder.glob("rank-*.json"))]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The whole tensors of a checkpoint, put together by torch.distributed.checkpoint itself."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    reader = HuggingFaceStorageReader(str(folder))
    found = {
        name: torch.empty(stored.size, dtype=stored.properties.dtype)
        for name, stored in reader.read_metadata().state_dict_metadata.items()
    }
    dcp.load(found, storage_reader=reader, no_dist=True)
    return found


def rows(output: Path, *names: str) -> list[list]:
    found = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [[row[name] for name in ("step", "epoch", "lr", *names)] for row in found]


def finish(pool, world: int, flags: dict, **kwargs) -> dict:
    done = pool.run(world, "whole_run", flags, **kwargs)
    assert {one["code"] for one in done} == {0}, done
    return done[0]


def interrupted(pool, world: int, given, tmp_path: Path, *args, **extra) -> tuple[Path, Path]:
    """The folders of a straight run, and of one that goes on from the straight one's middle."""
    straight, second = tmp_path / "straight", tmp_path / "second"
    finish(pool, world, given(straight, *args, **extra))
    shutil.copytree(straight / f"checkpoint-{HALF}", second / f"checkpoint-{HALF}")
    shutil.copy(straight / "metrics.jsonl", second)
    finish(pool, world, given(second, *args, **extra, resume="auto"))
    return straight, second


def assert_same(straight: Path, second: Path) -> None:
    last = f"checkpoint-{TOTAL}"
    assert sums(straight / last) == sums(second / last) != sums(straight / f"checkpoint-{HALF}")
    assert rows(straight, "loss", "grad_norm") == rows(second, "loss", "grad_norm")
    one, other = (json.loads((f / last / "state.json").read_text()) for f in (straight, second))
    assert one["scaler"] == other["scaler"] and one["schedule"] == other["schedule"]
    results = sorted(path.name for path in straight.glob("*.safetensors"))
    assert results and all((straight / n).read_bytes() == (second / n).read_bytes() for n in results)


def test_random_numbers_differ_between_seeds_steps_and_ranks():
    def numbers(*key):
        state.seed_step(*key)
        return tuple(torch.rand(4).tolist())

    keys = [(seed, step, rank) for seed in (1, 11) for step in (1, 2, 11) for rank in (0, 1)]
    assert len({numbers(*key) for key in keys}) == len(keys) and numbers(*keys[0]) == numbers(*keys[0])


@pytest.mark.parametrize("train_type", ["qlora", "full"])
def test_deterministic_kernels(pool, given, tmp_path, train_type):
    """A run may go on with the flag: torch lacks no operation in that form, and on a CPU the bits are the same."""
    straight, second = tmp_path / "straight", tmp_path / "second"
    finish(pool, 2, given(straight, train_type))
    shutil.copytree(straight / f"checkpoint-{HALF}", second / f"checkpoint-{HALF}")
    shutil.copy(straight / "metrics.jsonl", second)
    flags = given(second, train_type, deterministic=True, resume="auto")
    for done, seen, warned in pool.run(2, "deterministic_run", flags):
        assert done["code"] == 0 and seen == [True] * (TOTAL - HALF) and not warned, (done, warned)
    assert_same(straight, second)


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("given_size", [None, ":16:8"])
def test_kernels_are_chosen_before_anything_is_computed(monkeypatch, wanted, given_size):
    """What torch and its libraries are told when the process group is about to be made, and no device was used."""
    names = ("CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC")
    fill, seen = torch.utils.deterministic, []

    def look(**kwargs):
        seen.extend([torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark])
        seen.extend([fill.fill_uninitialized_memory, *map(os.environ.get, names)])
        raise train.UserError("far enough")

    monkeypatch.setattr(train, "start_runtime", look)
    monkeypatch.setattr(train, "fail", lambda error, *rest: seen.append(str(error)))
    monkeypatch.setattr(train.launcher, "Stops", lambda: None)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    filled = fill.fill_uninitialized_memory
    with mock.patch.dict(os.environ, {names[0]: given_size} if given_size else {}):
        for name in names[given_size is not None:]:
            os.environ.pop(name, None)
        train.work(train.Config(deterministic=wanted), [], rank=1)
    torch.use_deterministic_algorithms(False)
    fill.fill_uninitialized_memory = filled
    kept = [False, True, filled, given_size, None]
    assert seen == [*([True, False, False, given_size or ":4096:8", "1"] if wanted else kept), "far enough"]


def test_collections_look_at_what_steps_make_only(pool, given, tmp_path):
    """Else each rank goes, at a moment of its own, through all objects of torch and transformers."""
    for before, *steps, after in pool.run(2, "garbage_of_steps", given(tmp_path)):
        assert len(steps) == TOTAL and before[1] == after[1] == 0
        assert all(seen < before[0] / 10 and aside >= before[0] / 2 for seen, aside in steps)


@pytest.mark.parametrize("train_type", train.TRAIN_TYPES)
def test_train_types(pool, given, tmp_path, train_type):
    """Weights, moments, learning rate, order and dropout go on bit for bit."""
    assert_same(*interrupted(pool, 2, given, tmp_path, train_type))


@pytest.mark.parametrize("precision", [p for p in train.PRECISIONS if p != "fp32"])
@pytest.mark.parametrize("train_type", ["qlora", "full"])
def test_precisions(pool, given, tmp_path, precision, train_type):
    assert_same(*interrupted(pool, 2, given, tmp_path, train_type, precision=precision))


@pytest.mark.parametrize("optimizer", train.optim.OPTIMIZERS)
@pytest.mark.parametrize("train_type", ["lora", "full"])
def test_optimizers(pool, given, tmp_path, optimizer, train_type):
    assert_same(*interrupted(pool, 2, given, tmp_path, train_type, optimizer=optimizer))


@pytest.mark.parametrize("world", [1, 3, 4])
@pytest.mark.parametrize("train_type", ["hqq_dora", "full"])
def test_world_sizes(pool, given, tmp_path, world, train_type):
    split = dict(batch_size=12 // (3 * world)) if world != 3 else dict(batch_size=1, num_epochs=2)
    assert_same(*interrupted(pool, world, given, tmp_path, train_type, max_steps=TOTAL, **split))


@pytest.mark.parametrize(
    "flags",
    [
        dict(use_cpu_offload=True),
        dict(sharding_strategy="ddp"),
        dict(sharding_strategy="hybrid_full_shard", hybrid_shard_size=1),
        dict(packing=True, context_length=400, max_steps=TOTAL, batch_size=1, num_epochs=4),
        dict(group_by_length=True),
        dict(gradient_accumulation_steps=2, batch_size=1),
        dict(async_save=False),
        dict(neftune_alpha=5.0, loraplus_lr_ratio=4.0),
        dict(train_embeddings=True, optimizer="adamw_8bit"),
    ],
    ids=str,
)
def test_other_switches(pool, given, tmp_path, flags):
    assert_same(*interrupted(pool, 2, given, tmp_path, "lora", **flags))


@pytest.mark.parametrize(
    "world, flags",
    [
        (1, dict(batch_size=4)),
        (1, dict(batch_size=2, gradient_accumulation_steps=2)),
        (4, dict(batch_size=1)),
        (2, dict(sharding_strategy="ddp")),
        (4, dict(batch_size=1, sharding_strategy="hybrid_full_shard", hybrid_shard_size=2)),
    ],
)
@pytest.mark.parametrize("train_type", ["bnb_dora", "full"])
def test_another_split(pool, given, tmp_path, world, flags, train_type):
    """From two ranks to another world size or sharding: equal to rounding, weights and moments. `llama-odd` has
    numbers of rows that do not divide."""
    resplit(pool, given, tmp_path, world, flags, train_type, dict(model="llama-odd"))


@pytest.mark.parametrize("train_type", train.TRAIN_TYPES)
def test_another_split_of_packed_rows(pool, given, tmp_path, train_type):
    packed = dict(packing=True, context_length=400, max_steps=TOTAL, num_epochs=4, batch_size=1)
    resplit(pool, given, tmp_path, 1, dict(batch_size=2), train_type, packed)


def resplit(pool, given, tmp_path, world: int, flags: dict, train_type: str, plain: dict) -> None:
    straight, second, plain = tmp_path / "straight", tmp_path / "second", plain | dict(lora_dropout=0.0)
    finish(pool, 2, given(straight, train_type, **plain))
    shutil.copytree(straight / f"checkpoint-{HALF}", second / f"checkpoint-{HALF}")
    finish(pool, world, given(second, train_type, **plain | flags, resume="auto"))
    one, other = (tensors(folder / f"checkpoint-{TOTAL}") for folder in (straight, second))
    before = tensors(straight / f"checkpoint-{HALF}")
    assert one.keys() == other.keys() == before.keys()
    for name, wanted in one.items():
        assert torch.allclose(wanted, other[name], rtol=1e-4, atol=1e-6), name
    assert any(not torch.equal(wanted, before[name]) for name, wanted in one.items())


@pytest.mark.parametrize("world, flags", [(1, dict(batch_size=4)), (4, dict(batch_size=1))])
@pytest.mark.parametrize("optimizer", ["adamw_8bit", "lion"])
def test_states_of_bitsandbytes_at_another_split(pool, given, tmp_path, world, flags, optimizer):
    """Their states are kept by shard: put together, cut anew, and 8-bit ones rounded again. The next step is that
    of the run that was not split anew, to the rounding of eight bits."""
    straight, second = tmp_path / "straight", tmp_path / "second"
    plain = dict(model="llama-odd", optimizer=optimizer, save_steps=1, keep_checkpoints=9, lr=1e-3, max_steps=4)
    finish(pool, 2, given(straight, "full", **plain))
    shutil.copytree(straight / "checkpoint-3", second / "checkpoint-3")
    finish(pool, world, given(second, "full", **plain | flags, resume="auto"))
    before, one, other = (
        {name: t for name, t in tensors(path).items() if name.startswith("model.")}
        for path in (straight / "checkpoint-3", straight / "checkpoint-4", second / "checkpoint-4")
    )
    for name, start in before.items():
        moved, here = one[name] - start, other[name] - start
        if optimizer == "lion":  # a step is a sign times the rate: only where a sum is about zero may it turn
            assert ((moved - here).abs() > 1e-6).float().mean() < 2e-3, name
        else:
            assert (moved - here).norm() < 0.05 * moved.norm(), name
        assert moved.norm() > 0


def test_a_signal_to_one_rank_stops_all_saved(pool, given, tmp_path):
    """The last rank is asked to stop during step 2, in no step to save; then the run goes on, twice."""
    straight, second = tmp_path / "straight", tmp_path / "second"
    finish(pool, 2, given(straight))
    done = pool.run(2, "whole_run", given(second, save_steps=-1), 2)
    assert {one["code"] for one in done} == {75} and "SIGTERM: stopped after step 2" in done[0]["printed"]
    assert [path.name for path in state.found(str(second))] == ["checkpoint-2"]
    assert not (second / "adapter_model.safetensors").exists()
    done = pool.run(2, "whole_run", given(second, save_steps=-1, resume="auto"), 3)
    assert {one["code"] for one in done} == {75}
    printed = finish(pool, 2, given(second, resume="auto"))["printed"]
    assert "checkpoint-5, 5 steps done; changed: --save_steps -1 -> 3" in printed
    assert_same(straight, second)


def test_wandb_goes_on_with_the_same_run(pool, given, tmp_path):
    done = pool.run(2, "whole_run", given(tmp_path, log_to="wandb", save_steps=-1), 2)
    assert {one["code"] for one in done} == {75}
    kept = json.loads((tmp_path / "checkpoint-2" / "state.json").read_text())["logger"]["wandb_id"]
    finish(pool, 2, given(tmp_path, log_to="wandb", resume="auto"))
    ids = [path.name.rsplit("-", 1)[1] for path in (tmp_path / "wandb").glob("offline-run-*")]
    assert ids == [kept, kept] and [row[0] for row in rows(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_the_newest_are_kept_and_a_finished_run_is_left_alone(pool, given, tmp_path):
    out = tmp_path / "out"
    finish(pool, 2, given(out, save_steps=1, keep_checkpoints=3))
    assert [path.name for path in state.found(str(out))] == ["checkpoint-6", "checkpoint-5", "checkpoint-4"]
    before = {path: path.read_bytes() for path in out.rglob("*.safetensors")}
    finish(pool, 2, given(out, save_steps=1, keep_checkpoints=3, resume="auto"))
    assert before == {path: path.read_bytes() for path in out.rglob("*.safetensors")}
    assert len(rows(out)) == TOTAL


@pytest.mark.parametrize("steps", [(4,), (4, 5, 6)])
def test_a_save_that_fails_leaves_the_run_and_the_older_checkpoint(pool, given, tmp_path, steps):
    """Something stands where a checkpoint is to be written: training goes on, and the next one is written."""
    straight, out = tmp_path / "straight", tmp_path / "out"
    finish(pool, 2, given(straight, save_steps=1, keep_checkpoints=9))
    out.mkdir()
    for step in steps:
        (out / f".checkpoint-{step}.part").write_text("")
    printed = finish(pool, 2, given(out, save_steps=1, keep_checkpoints=9, overwrite_output_dir=True))["printed"]
    assert f"checkpoint-{steps[0]} failed, training goes on" in printed
    assert [state.step_of(path) for path in state.found(str(out))] == sorted({1, 2, 3, 4, 5, 6} - set(steps))[::-1]
    assert rows(out, "loss", "grad_norm") == rows(straight, "loss", "grad_norm")
    newest = state.found(str(out))[0].name
    assert sums(out / newest) == sums(straight / newest)


@pytest.mark.parametrize("train_type", ["qlora", "full"])
def test_training_goes_on_while_a_checkpoint_is_written(pool, given, tmp_path, train_type):
    finish(pool, 2, given(tmp_path / "straight", train_type, async_save=False))
    pool.run(2, "slow_save", given(tmp_path / "slow", train_type))
    for name in ("checkpoint-3", "checkpoint-6"):
        assert sums(tmp_path / "straight" / name) == sums(tmp_path / "slow" / name)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_save_that_fails_on_one_rank_only(pool, given, tmp_path, code):
    printed = pool.run(2, "failing_save", given(tmp_path / "out", save_steps=1), code)[0]["printed"]
    assert f"(rank 1: [Errno {code}]" in printed and "the last one is" in printed
    assert [path.name for path in state.found(str(tmp_path / "out"))] == ["checkpoint-6", "checkpoint-4"]


@pytest.mark.parametrize("where, allowed, code", [("loss", 0, 2), ("gradient", 0, 2), ("loss", 1, 0), ("gradient", 1, 2)])
def test_steps_that_are_not_finite(pool, given, tmp_path, where, allowed, code):
    """Named with step and rank; never in a checkpoint; left out where that is allowed, and then as if the step had
    not changed anything. The gradient is broken twice, the loss once."""
    out = tmp_path / "out"
    broken = {"loss": (4,), "gradient": (2, 5)}[where]
    flags = given(out, save_steps=1, keep_checkpoints=9, skip_nonfinite_steps=allowed)
    done = pool.run(2, "broken_steps", flags, where, broken)
    assert {one["code"] for one in done} == {code}
    last = broken[-1] if allowed else broken[0]
    if code:
        text = "the loss is nan (rank 1)" if where == "loss" else "the gradient is inf, the loss"
        assert f"step {last}: {text}" in done[0]["message"] == done[1]["message"]
        assert [state.step_of(path) for path in state.found(str(out))] == list(range(last - 1, 0, -1))
    if allowed:
        assert f"left out (1 of {allowed})" in done[0]["printed"]
        at = broken[0]
        before, after = (tensors(out / f"checkpoint-{step}") for step in (at - 1, at))
        assert all(torch.equal(before[name], after[name]) for name in before)
    for path in state.found(str(out)):
        assert all(t.isfinite().all() for t in tensors(path).values())
    assert not any("NaN" in line or "Infinity" in line for line in (out / "metrics.jsonl").read_text().splitlines())


def spoil(folder: Path, how: str) -> None:
    path = next(iter(sorted(folder.glob("rank-00001*.safetensors"))))
    content = path.read_bytes()
    if how == "truncated":
        path.write_bytes(content[:-100])
    elif how == "one byte":
        path.write_bytes(content[:-100] + bytes([content[-100] ^ 1]) + content[-99:])
    elif how == "missing":
        path.unlink()
    elif how == "no note":
        path.with_suffix(".json").unlink()
    else:
        (folder / "state.json").write_text(how)


@pytest.mark.parametrize("how", ["truncated", "one byte", "missing", "no note", "{", "[]", ""])
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(pool, given, tmp_path, how):
    straight, out = tmp_path / "straight", tmp_path / "out"
    finish(pool, 2, given(straight, save_steps=2))
    for step in (2, 4, 6):
        source = straight / f"checkpoint-{step}"
        if source.exists():
            shutil.copytree(source, out / source.name)
    spoil(out / "checkpoint-6", how)
    refused = pool.run(2, "whole_run", given(out, save_steps=2, resume=str(out / "checkpoint-6")))
    assert {one["code"] for one in refused} == {2} and "damaged" in refused[0]["message"]
    printed = finish(pool, 2, given(out, save_steps=2, resume="auto"))["printed"]
    assert "checkpoint-6 is damaged and passed over" in printed and "checkpoint-4, 4 steps done" in printed
    assert sums(out / "checkpoint-6") == sums(straight / "checkpoint-6")
    assert len(list(out.glob("set-aside-*-checkpoint-6"))) == 1


@pytest.mark.parametrize(
    "flags, named",
    [
        (dict(lr=2e-2), "--lr was 0.01, is 0.02"),
        (dict(lora_rank=8), "--lora_rank was 4, is 8"),
        (dict(num_epochs=3), "--num_epochs was 2, is 3"),
        (dict(train_type="lora"), "--train_type was qlora, is lora"),
        (dict(seed=1), "--seed was 42, is 1"),
        (dict(batch_size=4), "processes x batch_size x gradient_accumulation_steps was 4, is 8"),
        (dict(dataset="dummy"), "the data are not the same"),
        (dict(model="llama-tied"), "the base model is another one"),
    ],
)
def test_another_training_is_refused(pool, given, tmp_path, flags, named):
    out = tmp_path / "out"
    finish(pool, 2, given(out, max_steps=HALF))
    before = sorted(out.rglob("*"))
    done = pool.run(2, "whole_run", given(out, **dict(max_steps=HALF) | flags, resume="auto"))
    assert {one["code"] for one in done} == {2} and named in done[0]["message"]
    assert sorted(out.rglob("*")) == before


def test_flags_that_may_change_are_flags():
    known = {spec.name for spec in dataclasses.fields(train.Config)}
    assert state.FREE <= known and not state.FREE & {"lr", "seed", "precision", "train_type", "optimizer"}


def test_a_constant_rate_may_go_on_for_longer(pool, given, tmp_path):
    straight, second = tmp_path / "straight", tmp_path / "second"
    constant = dict(lr_scheduler="constant")
    finish(pool, 2, given(straight, **constant))
    finish(pool, 2, given(second, **constant, num_epochs=1))
    finish(pool, 2, given(second, **constant, resume="auto"))
    assert sums(straight / "checkpoint-6") == sums(second / "checkpoint-6")


def test_checkpoints_hold_what_is_trained_and_nothing_else(pool, given, tmp_path):
    """Adapters only, each element once, whatever the sharding; no pickle."""
    for number, (world, extra) in enumerate([(2, {}), (2, dict(sharding_strategy="ddp")), (3, {})]):
        out = tmp_path / str(number)
        finish(pool, world, given(out, max_steps=HALF, **extra))
        files = {path.suffix for path in (out / "checkpoint-3").iterdir()}
        assert files == {".json", ".safetensors"}
        trained = json.loads((out / "run.json").read_text())["model"]["trained_parameters"]
        whole = tensors(out / "checkpoint-3")
        assert sum(t.numel() for name, t in whole.items() if name.startswith("model.")) == trained
        held = sum(path.stat().st_size for path in (out / "checkpoint-3").glob("*.safetensors"))
        assert 3 * 4 * trained < held < 3 * 4 * trained + 300 * len(whole) * world


def test_checkpoints_have_the_loggers_state_of_their_moment(tmp_path, monkeypatch, capsys):
    """And only one that has its name counts as saved."""
    from types import SimpleNamespace

    monkeypatch.setattr(state, "shards", lambda training: {})
    plain = SimpleNamespace(state_dict=dict)
    runtime = SimpleNamespace(rank=0, world=1, main=True, gather=lambda *numbers: torch.tensor([numbers]))
    moments = iter(range(9))
    saver = state.Saver(
        train.Config(output_dir=str(tmp_path), keep_checkpoints=9), runtime, dict(a=1), lambda: dict(moment=next(moments))
    )
    (tmp_path / "checkpoint-3" / "in the way").mkdir(parents=True)
    newest = []
    for step in (1, 2, 3):
        saver.start(SimpleNamespace(step=step, schedule=plain, scaler=plain))
        saver.finish()
        newest.append(saver.newest)
    assert newest == [1, 2, 2] and "checkpoint-3" in capsys.readouterr().out
    said = [json.loads((tmp_path / f"checkpoint-{step}" / "state.json").read_text()) for step in (1, 2)]
    assert [(one["logger"], one["a"]) for one in said] == [(dict(moment=0), 1), (dict(moment=1), 1)]
