"""Trains the demo task with every train type and prints one table row for each.

    python scripts/bench_types.py [--train_types qlora,dora] [--max_steps 75]

Columns: parameters trained, size of the result, largest memory of a process, loss of the last step, exact
matches on the held-out questions (for the Llama-Pro types after merging). For speed see
scripts/bench_steps.py.
"""
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from any folder
from scripts.flags import run_script

ROOT = Path(__file__).resolve().parents[1]
# Without a default for small models: what these types need to learn the task in one epoch.
LEARNING_RATES = {"full": "1e-4", "llama_pro": "1e-3", "bnb_llama_pro": "1e-3", "hqq_llama_pro": "1e-3"}


def call(*command: str) -> str:
    """Output of one of the project's scripts. Raises CalledProcessError, after showing why, where it fails.
    """
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
        base = str(demo.model_folder(progress=lambda text: None))
        call("scripts/block_expansion.py", "--model_name", base, "--output_dir", str(folder))
    return str(folder)


def measure(train_type: str, max_steps: int, work: Path) -> dict:
    """One training, its size on disk, and its score."""
    import train
    new_blocks, output = train.TRAIN_TYPES[train_type].new_blocks, work / train_type
    extra = ["--llama_pro_path", expanded_model(work)] if new_blocks else []
    extra += ["--lr", LEARNING_RATES[train_type]] if train_type in LEARNING_RATES else []
    extra += ["--max_steps", str(max_steps)]
    call("train.py", "--train_type", train_type, "--output_dir", str(output), *extra)
    run = json.loads((output / "run.json").read_text())
    size, result = sum(path.stat().st_size for path in output.glob("*.safetensors")), output
    if new_blocks:
        result = work / f"{train_type}-merged"
        call("scripts/merge.py", "--adapter", str(output), "--output_dir", str(result))
    said = call("scripts/generate.py", "--adapter", str(result), "--eval", str(output / "held_out.jsonl"))
    return dict(trained=run["model"]["trained_parameters"], size=size, loss=run["summary"]["loss_last"],
                peak=run["summary"]["peak_memory_bytes"], steps=run["summary"]["steps"],
                exact=re.search(r"(?:adapter|model) (\d+/\d+)", said).group(1))


def main(
    train_types: str = "",  # comma-separated; default: all
    max_steps: int = 75,  # optimiser steps of eight examples
):
    "Train the demo task with every train type; print size, memory, loss and exact matches."
    import train
    print("| train type | trained | saved | memory/process | steps | last loss | exact match |")
    print("|---|---:|---:|---:|---:|---:|---:|", flush=True)
    with tempfile.TemporaryDirectory() as work:
        for name in train_types.split(",") if train_types else train.TRAIN_TYPES:
            row = measure(name, max_steps, Path(work))
            print(f"| `{name}` | {row['trained'] / 1e6:.2f} M | {row['size'] / 2**20:.0f} MiB | "
                  f"{row['peak'] / 2**30:.2f} GiB | {row['steps']} | {row['loss']:.3f} | {row['exact']} |",
                  flush=True)


if __name__ == "__main__":
    run_script(main)
