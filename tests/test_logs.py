"""What a run tells: rows, bars, TensorBoard and Weights & Biases, also across a resume; FLOPs; memory."""

import dataclasses
import json
import math
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tiny
import train
from scripts import flops, logs, memory

RUN = dict(
    data=dict(total_tokens=100, kept=10),
    model=dict(flops=dict(token=1000.0, supervised=500.0, attention=10.0)),
)


def alone(**changes) -> SimpleNamespace:
    """The runtime of a single process, without a process group."""
    given = dict(
        rank=0,
        main=True,
        world=1,
        device=torch.device("cpu"),
        peak_memory=lambda: 2**20,
        retries=lambda: 0,
        phase=lambda moment: None,
        gather=lambda *numbers: torch.tensor([numbers], dtype=torch.float64),
    )
    return SimpleNamespace(**given | changes)


def begin(
    folder, total=6, runtime=None, log_to="stdout", done=0, logger_state=None, **flags
) -> logs.Metrics:
    config = train.Config(output_dir=str(folder), log_to=log_to, **flags)
    return logs.Metrics(config, runtime or alone(), total, RUN, done=done, logger_state=logger_state)


def record(metrics: logs.Metrics, *steps: int, part: int = 0) -> None:
    """Rows whose loss is 1/step; `part` shows in the learning rate which part of a run wrote a row."""
    for step in steps:
        metrics.record(
            torch.tensor(4.0 / step), torch.tensor(1.5), 10, 4, step=step, epoch=0, lr=float(part)
        )


def rows(folder) -> list[dict]:
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


# ------------------------------------------------------------------------------------------------------- flags


def test_flags_stand_beside_their_code():
    names = [spec.name for spec in dataclasses.fields(train.Config)]
    assert len(names) == len(set(names)) and {"log_to", "profile", "batch_size"} <= set(names)
    with pytest.raises(dataclasses.FrozenInstanceError):
        train.Config().log_to = "stdout"
    assert list(dataclasses.asdict(train.Config())) == names
    assert dataclasses.replace(train.Config(), name="x").name == "x"


@pytest.mark.parametrize("name", logs.LOG_TO)
def test_a_missing_package_is_named(monkeypatch, name):
    find = train.checks.importlib.util.find_spec
    monkeypatch.setattr(
        train.checks.importlib.util, "find_spec", lambda package: None if package == name else find(package)
    )
    if name in ("wandb", "tensorboard"):
        with pytest.raises(train.UserError, match=f"--log_to {name} needs the package {name}"):
            train.parse(["--log_to", name])
    else:
        train.parse(["--log_to", name])


# -------------------------------------------------------------------------------------------- rows and resuming


def test_a_resumed_run_keeps_the_rows_before_and_writes_the_rest_anew(tmp_path, capsys):
    first = begin(tmp_path)
    record(first, 1, 2)
    first.evaluated(0.5, step=2, epoch=0, eval_supervised_tokens=7)
    record(first, 3, 4)
    first.evaluated(0.4, step=4, epoch=0, eval_supervised_tokens=7)
    with open(tmp_path / "metrics.jsonl", "a") as file:  # killed in the middle of a row
        file.write('{"step": 5, "lo')
    capsys.readouterr()
    second = begin(tmp_path, done=2, logger_state=first.state())
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 2]  # before anything new is written
    record(second, 3, 4, 5, 6, part=1)
    second.evaluated(0.3, step=6, epoch=0, eval_supervised_tokens=7)
    second.close()
    found = rows(tmp_path)
    assert [row["step"] for row in found] == [1, 2, 2, 3, 4, 5, 6, 6]
    assert [row["lr"] for row in found if "lr" in row] == [0, 0, 1, 1, 1, 1]
    assert {p.name for p in tmp_path.iterdir()} == {"metrics.jsonl"}
    said = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in said if "eval" not in line] == [
        f"step {n}/6" for n in range(3, 7)
    ]
    summary = second.summary(seconds=2.0)
    assert summary["steps"] == 6 and summary["tokens"] == 60 and summary["resumed_at"] == 2
    assert summary["loss_first"] == 1.0 and summary["loss_last"] == pytest.approx(1 / 6)
    evals = {name: value for name, value in summary.items() if name.startswith("eval")}
    assert evals == dict(eval_loss_first=0.5, eval_loss_last=0.3, eval_loss_lowest=0.3, eval_lowest_step=6)
    assert summary["tokens_per_second"] == 20.0  # the 40 tokens of this part in its 2 seconds


def test_the_lowest_held_out_loss_is_a_number(tmp_path):
    metrics = begin(tmp_path)
    assert not metrics.evals
    for step, loss in enumerate([math.nan, 0.75, 0.5, 0.875]):
        metrics.evaluated(loss, step=step, epoch=0, eval_supervised_tokens=7)
    record(metrics, 1)
    metrics.close()
    summary = metrics.summary(1.0)
    assert (summary["eval_loss_lowest"], summary["eval_lowest_step"], summary["eval_loss_last"]) == (0.5, 2, 0.875)
    assert rows(tmp_path)[0]["eval_loss"] is None  # JSON has no NaN


def test_a_resume_at_the_end_and_a_new_start(tmp_path):
    first = begin(tmp_path, total=2)
    record(first, 1, 2)
    first.close()
    again = begin(tmp_path, total=2, done=2)
    summary = again.summary(seconds=1.0)
    assert (summary["steps"], summary["tokens"], summary["tokens_per_second"]) == (2, 20, 0)
    again.close()
    anew = begin(tmp_path, total=2)
    assert rows(tmp_path) == []
    record(anew, 1, part=1)
    anew.close()
    assert [row["lr"] for row in rows(tmp_path)] == [1]
    assert "resumed_at" not in anew.summary(1.0)


def test_kept_rows_replace_the_file_at_once(tmp_path, monkeypatch):
    """A process that dies while it rewrites the file leaves the old one."""
    first = begin(tmp_path)
    record(first, 1, 2, 3)
    first.close()
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def die(self, target):
        assert [json.loads(line)["step"] for line in self.read_text().splitlines()] == [1, 2]
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", die)
    with pytest.raises(KeyboardInterrupt):
        begin(tmp_path, done=2)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_other_ranks_write_nothing(tmp_path):
    metrics = begin(tmp_path, runtime=alone(main=False, rank=1), done=1)
    record(metrics, 2)
    metrics.evaluated(0.5, step=2, epoch=0, eval_supervised_tokens=7)
    assert metrics.state() == {} and not list(tmp_path.iterdir())


def test_time_left_counts_from_where_the_run_goes_on(monkeypatch, capsys):
    clock = iter([100.0, 110.0, 120.0])
    monkeypatch.setattr(logs.time, "monotonic", lambda: next(clock))
    log = logs.StdoutLog(None, total=12, run={}, done=8, state={})
    row = dict(loss=1.0, lr=1.0, grad_norm=1.0, tokens_per_second=1.0, peak_memory_bytes=0)
    log.write(row | dict(step=9))
    log.write(row | dict(step=10))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step 9/12") and lines[0].endswith(" 30 s left")
    assert lines[1].endswith(" 20 s left")


# ---------------------------------------------------------------------------------- TensorBoard and wandb's files


def test_tensorboard_reads_each_step_once_after_a_resume(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = begin(tmp_path, log_to="tensorboard")
    record(first, 1, 2, 3, 4)
    flush, flushed = first.sink.writer.flush, []
    monkeypatch.setattr(first.sink.writer, "flush", lambda: flushed.append(flush()))
    first.state()  # a checkpoint: what was logged is on disk, also when the process is then killed
    reader = EventAccumulator(str(tmp_path / "tensorboard"))
    assert [e.step for e in reader.Reload().Scalars("loss")] == [1, 2, 3, 4] and flushed
    first.close()
    second = begin(tmp_path, log_to="tensorboard", done=2)
    record(second, 3, 4, 5, 6, part=1)
    second.evaluated(0.25, step=6, epoch=0, eval_supervised_tokens=7)
    second.close()
    reader = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in reader.Scalars("lr")] == [(n, float(n > 2)) for n in range(1, 7)]
    assert [e.value for e in reader.Scalars("loss")] == pytest.approx([1 / n for n in range(1, 7)])
    assert [(e.step, e.value) for e in reader.Scalars("eval_loss")] == [(6, 0.25)]
    assert {"tokens_per_second", "supervised_tokens_per_second", "grad_norm"} <= set(reader.Tags()["scalars"])


def wandb_records(file: Path):
    """Records of an offline run's file: LevelDB's log format behind a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, parts = file.read_bytes(), 7, b""
    while place + 7 <= len(content):
        if (room := 2**15 - place % 2**15) < 7:
            place += room
            continue
        size, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        parts, place = parts + content[place + 7 : place + 7 + size], place + 7 + size
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def wandb_history(folder: Path) -> tuple[str, list[dict]]:
    """(run id, logged rows) of an offline run's folder."""
    (file,) = folder.glob("*.wandb")
    found, logged = None, []
    for record in wandb_records(file):
        if record.HasField("run"):
            found = record.run.run_id
        if record.HasField("history"):
            items = record.history.item
            logged.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items})
    return found, logged


def test_wandb_goes_on_with_the_same_run(tmp_path, monkeypatch):
    """Each part with a wandb process of its own, as each has in earnest."""
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    first = begin(tmp_path, log_to="wandb", name="a name")
    record(first, 1, 2, 3)
    state = json.loads(json.dumps(first.state()))
    first.close()
    wandb.teardown()
    (before,) = (tmp_path / "wandb").glob("offline-run-*")
    second = begin(tmp_path, log_to="wandb", done=2, logger_state=state)
    record(second, 3, 4)
    assert second.state() == state
    second.close()
    wandb.teardown()
    (after,) = set((tmp_path / "wandb").glob("offline-run-*")) - {before}
    (one, logged), (two, logged_after) = wandb_history(before), wandb_history(after)
    assert one == two == state["wandb_id"]
    assert [row["_step"] for row in logged] == [1, 2, 3] and [row["_step"] for row in logged_after] == [3, 4]
    assert [row["loss"] for row in logged_after] == pytest.approx([1 / 3, 1 / 4])
    other = begin(tmp_path, log_to="wandb")
    assert other.state() != state
    other.close()
    wandb.teardown()


# ------------------------------------------------------------------------------------------- FLOPs and throughput

QKV = 64 * 64 + 2 * 64 * 32  # elements of a block's q, k and v in the tiny model


@pytest.mark.parametrize(
    "train_type, difference",
    [
        ("full", 0),
        ("llama_pro", 0),
        ("bnb_llama_pro", 0),
        ("lora", 2 * 64 * (QKV + 3 * 64 * 8)),  # the gradient at the first block's inputs, which nobody needs
        ("qlora", 2 * 64 * (QKV + 3 * 64 * 8)),
    ],
)
def test_flops_are_those_torch_counts(pool, models, train_type, difference):
    """A real step, 64 tokens: all matrix products and both products of attention, forward and backward."""
    (found,) = pool.run(1, "flops_of_step", models("llama", train_type), dict(train_type=train_type))
    assert found["said"] == found["counted"] + difference
    assert found["attention"] > 0.04 * found["said"]  # enough to be seen


@pytest.mark.parametrize("name, low", [("gemma2", 1), ("qwen2", 1), ("mixtral", 0.99)])
def test_flops_of_other_architectures(name, low):
    """Tied heads, biases, experts of which each token meets two of four (their router is not counted)."""
    from torch.utils.flop_counter import FlopCounterMode

    model, ids = tiny.model(name), torch.randint(2, 300, (4, 16))
    model.config._attn_implementation = model.config._experts_implementation = "eager"
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False).logits.float().logsumexp(-1).sum().backward()
    said = flops.of_step(flops.per_token(model, train.blocks_of(model)), 64, 64, 16)
    assert low <= said / counter.get_total_flops() <= 1


@pytest.mark.parametrize(
    "name, tera",
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA L40", 181),
        ("NVIDIA GeForce RTX 3090", 71),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("NVIDIA RTX A6000", 154.8),
        ("Tesla V100-SXM2-32GB", 125),
        ("Tesla V100-PCIE-16GB", 112),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA A10G", None),
        ("", None),
    ],
)
def test_peaks_by_device_name(name, tera):
    assert flops.peak(name) == (None if tera is None else pytest.approx(tera * 1e12))


def test_throughput_and_the_share_of_the_peak(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(flops, "device_peak", lambda device: 1e5)
    seconds = iter([0.0, 2.0, 2.5])
    monkeypatch.setattr(logs.time, "perf_counter", lambda: next(seconds))
    metrics = begin(tmp_path, runtime=alone(world=2))
    record(metrics, 1, 2)
    metrics.close()
    first, second = rows(tmp_path)
    assert (first["seconds"], second["seconds"]) == (2, 0.5)
    summary = metrics.summary(3.0)
    assert (summary["tokens_per_second"], summary["median_tokens_per_second"]) == (pytest.approx(20 / 3, 0.01), 20)
    assert summary["median_mfu"] == second["mfu"] and summary["first_step_seconds"] == 2
    assert (first["tokens_per_second"], first["supervised_tokens_per_second"]) == (5, 2)
    assert second["tokens_per_second"] == 20
    # 10 tokens of 1000 + 10 * 10 each (the mean example is 10 long), 4 supervised ones of 500 each
    assert second["mfu"] == pytest.approx((10 * 1100 + 4 * 500) / (0.5 * 2 * 1e5))
    assert "MFU 13.0%" in capsys.readouterr().out.splitlines()[1]


def test_seconds_of_steps_leave_out_evaluations_and_saves_and_tell_of_waiting(tmp_path, monkeypatch):
    """A clock that only the batches, the steps and what is between them move."""
    now = [0.0]
    monkeypatch.setattr(logs.time, "perf_counter", lambda: now[0])

    def passing(seconds, value=None):
        now[0] += seconds
        return value

    others = lambda *mine: torch.tensor([mine, [0.0] * 4 + [1.5, *mine[5:]]], dtype=torch.float64)  # noqa: E731
    metrics = begin(tmp_path, runtime=alone(world=2, gather=others))
    for step, _ in metrics.waiting((passing(wait, (step, None)) for step, wait in ((1, 4.0), (2, 1.0), (3, 0.0)))):
        passing(8)
        record(metrics, step)
        passing(2)  # what belongs to no step in particular belongs to the next
        if step == 1:  # an evaluation or a save
            passing(1000)
            metrics.go_on()
    metrics.close()
    found = rows(tmp_path)
    assert [row["seconds"] for row in found] == [12, 9, 10]
    assert [row["data_seconds"] for row in found] == [4, 1.5, 1.5]  # the other rank waited for 1.5 s
    assert [row["tokens_per_second"] for row in found] == [10 / 12, 10 / 9, 1]
    summary = metrics.summary(1029.0)
    assert summary["median_tokens_per_second"] == pytest.approx((10 / 9 + 1) / 2)
    assert summary["first_step_seconds"] == 12 and "median_mfu" not in summary


@pytest.mark.parametrize("peak, precision", [(None, "bf16"), (1e12, "fp32")])
def test_no_share_of_an_unknown_peak_or_in_fp32(tmp_path, monkeypatch, peak, precision):
    monkeypatch.setattr(flops, "device_peak", lambda device: peak)
    metrics = begin(tmp_path, precision=precision)
    record(metrics, 1)
    metrics.close()
    assert "mfu" not in rows(tmp_path)[0]


def test_a_cpu_has_no_peak():
    assert flops.device_peak(torch.device("cpu")) is None


# -------------------------------------------------------------------------------------------------------- memory

PHASES = ("before_forward", "after_forward", "after_backward", "after_optimizer_step", "peak")
BEFORE = ("after_model_created", "after_model_wrap", "after_model_loaded")


def test_memory_is_noted_in_the_first_three_steps(pool, models, tmp_path):
    """A real run of two processes, with two micro-batches a step and evaluations in between."""
    output = tmp_path / "out"
    data = tiny.write_alpaca(tmp_path / "rows.jsonl", 40)
    flags = dict(
        model_name=models("llama"),
        train_type="qlora",
        dataset=str(data),
        output_dir=str(output),
        log_to="stdout",
    )
    flags |= dict(
        gradient_accumulation_steps=2, profile_memory=True, max_steps=4, eval_fraction=0.2, eval_steps=1
    )
    pool.run(2, "whole_run", flags)
    found = [row for row in rows(output) if "loss" in row]
    names = [{key.removeprefix("memory/allocated_") for key in row if "/" in key} for row in found]
    assert names == [{*BEFORE, *PHASES}, set(PHASES), set(PHASES), set()]
    summary = json.loads((output / "run.json").read_text())["summary"]["memory"]
    assert set(summary) == {f"memory/allocated_{name}" for name in (*BEFORE, *PHASES)}
    for name, value in summary.items():
        assert value == max(row.get(name, 0) for row in found) > 2**20


def test_memory_keeps_the_largest_of_a_moment(tmp_path, monkeypatch):
    used = iter([9, 5, 7, 1, 3, *[1] * 20])  # the 1 is read for the row of step 1
    monkeypatch.setattr(memory, "host", lambda: next(used))
    monkeypatch.setattr(memory, "peak", lambda: 50)
    noted = memory.Memory(torch.device("cpu"))
    metrics = begin(tmp_path, runtime=alone(phase=noted), profile_memory=True)
    for moment in ("after_forward", "after_forward", "after_backward"):
        noted(moment)
    assert noted.moments == {"memory/allocated_after_forward": 9, "memory/allocated_after_backward": 7}
    record(metrics, 1)
    noted("after_forward")
    record(metrics, 2, 3)
    assert [row["memory/allocated_after_forward"] for row in rows(tmp_path)[:2]] == [9, 3]
    noted("after_forward")  # over: nothing is read any more
    assert not noted.moments
    metrics.close()


def test_ranks_report_the_largest_of_them(monkeypatch):
    noted = memory.Memory(torch.device("cpu"))
    noted.moments = {"memory/allocated_x": 5}
    others = alone(gather=lambda *mine: torch.tensor([mine, [2 * n for n in mine]], dtype=torch.float64))
    assert noted.take(others)["memory/allocated_x"] == 10


def test_a_run_that_does_not_profile_reads_no_memory():
    runtime = alone()
    assert memory.watch(train.Config(), runtime) is runtime
    assert math.isfinite(memory.host()) and train.Runtime.phase("anything") is None


@pytest.mark.parametrize("main", [True, False])
def test_retries_of_the_allocator_are_told_once(tmp_path, capsys, main):
    """Those of training, not those of loading; whichever rank has them."""
    counts = iter([7, 7, 7, 9, 11])
    others = lambda *mine: torch.tensor([[*mine[:5], 0.0], mine], dtype=torch.float64)  # noqa: E731
    metrics = begin(tmp_path, runtime=alone(main=main, world=2, gather=others, retries=lambda: next(counts)))
    record(metrics, 1, 2, 3, 4)
    metrics.close()
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note")]
    assert len(notes) == main
    assert all("step 3: rank 1 emptied its allocator's cache 2 times" in note for note in notes)


def test_retries_are_read_from_the_accelerator(monkeypatch):
    """Bound when the runtime starts; a CPU's allocator has none."""
    assert train.Runtime(0, 0, 1, 1, torch.device("cpu"), lambda: 0).retries() == 0
    fake = dict(is_available=lambda: True, device_count=lambda: 1, set_device_index=lambda index: None)
    fake |= dict(current_accelerator=lambda: torch.device("cuda"), max_memory_allocated=lambda: 0)
    fake |= dict(memory_stats=lambda: {"num_alloc_retries": 3})
    for name, function in fake.items():
        monkeypatch.setattr(torch.accelerator, name, function)
    monkeypatch.setattr(torch, "Stream", lambda device: None)
    monkeypatch.setattr(train.dist, "init_process_group", lambda *args, **kwargs: None)
    assert train.start_runtime(env={}).retries() == 3


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_cautions(tmp_path, key):
    """A model made in bf16 that computes in fp16, and rows that are longer than its positions."""
    (tmp_path / "config.json").write_text(json.dumps({key: "bfloat16"}))
    few, many = dict(positions=64), dict(positions=None)
    fp16, bf16 = (train.Config(precision=name) for name in ("mp_fp16_autocast", "mp_bf16_autocast"))
    assert [text.split(",")[0] for text in logs.cautions(fp16, few, tmp_path, 65)] == [
        "the model was made for 64 positions",
        "the model was made in bf16",
    ]
    assert logs.cautions(bf16, few, tmp_path, 64) == logs.cautions(bf16, many, tmp_path, 10**6) == []
    (tmp_path / "config.json").write_text(json.dumps({key: "float16"}))
    assert logs.cautions(fp16, few, tmp_path, 64) == []


# ----------------------------------------------------------------------------------------------- what a run was


def test_the_commit_says_whether_files_were_edited(tmp_path, monkeypatch):
    def git(*words):
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(["git", "-C", str(tmp_path), *who, *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    file = tmp_path / "scripts" / "logs.py"
    file.parent.mkdir()
    file.write_text("one\n")
    monkeypatch.setattr(logs, "__file__", str(file))
    assert logs.git_commit() is None  # no checkout, or one without a commit
    git("init", "-q")
    assert logs.git_commit() is None
    git("add", ".")
    git("commit", "-q", "-m", "x")
    git("tag", "-a", "v1", "-m", "x")
    head = git("rev-parse", "HEAD")
    assert logs.git_commit() == head and len(head) == 40
    (tmp_path / "output").write_text("not part of the checkout")
    assert logs.git_commit() == head
    file.write_text("two\n")
    assert logs.git_commit() == f"{head}-dirty"


def test_flags_that_are_not_defaults_can_be_typed_again():
    argv = ["--dataset", "my data.jsonl", "--packing", "--lr", "1e-3", "--use_rslora", "false", "--batch-size=8"]
    said = " ".join(logs.changed_flags(train.parse(argv)))
    assert said == "--dataset 'my data.jsonl' --packing true --batch_size 8 --lr 0.001"
    assert train.parse(shlex.split(said)) == train.parse(argv)
    assert logs.changed_flags(train.Config()) == []


def test_a_run_that_went_on_elsewhere_from_its_last_step_has_a_summary(tmp_path, capsys):
    metrics = begin(tmp_path, total=6, done=6)
    found = metrics.summary(0.5)
    metrics.close()
    assert found["steps"] == 0 and found["resumed_at"] == 6 and "loss_last" not in found
    logs.finish(train.Config(output_dir=str(tmp_path)), found)
    assert "no step was left to make" in capsys.readouterr().out


def test_a_flag_and_its_value_are_not_folded_apart(capsys, monkeypatch):
    monkeypatch.setattr(logs.sys.stdout, "isatty", lambda: True, raising=False)
    flags = [f"--flag_{i} {'x' * i}" for i in range(1, 24)]
    logs.say("flags", logs.kept_together(flags))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 3 and max(map(len, lines)) <= 80 and all(line[8:].startswith("--") for line in lines)
    assert " ".join(line[8:] for line in lines).split() == " ".join(flags).split()


# ------------------------------------------------------------------------------------------------------ 80 columns


ROW = dict(loss=12.3456, lr=2e-4, grad_norm=1234.5, tokens_per_second=123456.0, mfu=0.421, peak_memory_bytes=2**37)


@pytest.mark.parametrize("total", [9, 12345])
def test_step_lines_fit_into_80_columns(capsys, total):
    log = logs.StdoutLog(None, total=total, run={}, done=total - 1, state={})
    log.write(ROW | dict(step=total))
    (line,) = capsys.readouterr().out.splitlines()
    assert len(line) <= 80 and line.startswith(f"step {total}/{total}  loss 12.3456") and line.endswith("0 s left")
    assert "123456 tok/s" in line and "lr" in logs.describe(ROW, 100) and "128.00 GiB" in logs.describe(ROW, 100)
    assert logs.describe(ROW, 5) == "loss 12.3456"


SUMMARY = dict(
    steps=75, seconds=123.4, tokens=9876, loss_first=2.5, loss_last=0.5, tokens_per_second=80.0, peak_memory_bytes=2**31
) | dict(median_tokens_per_second=95.4, median_mfu=0.4321, first_step_seconds=12.34)
SUMMARY |= dict(eval_loss_first=2.25, eval_loss_last=0.75, eval_loss_lowest=0.625, eval_lowest_step=50)


def test_the_last_lines_fold_on_a_terminal_only(capsys, monkeypatch):
    """Time, tokens, losses, memory, where the result is, what comes next; commands stay commands."""
    config = train.Config(output_dir="a_folder_whose_name_is_quite_long/and_deep")
    logs.finish(config, SUMMARY)
    plain = capsys.readouterr().out
    for part in (
        "done    75 steps in 123 s, loss 2.500 -> 0.500, 9876 tokens, 80 tokens/s, peak 2.00 GiB",
        "speed   95 tokens/s, MFU 43.2% in a median step; the first took 12.3 s",
        "eval    loss 2.250 -> 0.750, lowest 0.625 at step 50",
        "saved   adapter and tokenizer in a_folder_whose_name_is_quite_long/and_deep",
        'try     python scripts/generate.py --adapter a_folder_whose_name_is_quite_long/and_deep --prompt "',
    ):
        assert part in plain
    for done, part in ((70, "done    75 steps (5 of them now) in 123 s, loss 2.500 -> 0.500, 9876 tokens, 80 tokens/s"),
                       (75, "done    75 steps (0 of them now) in 123 s, loss 2.500 -> 0.500, 9876 tokens, peak")):
        logs.finish(config, SUMMARY | dict(resumed_at=done))
        assert part in capsys.readouterr().out
    monkeypatch.setattr(logs.sys.stdout, "isatty", lambda: True, raising=False)
    logs.finish(config, SUMMARY)
    folded = capsys.readouterr().out
    assert max(map(len, folded.splitlines())) <= 80 < max(map(len, plain.splitlines()))
    assert folded.replace("\\\n", " ").split() == plain.split()
    assert "\033" not in folded
