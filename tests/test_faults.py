"""Processes that are killed at random moments: whatever dies, the run that goes on is the run that was never
disturbed."""

import json
import os
import random
import re
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch

import tiny
import train
from forked import Nursery

KILLS, STEPS = 30, 40
HANGING = """
import sys, time, train
step = train.train_step
def forgotten(training, *rest):
    if training.runtime.rank and training.step == 2:
        time.sleep(1000)
    return step(training, *rest)
train.train_step = forgotten
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def flags(models, tmp_path_factory):
    dataset = tiny.write_alpaca(tmp_path_factory.mktemp("data") / "rows.jsonl", 4 * STEPS)

    def command(output: Path, *extra: str) -> list[str]:
        text = f"""--model_name {models("llama")} --dataset {dataset} --output_dir {output} --precision fp32 --lr 0.01
            --lora_rank 4 --lora_dropout 0.1 --batch_size 2 --save_steps 1 --keep_checkpoints 2 --log_to stdout
            --resume auto"""
        return [*text.split(), *extra]

    return command


@pytest.fixture(scope="module")
def undisturbed(nursery, flags, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    nursery.start(flags(folder))
    assert nursery.end() == 0, nursery.log.read_text()
    return folder


def losses(folder: Path) -> list[tuple]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"], row["grad_norm"], row["lr"]) for row in found]


def assert_undisturbed(folder: Path, undisturbed: Path) -> None:
    assert losses(folder) == losses(undisturbed) and len(losses(folder)) == STEPS
    name = "adapter_model.safetensors"
    assert (folder / name).read_bytes() == (undisturbed / name).read_bytes()
    assert not list(folder.glob(".checkpoint-*")) and len(list(folder.glob("checkpoint-*"))) == 2


def newest(folder: Path) -> int:
    return max((int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*")), default=0)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return "zombie" in Path(f"/proc/{pid}/status").read_text()


def all_end(pids: list[int], seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while not all(map(gone, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return all(map(gone, pids))


@pytest.fixture
def another_nursery(tmp_path):
    made = Nursery(tmp_path / "nursery")
    yield made
    made.stop()


def kill_at_random_moments(nursery, flags, undisturbed, root, seed: int, wanted: int) -> None:
    rng, kills, number, finished, inside = random.Random(seed), 0, 0, 0, 0
    while kills < wanted:
        folder = root / str(number)
        before = newest(folder) if folder.exists() else 0
        pids = nursery.start(flags(folder))
        if rng.random() < 0.7:  # from the start, or from inside training
            while newest(folder) <= before and not gone(pids[0]):
                time.sleep(0.005)
        time.sleep(rng.random() * 0.8)
        victim = rng.choice(pids)
        if not gone(victim):
            os.kill(victim, signal.SIGKILL)
            kills += 1
        code = nursery.end()
        assert all_end(pids)  # also when it was the launcher: its ranks must not live on
        assert newest(folder) >= before
        inside += len(list(folder.glob(".checkpoint-*.part")))
        if code == 0:
            assert_undisturbed(folder, undisturbed)
            number, finished = number + 1, finished + 1
        else:
            assert code in (137, -9)
    nursery.start(flags(folder))
    assert nursery.end() == 0
    assert_undisturbed(folder, undisturbed)
    print(f"{kills} kills, {inside} during a save, {finished + 1} runs finished")


def test_killed_at_random_moments(nursery, another_nursery, flags, undisturbed, tmp_path):
    """A rank or the launcher is killed, 30 times, from the first moment to the last, often during a save (there is
    one every step). Checkpoints only ever grow newer, and each run that gets to its end is the undisturbed one. Two
    of these go on side by side, since each waits most of the time."""
    with ThreadPoolExecutor(2) as threads:
        jobs = [
            threads.submit(kill_at_random_moments, where, flags, undisturbed, tmp_path / f"seed-{seed}", seed, KILLS // 2)
            for seed, where in enumerate((nursery, another_nursery), 1)
        ]
    for job in jobs:
        job.result()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
@pytest.mark.parametrize("whom", ["launcher", "rank"])
def test_signals(nursery, flags, undisturbed, tmp_path, number, whom):
    """Documented code 75, the step saved, and the run goes on to the same end."""
    pids = nursery.start(flags(tmp_path, "--save_steps", "-1"))
    log_start = nursery.log.stat().st_size
    while not (tmp_path / "metrics.jsonl").exists() or len(losses(tmp_path)) < 5:
        time.sleep(0.01)
    os.kill(pids[0] if whom == "launcher" else pids[2], number)
    assert nursery.end() == 75 and 5 <= newest(tmp_path) == losses(tmp_path)[-1][0] < STEPS
    said = nursery.log.read_text()[log_start:]  # what the person did, and who takes it says so at once
    name = "Ctrl-C" if number == signal.SIGINT else number.name
    assert f"{name}: stopped after step {newest(tmp_path)}, which is saved" in said
    assert (f"{name}: stopping; " in said) == (whom == "launcher") and train.launcher.INTERRUPT.name not in said
    nursery.start(flags(tmp_path, "--save_steps", "20"))
    assert nursery.end() == 0
    assert losses(tmp_path) == losses(undisturbed)


def test_repeated_runs_end_normally(nursery, flags, tmp_path):
    """Again and again: gloo's threads must not outlive what they use (QSHARD_REPEATS sets how often)."""
    for number in range(int(os.environ.get("QSHARD_REPEATS", 5))):
        log_start = nursery.log.stat().st_size
        nursery.start(flags(tmp_path / str(number), "--max_steps", "1", "--train_type", "custom_qlora"), freezing=True)
        assert nursery.end() == 0
        said = nursery.log.read_text()[log_start:]
        assert "terminate" not in said and "Abort" not in said and "Traceback" not in said, said


def test_a_second_interrupt_ends_at_once(nursery, flags, tmp_path):
    pids = nursery.start(flags(tmp_path))
    while newest(tmp_path) < 2:
        time.sleep(0.01)
    for rank in pids[1:]:
        os.kill(rank, signal.SIGSTOP)  # so that no step ends in between
    os.kill(pids[0], signal.SIGINT)
    time.sleep(0.3)
    os.kill(pids[0], signal.SIGINT)
    assert nursery.end(10) == 130 and all_end(pids)


def test_a_signal_before_the_first_step(nursery, flags, tmp_path):
    pids = nursery.start(flags(tmp_path))
    os.kill(pids[0], signal.SIGUSR1)
    assert nursery.end(20) == 75 and not newest(tmp_path)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 600 KB."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(place)], capture_output=True)
    if made.returncode:
        pytest.skip("mounting a small file system needs root")
    yield place
    subprocess.run(["umount", "-l", str(place)])


def test_a_full_disk(nursery, flags, undisturbed, small_disk):
    """The disk fills up during training: the run ends with one message or without one, what was saved is whole, and
    goes on when there is room again."""
    output = small_disk / "out"
    log_start = nursery.log.stat().st_size
    nursery.start(flags(output))
    while newest(output) < 3:
        time.sleep(0.005)
    filler = small_disk / "filler"
    try:
        filler.write_bytes(bytes(10**6))
    except OSError:
        pass
    code, said = nursery.end(), nursery.log.read_text()[log_start:]
    assert code == 2 and "Traceback" not in said, said
    assert said.count("train.py: error: ") == 1 and "No space left on device" in said
    assert newest(output) >= 2
    filler.unlink()
    nursery.start(flags(output))
    assert nursery.end() == 0
    assert_undisturbed(output, undisturbed)


def test_a_rank_that_does_not_answer(nursery, flags, tmp_path):
    """It is stopped, not dead: the others wait for --timeout_minutes, and then all end, with a message that says so."""
    log_start = nursery.log.stat().st_size
    pids = nursery.start(flags(tmp_path, "--timeout_minutes", "0.05"))
    while newest(tmp_path) < 2:
        time.sleep(0.005)
    os.kill(pids[1], signal.SIGSTOP)
    assert nursery.end(30) == 1 and all_end(pids)
    said = nursery.log.read_text()[log_start:]
    assert "rank 1 failed:" in said and "rank 1 waited for the others longer than --timeout_minutes" in said
    assert newest(tmp_path) >= 2


def test_a_hang_is_explained(nursery, flags, tmp_path):
    """Rank 1 sleeps, rank 0 waits for it: SIGUSR2 to the launcher shows where both are and ends nothing; once
    --timeout_minutes are over, the files of both end in where they stood."""
    script, errors = tmp_path / "hanging.py", tmp_path / "errors"
    script.write_text(HANGING)
    argv = flags(tmp_path / "out", "--world_size", "2", "--timeout_minutes", "0.05", "--error_dir", str(errors))
    said, files = tmp_path / "err", [errors / f"rank-0000{rank}.err" for rank in (0, 1)]
    order = dict(script=str(script), argv=argv, cwd="/", env={}, out=str(tmp_path / "said"), err=str(said))
    nursery.order(False, **order)
    pids = nursery.started()
    os.kill(pids[0], signal.SIGUSR2)  # too early for ranks to answer, and no harm
    rows = tmp_path / "out" / "metrics.jsonl"
    while not gone(pids[0]) and (not rows.exists() or rows.read_text().count("\n") < 2):
        time.sleep(0.005)
    while not gone(pids[0]) and "in forgotten" not in files[1].read_text():
        os.kill(pids[0], signal.SIGUSR2)  # until rank 1 is there
        time.sleep(0.2)
    seen = files[1].read_text().count("in forgotten")
    assert nursery.end(60) == 1 and all_end(pids)
    waited, slept = (file.read_text() for file in files)
    assert 1 <= seen < slept.count("in forgotten") and "Traceback" not in slept
    assert "in forgotten" in slept.rpartition("Current thread")[2] and waited.count("Traceback") == 1
    assert "most recent call first" in waited.partition("Traceback")[0]
    assert "longer than --timeout_minutes" in waited and "longer than --timeout_minutes" in said.read_text()


@pytest.mark.parametrize("own_file", [False, True])
@pytest.mark.parametrize("error", [ConnectionError("closed by peer"), train.UserError("of all ranks")])
def test_who_waits_for_the_cause_has_spoken_where_it_has_a_file(monkeypatch, capsys, error, own_file):
    spoken = []
    monkeypatch.setattr(train.time, "sleep", lambda seconds: seconds and spoken.append(str(error) in capsys.readouterr().err))
    monkeypatch.setattr(train.os, "_exit", lambda code: None)
    train.fail(error, 1, own_file)
    assert spoken == [own_file] and (str(error) in capsys.readouterr().err) != own_file


@pytest.mark.parametrize("error_dir, file", [(None, None), ("errors", "errors/nccl_")])
def test_nccl_is_asked_for_what_it_was_doing(monkeypatch, error_dir, file):
    """On an accelerator, before the process group is made; what the person has set stays."""
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_DUMP_TEMP_FILE")
    fake = dict(is_available=lambda: True, device_count=lambda: 1, set_device_index=lambda index: None)
    for name, function in (fake | dict(current_accelerator=lambda: torch.device("cuda"))).items():
        monkeypatch.setattr(torch.accelerator, name, function)
    monkeypatch.setattr(torch, "Stream", lambda device: None)
    seen = []
    look = lambda *args, **kwargs: seen.append([os.environ.get(name) for name in names])  # noqa: E731
    monkeypatch.setattr(train.dist, "init_process_group", look)
    for given in ({}, {names[0]: "7"}):
        with mock.patch.dict(os.environ, given):
            for name in set(names) - set(given):
                os.environ.pop(name, None)
            train.start_runtime(env={}, error_dir=error_dir)
    assert seen == [["2000", "1", file], ["7", "1", file]]


def test_a_loss_that_is_no_number_names_its_rows(nursery, flags, tmp_path):
    """One character's embedding is no number; one row has it. The row is the file's ninth line, the fifth that is used."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = flags(tmp_path)[1]
    broken = AutoModelForCausalLM.from_pretrained(model)
    (spoilt,) = AutoTokenizer.from_pretrained(model)("~")["input_ids"]
    broken.get_input_embeddings().weight.data[spoilt] = torch.nan
    broken.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "model")
    rows = ["", "{", ""] + [json.dumps(dict(instruction=str(n), output="~" if n == 9 else "x")) for n in range(4, 29)]
    rows[3] = json.dumps(dict(instruction="4", output=1))
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    places = ("--model_name", str(tmp_path / "model"), "--dataset", str(tmp_path / "rows.jsonl"))
    log_start = nursery.log.stat().st_size
    nursery.start(flags(tmp_path / "out", *places, "--skip_bad_rows", "true"))
    assert nursery.end() == 2
    said = nursery.log.read_text()[log_start:]
    assert said.count("is not finite") == 1 and "Traceback" not in said, said
    rank, step, found = re.search(r"rank (\d): step (\d+): the loss of lines ([\d, ]+) of ", said).groups()
    assert f"step {step}: the loss is nan (rank {rank})" in said
    assert "9" in found.split(", ") and len(found.split(", ")) == 2
