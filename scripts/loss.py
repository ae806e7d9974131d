"""The loss: cross-entropy of the head's logits, computed chunk by chunk so that the logits never exist as a
whole."""
from typing import Callable

import torch
import torch.nn.functional as F

from scripts import models
from scripts.quantize import product_dtype

LOGITS_PER_CHUNK = 2**23  # elements of logits alive at a time: 32 MiB in fp32, and four of that at the peak
TOKENS = 2048  # whose hidden states go through a quantised head at a time


class KeepHere(torch.autograd.graph.saved_tensors_hooks):
    """What autograd saves stays where it is: a chunk's logits are used at once, and copying them to the host,
    as activation offload would, only makes more of them."""

    def __init__(self):
        super().__init__(lambda tensor: tensor, lambda tensor: tensor)


class ChunkedCrossEntropy(torch.autograd.Function):
    """Sum over tokens of -log softmax(head(hidden))[label], in fp32. The gradient of a chunk is taken while
    its logits are there, so that no more than a chunk of logits exists at any time (the idea of Liger's fused
    loss, in plain PyTorch)."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, transform, smoothing):
        kind, dtype = hidden.device.type, product_dtype(hidden)
        leaves = [t if t is None else t.detach().to(dtype).requires_grad_(needed)
                  for t, needed in zip((weight, bias), ctx.needs_input_grad[1:3])]
        total, grad_hidden = hidden.new_zeros((), dtype=torch.float32), torch.zeros_like(hidden)
        grads = [torch.zeros_like(t) if t is not None and t.requires_grad else None for t in leaves]
        size = max(1, LOGITS_PER_CHUNK // weight.shape[0])
        for low in range(0, len(hidden), size):
            part = hidden[low:low + size].detach().requires_grad_(ctx.needs_input_grad[0])
            with torch.enable_grad(), torch.autocast(kind, enabled=False), KeepHere():
                logits = transform(F.linear(part.to(dtype), *leaves).float())
                loss = F.cross_entropy(logits, labels[low:low + size], reduction="sum",
                                       label_smoothing=smoothing)
            total += loss.detach()
            wanted = [t for t in (part, *leaves) if t is not None and t.requires_grad]
            found = iter(torch.autograd.grad(loss, wanted) if wanted else ())
            if part.requires_grad:
                grad_hidden[low:low + size] = next(found)
            for grad in (g for g in grads if g is not None):
                grad += next(found)
        ctx.save_for_backward(grad_hidden, *(g if g is None else g.to(weight.dtype) for g in grads))
        return total

    @staticmethod
    def backward(ctx, grad):
        return *(None if g is None else g * grad.to(g.dtype) for g in ctx.saved_tensors), None, None, None


def logit_transform(config) -> Callable[[torch.Tensor], torch.Tensor]:
    """What some models do to logits: what their row says, or Gemma's soft cap, Cohere's, Granite's scales."""
    if make := models.row(config).logits:
        return make(config)
    cap = getattr(config, "final_logit_softcapping", None)
    scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)

    def transform(logits):
        logits = logits if scale == 1.0 else logits * scale
        return logits if cap is None else cap * torch.tanh(logits / cap)
    return transform


def chunked_cross_entropy(hidden, weight, bias, labels, transform, smoothing: float = 0.0) -> torch.Tensor:
    """fp32 scalar: the sum over tokens of the cross-entropy of transform(hidden W^T + bias) and labels, which
    are the part `smoothing` spread evenly over the vocabulary (Szegedy et al., arXiv:1512.00567).

    hidden (n, width), weight (vocabulary, width), bias (vocabulary,) or None, labels (n,).
    """
    return ChunkedCrossEntropy.apply(hidden, weight, bias, labels, transform, smoothing)


# -------------------------------------------------------------------------------------------- quantised heads

def logits_in_pieces(hidden, head, transform):
    """(low, high, logits (n, high - low) in fp32) of parts of the vocabulary, one after the other."""
    shape = (head.out_features, head.in_features)
    for low, high, weight in head.quantizer.pieces(head, shape, hidden.dtype, 0):
        bias = None if head.bias is None else head.bias[low:high].to(hidden.dtype)
        yield low, high, transform(F.linear(hidden, weight, bias).float())


def is_label(labels, low: int, high: int):
    """Which labels are in a piece, and where in it, (n, 1)."""
    return (labels >= low) & (labels < high), (labels - low).clamp(0, high - low - 1)[:, None]


def streamed_losses(hidden, head, labels, transform, smoothing: float):
    """(n,) fp32 losses, and the logs of the sums of exponentials."""
    normalizer = torch.full(labels.shape, -torch.inf, device=hidden.device)
    own, every = torch.zeros_like(normalizer), torch.zeros_like(normalizer)
    for low, high, logits in logits_in_pieces(hidden, head, transform):
        normalizer = torch.logaddexp(normalizer, logits.logsumexp(1))
        inside, place = is_label(labels, low, high)
        own += logits.gather(1, place)[:, 0].where(inside, 0.0)
        every += logits.sum(1)
    return normalizer - (1 - smoothing) * own - smoothing / head.out_features * every, normalizer


def streamed_gradient(hidden, head, labels, transform, smoothing: float, normalizer):
    """(n, width) fp32: the gradient of the losses' sum."""
    total, hidden = torch.zeros_like(hidden, dtype=torch.float32), hidden.requires_grad_()
    with torch.enable_grad():
        for low, high, logits in logits_in_pieces(hidden, head, transform):
            slope = (logits.detach() - normalizer[:, None]).exp_().sub_(smoothing / head.out_features)
            inside, place = is_label(labels, low, high)
            slope.scatter_add_(1, place, (smoothing - 1.0) * inside.float()[:, None])
            total += torch.autograd.grad(logits, hidden, slope)[0]
    return total


class StreamedCrossEntropy(torch.autograd.Function):
    """ChunkedCrossEntropy over a quantised, frozen head, by pieces of the vocabulary: neither logits nor head
    exist as a whole. For every TOKENS tokens a piece is dequantised twice: for the log of the sum of
    exponentials and, when that is known, for the gradient."""

    @staticmethod
    def forward(ctx, hidden, head, labels, transform, smoothing):
        kind, dtype = hidden.device.type, product_dtype(hidden)
        total, grad = hidden.new_zeros((), dtype=torch.float32), torch.empty_like(hidden)
        with torch.autocast(kind, enabled=False), KeepHere():
            for low in range(0, len(hidden), TOKENS):
                these = hidden[low:low + TOKENS].detach().to(dtype), head, labels[low:low + TOKENS], \
                    transform, smoothing
                losses, normalizer = streamed_losses(*these)
                total += losses.sum()
                if ctx.needs_input_grad[0]:
                    grad[low:low + TOKENS] = streamed_gradient(*these, normalizer)
        ctx.save_for_backward(grad)
        return total

    @staticmethod
    def backward(ctx, grad):
        (kept,) = ctx.saved_tensors
        return kept * grad.to(kept.dtype), None, None, None, None


def streamed_cross_entropy(hidden, head, labels, transform, smoothing: float = 0.0) -> torch.Tensor:
    """chunked_cross_entropy for a FrozenQuantLinear; `transform` takes each logit by itself."""
    return StreamedCrossEntropy.apply(hidden, head, labels, transform, smoothing)
