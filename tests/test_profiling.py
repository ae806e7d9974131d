"""--profile: which steps are recorded, what the files hold, and that nothing is there when it is off."""

import gzip
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tiny
import train
from scripts import profiling


def runtime(rank: int = 0) -> SimpleNamespace:
    return SimpleNamespace(rank=rank, main=rank == 0, device=torch.device("cpu"))


def some_work() -> torch.Tensor:
    weight = torch.ones(32, 32, requires_grad=True)
    return (torch.ones(8, 32) @ weight).sum().backward()


def loop(folder, steps: int, done: int = 0, **flags) -> Path:
    """A loop of `steps` small steps under the profiler."""
    config = train.Config(profile=True, profiling_output=str(folder), **flags)
    with profiling.profiler(config, runtime(), done) as tick:
        for _ in range(steps):
            tick()
            some_work()
    return folder


def events(trace: Path) -> list[dict]:
    return json.loads(gzip.open(trace).read())["traceEvents"]


def annotated_steps(trace: Path) -> list[int]:
    """Numbers of the steps in a trace, each of which must span its own operators."""
    found = events(trace)
    spans = {
        e["name"]: e for e in found if e["ph"] == "X" and e.get("name", "").startswith("ProfilerStep#")
    }
    products = [e for e in found if e.get("name") == "aten::mm"]
    for span in spans.values():
        assert any(span["ts"] <= e["ts"] < span["ts"] + span["dur"] for e in products), span
    return sorted(int(name.split("#")[1]) for name in spans)


def cycles(folder: Path) -> dict[str, list[int]]:
    return {p.name: annotated_steps(p / "rank0_trace.json.gz") for p in folder.iterdir()}


STEPS = dict(profiling_wait_steps=1, profiling_warmup_steps=1, profiling_active_steps=2)


@pytest.mark.parametrize(
    "steps, done, flags, wanted",
    [
        (8, 0, {}, {"step-4": [3, 4]}),
        (9, 0, dict(profiling_repeat=2), {"step-4": [3, 4], "step-8": [7, 8]}),
        (4, 0, {}, {"step-4": [3, 4]}),  # the last step is one of the cycle
        (3, 0, {}, {"step-3": [3]}),  # cut short by the end
        (2, 0, {}, {}),  # over before anything is recorded
        (6, 10, {}, {"step-14": [13, 14]}),  # a resumed run
        (12, 0, dict(profiling_repeat=0, profiling_frequency=5), {"step-5": [4, 5], "step-10": [9, 10]}),
        (2, 0, dict(profiling_wait_steps=0, profiling_warmup_steps=0), {"step-2": [1, 2]}),
    ],
)
def test_which_steps_are_recorded(tmp_path, steps, done, flags, wanted):
    folder = loop(tmp_path / "profile", steps, done, **STEPS | flags)
    assert (cycles(folder) if folder.exists() else {}) == wanted


def test_a_run_of_two_processes(pool, models, tmp_path):
    """One trace per rank, with the steps, FSDP's phases and the operators; the result is that of a run without.
    """
    data = tiny.write_alpaca(tmp_path / "rows.jsonl", 40)
    flags = dict(
        model_name=models("llama"), train_type="qlora", dataset=str(data), log_to="stdout", max_steps=5
    )
    pool.run(2, "whole_run", flags | dict(output_dir=str(tmp_path / "plain")))
    pool.run(2, "whole_run", flags | STEPS | dict(output_dir=str(tmp_path / "out"), profile=True))
    (folder,) = (tmp_path / "out" / "profile").iterdir()
    assert folder.name == "step-4"
    assert {p.name for p in folder.iterdir()} == {
        f"rank{rank}_{what}" for rank in (0, 1) for what in ("trace.json.gz", "key_averages.txt")
    }
    for rank in (0, 1):
        trace = folder / f"rank{rank}_trace.json.gz"
        assert annotated_steps(trace) == [3, 4]
        content = json.loads(gzip.open(trace).read())
        assert content["distributedInfo"]["rank"] == rank
        names = {event.get("name", "") for event in content["traceEvents"]}
        assert any(name.startswith("FSDP::pre_forward (model.layers.0") for name in names)
        assert not any("Input Dims" in event.get("args", {}) for event in content["traceEvents"])
        table = (folder / f"rank{rank}_key_averages.txt").read_text()
        assert "aten::mm" in table and "Self CPU time total" in table
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("plain", "out")
    ]
    assert losses[0] == losses[1]
    assert not (tmp_path / "plain" / "profile").exists()


def test_stacks_shapes_and_memory(tmp_path):
    flags = dict(with_stack=True, with_shapes=True, export_memory_timeline=True, export_trace=True)
    (folder,) = loop(tmp_path / "profile", 4, **STEPS | flags).iterdir()
    assert {p.name for p in folder.iterdir()} == {
        f"rank0_{what}"
        for what in ("trace.json.gz", "key_averages.txt", "stacks.txt", "memory.png")
    }
    stacks = (folder / "rank0_stacks.txt").read_text().splitlines()
    assert any("some_work" in line for line in stacks)
    assert all(re.search(r" \d+$", line) for line in stacks)
    products = [e for e in events(folder / "rank0_trace.json.gz") if e.get("name") == "aten::mm"]
    assert [[8, 32], [32, 32]] in [e["args"]["Input Dims"][:2] for e in products]
    assert "[[8, 32], [32, 32]]" in (folder / "rank0_key_averages.txt").read_text()


def test_memory_without_a_trace(tmp_path, monkeypatch):
    """The plot needs a trace, which goes again; what is drawn rises by what a step allocates."""
    from matplotlib.axes import Axes

    drawn = []
    monkeypatch.setattr(Axes, "step", lambda self, times, sizes, **kwargs: drawn.append((times, sizes)))
    flags = dict(export_memory_timeline=True, export_trace=False)
    (folder,) = loop(tmp_path / "profile", 4, **STEPS | flags).iterdir()
    assert {p.name for p in folder.iterdir()} == {"rank0_key_averages.txt", "rank0_memory.png"}
    ((times, sizes),) = drawn
    assert times[0] == 0 and times == sorted(times)
    assert max(sizes) - min(sizes) >= 2 * 32 * 32 * 4 / 2**20  # MiB: the weight and its gradient


def test_an_accelerator_gets_a_snapshot(tmp_path, monkeypatch):
    calls = []
    memory = SimpleNamespace(
        _record_memory_history=lambda enabled: calls.append(enabled),
        _dump_snapshot=lambda file: calls.append(Path(file).name),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(memory=memory))
    (folder,) = loop(tmp_path / "profile", 6, export_memory_timeline=True, **STEPS).iterdir()
    assert calls == ["all", "rank0_memory_snapshot.pickle", None]
    assert {p.name for p in folder.iterdir()} == {"rank0_trace.json.gz", "rank0_key_averages.txt"}


CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.69 GiB of which 1.00 GiB is free."
    " Of the allocated memory 20 GiB is allocated by PyTorch, and 1 GiB is reserved.\nmore"
)


@pytest.mark.parametrize(
    "error, what",
    [
        (torch.OutOfMemoryError(CUDA), "CUDA out of memory. Tried to allocate 2.00 GiB"),
        (RuntimeError("CUDA error: out of memory"), "CUDA error: out of memory"),  # outside of the allocator
        (MemoryError(), "MemoryError"),
    ],
)
def test_out_of_memory_says_what_to_do(tmp_path, error, what):
    found = profiling.explained(error, train.Config(output_dir=str(tmp_path)), 3)
    assert isinstance(found, train.UserError) and not list(tmp_path.iterdir())
    assert str(found).startswith(f"rank 3 is out of memory ({what}): ") and "--plan" in str(found)


@pytest.mark.parametrize("error", [ZeroDivisionError("x"), RuntimeError("shapes"), train.UserError("out of memory")])
def test_other_errors_stay_what_they_are(error):
    assert profiling.explained(error, train.Config(), 0) is error


@pytest.mark.parametrize("flag", ["profile_memory", "export_memory_timeline", None])
def test_out_of_memory_leaves_a_snapshot_where_allocations_were_recorded(tmp_path, monkeypatch, flag):
    """The history is on from the start of the run, and the error does not end it before the snapshot is written."""
    calls = []
    memory = SimpleNamespace(
        _record_memory_history=lambda enabled, **limits: calls.append(enabled),
        _dump_snapshot=lambda file: calls.append(file),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(memory=memory))
    flags = {flag: True, "profile": flag == "export_memory_timeline"} if flag else {}
    config = train.Config(output_dir=str(tmp_path), **flags)
    given = train.Runtime(0, 0, 1, 1, torch.device("cpu"), lambda: 0)
    train.memory.watch(config, given)
    with pytest.raises(torch.OutOfMemoryError) as caught, profiling.profiler(config, given):
        raise torch.OutOfMemoryError("full")
    path = tmp_path / "profile" / "rank0_out_of_memory.pickle"
    assert (str(path) in str(profiling.explained(caught.value, config, 0))) == bool(flag)
    assert calls == (["all", str(path)] if flag else [])


def test_off_makes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.profiler, "profile", lambda *args, **kwargs: pytest.fail("a profiler was made"))
    with profiling.profiler(train.Config(), None) as tick:
        tick()
    assert not list(tmp_path.iterdir())


def test_training_goes_on_where_files_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    loop(tmp_path / "file", 5, **STEPS)
    assert "rank 0 could not write it" in capsys.readouterr().out


def test_an_error_inside_the_loop_is_what_is_seen(tmp_path):
    """While a step is recorded: nothing is written, and nothing is recorded afterwards."""
    config = train.Config(profile=True, profiling_output=str(tmp_path / "profile"), **STEPS)
    with pytest.raises(ZeroDivisionError), profiling.profiler(config, runtime()) as tick:
        for _ in range(3):
            tick()
        assert torch.autograd._profiler_enabled()
        raise ZeroDivisionError
    assert not torch.autograd._profiler_enabled() and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--with_stack true", "--with_stack goes with --profile true"),
        ("--export_memory_timeline", "--export_memory_timeline goes with --profile true"),
        ("--profiling_output x", "--profiling_output goes with --profile true"),
        ("--profile --profiling_repeat 0 --profiling_frequency 2", "--profiling_frequency 2: must be at least"),
        ("--profile --profiling_active_steps 0", "--profiling_active_steps 0: must be at least 1"),
        ("--profile --profiling_wait_steps -1", "--profiling_wait_steps -1: must be at least 0"),
        ("--profile --max_steps 3", "--max_steps 3: profiling records from step 4 on"),
        ("--profile --max_steps 9 --profiling_repeat 0 --profiling_frequency 12", "records from step 11 on"),
    ],
)
def test_combinations_that_record_nothing(flags, message):
    with pytest.raises(train.UserError, match=re.escape(message)):
        train.parse(flags.split())


@pytest.mark.parametrize(
    "flags",
    [
        "--profile true --max_steps 4",
        "--profile --profiling_repeat 0 --profiling_frequency 3 --max_steps 2",
        "--profile --with_stack --with_shapes --export_memory_timeline --export_trace false",
        "--profile_memory true",
    ],
)
def test_combinations_that_do(flags):
    train.parse(flags.split())
