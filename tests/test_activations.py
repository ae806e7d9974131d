"""Saved activations in host memory, copied on a stream beside the computation: with a stream whose copies are made
as late as they may be, so that a copy nobody waits for leaves NaN in the gradients."""

import gc
import weakref

import pytest
import torch
import torch.nn as nn
from torch.utils._python_dispatch import TorchDispatchMode

from scripts.activations import Kept, Offload, recompute_blocks


class Computation:
    """The stream that everything else runs on, at once."""

    def wait_stream(self, stream):
        stream.run(len(stream.jobs))

    def wait_event(self, event):
        event.stream.run(event.until - event.stream.done)


class Late(TorchDispatchMode):
    """A stream: what is copied in it is NaN until the computation waits."""

    def __init__(self):
        super().__init__()
        self.jobs, self.done, self.log = [], 0, []

    def run(self, count):
        for job in self.jobs[: max(0, count)]:
            job()
            self.done += 1
        del self.jobs[: max(0, count)]

    def wait_stream(self, stream):
        self.log.append("waits")  # the computation is never behind

    def record_event(self):
        event = torch.nn.Module()
        event.stream, event.until = self, self.done + len(self.jobs)
        return event

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            target, source = args[:2]
        elif func is torch.ops.aten._to_copy.default:
            source = args[0]
            target = torch.empty_like(source)
        else:
            return func(*args, **(kwargs or {}))
        target.fill_(float("nan"))
        self.log.append("out" if func is torch.ops.aten.copy_.default else "back")
        self.jobs.append(lambda: target.copy_(source))
        return target


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, hidden):
        return hidden + self.down(torch.tanh(self.up(hidden)))


def gradients(recompute: bool, offload) -> tuple[list, list]:
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block() for _ in range(5))
    if recompute:
        recompute_blocks(blocks, False)
    hidden, alive = torch.randn(3, 8, requires_grad=True), []
    with offload:
        out = hidden * 1
        for block in blocks:
            out = block(out)
    if isinstance(offload, Offload):
        alive = list(offload.every)
    out.square().sum().backward()
    return [p.grad for p in blocks.parameters()], alive


@pytest.fixture
def late(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_stream", Computation)
    return Late()


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_those_without(late, recompute):
    wanted, _ = gradients(recompute, torch.enable_grad())
    for stream in (None, late):
        found, kept = gradients(recompute, Offload(stream))
        assert len(kept) >= 5
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        gc.collect()
        assert not any(ref() for ref in kept)  # host memory is given back by backward


def test_copies_come_back_before_they_are_asked_for(late, monkeypatch):
    """The second and later tensors are on their way when backward asks for the first; one at a time."""
    asked, unpack = [], Offload.unpack

    def watched(self, kept):
        if isinstance(kept, Kept):
            asked.append((kept.back is not None, len(late.jobs)))
        return unpack(self, kept)

    monkeypatch.setattr(Offload, "unpack", watched)
    gradients(True, Offload(late))
    assert asked[0] == (False, Offload.IN_FLIGHT)  # the last copies out are waited for then
    assert len(asked) >= 5 and all(entry == (True, 1) for entry in asked[1:])
    assert late.log.count("waits") == late.log.count("out") + late.log.count("back")


def test_a_tensor_on_its_way_out_keeps_its_memory(late):
    offload, gone, kept = Offload(late), [], []
    for number in range(4):
        tensor = torch.full((4,), float(number))
        kept.append(offload.pack(tensor))
        gone.append(weakref.ref(tensor))
        del tensor
    assert [ref() is None for ref in gone] == [True, True, False, False]
    offload.land(0)
    assert not late.jobs and [entry.host[0].item() for entry in kept] == [0, 1, 2, 3]
