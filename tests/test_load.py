"""Loading: each rank's rows give the bits of the whole tensor, and a checkpoint that does not fit is named as
such."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import cases
import tiny
import train
from pool import RankError
from scripts.quantized import FrozenQuantLinear, quantize_linears

NF4 = dict(train_type="qlora", precision="bf16")


def copy_model(source: str, target: Path, change=None, shards: bool = False) -> str:
    """A copy of a model folder whose tensors went through `change`; `shards`: one file per tensor, with an
    index."""
    target.mkdir(exist_ok=True)
    for file in Path(source).iterdir():
        if file.suffix != ".safetensors":
            (target / file.name).write_bytes(file.read_bytes())
    tensors = load_file(Path(source) / "model.safetensors")
    tensors = {k: v.contiguous().clone() for k, v in (change(tensors) if change else tensors).items()}
    if not shards:
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        return str(target)
    where = {name: f"model-{i:05}.safetensors" for i, name in enumerate(tensors)}
    for name, file in where.items():
        save_file({name: tensors[name]}, target / file)
    (target / "model.safetensors.index.json").write_text(json.dumps(dict(metadata={}, weight_map=where)))
    return str(target)


@pytest.mark.parametrize("model", ["llama", "llama-odd", "llama-tied", "qwen2", "gemma2"])
@pytest.mark.parametrize("train_type", ["qlora", "full"])
def test_rows_of_ranks_make_the_whole_tensor(pool, models, model, train_type):
    """Worlds 2 to 4, and each rank reading everything, hold the bits of one process; row counts are not
    divisible."""
    flags = dict(train_type=train_type, precision="bf16")
    wanted = pool.run(1, "load_only", models(model), flags)[0]["digests"]
    for world in (2, 3, 4):
        for result in pool.run(world, "load_only", models(model), flags):
            assert result["digests"] == wanted
    for result in pool.run(3, "load_only", models(model), flags | dict(low_memory=False)):
        assert result["digests"] == wanted
    for result in pool.run(2, "load_only", models(model), flags | dict(loading_workers=3)):
        assert result["digests"] == wanted


@pytest.mark.parametrize(
    "train_type, n_bits", [*(("hqq_lora", n) for n in (8, 4, 3, 2)), ("hqq_dora", 3), ("hqq_llama_pro", 2)]
)
def test_hqq_shards_are_the_whole_in_every_width(pool, models, train_type, n_bits):
    """The ranks take turns in quantising whole weights: the parts are those of one process, and of hqq itself."""
    flags, folder = dict(train_type=train_type, precision="bf16", n_bits=n_bits), models("llama-odd", train_type)
    alone = pool.run(1, "load_only", folder, flags)[0]
    for world in (2, 3, 4):
        for result in pool.run(world, "load_only", folder, flags):
            assert result["digests"] == alone["digests"]
    for result in pool.run(3, "load_only", folder, flags | dict(low_memory=False)):
        assert result["digests"] == alone["digests"]
    assert sum(r["local"] for r in pool.run(3, "load_only", folder, flags)) == alone["local"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_are_those_of_linear4bit(pool, models, tmp_path, dtype):
    import bitsandbytes as bnb

    folder = copy_model(models("qwen2"), tmp_path / "m", lambda t: {k: v.to(dtype) for k, v in t.items()})
    parts = pool.run(3, "load_only", folder, NF4)[0]["parts"]
    for name, weight in load_file(Path(folder) / "model.safetensors").items():
        if "layers" not in name or weight.ndim == 1:
            continue
        layer = bnb.nn.Linear4bit(
            weight.shape[1], weight.shape[0], bias=False, quant_type="nf4", compress_statistics=True
        )
        layer.weight = bnb.nn.Params4bit(
            weight, quant_type="nf4", compress_statistics=True, requires_grad=False
        )
        layer.to("cpu")
        state, base = layer.weight.quant_state, name.removesuffix("weight") + "base_layer."
        assert torch.equal(parts[base + "weight"].flatten(), layer.weight.data.flatten())
        assert torch.equal(parts[base + "absmax"].flatten(), state.absmax.flatten())
        assert torch.equal(parts[base + "absmax2"].view(torch.float32).flatten(), state.state2.absmax)
        assert torch.equal(parts[base + "offset"].view(torch.float32).flatten(), state.offset.flatten())
        assert torch.equal(
            dequantized(parts, base, weight), bnb.functional.dequantize_4bit(layer.weight.data, state).float()
        )


def dequantized(parts: dict, base: str, weight: torch.Tensor) -> torch.Tensor:
    import train

    linear = FrozenQuantLinear(
        torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False), train.QUANTIZERS["nf4"]()
    )
    for name in linear.quantizer.shapes(*weight.shape):
        getattr(linear, name).data = parts[base + name]
    return linear.dequantize(weight.dtype).float()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_bytes_read_and_held(pool, models, world):
    """A rank reads no more than its part and one tensor, and holds its part of the packed bytes and their
    statistics."""
    total = Path(models("llama"), "model.safetensors").stat().st_size
    largest = 300 * 64 * 4
    results = pool.run(world, "load_only", models("llama"), NF4)
    assert all(r["bytes_read"] <= total / world + largest for r in results)
    assert sum(r["bytes_read"] for r in results) <= total
    alone = pool.run(1, "load_only", models("llama"), NF4)[0]["local"]
    assert sum(r["local"] for r in results) == alone


def test_many_files_and_old_rope_entries(pool, models, tmp_path):
    wanted = pool.run(1, "load_only", models("llama"), NF4)[0]["digests"]

    def add_rope(tensors):
        return tensors | {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.zeros(8) for i in (0, 1)}

    folder = copy_model(models("llama"), tmp_path / "m", add_rope, shards=True)
    assert pool.run(2, "load_only", folder, NF4)[1]["digests"] == wanted


def test_tied_embeddings_stay_tied_with_and_without_a_stored_head(pool, models, tmp_path):
    """One parameter after loading, in the root's unit, whether or not the checkpoint repeats it."""
    result = pool.run(2, "load_only", models("llama-tied"), NF4)[0]
    assert "lm_head.weight" not in result["digests"] and "model.embed_tokens.weight" in result["digests"]
    assert not any("embed_tokens" in unit for unit in result["units"])
    folder = copy_model(
        models("llama-tied"),
        tmp_path / "m",
        lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"].clone()},
    )
    assert pool.run(2, "load_only", folder, NF4)[0]["digests"] == result["digests"]


def test_units(pool, models):
    flags = NF4 | dict(wrap_policy="decoder_attention_mlp")
    assert pool.run(1, "load_only", models("llama"), flags)[0]["units"] == [
        "model.layers.0.self_attn",
        "model.layers.0.mlp",
        "model.layers.0",
        "model.layers.1.self_attn",
        "model.layers.1.mlp",
        "model.layers.1",
        "model.embed_tokens",
        "model.norm",
        "lm_head",
        "root",
    ]


def fails(pool, folder: str, flags: dict = NF4) -> str:
    with pytest.raises(RankError) as caught:
        pool.run(1, "load_only", folder, flags)
    message = str(caught.value)
    assert "UserError" in message
    return message


def test_all_misfits_are_named_in_one_error(pool, models, tmp_path):
    def spoil(tensors):
        tensors.pop("model.layers.1.mlp.up_proj.weight")
        tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"][:100]
        return tensors | {"model.layers.7.surprise": torch.zeros(1)}

    message = fails(pool, copy_model(models("llama"), tmp_path / "m", spoil))
    assert "model.layers.1.mlp.up_proj.weight: missing" in message
    assert "model.layers.0.mlp.up_proj.weight: has shape (100, 64), the model wants (128, 64)" in message
    assert "model.layers.7.surprise: not in the model" in message


def test_truncated_file_is_named(pool, models, tmp_path):
    folder = Path(copy_model(models("llama"), tmp_path / "m", shards=True))
    file = folder / "model-00004.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    assert "model-00004.safetensors: cannot be read" in fails(pool, str(folder))


def test_integer_weights_are_refused(pool, models, tmp_path):
    folder = copy_model(
        models("llama"), tmp_path / "m", lambda t: t | {"lm_head.weight": t["lm_head.weight"].to(torch.int8)}
    )
    assert "lm_head.weight: stored as int8" in fails(pool, folder)


def test_blocks_that_would_straddle_rows_are_refused_by_name(pool, models):
    message = fails(pool, models("llama-in96"))
    assert "q_proj" in message and "multiple of 64" in message


def test_weights_that_are_no_linears_are_refused_for_quantised_types():
    """Matrices of an unknown module would stay in 16 bits unnoticed; a twentieth of them, as a router, may."""
    from torch import nn

    def quantize(rows: int) -> None:
        block = nn.Sequential(nn.Linear(64, 64, device="meta"), nn.Module())
        block[1].mixed = nn.Parameter(torch.empty(rows, 64, device="meta"))
        quantize_linears([block], train.QUANTIZERS["nf4"](None))

    quantize(3)
    with pytest.raises(train.UserError, match=r"no linears and would stay unquantised: 1\.mixed"):
        quantize(4)


def test_unmatched_adapter_targets_are_refused(pool, models):
    message = fails(pool, models("llama"), NF4 | dict(lora_target_modules="q_proj,qq_proj"))
    assert "qq_proj matches nothing" in message and "o_proj" in message


def test_adapters_start_the_same_everywhere(pool, models):
    """From (seed, name): independent of world size and implementation, different between layers and seeds."""

    def start(world, **flags):
        return pool.run(world, "fit", models("llama"), dict(train_type="custom_lora") | flags, 1)[0]["start"]

    one, three, other = start(1), start(3, train_type="lora"), start(1, seed=43)
    assert all(torch.equal(three[name], tensor) for name, tensor in one.items())
    a, b = (one[f"model.layers.{i}.self_attn.q_proj.lora_A.weight"] for i in (0, 1))
    assert not torch.equal(a, b) and not torch.equal(
        a, other["model.layers.0.self_attn.q_proj.lora_A.weight"]
    )
    bound = 1 / 64**0.5  # kaiming uniform with a = sqrt(5)
    assert 0.9 * bound < a.abs().max() <= bound
    assert all(not tensor.any() for name, tensor in one.items() if "lora_B" in name)


def test_numbers_of_a_case_do_not_depend_on_the_pool(models):
    """The cases' own defaults are what the tests think they are."""
    assert cases.configuration(models("llama"), train_type="lora").precision == "fp32"
    assert tiny.samples(3) == tiny.samples(3)
