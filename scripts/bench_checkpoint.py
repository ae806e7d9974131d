"""What a checkpoint costs training: windows of steps with and without one, in turn, in the same run.

    python scripts/bench_checkpoint.py --train_types qlora,full [--save_steps 5] [--windows 4]

Two processes train the small embedded model on one batch each. Printed per train type: seconds for which a
step is held up by starting a save (copying state to host memory) and by ending one, in percent of a step, and
how much longer a window with a save takes than the one before it, which had none; medians.
"""
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from any folder
from scripts.flags import run_script


def timed(work, *args) -> float:
    start = time.perf_counter()
    work(*args)
    return time.perf_counter() - start


def window(training, saver, batches: list, tokens: int, steps: int, save: bool) -> tuple[float, float]:
    """Begins a checkpoint, where `save`, and makes `steps` steps. Returns seconds in all, and held up by
    saving."""
    import train
    from scripts import state
    start, held_up = time.perf_counter(), 0.0
    if save:
        held_up += timed(saver.start, training)
    for _ in range(steps):
        statuses = training.runtime.gather(saver.status)[:, 0].tolist()
        held_up += timed(saver.settle, statuses)
        state.seed_step(0, training.step, training.runtime.rank)
        train.train_step(training, batches, tokens)
    return time.perf_counter() - start, held_up


def measure(name: str, folder: Path, runtime, save_steps: int, windows: int, batch_size: int) -> None:
    import train
    from scripts import data, state
    with tempfile.TemporaryDirectory(dir=".") as temporary:
        output = [temporary]
        train.dist.broadcast_object_list(output)
        config = train.Config(model_name=str(folder), train_type=name, output_dir=output[0])
        training = train.make_training(train.build(config, folder, runtime), config, runtime, 10**6)
        held = data.load_all(config, folder)
        batch = data.collate(held.train[runtime.rank * batch_size:][:batch_size], held.pad)
        arguments, count = data.arguments(batch, runtime.device)
        tokens, saver = int(runtime.gather(count).sum()), state.Saver(config, runtime, {})
        window(training, saver, [arguments], tokens, save_steps, True)  # the first is not counted
        saver.finish()
        pairs = []
        for _ in range(windows):
            pairs.append([window(training, saver, [arguments], tokens, save_steps, save)
                          for save in (False, True)])
            saver.finish()
        saver.pool.shutdown()  # it may still be removing an old one
        if runtime.main:
            newest = state.found(output[0])[0]
            report(name, pairs, save_steps, sum(path.stat().st_size for path in newest.iterdir()))


def report(name: str, pairs: list, save_steps: int, size: float) -> None:
    step = statistics.median(plain[0] / save_steps for plain, _ in pairs)
    held_up = statistics.median(saving[1] for _, saving in pairs)
    ratio = statistics.median(saving[0] / plain[0] for plain, saving in pairs)
    print(f"{name:<10} checkpoint {size / 2**20:7.1f} MiB; step {step:.2f} s, "
          f"held up {held_up * 1000:.0f} ms per save = {held_up / step:.1%} of a step; {save_steps} steps "
          f"with a save take {ratio:.3f} x as long", flush=True)


def main(
    train_types: str = "qlora,full",  # comma-separated
    model_name: str = "",  # folder or hub id; default: the embedded model
    save_steps: int = 5,  # steps of a window, and so from save to save
    windows: int = 4,  # windows with a save, each beside one without
    batch_size: int = 4,  # examples per process and step
):
    "Measure what a checkpoint costs training."
    from scripts import checkpoint, launcher
    folder = checkpoint.find_folder(model_name or None)

    def work(runtime):
        for name in train_types.split(","):
            measure(name, folder, runtime, save_steps, windows, batch_size)
    sys.exit(launcher.run_ranks(__file__, work, 2))


if __name__ == "__main__":
    run_script(main)
