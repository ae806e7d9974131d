"""The pieces of a step against their definitions: loss, optimisers on shards, clipping, who keeps which rows.
"""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import train
from scripts import loss as loss_module
from scripts.optim import OPTIMIZERS


def reference_loss(hidden, weight, bias, labels, transform, smoothing):
    logits = F.linear(hidden, weight, bias)
    return F.cross_entropy(transform(logits), labels, reduction="sum", label_smoothing=smoothing)


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(
    "config",
    [{}, dict(final_logit_softcapping=3.0), dict(logit_scale=0.25), dict(logits_scaling=4.0)],
    ids=str,
)
def test_chunked_loss_is_cross_entropy(monkeypatch, chunk, bias, smoothing, config):
    """Value and all gradients, in fp64, for every chunk size and for the models that change their logits."""
    monkeypatch.setattr(loss_module, "LOGITS_PER_CHUNK", chunk * 50)
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 16, dtype=torch.float64, requires_grad=True) for n in (10, 50))
    offset = torch.randn(50, dtype=torch.float64, requires_grad=True) if bias else None
    labels, transform = torch.randint(0, 50, (10,)), loss_module.logit_transform(SimpleNamespace(**config))
    inputs = [t for t in (hidden, weight, offset) if t is not None]
    wanted = reference_loss(hidden, weight, offset, labels, transform, smoothing)
    found = loss_module.chunked_cross_entropy(hidden, weight, offset, labels, transform, smoothing)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-6)
    for one, other in zip(torch.autograd.grad(found / 7, inputs), torch.autograd.grad(wanted / 7, inputs)):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-7)


def test_loss_without_labels_is_zero_and_attached():
    hidden, weight = torch.randn(0, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    loss = loss_module.chunked_cross_entropy(
        hidden, weight, None, torch.empty(0, dtype=torch.long), lambda x: x
    )
    loss.backward()
    assert loss.item() == 0 and not weight.grad.any()


def test_loss_is_fp32_for_bf16_input():
    hidden, weight = torch.randn(64, 32).bfloat16(), torch.randn(100, 32).bfloat16()
    labels = torch.randint(0, 100, (64,))
    loss = loss_module.chunked_cross_entropy(hidden, weight, None, labels, lambda x: x)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(
        F.cross_entropy((hidden @ weight.T).float(), labels, reduction="sum").item(), rel=1e-5
    )


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returned."""

    seen = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.seen = max(self.seen, result.numel())
        return result


def test_logits_never_exist_as_a_whole(monkeypatch):
    monkeypatch.setattr(loss_module, "LOGITS_PER_CHUNK", 8 * 1000)
    hidden, weight = torch.randn(512, 4, requires_grad=True), torch.randn(1000, 4)
    with Largest() as largest:
        loss_module.chunked_cross_entropy(
            hidden, weight, None, torch.zeros(512, dtype=torch.long), lambda x: x
        ).backward()
    assert largest.seen == 8 * 1000


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_on_shards(pool, models, name):
    flags = dict(train_type="custom_qlora", optimizer=name, lr=1.0 if name == "adadelta" else 1e-2, wd=0.1)
    (wanted,) = pool.run(1, "fit", models("llama"), flags | dict(batch_size=6))
    found = pool.run(3, "fit", models("llama"), flags | dict(batch_size=2))[0]
    assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-6)
    assert wanted["losses"][0] - wanted["losses"][-1] > 1e-4  # it does train


@pytest.mark.parametrize("limit", [0.01, 0.3, 1e9])
def test_clipping_is_global(pool, models, limit):
    """SGD at rate 1 for one step: the weights move by the clipped gradient, whose norm over all ranks is the
    limit."""
    flags = dict(
        train_type="full",
        optimizer="sgd",
        lr=1.0,
        apply_gradient_clipping=True,
        grad_norm=limit,
        batch_size=2,
    )
    result = pool.run(4, "fit", models("llama"), flags, 1)[2]
    change = math.sqrt(sum((t - result["start"][n]).square().sum().item() for n, t in result["end"].items()))
    assert change == pytest.approx(min(limit, result["norms"][0]), rel=1e-4)


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7, 8, 301])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_rows_are_cut_like_fsdp(rows, world):
    whole = torch.arange(rows)
    chunks = list(torch.chunk(whole, world)) if rows else []
    for rank in range(world):
        size = SimpleNamespace(size=lambda: world, get_local_rank=lambda: rank)
        low, high = train.local_rows(rows, {"shard": size})
        wanted = chunks[rank] if rank < len(chunks) else whole[:0]
        assert torch.equal(whole[low:high], wanted)
