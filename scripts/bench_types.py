"""Trains the demo task with every train type and prints one table row for each.

    python scripts/bench_types.py [--train_types qlora,dora] [--max_steps 75]

Columns: parameters trained, size of the result, largest memory of a process, seconds per step and their ratio to
custom_lora's on the same base where that was run before, loss of the last step, exact matches on the held-out
questions (after merging, for the Llama-Pro types). Seconds are medians over the run's steps, and noisy on a shared
machine: compare ratios.
"""
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # so that it runs from any folder
PEER = {"nf4": "custom_qlora", "hqq": "hqq_lora", "plain": "custom_lora"}  # the LoRA type of each base


def call(*command: str) -> str:
    """Output of one of the project's scripts. Raises CalledProcessError, after showing why, where it fails."""
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
        done.check_returncode()
    return done.stdout


def expanded_model(work: Path) -> str:
    """The demo's model with a tenth more blocks."""
    from scripts import demo
    folder = work / "expanded"
    if not folder.exists():
        call("scripts/block_expansion.py", "--model_name", str(demo.model_folder(progress=lambda text: None)),
             "--output_dir", str(folder), "--expansion_rate", "0.1")
    return str(folder)


def measure(train_type: str, max_steps: int, work: Path) -> dict:
    """One training, its size on disk, and its score."""
    import train
    kind, output = train.TRAIN_TYPES[train_type], work / train_type
    extra = ["--llama_pro_path", expanded_model(work), "--lr", "1e-3"] if kind.new_blocks else []
    call("train.py", "--train_type", train_type, "--output_dir", str(output), "--max_steps", str(max_steps), *extra)
    run = json.loads((output / "run.json").read_text())
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    seconds = statistics.median(row["tokens"] / row["tokens_per_second"] for row in rows[2:])
    size, result = sum(p.stat().st_size for p in output.glob("*.safetensors")), output
    if kind.new_blocks:
        result = work / f"{train_type}-merged"
        call("scripts/merge.py", "--adapter", str(output), "--output_dir", str(result))
    said = call("scripts/generate.py", "--adapter", str(result), "--eval", str(output / "held_out.jsonl"))
    return dict(trained=run["model"]["trained_parameters"], size=size, seconds=seconds, loss=rows[-1]["loss"],
                peak=run["summary"]["peak_memory_bytes"],
                exact=re.search(r"(?:adapter|model) (\d+/\d+)", said).group(1))


def main(
    train_types: str = "",  # comma-separated; default: all
    max_steps: int = 75,  # optimiser steps of eight examples
):
    "Train the demo task with every train type; print size, memory, speed and exact matches."
    import train
    print("| train type | trained | saved | memory/process | s/step | vs LoRA, same base | loss | exact match |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|", flush=True)
    names = train_types.split(",") if train_types else sorted(train.TRAIN_TYPES, key=lambda t: t not in PEER.values())
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as work:
        for name in names:
            row = measure(name, max_steps, Path(work))
            seconds[name] = row["seconds"]
            peer = seconds.get(PEER[train.TRAIN_TYPES[name].base])
            ratio = f"{row['seconds'] / peer:.2f}" if peer else "-"
            print(f"| `{name}` | {row['trained'] / 1e6:.2f} M | {row['size'] / 2**20:.0f} MiB | "
                  f"{row['peak'] / 2**30:.2f} GiB | {row['seconds']:.2f} | {ratio} | {row['loss']:.3f} | "
                  f"{row['exact']} |", flush=True)


if __name__ == "__main__":
    from fastcore.script import call_parse
    from scripts.data import kebab_flags
    sys.argv = kebab_flags(sys.argv)
    call_parse(main)
