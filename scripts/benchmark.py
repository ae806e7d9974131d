"""Runs train.py and the same training with TRL (scripts/hf_train.py), with other flags or at another commit,
in turn; prints ratios.

    python -m venv trl && trl/bin/pip install torch==2.13.0 transformers==5.24.0 peft==0.21.2 \\
        bitsandbytes==0.50.2 trl==1.16.0
    python scripts/benchmark.py --trl_python trl/bin/python --flags "--model_name ./llama --train_type lora"
    python scripts/benchmark.py --against "--world_size 1" --flags "--train_type lora"
    python scripts/benchmark.py --against_commit main --equal true --steps 3 --flags "--train_type lora"

Both sides make the same steps in every round, one side after the other, so that a machine's changing speed
meets both; a ratio is the median over rounds of the quotient of a round's two medians. The first steps of a
run, in which libraries warm up, are left out of times.
"""
import contextlib
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from any folder
from scripts.flags import Refused, UserError, run_script, to_bool

ROOT = Path(__file__).resolve().parents[1]
ALWAYS = "--save_steps -1 --save_model false --overwrite_output_dir true --lr_scheduler constant"


class Run(NamedTuple):
    """One training: rows of metrics.jsonl, with `cpu`, the processes' seconds of processor time up to then;
    seconds until the first step was made; run.json where there is one."""
    rows: list[dict]
    first: float
    facts: dict


class Side(NamedTuple):
    """What is measured of a run, after warm-up: medians over its steps."""
    seconds: float      # of a step
    processor: float    # seconds of processor time of a step, all processes
    tokens: float       # per second
    supervised: float   # likewise
    memory: float       # bytes, the fullest process
    first: float        # seconds from the start of the command to the end of the first step


# ------------------------------------------------------------------------------------------------ arithmetic

def side(run: Run, warmup: int) -> Side:
    """The medians of a run; its first `warmup` steps only count for memory."""
    rows = run.rows[warmup:]
    cpu = [after["cpu"] - before["cpu"] for before, after in zip(run.rows[warmup - 1:], rows)]

    def median(values):
        return statistics.median(list(values))
    return Side(median(row["tokens"] / row["tokens_per_second"] for row in rows), median(cpu),
                median(row["tokens_per_second"] for row in rows),
                median(row["supervised_tokens_per_second"] for row in rows),
                max(row["peak_memory_bytes"] for row in run.rows), run.first)


def ratios(pairs: list[tuple[Side, Side]]) -> dict[str, float]:
    """For each measure the median, over pairs, of the first side's by the second's."""
    return {name: statistics.median(getattr(a, name) / getattr(b, name) for a, b in pairs)
            for name in Side._fields}


def loss_gap(first: list[dict], second: list[dict]) -> float:
    """The largest difference of the losses of one step."""
    return max(abs(a["loss"] - b["loss"]) for a, b in zip(first, second, strict=True))


def first_difference(first: list[dict], second: list[dict]) -> str:
    """The first step whose loss or gradient norm is not the same number on both sides, with the numbers; ""
    where there is none."""
    for a, b in zip(first, second, strict=True):
        for name in ("loss", "grad_norm"):
            if a[name] != b[name]:
                return f"step {a['step']}: {name} {a[name]} and {b[name]}"
    return ""


class Product(NamedTuple):
    """`count` products of (batch, n, k) with (batch, k, m)."""
    batch: int
    n: int
    k: int
    m: int
    count: float

    @property
    def flops(self) -> float:
        return 2 * self.batch * self.n * self.k * self.m * self.count


def linear(n: int, inputs: int, outputs: int, forward: int, trained: bool) -> list[Product]:
    """The products of a linear with n tokens: forward, the gradient of its input, that of its weight."""
    made = [Product(1, n, inputs, outputs, forward), Product(1, n, outputs, inputs, 1)]
    return made + [Product(1, outputs, n, inputs, 1)] * trained


def products(model, blocks, tokens: int, supervised: int, length: int, recompute: bool) -> list[Product]:
    """The matrix products of one rank's step, of a model with whole (meta) weights: every linear of the
    blocks over all `tokens`, causal attention (half of its products) of examples of `length` tokens, the head
    over the `supervised` ones. Recomputing makes the blocks' forward ones twice."""
    import torch.nn as nn
    config, forward, found = model.config, 1 + recompute, []
    for block in blocks:
        for module in block.modules():
            if isinstance(module, nn.Linear) and getattr(module, "weight", None) is not None:
                trained = any(p.requires_grad for p in module.parameters(recurse=False))
                found += linear(tokens, module.in_features, module.out_features, forward, trained)
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    examples, half = max(1, tokens // length), len(blocks) / 2
    found += [Product(examples * heads, length, size, length, (forward + 1) * half),  # scores; their gradient
              Product(examples * heads, length, length, size, (forward + 3) * half)]  # and those of q, k, v
    head = model.get_output_embeddings().weight
    return found + linear(supervised, head.shape[1], head.shape[0], 1, head.requires_grad)


# ------------------------------------------------------------------------------------------------- the floor

def time_products(wanted: list[Product], dtype, device, repeats: int = 3) -> float:
    """Seconds that they take, each shape measured once and counted as often as it occurs."""
    import torch
    seconds, every = 0.0, {}
    for product in wanted:
        every[product[:4]] = every.get(product[:4], 0) + product.count
    for (batch, n, k, m), count in every.items():
        a = torch.randn(batch, n, k, device=device).to(dtype)
        b = torch.randn(batch, k, m, device=device).to(dtype)
        taken = []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            out = torch.bmm(a, b)
            float(out[0, 0, 0])  # waits for the device
            taken.append(time.perf_counter() - start)
        seconds += count * statistics.median(taken[1:])
    return seconds


def floor(flags: str, shape: str) -> int:
    """In the ranks of a run: measures its step's products on all at once. `shape`: tokens, supervised tokens
    and length of an example, per rank. The first rank prints FLOPs and seconds, as JSON."""
    import train
    from scripts import adapters, checkpoint, launcher
    config = train.parse(shlex.split(flags))
    tokens, supervised, length = map(int, shape.split(","))

    def work(runtime):
        model = train.empty_model(checkpoint.find_folder(config.weights), config.numbers.frozen)
        blocks = train.blocks_of(model)
        model.requires_grad_(config.type.adapter is None)
        if config.type.adapter:
            targets = adapters.find_targets(model, blocks, config.lora_target_modules)
            adapters.ADAPTERS[config.type.adapter](model, config, targets)
        wanted = products(model, blocks, tokens, supervised, length, config.use_gradient_checkpointing)
        taken = runtime.gather(time_products(wanted, config.numbers.compute, runtime.device)).max().item()
        if runtime.main:
            print(json.dumps(dict(flops=sum(p.flops for p in wanted), seconds=taken)))
    return launcher.run_ranks(__file__, work, config.world_size)


def measure_floor(flags: str, run: Run) -> dict:
    """FLOPs and seconds of the matrix products of a step, on as many processes as `run` had."""
    world, data = run.facts["world_size"], run.facts["data"]
    tokens, supervised = (int(statistics.median(row[name] for row in run.rows[1:])) // world
                          for name in ("tokens", "supervised_tokens"))
    shape = f"{tokens},{supervised},{min(tokens, data['total_tokens'] // data['kept'])}"
    command = [sys.executable, __file__, "--flags", flags, "--floor_of", shape]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(said.splitlines()[-1])


# --------------------------------------------------------------------------------------------------- the runs

@contextlib.contextmanager
def checkout(commit: str):
    """A folder that has the files of another commit of this repository, for a while; without a commit, this
    one. The user's files and index are left alone. Raises UserError for what git does not know."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}  # a hook's

    def git(*words: str) -> None:
        command = ["git", "-C", str(ROOT), "-c", "core.hooksPath=/dev/null", "worktree", *words]
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        if done.returncode:
            raise UserError(f"--against_commit {commit}: {done.stderr.strip().splitlines()[-1]}")
    if not commit:
        yield ROOT
        return
    with tempfile.TemporaryDirectory() as work:
        git("add", "--detach", f"{work}/tree", commit)
        try:
            yield Path(work) / "tree"
        finally:
            git("remove", "--force", f"{work}/tree")


def processor_seconds(process: subprocess.Popen) -> float:
    """Of a command and all that it has started."""
    import psutil
    try:
        root, found = psutil.Process(process.pid), 0.0
        for each in [root, *root.children(recursive=True)]:
            times = each.cpu_times()
            found += times.user + times.system
        return found
    except psutil.NoSuchProcess:
        return 0.0


def run(command: list[str], output: Path) -> Run:
    """Runs one training and watches its metrics.jsonl. Raises RuntimeError with what it said if it fails."""
    start, rows, first, file = time.perf_counter(), [], 0.0, output / "metrics.jsonl"
    file.unlink(missing_ok=True)
    command, log = [*command, "--output_dir", str(output)], tempfile.TemporaryFile("w+")
    with subprocess.Popen(command, stdout=log, stderr=log) as process:
        while process.poll() is None:
            lines = file.read_text().splitlines() if file.exists() else []
            if len(lines) > len(rows):
                first = first or time.perf_counter() - start
                rows += [dict(cpu=processor_seconds(process), **json.loads(x)) for x in lines[len(rows):]]
            time.sleep(0.02)
    if process.returncode:
        log.seek(0)
        raise RuntimeError(f"{shlex.join(command)}:\n{log.read()[-3000:]}")
    facts = output / "run.json"
    return Run(rows, first, json.loads(facts.read_text()) if facts.exists() else {})


def commands(flags: str, against: str, trl_python: str, trl_flags: str, tree: Path = ROOT) -> list[list[str]]:
    """Those of the two sides, the second with the train.py of `tree`. Later flags win."""
    ours = [sys.executable, str(ROOT / "train.py"), *shlex.split(f"{ALWAYS} {flags}")]
    if tree != ROOT or against != "trl":
        more = [] if against == "trl" else shlex.split(against)
        return [ours, [ours[0], str(tree / "train.py"), *ours[2:], *more]]
    theirs = [trl_python, str(ROOT / "scripts" / "hf_train.py")]
    return [ours, [*theirs, *shlex.split(f"{ALWAYS} {flags} {trl_flags}")]]


def measure(both: list[list[str]], rounds: int, warmup: int) -> tuple[list, list[Run], str]:
    """Pairs of sides, the runs of the last round, and the first difference of the numbers in any round."""
    pairs, differing = [], ""
    with tempfile.TemporaryDirectory() as work:
        for number in range(rounds):
            runs = [run(command, Path(work) / str(which)) for which, command in enumerate(both)]
            pairs.append((side(runs[0], warmup), side(runs[1], warmup)))
            differing = differing or first_difference(*(one.rows for one in runs))
            now = ratios(pairs[-1:])
            print(f"round {number + 1}: " + ", ".join(f"{k} {v:.2f}" for k, v in now.items()), flush=True)
    return pairs, runs, differing


def report(pairs: list[tuple[Side, Side]], runs: list[Run], base: dict, against: str) -> None:
    medians = [Side(*(statistics.median(column) for column in zip(*sides))) for sides in zip(*pairs)]
    units = dict(seconds=("seconds per step", 1), processor=("processor seconds per step", 1),
                 tokens=("tokens/s", 1), supervised=("supervised tokens/s", 1),
                 memory=("peak memory per process, MiB", 2**20), first=("seconds to the first step", 1))
    print(f"| | train.py | {against} | ratio |\n|---|---:|---:|---:|")
    for name, ratio in ratios(pairs).items():
        title, unit = units[name]
        ours, theirs = (getattr(m, name) / unit for m in medians)
        print(f"| {title} | {ours:.2f} | {theirs:.2f} | {ratio:.2f} |")
    gap = loss_gap(*(one.rows for one in runs))
    print(f"| largest difference of a step's losses | | | {gap:.2g} |")
    print(f"floor: the matrix products of a step, {base['flops'] / 1e9:.0f} GFLOP per process, take "
          f"{base['seconds']:.2f} s; steps take {medians[0].seconds / base['seconds']:.2f} and "
          f"{medians[1].seconds / base['seconds']:.2f} times that", flush=True)


def main(
    flags: str = "",  # train.py's flags, for both sides
    against: str = "trl",  # trl, or flags of train.py that the second side has besides
    trl_python: str = "trl/bin/python",  # the Python of TRL's environment
    trl_flags: str = "",  # for TRL alone: --trl_fsdp true, --trl_data true ...
    against_commit: str = "",  # another commit, branch or tag, whose train.py is the second side
    equal: to_bool = False,  # exit with 1 if a loss or a gradient norm of the sides differs
    steps: int = 5,  # of each run
    warmup: int = 2,  # of them, not counted
    rounds: int = 3,  # runs of each side
    floor_of: str = "",  # used by the processes that this script starts
):
    "Compare train.py with TRL, with itself under other flags, or with another commit's train.py."
    if floor_of:
        return floor(flags, floor_of)
    try:
        with checkout(against_commit) as tree:
            both = commands(f"{flags} --max_steps {steps}", against, trl_python, trl_flags, tree)
            pairs, runs, differing = measure(both, rounds, warmup)
    except UserError as error:
        raise Refused("benchmark.py", error) from None
    report(pairs, runs, measure_floor(flags, runs[0]), against_commit or against)
    if against_commit or equal:
        print(f"first difference: {differing or 'none'}")
    if equal and differing:
        raise SystemExit(1)


if __name__ == "__main__":
    run_script(main)
