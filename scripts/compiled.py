"""torch.compile, block by block: --compile.

What is compiled is a block's own forward. FSDP's hooks, recomputation and offload of activations stand around
it, as without. A quantised linear is one opaque operator, forward and backward each: else every one would
break the graph (its tables cannot be traced), and the compiler could merge the dequantisations of forward and
backward, that is, keep 16-bit weights in between.
"""
import functools
import importlib.util
import shutil
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn as nn

from scripts import experts, models
from scripts.flags import UserError
from scripts.quantize import product_dtype

VARIANTS = 32  # of one piece of code: train or evaluate, input with or without gradient, kinds of blocks
LINEARS: dict[str, Any] = {}  # a quantiser and a shape, by name -> what stands for a linear that has them


@functools.cache
def operator():
    """qshard::frozen_linear(x, parts, name, dtype): x W^T, W being dequantised to `dtype` from its parts. x
    (..., in), a key of LINEARS, and the linear's parts in the order of its `names`; gives (..., out)."""
    def linear(parts: list[torch.Tensor], name: str):
        module = LINEARS[name]
        made = SimpleNamespace(**module.__dict__ | dict(zip(module.names, parts)))
        return functools.partial(module.in_pieces, made)

    @torch.library.custom_op("qshard::frozen_linear", mutates_args=())
    def forward(x: torch.Tensor, parts: list[torch.Tensor], name: str,
                dtype: torch.dtype) -> torch.Tensor:
        return linear(parts, name)(lambda weight: nn.functional.linear(x.to(dtype), weight), dtype, 0)

    @torch.library.custom_op("qshard::frozen_linear_backward", mutates_args=())
    def backward(grad: torch.Tensor, parts: list[torch.Tensor], name: str,
                 dtype: torch.dtype) -> torch.Tensor:
        return linear(parts, name)(lambda weight: grad @ weight, grad.dtype, 1).to(dtype)

    @forward.register_fake
    def _(x, parts, name, dtype):
        return x.new_empty(*x.shape[:-1], LINEARS[name].out_features, dtype=dtype)

    @backward.register_fake
    def _(grad, parts, name, dtype):
        return grad.new_empty(*grad.shape[:-1], LINEARS[name].in_features, dtype=dtype)

    def keep(ctx, inputs, output):
        x, parts, ctx.name, _ = inputs
        ctx.dtype = x.dtype
        ctx.save_for_backward(*parts)

    def gradient(ctx, grad):
        parts = list(ctx.saved_tensors)
        return backward(grad.contiguous(), parts, ctx.name, ctx.dtype), [None] * len(parts), None, None
    forward.register_autograd(gradient, setup_context=keep)
    return forward


def as_operator(module) -> None:
    """Makes a quantised linear's forward one operator."""
    call, names = operator(), list(module.quantizer.shapes(module.out_features, module.in_features))
    name = f"{module.quantizer.recipe} {module.out_features} {module.in_features}"
    LINEARS[name] = SimpleNamespace(
        quantizer=module.quantizer, out_features=module.out_features, in_features=module.in_features,
        names=names, in_pieces=type(module).in_pieces)

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = call(x, [getattr(module, part) for part in names], name, product_dtype(x))
        return y if module.bias is None else y + module.bias.to(y.dtype)
    module.forward = forward


def compile_blocks(blocks: nn.ModuleList, config, backend: str = "inductor") -> None:
    """Compiles `forward` in place, before recomputation and FSDP wrap it; so parameter names stay. Batches
    differ in length, so lengths are symbols from the start; under --packing they hardly do: the first one
    is compiled for itself, and any length with the second. Random numbers are eager's."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, VARIANTS)
    options = dict(fallback_random=True) if backend == "inductor" else None
    if experts.find(blocks):
        raise UserError("--compile true: only the host knows which rows go to which expert, which no graph "
                        "can hold; leave it out for mixtures of experts")
    inner = [part for block in blocks for part in models.parts(block)]  # the smallest FSDP units: no hook
    chosen = list(blocks) if config.wrap_policy == "decoder" else inner  # runs inside them
    for module in (m for unit in chosen for m in unit.modules() if hasattr(m, "quantizer")):
        as_operator(module)
    for unit in chosen:
        unit.forward = explained(torch.compile(
            unit.forward, backend=backend, dynamic=None if config.packing else True, options=options))


def explained(forward):
    """`forward`, with a failure of the compiler as a UserError."""
    from torch._dynamo.exc import BackendCompilerFailed

    @functools.wraps(forward)
    def call(*args, **kwargs):
        try:
            return forward(*args, **kwargs)
        except BackendCompilerFailed as error:
            lines = [line.strip() for line in str(error.inner_exception).splitlines() if line.strip()]
            reason = lines[0] if lines else type(error.inner_exception).__name__
            raise UserError(f"--compile true: torch.compile failed here ({reason}); leave it out") from error
    return call


def problems(accelerators: int) -> list[str]:
    """What torch.compile lacks on this machine: triton where there are accelerators, and a C++ compiler."""
    from torch._inductor import config
    if accelerators and importlib.util.find_spec("triton") is None:
        return ["--compile true needs the package triton: pip install triton, or leave --compile out"]
    if not any(shutil.which(name) for name in config.cpp.cxx if name):
        return ["--compile true needs a C++ compiler, but g++ is not found; leave --compile out"]
    return []
