"""What the planner's tests run in a process of their own: it registers a fake accelerator, which cannot be undone.

`real` is the reference: the same steps with real tensors on the CPU, whose memory a counter of its own adds
up."""

import contextlib
import gc
import io
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train
from scripts import plan, plan_trace


def configuration(folder: str, flags: dict) -> train.Config:
    base = dict(model_name=folder, dataset="dummy", output_dir="unused", context_length=32, lora_rank=8)
    if train.TRAIN_TYPES[flags.get("train_type", "qlora")].new_blocks:
        base["llama_pro_path"] = folder
    return train.Config(**base | flags)


class Counter(TorchDispatchMode):
    """Bytes of all storages that operations made and that are still there, and the most there were."""

    def __init__(self):
        super().__init__()
        self.sizes, self.now, self.peak = weakref.WeakKeyDictionary(), 0, 0

    def set(self, storage) -> None:
        if storage not in self.sizes:
            weakref.finalize(storage, self.gone, entry := [0])
            self.sizes[storage] = entry
        self.now += storage.nbytes() - self.sizes[storage][0]
        self.sizes[storage][0] = storage.nbytes()
        self.peak = max(self.peak, self.now)

    def gone(self, entry: list) -> None:
        self.now -= entry[0]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        from torch.distributed.tensor import DTensor

        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        out = func(*args, **kwargs or {})
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                self.set(tensor.untyped_storage())
        return out


@contextlib.contextmanager
def counting():
    resize = torch.UntypedStorage.resize_

    def resize_(storage, size):
        resize(storage, size)
        if storage in counter.sizes:
            counter.set(storage)

    with Counter() as counter:
        torch.UntypedStorage.resize_ = resize_
        try:
            yield counter
        finally:
            torch.UntypedStorage.resize_ = resize


def real(folder: str, flags: dict, world: int, count: int = 2) -> dict:
    """Persistent bytes and the peak of `count` optimiser steps of rank 0, with real tensors on the CPU. The group is
    a fake one: numbers come out wrong, memory right."""
    config, device = configuration(folder, flags), torch.device("cpu")
    runtime = train.Runtime(0, 0, world, world, device, peak_memory=lambda: 0)
    accelerators = train.accelerator_count
    train.accelerator_count = lambda: 0
    available, torch.accelerator.is_available = torch.accelerator.is_available, lambda: False
    try:
        with plan_trace.fake_group("cpu", world), counting() as counter:
            model = train.build(config, Path(folder), runtime, plan_trace.NoWeights())
            gc.collect()
            params = sum(p.to_local().numel() * p.element_size() for p in model.module.parameters())
            training = train.make_training(model, config, runtime, 10)
            counter.peak = counter.now
            for _ in range(count):
                number = min(2, config.gradient_accumulation_steps)
                batches = [plan_trace.make_batch(config, device) for _ in range(number)]
                train.train_step(training, [batch for batch, _ in batches], 100)
                del batches
                gc.collect()
            states = [t for state in training.optimizer.state.values() for t in state.values()]
            states = [getattr(t, "_local_tensor", t) for t in states if isinstance(t, torch.Tensor)]
            state = sum(t.numel() * t.element_size() for t in states)
            return dict(parameters_bytes=params, state_bytes=state, peak=counter.peak)
    finally:
        train.accelerator_count, torch.accelerator.is_available = accelerators, available
        assert not dist.is_initialized()


def planned(
    folder: str, flags: dict, world: int, kind: str, exact_sizes: bool = True, count: int = 2
) -> dict:
    """The planner's peaks of the same; without rounding to blocks of 512 bytes or powers of two, as real tensors on a
    CPU have none."""
    config = configuration(folder, flags)
    size = plan_trace.Trace.size
    if exact_sizes:
        plan_trace.Trace.size = lambda self, place, count: count
    try:
        trace, facts = plan_trace.run(train, config, Path(folder), world, kind, count)
    finally:
        plan_trace.Trace.size = size
    peaks = {}
    for (phase, place), value in trace.peak.items():
        if phase.split()[0] in ("forward", "backward", "optimiser"):
            peaks[place] = max(value, peaks.get(place, 0))
    return dict(facts, peaks=peaks, together=trace.together, blocking=dict(trace.blocking))


def built(folder: str, flags: dict, world: int, kind: str) -> dict:
    """Facts after building, with no step."""
    return plan_trace.run(train, configuration(folder, flags), Path(folder), world, kind, 0)[1]


def shards(folder: str, flags: dict, world: int) -> tuple[int, int]:
    """Bytes of rank 0's parameters: planned, and of real tensors."""
    return built(folder, flags, world, "gpu")["parameters_bytes"], real(folder, flags, world, 0)["parameters_bytes"]


def shard_bytes(name: str, flags: dict, depth: int, world: int) -> int:
    with plan.model_folder(plan.SHAPES[name], depth, []) as folder:
        return built(str(folder), flags, world, "gpu")["parameters_bytes"]


def quick_and_exact(name: str, flags: dict, depth: int) -> tuple[dict, dict]:
    """{(phase, place): bytes} of both modes, for the model with `depth` blocks."""
    plan.SHAPES[name], kept = plan.SHAPES[name] | dict(num_hidden_layers=depth), plan.SHAPES[name]
    try:
        plans = [plan.plan(configuration(name, flags), 2, mode) for mode in ("quick", "exact")]
    finally:
        plan.SHAPES[name] = kept
    assert [made.mode for made in plans] == ["quick", "exact"]
    return tuple({(p, w): made.phase(p, w) for p in plan.PHASES for w in plan.PLACES} for made in plans)


def with_mistake(folder: str, mistake: str) -> str:
    """The error of a plan with a mistake built into the step."""
    step, allocate, cross_entropy = train.train_step, train.allocate, train.loss.chunked_cross_entropy

    def value_read(training, batches, tokens):
        total, norm = step(training, batches, tokens)
        return total.item(), norm

    def shards_left(module, home, device):
        allocate(module, torch.device("cpu"), device)

    def wrong_device(hidden, weight, bias, labels, *args):
        return cross_entropy(hidden, weight, bias, labels.cpu(), *args)

    changes = dict(
        value_read=(train, "train_step", value_read),
        shards_left=(train, "allocate", shards_left),
        wrong_device=(train.loss, "chunked_cross_entropy", wrong_device),
    )
    with plan_trace.substituted(changes[mistake]):
        try:
            planned(folder, {}, 2, "gpu", count=1)
        except Exception as error:
            return type(error).__name__
    return ""


def command(argv: list[str]) -> tuple[int, str]:
    """Exit code and output of `train.py` with these flags."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = train.main(argv)
    return code, out.getvalue()


def room(folder: str, free: int, flags: dict) -> tuple[str, str]:
    """What a run that finds `free` bytes says, and the error it ends with, on a CPU."""
    config = configuration(folder, flags)
    runtime = train.Runtime(0, 0, 1, 1, torch.device("cpu"), lambda: 0, free_memory=lambda: free)
    with plan_trace.fake_group("cpu", 1), contextlib.redirect_stdout(io.StringIO()) as out:
        substitutes = [(train, "accelerator_count", lambda: 0)]
        try:
            with plan_trace.substituted(*substitutes):
                train.build(config, Path(folder), runtime, plan_trace.NoWeights())
        except train.UserError as error:
            return out.getvalue(), str(error)
    return out.getvalue(), ""


def block_bytes(folder: str) -> int:
    model = train.empty_model(Path(folder), torch.float32)
    return sum(p.numel() * 4 for p in train.blocks_of(model)[0].parameters())
