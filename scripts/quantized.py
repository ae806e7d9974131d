"""Modules over quantised weights: linears, embedding and head, and putting them in place of a model's own."""
from types import SimpleNamespace
from typing import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F

from scripts import experts
from scripts.flags import UserError
from scripts.models import is_plain
from scripts.quantize import Int8, product_dtype


# ---------------------------------------------------------------------------------------------------- linears

class _DequantLinear(torch.autograd.Function):
    """y = x W^T. Keeps the module, not the weight: backward dequantises again, after FSDP has gathered the
    parts again. A large weight is dequantised in pieces: rows of it forward, columns backward, so that each
    output is still one sum."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.module, ctx.dtype = module, x.dtype
        dtype = product_dtype(x)
        return module.in_pieces(lambda weight: F.linear(x.to(dtype), weight), dtype, 0)

    @staticmethod
    def backward(ctx, grad):
        return ctx.module.in_pieces(lambda weight: grad @ weight, grad.dtype, 1).to(ctx.dtype), None


class FrozenQuantLinear(nn.Linear):
    """A frozen linear whose weight is kept quantised, in uint8 parameters. An nn.Linear, so that PEFT can
    wrap it. For experts' stacked weights see scripts/experts.py."""

    def __init__(self, linear: nn.Linear, quantizer):
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.quantizer = quantizer
        for name, shape in quantizer.shapes(self.out_features, self.in_features).items():
            part = torch.empty(shape, dtype=torch.uint8, device=linear.weight.device)
            self.register_parameter(name, nn.Parameter(part, requires_grad=False))
        self.bias = linear.bias

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        return self.quantizer.dequantize(self, (self.out_features, self.in_features), dtype)

    def in_pieces(self, product: Callable, dtype: torch.dtype, dim: int) -> torch.Tensor:
        """product(weight), made of the products with the weight's rows (dim 0) or columns (1)."""
        shape, whole = (self.out_features, self.in_features), None
        for low, high, weight in self.quantizer.pieces(self, shape, dtype, dim):
            part = product(weight)
            if high - low == shape[dim]:
                return part
            whole = part.new_empty(*part.shape[:-1], shape[dim]) if whole is None else whole
            whole[..., low:high] = part
            del part, weight
        return whole

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = _DequantLinear.apply(x, self)
        return y if self.bias is None else y + self.bias.to(y.dtype)


def quantize_linears(blocks: list[nn.Module], quantizer, kept=frozenset()) -> None:
    """Puts a FrozenQuantLinear in place of every linear of the blocks that is not among the `kept` modules,
    and a QuantStack in that of experts' weights. Raises UserError, naming them, where weights cannot be
    quantised."""
    linears = {name: m for block in blocks for name, m in block.named_modules()
               if is_plain(type(m)) and m not in kept}  # type: ignore[arg-type]
    problems = {name: quantizer.problem(m.out_features, m.in_features) for name, m in linears.items()}
    problems |= experts.quantize(blocks, quantizer, kept)
    if refused := {name: why for name, why in problems.items() if why}:
        raise UserError(f"cannot quantise {', '.join(refused)}: {next(iter(refused.values()))}; a plain base "
                        f"(--train_type lora) has no such limit")
    for block in blocks:
        for parent in list(block.modules()):
            for name, child in list(parent.named_children()):
                if is_plain(type(child)) and child not in kept:  # type: ignore[arg-type]
                    setattr(parent, name, FrozenQuantLinear(child, quantizer))
    plain = {f"{name}.{n}": p for name, m in blocks[0].named_modules() if m not in kept
             for n, p in m._parameters.items() if p is not None and p.ndim > 1 and p.dtype != torch.uint8}
    if sum(p.numel() for p in plain.values()) > 0.05 * quantized_elements(blocks[0]):
        raise UserError(f"these weights of a block are no linears and would stay unquantised: "
                        f"{', '.join(plain)}; use --train_type lora")


def quantized_elements(module: nn.Module) -> int:
    return sum(m.in_features * m.out_features * getattr(m, "count", 1) for m in module.modules()
               if hasattr(m, "quantizer"))


# ----------------------------------------------------------------------------------------- embedding and head

class FrozenQuantEmbedding(nn.Embedding):
    """A frozen embedding whose weight is kept quantised; only the rows that are looked up are dequantised."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids (...) -> (..., width) in the dtype that the weight had, or was to be gathered in."""
        rows = SimpleNamespace(**{name: part[ids.flatten()] for name, part in self._parameters.items()})
        found = self.quantizer.dequantize(rows, (ids.numel(), self.in_features), self.dtype)
        return found.view(*ids.shape, self.in_features)


def quantize_ends(model: nn.Module, config, kept=frozenset()) -> dict | None:
    """Keeps embedding and head in 8 bits; tied ones stay tied. Returns the quantiser's recipe. Raises
    UserError where they cannot be quantised, or are among the `kept` modules."""
    quantizer = Int8()
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    width, tied = embedding.weight.shape[1], embedding.weight is head.weight
    if embedding in kept or head in kept:
        raise UserError("--quantize_embeddings: embedding or head is trained (--modules_to_save)")
    if reason := quantizer.problem(len(embedding.weight), width):
        raise UserError(f"--quantize_embeddings: cannot quantise them: {reason}")
    quantized = FrozenQuantLinear(head, quantizer)
    model.set_output_embeddings(quantized)
    parts = quantized if tied else \
        FrozenQuantLinear(nn.Linear(width, len(embedding.weight), device="meta"), quantizer)
    kind, dtype = type(embedding), config.numbers.param or embedding.weight.dtype
    # Some models' embeddings are of a class of their own, whose forward calls nn.Embedding's: now ours.
    embedding.__class__ = FrozenQuantEmbedding if kind is nn.Embedding else \
        type(f"Quant{kind.__name__}", (kind, FrozenQuantEmbedding), {})
    embedding.quantizer, embedding.dtype = quantizer, dtype
    embedding.out_features, embedding.in_features = parts.out_features, width
    for name in quantizer.shapes(1, width):
        setattr(embedding, name, getattr(parts, name))
    return quantizer.recipe
