"""Measures the data side: tokenising, the second start, packing, and how long a step waits for its batch.

    python scripts/bench_data.py [--dataset FILE] [--model_name MODEL] [--rows 50000] [--context_length 1024]

Rows of the dataset are repeated, each with a number of its own, until there are --rows of them.
"""
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from any folder
from scripts.flags import run_script


def write_rows(source: str, number: int, file: Path) -> None:
    from scripts import data
    rows = data.load(source)
    with open(file, "w") as out:
        for i in range(number):
            row = rows[i % len(rows)]
            out.write(json.dumps(row | {"instruction": f"{row['instruction']} ({i})"}) + "\n")


def seconds(work) -> tuple[float, Any]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def waiting(samples, config, pad: int, steps: int = 50) -> float:
    """Seconds that making one batch takes: what a step would wait if batches were not made a step ahead."""
    from scripts import data
    windows = data.plan(samples.lengths, config, epoch=0, rank=0, world=1)[:steps]
    taken, _ = seconds(lambda: [data.collate_packed([[samples[i] for i in row] for row in window[0]], pad)
                                for window in windows])
    return taken / len(windows)


def main(
    dataset: str = "demo",  # name or file in alpaca form
    model_name: str = "",  # whose tokenizer; default: the demo's
    rows: int = 50000,  # number of rows to tokenise
    context_length: int = 1024,  # length of packed rows
):
    "Measure tokenising, the second start, packing, and making batches."
    from transformers import AutoTokenizer
    import train
    from scripts import checkpoint, data
    tokenizer = AutoTokenizer.from_pretrained(checkpoint.find_folder(model_name or None))
    with tempfile.TemporaryDirectory() as work:
        os.environ["XDG_CACHE_HOME"], file = work, Path(work) / "rows.jsonl"
        write_rows(dataset, rows, file)
        config = train.Config(dataset=str(file), context_length=context_length, packing=True)
        first, (samples, counts) = seconds(lambda: data.prepare(config, tokenizer))
        second, _ = seconds(lambda: data.prepare(config, tokenizer))
        packing, packed = seconds(lambda: data.packing.pack(samples.lengths, context_length))
        print(f"tokenising  {rows} rows, {counts.total_tokens} tokens in {first:.1f} s "
              f"({counts.total_tokens / first:.0f} tokens/s)")
        print(f"next start  {second:.2f} s, {first / second:.0f} times faster")
        used = counts.total_tokens / (len(packed) * context_length)
        print(f"packing     {len(packed)} rows in {packing:.1f} s, {used:.1%} of positions used")
        each = waiting(samples, config, data.pad_id(tokenizer))
        print(f"a batch     {1000 * each:.1f} ms for {4 * context_length} positions, made a step ahead")


if __name__ == "__main__":
    run_script(main)
