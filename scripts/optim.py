"""Optimisers and learning-rate schedules: torch's, and bitsandbytes' on this rank's shards; parameter groups;
steps inside backward; and the optimiser's state by name, for checkpoints.

8-bit states are block-wise (Dettmers et al., arXiv:2110.02861); Lion is Chen et al., arXiv:2302.06675; LoRA+
is Hayou et al., arXiv:2402.12354.
"""
import functools
import inspect
import math
from dataclasses import dataclass
from typing import Callable, Iterable

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

from scripts.flags import UserError
from scripts.quantize import load_bitsandbytes

BLOCK = 256        # elements that share a scale in bitsandbytes' 8-bit states
SMALLEST = 4096    # parameters with fewer elements keep 32-bit states, as in bitsandbytes
CODE_BOOKS = {"state1": True, "state2": False}  # 8-bit states and whether their code book has negative values


# ------------------------------------------------------------------------------ bitsandbytes' on local shards

def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, without a copy; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def local_bytes(tensors) -> int:
    return sum(local(tensor).nbytes for tensor in tensors)


class LocalOptimizer(torch.optim.Optimizer):
    """A bitsandbytes optimiser (`kind`: a class of bitsandbytes.optim) for sharded parameters.

    Its kernels refuse DTensors, so they get this rank's rows. Groups and state are kept here, by parameter,
    as in torch's optimisers; of bitsandbytes' object only `init_state` and `update_step` are used. With
    `bits` 8, groups marked `wide` (embeddings, as bitsandbytes advises) and small parameters stay at 32: both
    are told by the whole parameter, not by the shard, so that all ranks and world sizes agree. `paged` states
    live in CUDA's managed memory; parameters in host memory get plain ones.
    """

    def __init__(self, params, kind: str, bits: int = 32, paged: bool = False, **options):
        self.bits = bits
        with _disable_current_modes():  # code books come of values, which fake tensors lack
            self.inner = {width: getattr(load_bitsandbytes().optim, kind)(
                [nn.Parameter(torch.empty(0))], optim_bits=width, is_paged=paged, min_8bit_size=0, **options)
                for width in {bits, 32}}
            books = {name: book.tolist() for name, book in self.inner[bits].name2qmap.items()}
        self.inner[bits].name2qmap = {name: torch.tensor(book) for name, book in books.items()}
        for worker in self.inner.values():
            worker._cpu_paged_warned = True  # parameters in host memory have nothing to page
        super().__init__(params, self.inner[32].defaults)

    def worker(self, group: dict, parameter: nn.Parameter):
        """bitsandbytes' object of the width that this parameter's state has."""
        wide = group.get("wide") or parameter.numel() < SMALLEST
        return self.inner[32 if wide else self.bits]

    def allocate(self, group: dict, parameter: nn.Parameter) -> None:
        """Zero state, as before the first step."""
        worker, view = self.worker(group, parameter), local(parameter)
        worker.init_state(group, view, 0, 0)
        self.state[parameter] = worker.state.pop(view)

    def update(self, group: dict, parameter: nn.Parameter) -> None:
        if not self.state[parameter]:
            self.allocate(group, parameter)
        worker, view, state = self.worker(group, parameter), local(parameter), self.state[parameter]
        state["step"] = int(state["step"])  # a tensor after a checkpoint
        if not view.numel():  # fewer rows than ranks: no kernel is started for nothing
            state["step"] += 1
            return
        view.grad = local(parameter.grad)
        worker.state[view] = state
        worker.prefetch_state(view)
        worker.update_step(group, view, 0, 0)
        del worker.state[view]

    @torch.no_grad()
    def step(self, closure=None):
        from bitsandbytes.utils import sync_gpu  # its kernels run on the default stream, whatever is current
        used = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for _, parameter in used[:1]:
            sync_gpu(local(parameter))
        for group, parameter in used:
            self.update(group, parameter)
        for _, parameter in used[-1:]:
            sync_gpu(local(parameter))


# ----------------------------------------------------------------------------------------------------- tables

ADAM: dict = dict(betas=(0.9, 0.95))
LION: dict = dict(kind="Lion", betas=(0.9, 0.99))
OPTIMIZERS: dict[str, Callable] = {
    "adamw": functools.partial(torch.optim.AdamW, **ADAM),
    "adam": functools.partial(torch.optim.Adam, **ADAM),
    "sgd": functools.partial(torch.optim.SGD, momentum=0.9),
    "adadelta": torch.optim.Adadelta,
    "fused_adamw": functools.partial(torch.optim.AdamW, **ADAM, fused=True),
    "fused_adam": functools.partial(torch.optim.Adam, **ADAM, fused=True),
    "adamw_8bit": functools.partial(LocalOptimizer, kind="AdamW", bits=8, **ADAM),
    "paged_adamw_32bit": functools.partial(LocalOptimizer, kind="AdamW", paged=True, **ADAM),
    "paged_adamw_8bit": functools.partial(LocalOptimizer, kind="AdamW", bits=8, paged=True, **ADAM),
    "lion": functools.partial(LocalOptimizer, **LION),
    "lion_8bit": functools.partial(LocalOptimizer, bits=8, **LION),
}


STATES = {"sgd": 1, "lion": 1, "lion_8bit": 1}  # tensors of state per trained one; for the others 2


@dataclass(frozen=True)
class Schedule:
    fall: Callable[[float], float]   # 1 to 0 while the way from the end of the warm-up goes from 0 to 1
    floor: Callable[[int], float]    # part of the peak at the end, from the steps after the warm-up
    warmup: float                    # part of the steps, where no flag says it


SCHEDULES = {
    "constant": Schedule(lambda way: 1.0, lambda steps: 1.0, 0.0),
    "linear": Schedule(lambda way: 1 - way, lambda steps: 1 / (steps + 1), 0.1),  # zero would lose a step
    "cosine": Schedule(lambda way: (1 + math.cos(math.pi * way)) / 2, lambda steps: 0.1, 0.1),
}


# --------------------------------------------------------------------------------------------- learning rates

def peak_lr(config) -> float:
    if config.lr is not None:
        return config.lr
    small = config.model_name is None and config.type.adapter  # small models take, and need, larger steps
    return 1e-3 if small else config.type.lr


def warmup_steps(config, total: int) -> int:
    """The optimiser step, from 1, that is the first at the peak."""
    if config.warmup_steps is not None:
        return max(1, config.warmup_steps)
    own = SCHEDULES[config.lr_scheduler].warmup
    return max(1, round((own if config.warmup_ratio is None else config.warmup_ratio) * total))


def factor(step: int, name: str, warmup: int, total: int, floor: float | None = None) -> float:
    """Part of the peak rate at optimiser step `step` = 1..total: step / warmup up to `warmup`, then down to
    `floor` (None: the schedule's own) at step `total`."""
    if step <= warmup:
        return step / warmup
    schedule, left = SCHEDULES[name], total - warmup
    floor = schedule.floor(left) if floor is None else floor
    return floor + (1 - floor) * schedule.fall((step - warmup) / left)


def make_schedule(optimizer: torch.optim.Optimizer, config, total: int):
    """A LambdaLR for a run of `total` optimiser steps; it scales the rates of all groups alike."""
    warmup = warmup_steps(config, total)
    floor = None if config.min_lr is None else config.min_lr / peak_lr(config)
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: factor(min(done + 1, total), config.lr_scheduler, warmup, total, floor))


# ----------------------------------------------------------------------------------------------- construction

def param_groups(named: dict[str, nn.Parameter], config, embeddings: Iterable = ()) -> list[dict]:
    """Parameters by learning rate and weight decay; the first group has the base rate.

    No decay on what has one dimension (norms, biases, DoRA's magnitudes), as in nanoGPT and torchtitan;
    embeddings do decay. lora_B learns `loraplus_lr_ratio` times as fast. With optim_in_backward every
    parameter is a group, so that it can step alone.
    """
    wide, base, groups = set(embeddings), peak_lr(config), {}
    for name, parameter in named.items():
        group = dict(lr=base * config.loraplus_lr_ratio if "lora_B" in name else base,
                     weight_decay=config.wd if parameter.ndim > 1 else 0.0, wide=parameter in wide)
        key = (name if config.optim_in_backward else "", *group.values())
        groups.setdefault(key, dict(params=[], **group))["params"].append(parameter)
    return sorted(groups.values(), key=lambda group: group["lr"] != base)


def step_in_backward(optimizer: torch.optim.Optimizer) -> None:
    """Steps each parameter as soon as its gradient is reduced, and frees the gradient: only one FSDP unit's
    gradients exist at a time. `optimizer` has a group per parameter. Its own step() then finds no gradient
    and does nothing; `gradient_norms` reads what the hooks have noted."""
    optimizer.noted = {}

    def hook(group: dict, parameter: nn.Parameter) -> None:
        if parameter in optimizer.noted:
            raise RuntimeError("a gradient came in two parts: --optim_in_backward would step twice")
        optimizer.noted[parameter] = norm(parameter.grad)
        groups, optimizer.param_groups = optimizer.param_groups, [group]
        try:
            optimizer.step()
        finally:
            optimizer.param_groups = groups
        parameter.grad = None
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.register_post_accumulate_grad_hook(functools.partial(hook, group))


def norm(gradient: torch.Tensor) -> torch.Tensor:
    """fp32 scalar: the norm of this rank's rows; in fp32 also where gradients are bf16 (two digits)."""
    return torch.linalg.vector_norm(local(gradient), dtype=torch.float32)


def gradient_norms(optimizer: torch.optim.Optimizer, trained: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """fp32 norms of this rank's gradients, also of those that were used and freed inside backward."""
    noted = getattr(optimizer, "noted", {})
    norms = [noted[p] if p in noted else norm(p.grad) for p in trained if p in noted or p.grad is not None]
    noted.clear()
    return norms


def make_optimizer(named: dict[str, nn.Parameter], config, embeddings: Iterable = ()):
    """The configured optimiser. `embeddings` are parameters whose state stays in 32 bits."""
    groups = param_groups(named, config, embeddings)
    optimizer = OPTIMIZERS[config.optimizer](groups, lr=peak_lr(config), weight_decay=config.wd)
    if config.optim_in_backward:
        step_in_backward(optimizer)
    return optimizer


def state_bytes(config, trained: int, stored: int) -> int:
    """About how much the state takes for `trained` elements that take `stored` bytes."""
    return STATES.get(config.optimizer, 2) * (trained if "8bit" in config.optimizer else stored)


# ------------------------------------------------------------------------------------- state, by its name

def state_tensors(optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter]) -> dict:
    """{"key.parameter name": tensor} of the whole state, the live tensors: what is copied into them counts.

    torch's states that are shaped like a parameter are DTensors; bitsandbytes' are this rank's plain tensors,
    without the constant code books, and with `step` as an int64 scalar, which the next step takes over.
    """
    found = {}
    for name, parameter in named.items():
        state = optimizer.state.get(parameter, {})
        for key in [key for key, value in state.items() if value is not None and "qmap" not in key]:
            if not isinstance(state[key], torch.Tensor):
                state[key] = torch.tensor(state[key])
            found[f"{key}.{name}"] = state[key]
    return found


def torch_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
    """Zero state like that which one of torch's optimisers makes at its first step: what such a step makes
    for a parameter of one element tells."""
    known = inspect.signature(type(optimizer)).parameters
    one = nn.Parameter(torch.zeros(1, dtype=parameter.dtype, device=parameter.device))
    one.grad = torch.zeros_like(one)
    probe = type(optimizer)([one], **{k: v for k, v in optimizer.defaults.items() if k in known})
    probe.step()
    return {key: torch.zeros_like(parameter, dtype=value.dtype) if value.ndim else torch.zeros_like(value)
            for key, value in probe.state[one].items()}


@torch.no_grad()
def allocate_state(optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter], keys) -> None:
    """Zero state for the names (as in `state_tensors`) found in a checkpoint, to copy values into. Raises
    UserError where they are not those of this optimiser and these parameters."""
    group = {p: group for group in optimizer.param_groups for p in group["params"]}
    stepped = {key.split(".", 1)[1] for key in keys}
    for parameter in (p for name, p in named.items() if name in stepped):
        if isinstance(optimizer, LocalOptimizer):
            optimizer.allocate(group[parameter], parameter)
        else:
            optimizer.state[parameter] = torch_state(optimizer, parameter)
    if wrong := set(keys) ^ set(state_tensors(optimizer, named)):
        raise UserError(f"the checkpoint's optimiser state does not fit this optimiser: {min(wrong)}"
                        + (f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""))


def code_book(key: str) -> torch.Tensor:
    from bitsandbytes.functional import create_dynamic_map
    return create_dynamic_map(signed=CODE_BOOKS[key])


def dequantized(key: str, pieces: list[tuple[int, torch.Tensor, torch.Tensor]], low: int, high: int):
    """fp32 rows [low, high) of an 8-bit state (`key`: state1 or state2) from ranks' pieces in their order:
    (first row, codes (rows, ...) uint8, absmax of blocks over the flat codes)."""
    parts = [pieces[0][1][:0].float()]
    for first, codes, absmax in pieces:
        if max(low, first) < min(high, first + len(codes)):
            whole = torch.ops.bitsandbytes.dequantize_blockwise(
                codes.contiguous(), absmax, code_book(key).to(codes.device), BLOCK, torch.float32)
            parts.append(whole.view(codes.shape)[max(0, low - first):high - first])
    return torch.cat(parts)


def requantized(key: str, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's fp32 rows -> (codes of the same shape, absmax), as bitsandbytes' 8-bit optimisers keep them.
    """
    if not rows.numel():
        return rows.to(torch.uint8), rows.new_zeros(0)
    codes, absmax = torch.ops.bitsandbytes.quantize_blockwise(
        rows.contiguous(), code_book(key).to(rows.device), BLOCK)
    return codes.view(rows.shape), absmax
