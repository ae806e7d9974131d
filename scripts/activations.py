"""What backward needs of forward: recomputed block by block, or kept in host memory meanwhile."""
import contextlib
import functools
import inspect
import weakref
from collections import deque

import torch
import torch.nn as nn


def recompute_blocks(blocks: nn.ModuleList, reentrant: bool) -> None:
    """Recompute blocks in backward. Wraps `forward`, so that parameter names and FSDP's hooks stay as they
    are."""
    from torch.utils.checkpoint import checkpoint as recompute

    def wrap(forward, trains):
        first = next(iter(inspect.signature(forward).parameters))
        def checkpointed(*args, **kwargs):
            args = args or (kwargs.pop(first),)
            if not torch.is_grad_enabled() or not (trains or args[0].requires_grad):  # no backward comes here
                return forward(*args, **kwargs)
            if reentrant:  # it needs an input that requires grad, and what is frozen before it gives none
                args[0].requires_grad_()
            return recompute(functools.partial(forward, **kwargs), *args, use_reentrant=reentrant)
        return checkpointed
    for block in blocks:
        block.forward = wrap(block.forward, any(p.requires_grad for p in block.parameters()))


class Kept:
    """A saved tensor in host memory, and on its way back on its device."""
    __slots__ = ("host", "device", "back", "number", "__weakref__")

    def __init__(self, host: torch.Tensor, device: torch.device, number: int):
        self.host, self.device, self.back, self.number = host, device, None, number


class Offload(torch.autograd.graph.saved_tensors_hooks):
    """Keeps in host memory, until backward, what autograd saves; parameters (and views of them) stay where
    they are.

    With a `stream` copies run there, beside the computation: out while forward goes on, at most IN_FLIGHT of
    them; and back a tensor before backward asks for it, which goes through them from the last to the first.
    """
    IN_FLIGHT = 2

    def __init__(self, stream: torch.Stream | None = None):
        self.stream, self.every = stream, []  # weak references: autograd drops what backward is done with
        self.leaving: deque = deque()  # (tensor, event): its memory is not free before the copy is made
        super().__init__(self.pack, self.unpack)

    @contextlib.contextmanager
    def beside(self):
        """Work goes to the stream, after all that the computation has been given so far."""
        if self.stream is None:
            yield
        else:
            self.stream.wait_stream(torch.accelerator.current_stream())
            with self.stream:
                yield

    def pack(self, tensor):
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return tensor
        host = torch.empty_like(tensor, device="cpu", pin_memory=torch.accelerator.is_available())
        with self.beside():
            host.copy_(tensor, non_blocking=True)
        if self.stream is not None:
            self.leaving.append((tensor, self.stream.record_event()))
            self.land(self.IN_FLIGHT)
        kept = Kept(host, tensor.device, len(self.every))
        self.every.append(weakref.ref(kept))
        return kept

    def land(self, left: int) -> None:
        """The computation waits for all but the last `left` copies to the host, whose tensors are let go."""
        while len(self.leaving) > left:
            torch.accelerator.current_stream().wait_event(self.leaving.popleft()[1])

    def fetch(self, kept: Kept) -> None:
        if kept.back is None:
            with self.beside():
                kept.back = kept.host.to(kept.device, non_blocking=True, copy=self.stream is not None)

    def unpack(self, kept):
        if isinstance(kept, torch.Tensor):
            return kept
        self.land(0)
        self.fetch(kept)
        tensor, kept.back = kept.back, None
        if self.stream is not None:
            torch.accelerator.current_stream().wait_stream(self.stream)
            earlier = (self.every[number]() for number in range(kept.number - 1, -1, -1))
            if before := next(filter(None, earlier), None):
                self.fetch(before)
        return tensor
