"""What backward needs of forward: recomputed block by block, or kept in host memory meanwhile."""
import functools
import inspect

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


class Offload(torch.autograd.graph.saved_tensors_hooks):
    """Keeps in host memory, until backward, what autograd saves; parameters (and views of them) stay where
    they are."""

    def __init__(self):
        pin = torch.accelerator.is_available()

        def pack(tensor):
            if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
                return tensor, None
            host = torch.empty_like(tensor, device="cpu", pin_memory=pin)
            return host.copy_(tensor, non_blocking=True), tensor.device

        def unpack(saved):
            tensor, device = saved
            return tensor if device is None else tensor.to(device, non_blocking=True)
        super().__init__(pack, unpack)
