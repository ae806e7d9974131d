"""What rank processes run for the tests (see pool.py): functions of a runtime and plain arguments, with plain
results."""

import contextlib
import dataclasses
import gc
import hashlib
import io
import math
import os
import re
import signal
import time
import types
import warnings
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tiny
import train
from scripts import loss as loss_module
from scripts import attention, data
from scripts.quantized import FrozenQuantLinear


def configuration(folder: str, **flags) -> train.Config:
    """Defaults of the tests: fp32, no clipping, small adapters."""
    base = dict(
        model_name=folder,
        precision="fp32",
        lora_rank=8,
        lora_alpha=16,
        lr=1e-2,
        lr_scheduler="constant",
        apply_gradient_clipping=False,
        batch_size=2,
        wd=0.0,
        dataset="dummy",
        output_dir="unused",
    )
    if train.TRAIN_TYPES[flags["train_type"]].new_blocks:
        base["llama_pro_path"] = folder
    return train.Config(**base | flags)


def whole(model: train.Model) -> dict:
    return {
        train.adapters.plain_name(name): p.detach().full_tensor().float().cpu().clone()
        for name, p in model.trained().items()
    }


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(
        tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    ).hexdigest()


class Frozen:
    """Digests of the whole parameters that are not trained. To gather all of them takes as long as a step: where no
    rank's shard has changed since it was made, they are those of that time."""

    def __init__(self, model: train.Model, runtime: train.Runtime):
        self.module, self.runtime = model.module, runtime
        self.shards, self.digests = self.of(DTensor.to_local), self.of(DTensor.full_tensor)

    def of(self, part) -> dict[str, str]:
        return {name: digest(part(p)) for name, p in self.module.named_parameters() if not p.requires_grad}

    def now(self) -> dict[str, str]:
        changed = self.runtime.gather(self.of(DTensor.to_local) != self.shards).any()
        return self.of(DTensor.full_tensor) if changed else self.digests


def steps(training: train.Training, samples: list, count: int):
    """Runs `count` optimiser steps of the real step function; returns losses and gradient norms."""
    config, runtime, losses, norms = training.config, training.runtime, [], []
    windows = data.steps(
        len(samples),
        seed=1,
        epoch=0,
        batch_size=config.batch_size,
        rank=runtime.rank,
        accumulation=config.gradient_accumulation_steps,
        world=runtime.world,
    )
    for window in (windows * count)[:count]:
        collated = [data.collate([samples[i] for i in micro], 1) for micro in window]
        batches, counts = zip(*(data.arguments(batch, runtime.device) for batch in collated))
        supervised = int(runtime.gather(sum(counts)).sum())
        loss, norm = train.train_step(training, batches, max(1, supervised))
        total = loss.double()
        dist.all_reduce(total)
        losses.append(total.item() / supervised)
        norms.append(norm.item())
    return losses, norms


def fit(
    runtime: train.Runtime, folder: str, flags: dict, count: int = 4, n_samples: int = 8, masked: tuple = ()
) -> dict:
    """A short training; samples whose number is in `masked` have no supervised token."""
    config = configuration(folder, **flags)
    samples = tiny.samples(n_samples)
    samples = [s._replace(labels=[-100] * len(s.ids)) if i in masked else s for i, s in enumerate(samples)]
    torch.manual_seed(0)
    model = train.build(config, Path(folder), runtime)
    start, frozen = whole(model), Frozen(model, runtime)
    training = train.make_training(model, config, runtime, count)
    losses, norms = steps(training, samples, count)
    return dict(
        losses=losses,
        norms=norms,
        start=start,
        end=whole(model),
        frozen=frozen.digests,
        frozen_after=frozen.now(),
        facts=model.facts,
        buffers={n: b.clone() for n, b in model.module.named_buffers()},
    )


def load_only(runtime: train.Runtime, folder: str, flags: dict) -> dict:
    """Digests of every parameter after loading, and what this rank read and holds."""
    model = train.build(configuration(folder, **flags), Path(folder), runtime)
    local = sum(p.to_local().numel() * p.element_size() for p in model.module.parameters())
    return dict(
        digests={n: digest(p.full_tensor()) for n, p in model.module.named_parameters()},
        local=local,
        bytes_read=model.facts["bytes_read"],
        units=model.facts["units"],
        parts={n: p.detach().full_tensor() for n, p in model.module.named_parameters()},
    )


def unsharded_bytes(runtime: train.Runtime, folder: str, flags: dict) -> bool:
    """Whether the bytes that forward and backward see (gathered under the precision policy) are the stored
    ones."""
    model = train.build(configuration(folder, **flags), Path(folder), runtime)
    stored = {
        n: p.full_tensor().clone() for n, p in model.module.named_parameters() if p.dtype == torch.uint8
    }
    seen = {}

    def look(prefix):
        def hook(module, args):
            for name in module.quantizer.shapes(module.out_features, module.in_features):
                seen[f"{prefix}.{name}"] = getattr(module, name).detach().clone()

        return hook

    for prefix, module in model.module.named_modules():
        if isinstance(module, FrozenQuantLinear):
            module.register_forward_pre_hook(look(prefix))
    config = configuration(folder, **flags)
    steps(train.make_training(model, config, runtime, 1), tiny.samples(4 * runtime.world), 1)
    return bool(stored) and all(torch.equal(stored[n], seen[n]) for n in stored)


def logits(
    runtime: train.Runtime, folder: str, flags: dict, ids: list[list[int]], count: int, output: str
) -> list:
    """Trains, saves to `output`, and returns the logits of the in-memory model."""
    config = configuration(folder, **flags | dict(output_dir=output))
    model = train.build(config, Path(folder), runtime)
    steps(train.make_training(model, config, runtime, count), tiny.samples(8), count)
    if runtime.main:
        Path(output).mkdir(exist_ok=True)
    train.save(model, config, Path(folder), tiny.tokenizer(), runtime)
    module, head = model.module.eval(), model.module.get_output_embeddings()
    transform = loss_module.logit_transform(module.config)

    def forward(input_ids, positions, labels):  # the head without the loss, in the same FSDP unit
        packed = dict(documents=()) if attention.used(module) else {}
        head.forward = lambda hidden: transform(type(head).forward(head, hidden))
        return head(module.base_model(input_ids=input_ids, use_cache=False, **packed).last_hidden_state)

    module.forward = forward
    with torch.no_grad():
        return module(torch.tensor(ids), None, None).float()


def gradients(runtime: train.Runtime, folder: str, flags: dict) -> dict:
    """Who gets a gradient, and what the optimiser holds, after one backward pass."""
    config = configuration(folder, **flags)
    model = train.build(config, Path(folder), runtime)
    training = train.make_training(model, config, runtime, 1)
    batch, _ = data.arguments(data.collate(tiny.samples(2), 1), runtime.device)
    with training.scope():
        model.module(**batch).backward()
    held = [p for group in training.optimizer.param_groups for p in group["params"]]
    return dict(
        graded={n for n, p in model.module.named_parameters() if p.grad is not None},
        dtypes={n: p.dtype for n, p in model.module.named_parameters()},
        trained=list(model.trained()),
        held=sum(p.numel() for p in held),
        own=len({id(p) for p in held} & {id(p) for p in model.trained().values()}),
        facts=model.facts,
    )


def gathers(runtime: train.Runtime, folder: str, flags: dict) -> list[str]:
    """What the second step does with blocks, in order: "gather 0" (their parameters) and "use 0" (backward reaches
    them)."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup as Group

    config = configuration(folder, **flags)
    model = train.build(config, Path(folder), runtime)
    training = train.make_training(model, config, runtime, 2)
    steps(training, tiny.samples(8), 1)
    log, unshard, pre_backward = [], Group.unshard, Group.pre_backward

    def note(what, group):
        if number := re.search(r"layers\.(\d+)$", group._module_fqn or ""):
            log.append(f"{what} {number[1]}")

    def watched_unshard(self, *args):
        before = self._all_gather_result
        unshard(self, *args)
        if self._all_gather_result is not before:
            note("gather", self)

    def watched_pre_backward(self, *args):
        note("use", self)
        pre_backward(self, *args)

    Group.unshard, Group.pre_backward = watched_unshard, watched_pre_backward
    try:
        steps(training, tiny.samples(8), 1)
    finally:
        Group.unshard, Group.pre_backward = unshard, pre_backward
    return log


def fp16_overflow(runtime: train.Runtime, folder: str, flags: dict) -> dict:
    """An infinite gradient on the last rank only: all ranks must skip the step and lower the scale together."""
    config = configuration(folder, **flags)
    model = train.build(config, Path(folder), runtime)
    training = train.make_training(model, config, runtime, 2)
    before = whole(model)
    last = next(p for n, p in reversed(list(model.trained().items())) if "lora_B" in n or "weight" in n)
    handle = last.register_post_accumulate_grad_hook(
        lambda p: p.grad.to_local().fill_(math.inf) if runtime.rank == runtime.world - 1 else None
    )
    steps(training, tiny.samples(4), 1)
    skipped = all(torch.equal(before[n], t) for n, t in whole(model).items())
    handle.remove()
    scale = training.scaler.get_scale()
    steps(training, tiny.samples(4), 1)
    return dict(
        skipped=skipped,
        scale=scale,
        moved=any(not torch.equal(before[n], t) for n, t in whole(model).items()),
    )


def gather(runtime: train.Runtime) -> int:
    total = torch.tensor([runtime.rank])
    dist.all_reduce(total)
    return total.item()


def whereabouts(runtime: train.Runtime, another: bool = False) -> tuple[int, str, int]:
    """Process, process group (by the port of its store), processes of the node. `another`: makes a group."""
    if another:
        dist.new_group([0])
    return os.getpid(), os.environ["MASTER_PORT"], runtime.local_world


def in_trouble(runtime: train.Runtime, how: str) -> None:
    """The last rank is, in a collective with the others."""
    if runtime.rank < runtime.world - 1:
        dist.all_reduce(torch.zeros(1))
    elif how == "raises":
        raise ZeroDivisionError
    elif how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "hangs":
        time.sleep(60)


def replace(config: train.Config, **flags) -> train.Config:
    return dataclasses.replace(config, **flags)


def small_files(runtime: train.Runtime, *args) -> torch.Tensor:
    """`logits`, saving in files of 64 KiB."""
    train.checkpoint.SAVED_FILE_BYTES = 2**16
    try:
        return logits(runtime, *args)
    finally:
        train.checkpoint.SAVED_FILE_BYTES = 2 * 2**30


def flat_and_padded(runtime: train.Runtime, folder: str) -> dict:
    """Losses and gradient norms of a batch without padding, and of padded rows under transformers' masks."""
    samples, found = tiny.samples(5, seed=4), dict(attention=[], lengths=[], losses=[], norms=[])
    held = data.Held.__new__(data.Held)
    held.train, held.lengths, held.pad = samples, [len(s.ids) for s in samples], 1
    for kind in ("auto", "sdpa"):
        config = configuration(folder, train_type="full", attn_implementation=kind)
        module = train.build(config, Path(folder), runtime).module
        batch = held.collate([[i] for i in range(5)], False, train.attention.used(module))
        given, _ = data.arguments(batch, runtime.device)
        loss = module(**given)
        loss.backward()
        found["attention"].append(module.config._attn_implementation)
        found["lengths"].append(batch["input_ids"].numel())
        found["losses"].append(loss.item())
        found["norms"].append([p.grad.full_tensor().norm().item() for p in module.parameters()])
    return found


def packed_losses(
    runtime: train.Runtime, folder: str, rows: list, others: list, attention: str, train_type: str = "full"
) -> dict:
    """Summed losses of the documents of packed rows: alone, packed, and packed among other documents. "one row"
    lays all rows of a batch behind one another, as flash attention needs it."""
    together = attention == "one row"
    given = "auto" if together else attention
    config = configuration(folder, train_type=train_type, attn_implementation=given)
    model = train.build(config, Path(folder), runtime).module
    if together:
        model.config._attn_implementation, kept = "flash", model.config._attn_implementation
        train.use_fused_loss(model)
        model.config._attn_implementation = kept

    def loss(batch: dict, keep=None) -> float:
        given, _ = data.arguments(batch, runtime.device)
        if keep is not None:
            given |= dict(positions=given["positions"][keep], labels=given["labels"][keep])
        with torch.no_grad():
            return model(**given).item()

    def each(packed: list) -> list[list[float]]:
        """The loss of each document inside its packed row, all rows in one batch."""
        start, found = 0, []
        for row in packed:
            losses = []
            for count in (sum(x != -100 for x in s.labels[1:]) for s in row):
                losses.append(loss(data.collate_packed(packed, 1), slice(start, start + count)))
                start += count
            found.append(losses)
        return found

    alone = [[loss(data.collate([sample], 1)) for sample in row] for row in rows]
    return dict(
        alone=alone, packed=each(rows), swapped=each([[other, *row[1:]] for other, row in zip(others, rows)])
    )


def evaluated(runtime: train.Runtime, folder: str, flags: dict, count: int) -> dict:
    """The exact loss over random samples, and what the model answers."""
    config = configuration(folder, **flags)
    model = train.build(config, Path(folder), runtime)
    training = train.make_training(model, config, runtime, 1)
    loss, tokens = train.evaluation.mean_loss(training, tiny.samples(count), 1)
    answers = list(train.evaluation.answers(training, tiny.samples(2), tiny.tokenizer(), 2, longest=5))
    return dict(loss=loss, tokens=tokens, answers=answers, training=model.module.training)


def flops_of_step(runtime: train.Runtime, folder: str, flags: dict) -> dict:
    """What torch's counter counts in a step without recomputation, and what scripts/flops.py says of it."""
    from torch.utils.flop_counter import FlopCounterMode

    flags = flags | dict(use_gradient_checkpointing=False, attn_implementation="eager")
    config = configuration(folder, **flags)
    model = train.build(config, Path(folder), runtime)
    training = train.make_training(model, config, runtime, 2)
    samples = [s._replace(labels=[-100] * 3 + s.ids[3:]) for s in tiny.samples(60) if len(s.ids) >= 16]
    samples = [type(s)(s.ids[:16], s.labels[:16]) for s in samples[:4]]
    batch, supervised = data.arguments(data.collate(samples, 1), runtime.device)
    with FlopCounterMode(display=False) as counter:
        train.train_step(training, [batch], supervised)
    per = model.facts["flops"]
    said = train.flops.of_step(per, 4 * 16, supervised, 16)
    return dict(counted=counter.get_total_flops(), said=said, attention=per["attention"] * 4 * 16 * 16)


class StopAfter:
    """Stands for launcher.Stops: a signal arrives at `rank` during step `step`."""

    def __init__(self, runtime: train.Runtime, step: int | None, rank: int = 0):
        self.step, self.mine, self.reads, self.at_once = step, runtime.rank == rank, 0, True

    @property
    def asked(self) -> int:
        self.reads += 1
        return signal.SIGTERM if self.mine and self.reads == self.step else 0


def whole_run(runtime: train.Runtime, flags: dict, stop: int | None = None, freezing: bool = False) -> dict:
    """train.run itself: its exit code, what it printed, and the message of a UserError. Unless `freezing`, no object
    is set aside: pool.py has set aside those of the libraries, and to take them back and search them for garbage
    takes longer than the run."""
    printed, rank = io.StringIO(), runtime.world - 1
    still = types.SimpleNamespace(collect=gc.collect, freeze=lambda: None, unfreeze=lambda: None)
    with contextlib.redirect_stdout(printed), mock.patch.object(train, "gc", gc if freezing else still):
        try:
            config = configuration(flags["model_name"], **flags)
            code, message = train.run(config, runtime, StopAfter(runtime, stop, rank)), None
        except train.UserError as error:
            code, message = 2, str(error)
    return dict(code=code, printed=printed.getvalue(), message=message)


def deterministic_run(runtime: train.Runtime, flags: dict) -> tuple[dict, list[bool], list[str]]:
    """whole_run under --deterministic; whether torch was told, in each step; what it warned of."""
    step, seen = train.train_step, []
    told = (torch.are_deterministic_algorithms_enabled, torch.is_deterministic_algorithms_warn_only_enabled)

    def watched(*args):
        seen.append(all(ask() for ask in told))
        return step(*args)

    before = torch.backends.cudnn.benchmark, torch.utils.deterministic.fill_uninitialized_memory
    patches = mock.patch.dict(os.environ), mock.patch.object(train, "train_step", watched)
    with patches[0], patches[1], warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train.state.choose_kernels(flags["deterministic"])
        done = whole_run(runtime, flags)
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark, torch.utils.deterministic.fill_uninitialized_memory = before
    return done, seen, [str(one.message) for one in said if "deterministic" in str(one.message)]


def garbage_of_steps(runtime: train.Runtime, flags: dict) -> list[tuple[int, int]]:
    """(objects that collections look at, objects set aside): before a run, in each of its steps, after it."""
    step, seen = train.train_step, []
    look = lambda: seen.append((len(gc.get_objects()), gc.get_freeze_count()))  # noqa: E731

    def watched(*args):
        look()
        return step(*args)

    gc.unfreeze()  # as in a process of its own
    look()
    with mock.patch.object(train, "train_step", watched):
        assert whole_run(runtime, flags, freezing=True)["code"] == 0
    look()
    return seen


def failing_save(runtime: train.Runtime, flags: dict, code: int) -> dict:
    """The last rank cannot write the checkpoint of step 5."""
    write = train.state.write_shards

    def failing(path, shards):
        if "checkpoint-5" in str(path) and runtime.rank == runtime.world - 1:
            raise OSError(code, "no")
        write(path, shards)

    with mock.patch.object(train.state, "write_shards", failing):
        return whole_run(runtime, flags)


def slow_save(runtime: train.Runtime, flags: dict) -> dict:
    """Writing takes longer than a step: what is written must be what was there when it began."""
    write = train.state.write_shards
    slow = lambda *args: (time.sleep(0.5), write(*args))  # noqa: E731
    with mock.patch.object(train.state, "write_shards", slow):
        return whole_run(runtime, flags)


def clocks_set(runtime: train.Runtime, flags: dict) -> list[int]:
    """After which steps the clock of the next one was set anew."""
    found, go_on = [], train.logs.Metrics.go_on

    def noting(self):
        found.append(self.made)
        go_on(self)

    with mock.patch.object(train.logs.Metrics, "go_on", noting):
        assert whole_run(runtime, flags)["code"] == 0
    return found


def broken_steps(runtime: train.Runtime, flags: dict, where: str, numbers: list[int]) -> dict:
    """In some steps the last rank's loss is no number, or its gradients are infinite."""
    step, clip, last = train.train_step, train.clip_gradients, runtime.rank == runtime.world - 1

    def broken_loss(training, batches, tokens):
        if where == "loss" and training.step + 1 in numbers and last:
            head = training.model.module.get_output_embeddings()
            forward = head.forward
            with mock.patch.object(head, "forward", lambda *args: forward(*args) * math.nan):
                return step(training, batches, tokens)
        return step(training, batches, tokens)

    def broken_gradients(training, limit):
        if where == "gradient" and training.step + 1 in numbers and last:
            next(p for p in training.model.trained().values() if p.to_local().numel()).grad.to_local().fill_(math.inf)
        return clip(training, limit)

    with mock.patch.multiple(train, train_step=broken_loss, clip_gradients=broken_gradients):
        return whole_run(runtime, flags)


SHAPES = {  # the last have fewer rows than ranks, or rows that do not divide
    "embed.weight": (96, 64),
    "a.lora_A.weight": (64, 128),
    "a.lora_B.weight": (40, 128),
    "norm.weight": (64,),
    "odd.weight": (5, 7),
    "one.weight": (1, 5),
}


def optimizer_numbers(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def sharded(whole: dict[str, torch.Tensor], runtime: train.Runtime) -> dict:
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = dist.init_device_mesh("cpu", (runtime.world,))
    return {name: torch.nn.Parameter(distribute_tensor(t, mesh, [Shard(0)])) for name, t in whole.items()}


def optimizer_run(runtime: train.Runtime, name: str, total: int, stop: int | None = None) -> dict:
    """`total` steps of an optimiser on sharded parameters with given gradients. After step `stop` all goes over
    into new parameters and a new optimiser, by the names of its state. Returns the whole parameters, this
    rank's state, and the dtypes of the state."""
    config = configuration(
        "unused", train_type="lora", optimizer=name, wd=0.1, lr=1e-2, loraplus_lr_ratio=4.0, lr_scheduler="linear"
    )
    optim, named = train.optim, sharded(optimizer_numbers(0), runtime)

    def make(named):
        optimizer = optim.make_optimizer(named, config, [named["embed.weight"]])
        return optimizer, optim.make_schedule(optimizer, config, total)

    optimizer, schedule = make(named)
    for step in range(total):
        if step == stop:
            saved = {k: t.clone() for k, t in optim.state_tensors(optimizer, named).items()}
            fresh = {k: torch.nn.Parameter(p.detach().clone()) for k, p in named.items()}
            position, named = schedule.state_dict(), fresh
            optimizer, schedule = make(named)
            schedule.load_state_dict(position)
            for group, rate in zip(optimizer.param_groups, schedule.get_last_lr()):
                group["lr"] = rate
            optim.allocate_state(optimizer, named, list(saved))
            for key, tensor in optim.state_tensors(optimizer, named).items():
                tensor.copy_(saved[key])
        for key, grad in sharded(optimizer_numbers(step + 1), runtime).items():
            named[key].grad = grad.detach()
        optimizer.step()
        schedule.step()
    state = {k: optim.local(t).clone() for k, t in optim.state_tensors(optimizer, named).items()}
    return dict(
        end={k: p.detach().full_tensor() for k, p in named.items()},
        state=state,
        groups=[(g["lr"], g["initial_lr"], g["weight_decay"], len(g["params"])) for g in optimizer.param_groups],
    )


def state_kinds(runtime: train.Runtime, folder: str, flags: dict) -> dict[str, str]:
    """The dtype of each state after a real step."""
    config = configuration(folder, **flags)
    model = train.build(config, Path(folder), runtime)
    training = train.make_training(model, config, runtime, 1)
    steps(training, tiny.samples(4), 1)
    state = train.optim.state_tensors(training.optimizer, model.trained())
    return {name: str(t.dtype) for name, t in state.items()}


def gradient_bytes(runtime: train.Runtime, folder: str, flags: dict) -> dict:
    """Bytes of gradient storage alive at once in a step, the most seen, and of all parameters together."""
    config, seen, most = configuration(folder, **flags), {}, 0
    model = train.build(config, Path(folder), runtime)

    def look(parameter):
        nonlocal most
        storage = parameter.grad.to_local().untyped_storage()
        seen[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        most = max(most, sum(size for reference, size in seen.values() if not reference.expired()))

    trained = model.trained().values()
    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(look)
    training = train.make_training(model, config, runtime, 2)
    steps(training, tiny.samples(4 * runtime.world), 2)
    return dict(most=most, whole=sum(p.to_local().nbytes for p in trained))


def smoothed_evaluation(runtime: train.Runtime, folder: str, flags: dict) -> list[float]:
    """The loss of the model as evaluation and as training see it."""
    config = configuration(folder, **flags)
    model = train.build(config, Path(folder), runtime)
    training = train.make_training(model, config, runtime, 1)
    held_out, _ = train.evaluation.mean_loss(training, tiny.samples(4), 1)
    return [held_out, steps(training, tiny.samples(4), 1)[0][0]]


def with_rows(runtime: train.Runtime, rows: str, case: str, *args) -> dict | str:
    """Another case, with rows of scripts/models.py's MODELS as README writes them, and the message of its
    UserError."""
    known, models = dict(train.models.MODELS), train.models
    models.MODELS |= eval("{" + rows + "}", {"Row": models.Row})
    try:
        return globals()[case](runtime, *args)
    except train.UserError as error:
        return str(error)
    finally:
        models.MODELS.clear()
        models.MODELS |= known


class Storages(TorchDispatchMode):
    """Bytes of the storages that operators made and that are alive, the most there were, and the largest one."""

    def __init__(self):
        super().__init__()
        self.alive, self.most, self.largest = {}, 0, 0

    def now(self) -> int:
        self.alive = {key: found for key, found in self.alive.items() if not found[0].expired()}
        return sum(size for _, size in self.alive.values())

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                self.largest = max(self.largest, storage.nbytes())
        self.most = max(self.most, self.now())
        return result


def long_step(runtime: train.Runtime, folder: str, flags: dict, length: int) -> dict:
    """Bytes made in a forward and backward pass of one text: kept between the two, the most at a time, and the
    largest tensor."""
    config = configuration(folder, **flags)
    model = train.build(config, Path(folder), runtime)
    training = train.make_training(model, config, runtime, 2)
    sample = data.Sample([2 + i % 290 for i in range(length)], [-100, *(2 + i % 290 for i in range(1, length))])
    batch, _ = data.arguments(data.collate([sample], 1), runtime.device)
    train.train_step(training, [batch], length)  # what stays after the first step is not counted
    loss_module.LOGITS_PER_CHUNK, kept = 2**15, loss_module.LOGITS_PER_CHUNK
    try:
        with Storages() as seen:
            with training.scope():
                summed = model.module(**batch)
            between = seen.now()
            summed.backward()
    finally:
        loss_module.LOGITS_PER_CHUNK = kept
    return dict(between=between, most=seen.most, largest=seen.largest)


def routed_apart(runtime: train.Runtime, folder: str, flags: dict, halves: list) -> dict:
    """Two steps in which each rank has one of the `halves`, or one process both in turn; and the experts that
    this rank's tokens went to."""
    config, hit = configuration(folder, **flags), set()
    model = train.build(config, Path(folder), runtime)
    for router in (m for m in model.module.modules() if type(m).__name__.endswith("TopKRouter")):
        router.register_forward_hook(lambda module, args, out: hit.update(out[2].flatten().tolist()))
    training = train.make_training(model, config, runtime, 2)
    mine = halves if runtime.world == 1 else [halves[runtime.rank]]
    supervised = sum(label != -100 for half in halves for s in half for label in s.labels[1:])
    start, losses, norms = whole(model), [], []
    for _ in range(2):
        batches = [data.arguments(data.collate(half, 1), runtime.device)[0] for half in mine]
        loss, norm = train.train_step(training, batches, supervised)
        dist.all_reduce(loss)
        losses.append(loss.item() / supervised)
        norms.append(norm.item())
    return dict(losses=losses, norms=norms, start=start, end=whole(model), hit=hit)


def refused(runtime: train.Runtime, folder: str, flags: dict) -> str | None:
    """The message with which a model is not built."""
    try:
        train.build(configuration(folder, **flags), Path(folder), runtime)
    except train.UserError as error:
        return str(error)


def with_backend(backend: str):
    """Compiled blocks by another backend than torch.compile's own."""
    make = train.compiled.compile_blocks
    return mock.patch.object(train.compiled, "compile_blocks", lambda *args: make(*args, backend=backend))


def compiled_fit(runtime: train.Runtime, folder: str, flags: dict, backend: str) -> dict:
    """`fit` under --compile; how many graphs it compiled, how often code was left out of
    them, and how many graphs there are after batches of other lengths."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    with with_backend(backend):
        result = fit(runtime, folder, flags)
        config = configuration(folder, **flags)
        model = train.build(config, Path(folder), runtime)
    training = train.make_training(model, config, runtime, 4)
    steps(training, tiny.samples(8), 2)  # the same kinds of batches, in a new model of the same code
    graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    for longest in (30, 47, 61):
        steps(training, tiny.samples(8, longest, longest), 1)
    return result | dict(graphs=graphs, breaks=breaks, graphs_later=counters["stats"]["unique_graphs"])
