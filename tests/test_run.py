"""The real command, in processes of its own: starting, ending, failing, what lies on disk afterwards. What a test
needs beside its subject starts in forks (tests/forked.py): launcher, ranks, signals and files are the real ones."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import tiny
import train
from pool import free_port

ROOT = Path(train.__file__).parent
METRICS = {
    "step",
    "epoch",
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "supervised_tokens",
    "tokens_per_second",
    "supervised_tokens_per_second",
    "peak_memory_bytes",
    "host_memory_bytes",
    "seconds",
    "data_seconds",
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    return tiny.write_alpaca(tmp_path_factory.mktemp("data") / "rows.jsonl")


def environment(**extra) -> dict:
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")}
    return env | dict(HF_HUB_OFFLINE="1", WANDB_MODE="offline") | extra


def command(
    model: str, dataset, output, *flags: str, start=(sys.executable, str(ROOT / "train.py"))
) -> list[str]:
    return [
        *start,
        "--model_name",
        model,
        "--dataset",
        str(dataset),
        "--output_dir",
        str(output),
        "--precision",
        "fp32",
        "--lora_rank",
        "4",
        "--lr",
        "0.01",
        *flags,
    ]


def called(words: list[str], env=None) -> subprocess.CompletedProcess:
    return subprocess.run(words, capture_output=True, text=True, cwd="/", timeout=240, env=env or environment())


def run(*args, env=None, **kwargs) -> subprocess.CompletedProcess:
    return called(command(*args, **kwargs), env)


def together(*calls) -> list:
    """The results of several functions, called side by side."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [job.result() for job in [threads.submit(call) for call in calls]]


def forked(nursery, *args) -> subprocess.CompletedProcess:
    """The same as `run`, in forks."""
    _, script, *argv = command(*map(str, args))
    return nursery.run(script, *argv)


def rows(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def test_a_run_and_what_it_leaves(models, dataset, tmp_path):
    """12 examples in steps of 5 x 2: a full window and a tail, two epochs."""
    output = tmp_path / "out"
    done = run(models("llama"), dataset, output, "--batch_size", "5", "--num_epochs", "2")
    assert done.returncode == 0, done.stderr
    for line in (
        "model   ",
        "train   qlora",
        "data    ",
        "2 processes on cpu",
        f"--model_name {models('llama')} --dataset {dataset} --output_dir {output} --lora_rank 4 --batch_size 5 "
        "--num_epochs 2 --lr 0.01 --precision fp32",
        "done    4 steps",
        f"generate.py --adapter {output}",
    ):
        assert line in done.stdout
    found = rows(output)
    assert [row["step"] for row in found] == [1, 2, 3, 4] and [row["epoch"] for row in found] == [0, 0, 1, 1]
    assert all(set(row) == METRICS for row in found)
    kept = json.loads((output / "run.json").read_text())
    assert sum(row["supervised_tokens"] for row in found) == 2 * kept["data"]["supervised_tokens"]
    assert sum(row["tokens"] for row in found) == 2 * kept["data"]["total_tokens"]
    assert kept["config"]["batch_size"] == 5 and kept["summary"]["steps"] == 4 and kept["versions"]["torch"]
    assert kept["summary"]["loss_last"] == found[-1]["loss"] < found[0]["loss"]
    assert (
        kept["model"]["fingerprint"]
        and kept["data"]["fingerprint"]
        and kept["model"]["quantized_parameters"] > 0
    )
    assert {p.name for p in output.iterdir()} == {
        "run.json",
        "metrics.jsonl",
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    again = run(models("llama"), dataset, output)
    assert again.returncode == 2 and "not empty" in again.stderr


def test_torchrun_seed_and_wandb(nursery, models, dataset, tmp_path):
    """The same seed gives the same run, bit for bit, whoever starts the processes; another gives another."""
    torchrun = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        str(ROOT / "train.py"),
    )
    flags = ("--train_type", "custom_lora", "--max_steps", "2", "--lora_dropout", "0.1")
    outputs = [tmp_path / name for name in "abc"]
    model = models("llama")
    first, second = together(
        lambda: run(model, dataset, outputs[0], *flags, "--log_to", "stdout"),
        lambda: run(model, dataset, outputs[1], *flags, "--log_to", "wandb", start=torchrun),
    )
    third = forked(nursery, model, dataset, outputs[2], *flags, "--seed", "7", "--save_model", "false")
    for done in (first, second, third):
        assert done.returncode == 0, done.stderr
    assert "step 1/2" in first.stdout and "step 2/2" in first.stdout
    one, two, other = ([row["loss"] for row in rows(output)] for output in outputs)
    assert one == two != other
    name = "adapter_model.safetensors"
    assert (outputs[0] / name).read_bytes() == (outputs[1] / name).read_bytes()
    assert not (outputs[2] / name).exists()
    assert list((outputs[1] / "wandb").glob("offline-run-*/*.wandb"))


def test_world_sizes_are_obeyed(models, dataset, tmp_path):
    env = environment(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    model = models("llama")
    *alone, refused = together(
        lambda: run(model, dataset, tmp_path / "1", "--world_size", "1", "--max_steps", "1"),
        lambda: run(model, dataset, tmp_path / "2", "--max_steps", "1", env=env),
        lambda: run(model, dataset, tmp_path / "3", "--world_size", "3", env=env),
    )
    for done in alone:
        assert done.returncode == 0 and "1 process on cpu" in done.stdout, done.stderr
    assert refused.returncode == 2 and "--world_size 3, but WORLD_SIZE 1" in refused.stderr


FAILING = """
import sys
sys.path.insert(0, {root!r})
import train
step, train.__file__ = train.train_step, __file__
def broken(training, batches, tokens):
    if training.runtime.rank == 1:
        {action}
    return step(training, batches, tokens)
train.train_step = broken
if __name__ == "__main__":
    sys.exit(train.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "action, code, text",
    [
        ("raise ZeroDivisionError('the cause')", 1, "ZeroDivisionError: the cause"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137, ""),
        ("raise train.UserError('mend this')", 2, "train.py: error: mend this"),
        ("import torch; torch.empty(10**15)", 2, "train.py: error: rank 1 is out of memory ("),  # torch's own error
        ("import torch; raise torch.OutOfMemoryError('Tried to allocate')", 2, "rank 1 is out of memory (Tried to"),
    ],
)
def test_a_failing_rank_ends_all(nursery, models, dataset, tmp_path, action, code, text):
    """Rank 1 fails while rank 0 waits for it: all end within seconds, and the cause is the first thing to
    read."""
    script = tmp_path / "failing.py"
    script.write_text(FAILING.format(root=str(ROOT), action=action))
    start = time.monotonic()
    words = command(models("llama"), dataset, tmp_path / "out", start=(sys.executable, str(script)))
    done = nursery.run(*words[1:]) if code == 2 else called(words)
    assert done.returncode == code and time.monotonic() - start < 60
    assert text in done.stderr and "closed by peer" not in done.stderr
    assert done.stderr.count("Traceback") == (code == 1)


def test_a_loss_that_is_no_number_stops_the_run(nursery, models, dataset, tmp_path):
    done = forked(
        nursery,
        models("llama"),
        dataset,
        tmp_path / "out",
        "--lr",
        "1e30",
        "--train_type",
        "full",
        "--batch_size",
        "2",
    )
    assert done.returncode == 2 and "the gradient is nan" in done.stderr and "Traceback" not in done.stderr
    kept = json.loads((tmp_path / "out" / "run.json").read_text())  # from the start of the run
    assert kept["config"]["lr"] == 1e30 and kept["model"]["trained_parameters"] and "summary" not in kept
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_bad_rows_and_misfitting_models_are_one_message(nursery, models, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"instruction": "a", "output": "b"}\n{"instruction": 3}\n')
    done = forked(nursery, models("llama"), bad, tmp_path / "out")
    assert done.returncode == 2 and "Traceback" not in done.stderr and not (tmp_path / "out").exists()
    assert done.stderr.count("train.py: error") == 1 and "line 2" in done.stderr


def test_fsdp_qloras_full_command_runs(models, dataset, tmp_path):
    """Its README's command for --train_type full, with a small model and file in place of Llama-2 and alpaca."""
    output = tmp_path / "out"
    flags = """--world_size 2 --master_port {port} --gradient_accumulation_steps 4 --batch_size 8 --context_length 512
    --precision bf16 --train_type full --use_gradient_checkpointing true --use_cpu_offload false
    --use_activation_cpu_offload false --log_to wandb --model_name {model} --dataset {dataset} --output_dir {output}"""
    given = flags.format(port=free_port(), model=models("llama"), dataset=dataset, output=output).split()
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *given],
        capture_output=True,
        text=True,
        cwd="/",
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    assert (output / "model.safetensors").exists() and (output / "config.json").exists()
    assert len(rows(output)) == 1  # 12 examples in one window of 8 x 4 x 2


@pytest.mark.parametrize("train_type", ["hqq_dora", "bnb_llama_pro"])
def test_other_results_and_their_next_command(models, dataset, tmp_path, train_type):
    output, model = tmp_path / "out", models("llama", train_type)
    extra = ("--llama_pro_path", model) if "pro" in train_type else ("--n_bits", "3")
    done = run(models("llama"), dataset, output, "--train_type", train_type, "--max_steps", "2", *extra)
    assert done.returncode == 0, done.stderr
    kept = json.loads((output / "run.json").read_text())["model"]
    assert kept["quantizer"]["name"] == ("nf4" if "bnb" in train_type else "hqq")
    if "pro" in train_type:
        assert f"merge.py --adapter {output} --output_dir {output}-merged" in done.stdout
        assert kept["new_blocks"] == [1, 3] and (output / "blocks.safetensors").exists()
    else:
        assert (
            kept["quantizer"]["n_bits"] == 3
            and json.loads((output / "adapter_config.json").read_text())["use_dora"]
        )


@pytest.mark.parametrize(
    "train_type", ["qlora", "hqq_dora", "bnb_dora", "bnb_llama_pro", "hqq_llama_pro", "dora"]
)
def test_trained_saved_merged(nursery, models, dataset, tmp_path, train_type):
    """The two commands a person types, the second in a process of its own, and the merged folder's logits: those of
    what was trained."""
    import torch
    from peft import PeftModel
    from safetensors.torch import load_file

    from reference import plain_base

    output, merged, kind = tmp_path / "out", tmp_path / "merged", train.TRAIN_TYPES[train_type]
    folder = models("llama", train_type)
    extra = ("--llama_pro_path", folder) if kind.new_blocks else ()
    done = forked(nursery, models("llama"), dataset, output, "--train_type", train_type, "--max_steps", "3", *extra)
    assert done.returncode == 0, done.stderr
    merge = [
        sys.executable,
        str(ROOT / "scripts" / "merge.py"),
        "--adapter",
        str(output),
        "--output_dir",
        str(merged),
    ]
    base = "original" if kind.base == "plain" else "dequantized"
    done = subprocess.run(
        [*merge, "--merge_base", base], capture_output=True, text=True, cwd="/", env=environment()
    )
    assert done.returncode == 0, done.stderr
    new_blocks = json.loads((output / "run.json").read_text())["model"]["new_blocks"]
    wanted = plain_base(folder, kind.base, new_blocks)
    if kind.new_blocks:
        wanted.load_state_dict(load_file(output / "blocks.safetensors"), strict=False)
    else:
        wanted = PeftModel.from_pretrained(wanted, str(output))
    ids = torch.tensor([[5, 9, 200, 31, 7, 120, 44, 2]])
    with torch.no_grad():
        found = plain_base(str(merged), "plain", []).train()(input_ids=ids).logits
        assert torch.allclose(found, wanted.train()(input_ids=ids).logits, atol=5e-5)
