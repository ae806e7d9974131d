"""Memory of the state and time of a step of every optimiser, for full fine-tuning on two processes.

    python scripts/bench_optim.py [--optimizers adamw,adamw_8bit] [--model_name FOLDER] [--steps 5]

One model is loaded and trained with one optimiser after the other, on the same short example; times are
medians of processor time without the first step, and ratios are to the first optimiser. `in backward` is
that one under --optim_in_backward.
"""
import dataclasses
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from any folder
from scripts.flags import run_script


def stopwatch(optimizer) -> list[float]:
    """A list to which every call of the optimiser's step adds its seconds of processor time."""
    taken: list[float] = []
    optimizer.register_step_pre_hook(lambda *args: taken.append(-time.process_time()))
    optimizer.register_step_post_hook(lambda *args: taken.append(taken.pop() + time.process_time()))
    return taken


def gradient_peak(model, sizes: list[int]):
    """Hooks that note the bytes of all gradients there are, whenever one is ready."""
    trained = list(model.trained().values())
    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(
            lambda _: sizes.append(sum(p.grad.to_local().nbytes for p in trained if p.grad is not None)))


def measure_one(training, batch, supervised: int, steps: int) -> dict:
    """Medians of one optimiser, its state's bytes, and the most bytes of gradients at a time."""
    import train
    from scripts import optim
    taken, whole, part, sizes = stopwatch(training.optimizer), [], [], training.model.facts["gradients"]
    sizes.clear()
    for _ in range(steps):
        taken.clear()
        start = time.process_time()
        train.train_step(training, [batch], supervised)
        whole.append(time.process_time() - start)
        part.append(sum(taken))
    state = optim.state_tensors(training.optimizer, training.model.trained()).values()
    return dict(state=sum(optim.local(t).nbytes for t in state), gradients=max(sizes),
                step=statistics.median(whole[1:]), part=statistics.median(part[1:]))


def report(name: str, row: dict, first: dict) -> None:
    print(f"| `{name}` | {row['state'] / 2**20:.0f} MiB | {row['gradients'] / 2**20:.0f} MiB | "
          f"{row['part']:.2f} s | {row['part'] / first['part']:.2f} | "
          f"{row['step']:.2f} s | {row['step'] / first['step']:.2f} |", flush=True)


def measure(runtime, names: list[str], folder: str, steps: int, tokens: int) -> None:
    """One rank's part; the first prints its numbers of every optimiser."""
    import train
    from scripts import data
    config = train.Config(model_name=folder, train_type="full", lr=1e-6, apply_gradient_clipping=False)
    model, found = train.build(config, Path(folder), runtime), {}
    gradient_peak(model, model.facts.setdefault("gradients", []))
    sample = data.Sample(list(range(5, 5 + tokens)), list(range(5, 5 + tokens)))
    batch, supervised = data.arguments(data.collate([sample], 0), runtime.device)
    if runtime.main:
        print("| optimiser | state/process | gradients/process | its own time | ratio | whole step | ratio |")
        print("|---|---:|---:|---:|---:|---:|---:|", flush=True)
    runs: dict[str, dict] = {name: dict(optimizer=name) for name in names}
    runs["in backward"] = dict(optimizer=names[0], optim_in_backward=True)  # last: its hooks stay
    for name, flags in runs.items():
        training = train.make_training(model, dataclasses.replace(config, **flags), runtime, 1000)
        found[name] = measure_one(training, batch, supervised * runtime.world, steps)
        if runtime.main:
            report(name, found[name], found[names[0]])
        del training


def main(
    optimizers: str = "",  # comma-separated; default: all. The others are compared to the first
    model_name: str = "",  # folder or hub id; default: the embedded model
    steps: int = 5,  # steps of each; the first is not counted
    tokens: int = 64,  # tokens per process and step
    world_size: int = 2,  # processes
):
    "Compare memory and step time of the optimisers, for full fine-tuning."
    from scripts import checkpoint, launcher, optim
    names = optimizers.split(",") if optimizers else list(optim.OPTIMIZERS)
    folder = str(checkpoint.find_folder(model_name or None))
    sys.exit(launcher.run_ranks(
        __file__, lambda runtime: measure(runtime, names, folder, steps, tokens), world_size))


if __name__ == "__main__":
    run_script(main)
