"""Quantisers and DoRA's layer against hqq's own modules, bitsandbytes' and PEFT's."""

from types import SimpleNamespace

import pytest
import torch

from scripts import quantize
from scripts.dora import DoRALinear
from scripts.quantized import FrozenQuantLinear
from train import QUANTIZERS

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def hqq_quantizer(n_bits: int, group_size: int = 64, dtype: torch.dtype = torch.float32) -> quantize.HQQ:
    return quantize.HQQ(
        SimpleNamespace(n_bits=n_bits, hqq_group_size=group_size, numbers=SimpleNamespace(compute=dtype))
    )


def quantized(weight: torch.Tensor, quantizer) -> FrozenQuantLinear:
    linear = FrozenQuantLinear(torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False), quantizer)
    parts = quantizer.quantize(weight)
    assert {name: tuple(part.shape) for name, part in parts.items()} == quantizer.shapes(*weight.shape)
    for name, part in parts.items():
        getattr(linear, name).data = part.clone()
    return linear


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("group_size", [64, 32])
@pytest.mark.parametrize("n_bits", [8, 4, 3, 2])
def test_hqq_is_hqqs_own(n_bits, group_size, dtype):
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    torch.manual_seed(0)
    plain = torch.nn.Linear(192, 60, bias=False)
    weight = plain.weight.detach().clone()
    own = HQQLinear(plain, BaseQuantizeConfig(n_bits, group_size, axis=1), compute_dtype=dtype, device="cpu")
    found = quantized(weight, hqq_quantizer(n_bits, group_size, dtype)).dequantize(dtype)
    assert found.dtype == dtype and torch.equal(found, own.dequantize())
    assert (found.float() - weight).norm() / weight.norm() < 0.9 / 2 ** (n_bits - 1)


@pytest.mark.parametrize("n_bits", [8, 4, 3, 2])
def test_hqq_in_chunks_gives_hqqs_bits(monkeypatch, n_bits):
    """Codes, scales and zeros; with blocks of zeros and of one value, and a last chunk that is shorter."""
    from hqq.core.quantize import Quantizer

    monkeypatch.setattr(quantize, "CHUNK", 64 * 100)
    torch.manual_seed(n_bits)
    weight = torch.randn(128, 192).bfloat16()
    weight[3], weight[4], weight[5, :64] = 0, 1e-5, 0.7
    packed, meta = Quantizer.quantize(
        weight, nbits=n_bits, group_size=64, axis=1, device="cpu", round_zero=n_bits == 4
    )
    codes, scale, zero = quantize.quantize_hqq(weight.view(-1, 64), n_bits)
    assert torch.equal(Quantizer.pack[meta["packing"]](codes), packed)
    assert torch.equal(scale, meta["scale"]) and torch.equal(zero, meta["zero"])


def awkward_blocks() -> torch.Tensor:
    """(rows, 64) fp32: each limit between two codes and its 40 neighbours on both sides, the edges of the bins,
    zeros, subnormals, infinities and NaN."""
    from bitsandbytes.functional import get_4bit_type

    code = get_4bit_type("nf4", device="cpu")
    limits = ((code[:-1] + code[1:]) / 2).view(torch.int32)
    near = (limits[:, None] + torch.arange(-40, 41, dtype=torch.int32)).view(torch.float32).flatten()
    values = torch.cat([near, torch.linspace(-1, 1, 65)])
    values = torch.cat([values, torch.zeros(-len(values) % 63)]).view(-1, 63)
    whole = torch.cat([values, torch.ones(len(values), 1)], 1)
    odd = torch.randn(5, 64)
    odd[0], odd[1], odd[2, 3], odd[3, 4], odd[4, 5] = 0, 1e-41, torch.nan, torch.inf, -torch.inf
    return torch.cat([whole, odd, torch.randn(5000, 64)])


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
def test_nf4_is_bitsandbytes_own_at_every_limit(dtype):
    import bitsandbytes  # noqa: F401

    weight = awkward_blocks().to(dtype)
    before = weight.clone()
    packed, absmax = quantize.NF4().quantize_rows(weight)
    own, blocks = torch.ops.bitsandbytes.quantize_4bit(weight, 64, "nf4", torch.uint8)
    assert torch.equal(packed.flatten(), own.flatten())
    torch.testing.assert_close(absmax.flatten(), blocks, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(weight, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "kernel, used", [("right", True), ("wrong", False), ("broken", False), (None, False)]
)
def test_compiled_kernel_is_used_where_it_agrees(monkeypatch, kernel, used):
    import hqq.core.quantize as own

    calls = []

    def aten(packed, scale, zero, rows, columns, group, n_bits, axis, packing):
        calls.append(packing)
        if kernel == "broken":
            raise RuntimeError("no kernel image")
        codes = own.Quantizer.unpack[packing](packed, dtype=scale.dtype)
        return ((codes - zero) * scale).view(rows, columns) + (kernel == "wrong")

    monkeypatch.setattr(own, "hqq_aten_is_available", kernel is not None)
    monkeypatch.setattr(own, "hqq_aten_dequantize", aten, raising=False)
    quantize.compiled_kernel.cache_clear()
    weight = torch.randn(8, 128)
    linear = quantized(weight, hqq_quantizer(4))
    found = linear.dequantize(torch.float32)
    quantize.compiled_kernel.cache_clear()
    monkeypatch.setattr(own, "hqq_aten_is_available", False)
    assert torch.equal(found, linear.dequantize(torch.float32))
    quantize.compiled_kernel.cache_clear()
    assert len(calls) == {"right": 2, "wrong": 1, "broken": 1, None: 0}[kernel] and used == (
        kernel == "right"
    )


def test_shapes_that_cannot_be_quantised_are_explained():
    assert "multiple of 64" in quantize.NF4().problem(8, 96) and not quantize.NF4().problem(7, 128)
    assert "--hqq_group_size 64" in hqq_quantizer(4).problem(8, 96)
    assert "multiple of 4" in hqq_quantizer(2).problem(3, 128) and not hqq_quantizer(3).problem(3, 128)
    assert set(QUANTIZERS) == {"nf4", "hqq"}


# ------------------------------------------------------------------------------------------------------- DoRA


def make_dora(linear: torch.nn.Linear, dropout: float = 0.0) -> DoRALinear:
    layer = DoRALinear(linear, rank=4, scaling=2.0, dropout=dropout).to(linear.weight.dtype)
    with torch.no_grad():
        torch.nn.init.normal_(layer.lora_A.weight)
        torch.nn.init.zeros_(layer.lora_B.weight)
        squares = layer.row_squares()
        layer.base_squares.data = squares.float().view(-1, 1).view(torch.uint8)
        layer.lora_magnitude_vector.copy_(squares.sqrt())
    return layer


def pefts_dora(layer: DoRALinear, linear: torch.nn.Linear, dropout: float = 0.0):
    from peft import LoraConfig
    from peft.tuners.lora.layer import Linear

    config = LoraConfig(r=4, lora_alpha=8, use_dora=True, lora_dropout=dropout)
    own = Linear(linear, adapter_name="default", r=4, lora_alpha=8, lora_dropout=dropout, config=config)
    with torch.no_grad():
        own.lora_A["default"].weight.copy_(layer.lora_A.weight)
        own.lora_B["default"].weight.copy_(layer.lora_B.weight)
        own.lora_magnitude_vector["default"].weight.copy_(layer.lora_magnitude_vector)
    return own


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_dora_is_pefts(bias, dropout):
    """Values and all gradients, away from the start; the same dropout mask from the same seed."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(24, 10, bias=bias).requires_grad_(False)
    layer = make_dora(linear, dropout)
    with torch.no_grad():
        layer.lora_B.weight.normal_()
        layer.lora_magnitude_vector.mul_(torch.rand(10) + 0.5)
    own, results = pefts_dora(layer, linear, dropout), []
    for module, a, b, m in [
        (layer, layer.lora_A, layer.lora_B, layer.lora_magnitude_vector),
        (own, own.lora_A["default"], own.lora_B["default"], own.lora_magnitude_vector["default"].weight),
    ]:
        torch.manual_seed(1)
        x = torch.linspace(-1, 1, 3 * 5 * 24).view(3, 5, 24).requires_grad_()
        y = module.train()(x)
        results.append([y, *torch.autograd.grad(y.square().sum(), [x, a.weight, b.weight, m])])
    for one, other in zip(*results):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dora_starts_as_the_identity(dtype):
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 32).requires_grad_(False).to(dtype)
    x = torch.randn(7, 64, dtype=dtype)
    assert torch.equal(make_dora(linear)(x), linear(x)) or dtype == torch.bfloat16
    assert torch.allclose(
        make_dora(linear)(x), linear(x), rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-2
    )


def test_a_row_of_zeros_stays_finite():
    linear = torch.nn.Linear(16, 4, bias=False).requires_grad_(False)
    linear.weight[1] = 0
    layer = make_dora(linear)
    y = layer(torch.randn(3, 16))
    y.sum().backward()
    assert y.isfinite().all() and not y[:, 1].any()
    assert all(p.grad.isfinite().all() for p in layer.parameters() if p.requires_grad)


@pytest.mark.parametrize("shape", [(96, 128), (70, 320)])
def test_a_weight_in_pieces_is_the_whole_weight(monkeypatch, shape):
    """Rows and columns, of any number; and a layer that works in pieces gives what the whole weight gives."""
    torch.manual_seed(0)
    linear = quantized(torch.randn(shape), quantize.NF4())
    whole = linear.dequantize(torch.float32)
    x, grad = torch.randn(2, 5, shape[1], requires_grad=True), torch.randn(2, 5, shape[0])
    wanted = torch.autograd.grad((x @ whole.T * grad).sum(), x)[0]
    counts = set()
    for size in (2**25, 4 * whole.numel() // 2, 1):
        monkeypatch.setattr(quantize, "PIECE_BYTES", size)
        for dim in (0, 1):
            pieces = list(linear.quantizer.pieces(linear, shape, torch.float32, dim))
            assert torch.equal(torch.cat([piece for *_, piece in pieces], dim), whole)
            counts.add(len(pieces))
        y = linear(x)
        torch.testing.assert_close(y, x @ whole.T)
        torch.testing.assert_close(torch.autograd.grad((y * grad).sum(), x)[0], wanted)
    assert {1, 2} <= counts
