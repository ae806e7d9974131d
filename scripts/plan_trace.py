"""Runs train.py's own build, steps and saving on fake tensors, and records who holds how much memory when.

Three stand-ins make that possible without a GPU: a fake accelerator (torch's PrivateUse1 device, renamed, in
pure Python: distinct from the CPU, so a tensor on the wrong device fails as it would on CUDA), torch's fake
process group, and fake tensors, which have shapes and devices but no memory, so that reading a value fails.
Registering the device cannot be undone: plan in a process of its own.
"""
import contextlib
import gc
import weakref
from collections import defaultdict, deque

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import _DummyBackendModule

from scripts.checkpoint import Checkpoint
from scripts.cuda_allocator import rounded
from scripts.optim import local_bytes
from scripts.quantize import HQQ, NF4, Int8

NAME = "gpu"  # of the fake accelerator
ACCELERATOR, PINNED, PAGEABLE = "accelerator", "pinned", "pageable"  # where memory is
HOST = "host"  # pinned and pageable together
# What half-precision matrix products are under autocast on CUDA; a fake device has no table of its own.
AUTOCAST = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm")


# ------------------------------------------------------------------------------------------- fake accelerator

class Stream:
    """Also serves as an event: nothing is ever asynchronous here. Streams differ, since each has an allocator
    pool of its own."""
    count = 0

    def __init__(self, *args, **kwargs):
        Stream.count += 1
        self.id = Stream.count

    def record(self, *args):
        return self

    def wait_stream(self, *args):
        pass
    record_event, wait_event, wait, synchronize = record, wait_stream, wait_stream, wait_stream

    def __enter__(self):
        getattr(torch, NAME).streams.append(self)

    def __exit__(self, *error):
        getattr(torch, NAME).streams.pop()


class Accelerator(_DummyBackendModule):
    """Becomes torch.gpu."""
    Stream = Event = Stream

    def __init__(self):
        self.streams = [Stream()]

    def current_stream(self, *args):
        return self.streams[-1]

    def get_amp_supported_dtype(self):
        return [torch.bfloat16, torch.float16]

    def set_device(self, index) -> None:
        pass

    def synchronize(self, *args) -> None:
        pass

    @contextlib.contextmanager
    def stream(self, stream):
        self.streams.append(stream)
        try:
            yield
        finally:
            self.streams.pop()


def register() -> None:
    """The fake accelerator, once per process."""
    if not hasattr(torch, NAME):
        from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
        _setup_privateuseone_for_python_backend(NAME, backend_module=Accelerator())
        register_autocast()


def register_autocast() -> None:
    """Autocast of matrix products, as CUDA has it; everything else passes."""
    def casting(op):
        def cast(*args, **kwargs):
            with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
                return op(*map(Trace.now.autocast, args), **kwargs)
        return cast
    key = torch._C.DispatchKey.AutocastPrivateUse1
    every, aten = (torch.library.Library(space, "IMPL", "AutocastPrivateUse1") for space in ("_", "aten"))
    every.fallback(torch.library.fallthrough_kernel)
    for name in AUTOCAST:
        aten.impl(name, casting(getattr(torch.ops.aten, name)))
    LIBRARIES.extend((every, aten))  # a library that is collected unregisters


LIBRARIES: list = []


# ------------------------------------------------------------------------------------------------------ trace

class Trace(TorchDispatchMode):
    """Every allocation and release of storage memory, with what it is for (`tag`) and when (`phase`).

    held[place]: bytes held; peak[phase, place]: most bytes; parts[phase, place]: {tag: bytes} at that moment;
    together: most bytes in all places during the steps; events: the accelerator's, for cuda_allocator.replay;
    blocking: copies that made the host wait.
    """
    now: "Trace | None" = None  # the one in progress, which substitutes below report to

    def __init__(self, kind: str = NAME):
        super().__init__()
        self.kind, self.phase, self.tag, self.paused, self.backward = kind, "load", "loading", 0, False
        self.ids, self.info = weakref.WeakKeyDictionary(), {}  # storage -> id -> [place, bytes, tag, stream]
        self.events, self.blocking, self.count = [], defaultdict(int), 0
        self.held, self.by, self.peak, self.parts = defaultdict(int), defaultdict(int), {}, {}
        self.pinned, self.cast, self.labels, self.together = weakref.WeakSet(), {}, {}, 0

    def __enter__(self):
        Trace.now = self
        return super().__enter__()

    # -- accounting

    def resize(self, key: int, size: int) -> None:
        entry = self.info[key]
        place, old, tag, _ = entry
        if size == old:
            return
        if place == ACCELERATOR:
            if old:
                self.events.append((key, 0, entry[3]))
            if size:
                entry[3] = getattr(torch, NAME).current_stream().id if self.kind == NAME else 0
                self.events.append((key, size, entry[3]))
        entry[1] = size
        self.held[place] += size - old
        self.by[place, tag] += size - old
        self.note(place)
        if place != ACCELERATOR:
            self.held[HOST] += size - old
            self.note(HOST)
        if self.phase not in ("load", "save"):
            self.together = max(self.together, self.held[ACCELERATOR] + self.held[HOST])

    def note(self, place: str) -> None:
        if self.held[place] > self.peak.get((self.phase, place), -1):
            self.peak[self.phase, place] = self.held[place]
            self.parts[self.phase, place] = {t: n for (p, t), n in self.by.items() if p == place and n}

    def enter(self, phase: str) -> None:
        """A new phase; what is held now counts for it."""
        self.phase = phase
        for place in (ACCELERATOR, PINNED, PAGEABLE, HOST):
            self.note(place)

    def size(self, place: str, count: int) -> int:
        """What `count` bytes take: CUDA blocks are multiples of 512, pinned blocks powers of two."""
        if place == ACCELERATOR:
            return rounded(count) if self.kind == NAME else count
        return 1 << (count - 1).bit_length() if place == PINNED and count else count

    def add(self, place: str, size: int, tag: str) -> int:
        self.count += 1
        self.info[self.count] = [place, 0, tag, 0]
        self.resize(self.count, size)
        return self.count

    def drop(self, key: int) -> None:
        self.resize(key, 0)
        del self.info[key]

    def see(self, tensor: torch.Tensor, pinned: bool = False) -> None:
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        if storage in self.ids:
            return self.resized(storage, storage.nbytes())
        place = ACCELERATOR if tensor.device.type == self.kind else PINNED if pinned else PAGEABLE
        if pinned:
            self.pinned.add(storage)
        self.ids[storage] = self.add(place, self.size(place, storage.nbytes()), self.tag)
        weakref.finalize(storage, self.drop, self.ids[storage])

    def resized(self, storage, count: int) -> None:
        if storage in self.ids:
            key = self.ids[storage]
            self.resize(key, self.size(self.info[key][0], count))

    def label(self, tensor: torch.Tensor, tag: str) -> None:
        """What a tensor's memory is for, said afterwards."""
        key = self.ids.get(tensor.untyped_storage())
        if key is not None:
            entry = self.info[key]
            self.by[entry[0], entry[2]] -= entry[1]
            self.by[entry[0], tag] += entry[1]
            entry[2] = tag

    @contextlib.contextmanager
    def tagged(self, tag: str):
        self.tag, old = tag, self.tag
        try:
            yield
        finally:
            self.tag = old

    # -- operations

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor takes it apart; its local operations come by here
        kwargs = dict(kwargs or {})
        pinned = bool(kwargs.pop("pin_memory", False))
        if func is torch.ops.aten._to_copy.default and args[0].device.type == self.kind == NAME:
            if torch.device(kwargs.get("device") or NAME).type == "cpu":
                pinned = kwargs.get("non_blocking", False)  # as CUDA's copy to the host does
                self.blocking[self.phase.split()[0]] += not pinned
        workspace = self.workspace(func, args)
        out = func(*args, **kwargs)
        if not self.paused:
            for tensor in tree_leaves(out):
                if isinstance(tensor, torch.Tensor):
                    self.see(tensor, pinned)
        if workspace:
            self.drop(workspace)
        return out

    def workspace(self, func, args) -> int:
        """Memory that a fused kernel takes inside, which fake kernels do not show: flash attention's backward
        sums dq in fp32, and has dk and dv once per query head."""
        if func is not torch.ops.aten._scaled_dot_product_flash_attention_backward.default:
            return 0
        query, keys = args[1], args[2]
        expanded = 0 if query.shape[1] == keys.shape[1] else 2 * query.numel() * query.element_size()
        return self.add(ACCELERATOR, rounded(query.numel() * 4 + expanded), "kernel workspaces")

    def autocast(self, value):
        """Casts like CUDA's autocast: a parameter's cast copy is kept until the region ends."""
        dtype = torch.get_autocast_dtype(NAME)
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dtype == dtype:
            return value
        if not (value.requires_grad and value.is_leaf and torch.is_autocast_cache_enabled()):
            return value.to(dtype)
        if id(value) not in self.cast:
            self.cast[id(value)] = value.to(dtype)
        return self.cast[id(value)]


# ------------------------------------------------------------------------------------------------ substitutes

def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
              enable_gqa=False):
    """The kernel that CUDA's scaled_dot_product_attention picks: flash without a mask in 16 bits, else the
    memory-efficient one where there are as many keys' heads as queries', else plain products."""
    if torch.is_autocast_enabled(NAME):
        query, key, value = (t.to(torch.get_autocast_dtype(NAME)) for t in (query, key, value))
    aten, half = torch.ops.aten, query.dtype in (torch.bfloat16, torch.float16)
    if attn_mask is None and half and query.shape[-1] <= 256:
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal,
                                                        scale=scale)[0]
    if query.shape[1] == key.shape[1]:
        bias = attn_mask
        if bias is not None:
            bias = torch.zeros_like(bias, dtype=query.dtype) if bias.dtype == torch.bool else bias
            bias = bias.expand(*query.shape[:3], key.shape[2])
        grad = torch.is_grad_enabled() and query.requires_grad
        return aten._scaled_dot_product_efficient_attention(query, key, value, bias, grad, dropout_p,
                                                            is_causal, scale=scale)[0]
    return aten._scaled_dot_product_attention_math(query, key, value, attn_mask, dropout_p, is_causal,
                                                   scale=scale, enable_gqa=enable_gqa)[0]


def pin(tensor, *args, **kwargs):
    trace = Trace.now
    key = trace.ids.get(tensor.untyped_storage())
    with trace.tagged(trace.info[key][2] if key else trace.tag):  # a parameter stays one
        return torch.empty_like(tensor, pin_memory=True).copy_(tensor)


def one_by_one(jobs, work, workers):
    """train.prefetch in this thread (modes are per thread), with as many results alive."""
    pending: deque = deque()
    for job in jobs:
        pending.append((job, work(job)))
        if len(pending) >= workers:
            yield pending.popleft()
    yield from pending


def hqq_quantize(self, weight) -> dict:
    """The parts, empty, and what hqq's solver holds meanwhile: fp32 weight, error, estimate, two temporaries.
    """
    held = [torch.empty_like(weight, dtype=torch.float32) for _ in range(5)]
    del held
    return {name: torch.empty(shape, dtype=torch.uint8, device=weight.device)
            for name, shape in self.shapes(*weight.shape).items()}


class NoWeights(Checkpoint):
    """All that a model wants, in bf16, and nothing on disk."""

    def __init__(self):
        self.bytes_read, self.rows_before, self.shape, self.pieces = 0, {}, {}, {}

    def match(self, slots) -> dict:
        self.file, found = {}, {slot.names[0]: slot for slot in slots}
        self.file, self.shape = dict.fromkeys(found, ""), {name: slot.shape for name, slot in found.items()}
        return found

    def rows(self, name: str, low: int, high: int):
        shape = (high - low, *self.shape[name][1:])
        self.bytes_read += 2 * torch.Size(shape).numel()
        return torch.empty(shape, dtype=torch.bfloat16)

    def close(self, file: str) -> None:
        pass


@contextlib.contextmanager
def substituted(*changes):
    """setattr(owner, name, value) for each, undone at the end."""
    old = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    try:
        for change in changes:
            setattr(*change)
        yield
    finally:
        for change in old:
            setattr(*change)


def around(owner, name: str, before=None, tag: str | None = None, pause: bool = False):
    """A substitute for a method that reports to the trace in progress: `before`(trace, self) is called first,
    and what it allocates is tagged, or not seen."""
    method = getattr(owner, name)

    def reporting(self, *args, **kwargs):
        trace = Trace.now
        if before:
            before(trace, self)
        trace.paused += pause
        try:
            with trace.tagged(tag or trace.tag):
                return method(self, *args, **kwargs)
        finally:
            trace.paused -= pause
    return owner, name, reporting


def reports(train) -> list:
    """Substitutes that tell a trace what is being done."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup as Group
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    storage_resize, backward = torch.UntypedStorage.resize_, torch.Tensor.backward
    clip = train.clip_gradients

    def unit(trace, group):
        way = "backward" if trace.backward else "forward"
        trace.enter(f"{way} {trace.labels.get(id(group), 'root')}")

    def resize_(storage, count):
        storage_resize(storage, count)
        Trace.now.resized(storage, count)

    def run_backward(tensor, *args, **kwargs):
        Trace.now.backward = True
        Trace.now.enter("backward loss")
        with Trace.now.tagged("backward"):
            backward(tensor, *args, **kwargs)
        Trace.now.backward = False

    def clip_gradients(*args):
        Trace.now.enter("optimiser")
        with Trace.now.tagged("optimiser"):
            return clip(*args)
    return [
        *(around(Group, name, tag="gathered units") for name in ("unshard", "wait_for_unshard")),
        around(Group, "pre_forward", unit), around(Group, "pre_backward", unit),
        around(Group, "post_backward", tag="gradients"),
        around(ShardingPropagator, "_propagate_tensor_meta_non_cached", pause=True),  # whole-model phantoms
        *(around(kind, name, tag="dequantised weights") for kind in (NF4, Int8, HQQ)
          for name in ("dequantize", "statistics", "unpacked") if hasattr(kind, name)),
        *(around(kind, "forward", tag="logits")
          for kind in (train.loss.ChunkedCrossEntropy, train.loss.StreamedCrossEntropy)),
        (torch.UntypedStorage, "resize_", resize_), (torch.Tensor, "backward", run_backward),
        (train, "clip_gradients", clip_gradients),
    ]


def stand_ins(train, config) -> list:
    """What fake tensors, or the fake device, lack."""
    from torch.distributed.fsdp._fully_shard import _fsdp_init
    from transformers import masking_utils

    from scripts import quantize
    packed = masking_utils.find_packed_sequence_indices
    return [
        (_fsdp_init, "_move_states_to_device", lambda *args: None),  # fake buffers: train.allocate does it
        (train, "prefetch", one_by_one),
        # It reads values to see whether there are several documents in a row.
        (masking_utils, "find_packed_sequence_indices", packed if config.packing else lambda ids: None),
        *((quantize, name, lambda device: torch.empty(256, device=device))
          for name in ("dynamic_map", "linear_map")),
        (quantize, "nf4_bins", lambda: (torch.empty(65, dtype=torch.uint8), torch.empty(65))),
        (quantize, "compiled_kernel", lambda *args: None),
        (quantize.HQQ, "quantize", hqq_quantize),
        # It reads whether a gradient overflowed.
        (torch.amp.GradScaler, "_maybe_opt_step", lambda self, optimizer, state, *a, **k: optimizer.step()),
    ]


def device_stand_ins(train, kind: str, world: int) -> list:
    """The machine: as many accelerators as processes, or none."""
    if kind != NAME:
        return [(train, "accelerator_count", lambda: 0), (torch.accelerator, "is_available", lambda: False)]
    accelerator, clear = getattr(torch, NAME), torch.clear_autocast_cache

    def clear_autocast_cache():
        clear()
        Trace.now.cast.clear()
    return [
        (train, "accelerator_count", lambda: world),
        (torch.accelerator, "is_available", lambda: True),
        (torch.accelerator, "current_stream", accelerator.current_stream),
        (torch.Tensor, "pin_memory", pin),
        (torch.Tensor, "is_pinned", lambda t, *args: t.untyped_storage() in Trace.now.pinned),
        (torch, "clear_autocast_cache", clear_autocast_cache),
        (F, "scaled_dot_product_attention", attention),
    ]


# -------------------------------------------------------------------------------------------------------- run

@contextlib.contextmanager
def fake_group(kind: str, world: int):
    """Rank 0 of `world` processes that do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore
    capable = dist.Backend.backend_capability["fake"]
    if kind not in capable:
        capable.append(kind)
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def make_batch(config, device) -> tuple[dict, int]:
    """Full rows with every position supervised, and their number of supervised tokens. Packed rows stand for
    documents that are cut out of them and put back."""
    rows, length = config.batch_size, config.context_length
    tokens = rows * (length - 1)
    host = dict(input_ids=torch.zeros(rows, length, dtype=torch.long),
                positions=torch.zeros(tokens, dtype=torch.long),
                labels=torch.zeros(tokens, dtype=torch.long))
    if config.packing:
        host["position_ids"] = torch.zeros(rows, length, dtype=torch.long)
    sent = {name: tensor.to(device, non_blocking=True) for name, tensor in host.items()}
    if config.packing:
        place = torch.zeros(rows * length, dtype=torch.long).to(device)
        sent["documents"] = (place.view(rows, length), place)
    return sent, tokens


def fake_from_shard_on(train, modes: contextlib.ExitStack, kind: str):
    """A substitute for train.shard, before which a model has shapes and small buffers only: from there on
    everything is fake, and traced."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    shard = train.shard

    def begin(module, *args):
        modes.enter_context(FakeTensorMode())
        modes.enter_context(Trace(kind))
        train.map_parameters(module, lambda p: torch.empty(p.shape, dtype=p.dtype, device="meta"))
        for owner in module.modules():
            for name, buffer in owner._buffers.items():
                if buffer is not None:
                    owner._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
        return shard(module, *args)
    return train, "shard", begin


def label_units(trace: Trace, train, model) -> None:
    """Names for FSDP's units: blocks by number, counted from the nearer end, so that each label's peak is
    linear in the number of blocks; blocks far from both ends are never the worst."""
    blocks = train.blocks_of(model.module)
    count = len(blocks)

    def name(module, text: str) -> None:
        for number, group in enumerate(module._get_fsdp_state()._fsdp_param_groups):
            trace.labels.setdefault(id(group), text + "'" * number)
    for index, block in enumerate(blocks):
        place = str(index) if index < 3 else str(max(index - count, -4))
        units = [(n, m) for n, m in block.named_modules() if hasattr(m, "_get_fsdp_state")]
        for inner, module in units:
            name(module, f"block {place} {inner}".strip())
    for module, text in ((model.module.get_output_embeddings(), "head"),
                         (model.module.get_input_embeddings(), "embedding")):
        if hasattr(module, "_get_fsdp_state"):  # tied ones are in the root
            name(module, text)


def label_parameters(trace: Trace, model) -> None:
    for owner in model.module.modules():
        quantized = hasattr(owner, "quantizer")
        for name, parameter in owner._parameters.items():
            if parameter is None:
                continue
            if parameter.requires_grad:
                tag = "adapters" if model.targets else "trained parameters"
            elif parameter.dtype == torch.uint8:
                tag = "packed weights" if quantized and name == "weight" else "statistics"
            else:
                tag = "plain parameters"
            trace.label(parameter.to_local(), tag)
        for buffer in owner._buffers.values():
            if buffer is not None:
                trace.label(buffer, "buffers")


def steps(trace: Trace, train, training, count: int) -> None:
    """`count` optimiser steps; from the second on the optimiser's state is there. Two micro-batches show all
    that gradient accumulation adds."""
    config = training.config
    training.optimizer.register_step_pre_hook(lambda *args: setattr(trace, "tag", "optimiser"))
    for _ in range(count):
        trace.enter("forward start")
        trace.tag = "activations"
        number = min(2, config.gradient_accumulation_steps)
        batches = [make_batch(config, training.runtime.device) for _ in range(number)]
        train.train_step(training, [batch for batch, _ in batches], sum(tokens for _, tokens in batches))
        del batches
        gc.collect()


def run(train, config, folder, world: int, kind: str = NAME, count: int = 2) -> tuple[Trace, dict]:
    """Builds, trains `count` steps and saves as rank 0 of `world`, on the fake accelerator (or, as `kind`
    "cpu", on a fake CPU). `folder` needs no more than config.json. Returns the trace, and facts of the model
    with its persistent bytes."""
    register()
    changes = reports(train) + stand_ins(train, config) + device_stand_ins(train, kind, world)
    runtime = train.Runtime(0, 0, world, world, torch.device(kind), peak_memory=lambda: 0,
                            copies=Stream() if kind == NAME else None)
    gc.collect()
    gc.freeze()  # so that collections look at this trace's objects only
    with (substituted(*changes), fake_group(kind, world), torch.autograd.set_multithreading_enabled(False),
          contextlib.ExitStack() as modes, substituted(fake_from_shard_on(train, modes, kind))):
        model = train.build(config, folder, runtime, NoWeights())
        trace = Trace.now
        gc.collect()
        label_units(trace, train, model)
        label_parameters(trace, model)
        training = train.make_training(model, config, runtime, 10)
        steps(trace, train, training, count)
        trace.enter("save")
        trace.tag = "saving"
        train.checkpoint.write_tensors(folder, "model", model.trained(), False)
        state = train.optim.state_tensors(training.optimizer, model.trained())
        facts = dict(model.facts, parameters_bytes=local_bytes(model.module.parameters()),
                     trained_bytes=local_bytes(model.trained().values()),
                     state_bytes=local_bytes(state.values()))
        del model, training
    return trace, facts
