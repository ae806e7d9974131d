"""Embedding and head in 8 bits: a run over them is the run over the weights that they stand for, which bitsandbytes'
own functions make; and the loss over a quantised head is plain PyTorch's."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import train
from scripts import loss, merge, quantize
from scripts.quantized import FrozenQuantLinear
from test_load import copy_model
from test_parity import assert_close

ENDS = ("embed_tokens.weight", "lm_head.weight")


def rounded(weight: torch.Tensor) -> torch.Tensor:
    from bitsandbytes.functional import create_linear_map, dequantize_blockwise, quantize_blockwise

    return dequantize_blockwise(*quantize_blockwise(weight, create_linear_map(True, 8), blocksize=64))


def rounded_copy(folder: str) -> str:
    """The model with the values that 8 bits leave of its ends."""
    target = Path(folder).with_name(Path(folder).name + "-rounded")
    if not target.exists():
        copy_model(folder, target, lambda t: {n: rounded(w) if n.endswith(ENDS) else w for n, w in t.items()})
    return str(target)


def quantized(weight: torch.Tensor, bias=None) -> FrozenQuantLinear:
    quantizer = quantize.Int8()
    head = FrozenQuantLinear(torch.nn.Linear(*weight.shape[::-1], bias=False), quantizer)
    head.bias = bias
    for name, part in quantizer.quantize(weight).items():
        getattr(head, name).data = part
    return head


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_quantiser_is_bitsandbytes(dtype):
    torch.manual_seed(0)
    weight = torch.randn(70, 192).mul_(0.02).to(dtype)
    weight[7] = 0  # rows of padding
    head = quantized(weight)
    found = head.dequantize(dtype)
    assert found.dtype == dtype and torch.equal(found, rounded(weight)) and not found[7].any()
    assert (found.float() - weight.float()).norm() / weight.float().norm() < 0.007
    shapes = head.quantizer.shapes(70, 192)
    assert {name: tuple(part.shape) for name, part in head.named_parameters()} == shapes
    assert 8 * sum(part.numel() for part in head.parameters()) == head.quantizer.bits * weight.numel()


@pytest.mark.parametrize("precision", train.PRECISIONS)
def test_rows_are_in_the_dtype_that_a_plain_embedding_gives(models, precision):
    """Under mixed precision FSDP gathers a plain embedding in its parameter dtype."""
    import bitsandbytes  # noqa: F401
    from torch.distributed.fsdp import MixedPrecisionPolicy

    config = train.Config(model_name="unused", precision=precision, quantize_embeddings=8)
    model = train.empty_model(Path(models("llama")), config.numbers.frozen)
    wanted = MixedPrecisionPolicy(param_dtype=config.numbers.param).param_dtype or config.numbers.frozen
    train.quantize_ends(model, config)
    rows = model.get_input_embeddings().to_empty(device="cpu")(torch.zeros(2, 3, dtype=torch.long))
    assert rows.dtype == wanted and rows.shape == (2, 3, model.config.hidden_size)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("transform", [lambda x: x, lambda x: 5 * torch.tanh(x / 5)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_streamed_loss_is_plain_pytorchs(monkeypatch, transform, smoothing, with_bias):
    """In pieces of the vocabulary and of the tokens that divide nothing; fp64 as the reference."""
    torch.manual_seed(0)
    hidden, labels = torch.randn(23, 64, requires_grad=True), torch.randint(0, 300, (23,))
    bias = torch.randn(300) if with_bias else None
    head = quantized(torch.randn(300, 64), bias)
    wide = hidden.detach().double().requires_grad_()
    logits = F.linear(wide, head.dequantize(torch.float64), bias if bias is None else bias.double())
    wanted = F.cross_entropy(transform(logits), labels, reduction="sum", label_smoothing=smoothing)
    wanted.backward()
    for size, tokens in ((2**25, 2048), (300 * 64, 10)):
        monkeypatch.setattr(quantize, "PIECE_BYTES", size)
        monkeypatch.setattr(loss, "TOKENS", tokens)
        hidden.grad = None
        found = loss.streamed_cross_entropy(hidden, head, labels, transform, smoothing)
        (found * 0.5).backward()
        assert found.item() == pytest.approx(wanted.item(), rel=1e-6)
        assert (hidden.grad * 2 - wide.grad).norm() <= 3e-6 * wide.grad.norm()
    with torch.no_grad():
        again = loss.streamed_cross_entropy(hidden, head, labels, transform, smoothing)
    assert again.item() == found.item()


CASES = [
    ("llama", "lora"),
    ("llama", "qlora"),
    ("llama-tied", "custom_qlora"),
    ("gemma2", "hqq_lora"),  # tied, soft cap, an embedding that scales
    ("llama", "bnb_llama_pro"),
    *(("llama", t) for t in ("custom_lora", "dora", "bnb_dora", "hqq_dora", "llama_pro", "hqq_llama_pro")),
]


@pytest.mark.parametrize("model, train_type", CASES)
def test_a_run_is_that_over_the_rounded_weights(pool, models, model, train_type):
    flags = dict(train_type=train_type, label_smoothing=0.1, optimizer="sgd", lr=0.1)
    folder = models(model, train_type)
    wanted = pool.run(1, "fit", rounded_copy(folder), flags | dict(batch_size=12), 3, 24)[0]
    for world in (1, 2, 3):
        split = flags | dict(batch_size=12 // world, quantize_embeddings=8)
        found = pool.run(world, "fit", folder, split, 3, 24)[0]
        assert found["facts"]["end_quantizer"] == dict(name="int8", block=64)
        assert_close(found, wanted)


@pytest.mark.parametrize("precision", ["bf16", "mp_bf16", "mp_fp16_autocast"])
def test_precisions(pool, models, precision):
    flags = dict(train_type="qlora", precision=precision, quantize_embeddings=8)
    alone = pool.run(1, "fit", models("llama"), flags | dict(batch_size=4))[0]
    found = pool.run(2, "fit", models("llama"), flags | dict(batch_size=2, use_cpu_offload=True))[0]
    assert_close(found, alone, precision)
    exact = pool.run(1, "fit", models("llama"), flags | dict(batch_size=4, precision="fp32"))[0]
    assert found["losses"] == pytest.approx(exact["losses"], rel=3e-3)


def test_what_is_trained_is_not_quantised(models):
    for flags in (
        dict(train_type="full"),
        dict(train_type="qlora", train_embeddings=True),
        dict(train_type="qlora", add_tokens="tokens.txt"),
    ):
        problems = train.checks.train_type(train.Config(quantize_embeddings=8, **flags))
        assert any("--quantize_embeddings" in problem for problem in problems), flags
    assert not train.checks.train_type(train.Config(quantize_embeddings=8, train_type="lora"))


def test_saved_head_is_refused(pool, models):
    flags = dict(train_type="lora", quantize_embeddings=8, modules_to_save="lm_head")
    assert "embedding or head is trained" in pool.run(1, "refused", models("llama"), flags)[0]


def test_merge_over_what_the_run_computed_with(pool, models, tmp_path):
    """--merge_base dequantized gives the ends that the run had."""
    from safetensors.torch import load_file

    output = tmp_path / "out"
    flags = dict(train_type="qlora", quantize_embeddings=8)
    pool.run(1, "logits", models("llama"), flags, [[5, 9, 200, 31]], 1, str(output))
    said = dict(quantizer=dict(name="nf4"), end_quantizer=dict(name="int8", block=64))
    (output / "run.json").write_text(json.dumps(dict(config={}, model=said)))
    merge.merge(str(output), str(tmp_path / "merged"), base=models("llama"), merge_base="dequantized")
    base, found = (load_file(Path(f, "model.safetensors")) for f in (models("llama"), tmp_path / "merged"))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(found[name], rounded(base[name])) and not torch.equal(found[name], base[name])
