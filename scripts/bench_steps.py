"""Compares the processor time of one training step between train types, in one process.

    python scripts/bench_steps.py --train_types custom_qlora,qlora,bnb_dora [--batch_size 8] [--steps 6]

All types are loaded side by side and make their steps in turn on the same batches, so that a machine's
changing speed meets all of them alike; printed are medians and, pair by pair, ratios to the first type.
"""
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from any folder


def main(
    train_types: str = "custom_qlora,qlora,bnb_dora",  # comma-separated; compared to the first
    model_name: str = "",  # folder or hub id; default: the embedded model
    batch_size: int = 8,  # examples per step
    steps: int = 6,  # steps of each type; the first is not counted
):
    "Compare the processor time of one training step between train types."
    import bitsandbytes  # noqa: F401  registers torch.ops.bitsandbytes
    import train
    from scripts import checkpoint, data
    runtime, folder = train.start_runtime(), checkpoint.find_folder(model_name or None)
    seconds: dict[str, list[float]] = {}
    trainings = {}
    for name in train_types.split(","):
        config = train.Config(model_name=str(folder), train_type=name, batch_size=batch_size)
        tokenizer, samples, _ = train.load_data(config, folder)
        trainings[name] = train.make_training(train.build(config, folder, runtime), config, runtime, steps)
        seconds[name] = []
    for step in range(steps):
        chosen = [samples[i % len(samples)] for i in range(step * batch_size, (step + 1) * batch_size)]
        batch = data.collate(chosen, data.pad_id(tokenizer))
        arguments, supervised = train.to_device(batch, runtime.device)
        for name, training in trainings.items():
            start = time.process_time()
            train.train_step(training, [arguments], supervised)
            seconds[name].append(time.process_time() - start)
    first = next(iter(seconds.values()))[1:]
    for name, taken in seconds.items():
        median = statistics.median(taken[1:])
        ratio = statistics.median(a / b for a, b in zip(taken[1:], first))
        print(f"{name:<16} {median:6.2f} s of processor time per step, {ratio:.2f} x the first")
    del trainings, training
    train.stop_runtime()


if __name__ == "__main__":
    from fastcore.script import call_parse
    from scripts.data import kebab_flags
    sys.argv = kebab_flags(sys.argv)
    call_parse(main)
