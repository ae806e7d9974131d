"""Compares the processor time of one training step between train types, in one process.

    python scripts/bench_steps.py --train_types custom_qlora,qlora,bnb_dora [--batch_size 8] [--steps 6]
    python scripts/bench_steps.py --train_types lora,lora+compile      # under --compile, beside without

All types are loaded side by side and make their steps in turn on the same batches, so that a machine's
changing speed meets all of them alike; printed are medians and, pair by pair, ratios to the first type.
"""
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from any folder
from scripts.flags import run_script


def prepare(train_types: list[str], folder: Path, runtime) -> tuple[dict, Any, int]:
    """(train type -> a loaded training, samples, padding id)."""
    import train
    trainings = {}
    for name in train_types:
        kind, _, more = name.partition("+")
        config = train.Config(model_name=str(folder), train_type=kind, compile=more == "compile")
        trainings[name] = train.make_training(train.build(config, folder, runtime), config, runtime, 1000)
    held = train.data.load_all(config, folder)
    return trainings, held.train, held.pad


def time_steps(trainings: dict, batches: list[dict], device) -> dict[str, list[float]]:
    """Seconds of processor time of each type's step on each batch."""
    import train
    from scripts import data
    seconds: dict[str, list[float]] = {name: [] for name in trainings}
    for batch in batches:
        arguments, supervised = data.arguments(batch, device)
        for name, training in trainings.items():
            start = time.process_time()
            train.train_step(training, [arguments], supervised)
            seconds[name].append(time.process_time() - start)
    return seconds


def report(seconds: dict[str, list[float]]) -> None:
    first = next(iter(seconds.values()))[1:]
    for name, (_, *taken) in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(taken, first))
        median = statistics.median(taken)
        print(f"{name:<20} {median:6.2f} s of processor time per step, {ratio:.2f} x the first")


def main(
    train_types: str = "custom_qlora,qlora,bnb_dora",  # TYPE or TYPE+compile; compared to the first
    model_name: str = "",  # folder or hub id; default: the embedded model
    batch_size: int = 8,  # examples per step
    steps: int = 6,  # steps of each type; the first is not counted
):
    "Compare the processor time of one training step between train types."
    import train
    from scripts import checkpoint, data
    runtime, folder = train.start_runtime(), checkpoint.find_folder(model_name or None)
    trainings, samples, pad = prepare(train_types.split(","), folder, runtime)
    cut = [range(start, start + batch_size) for start in range(0, steps * batch_size, batch_size)]
    batches = [data.collate([samples[i % len(samples)] for i in chosen], pad) for chosen in cut]
    report(time_steps(trainings, batches, runtime.device))
    del trainings
    train.stop_runtime()


if __name__ == "__main__":
    run_script(main)
