"""Folders that are quantised already, and GGUF files: taken as they are or dequantised, compared with what
bitsandbytes and transformers themselves load; what cannot be read is named."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
import train
from scripts import checkpoint, checks, merge, prequantized
from scripts.quantize import NF4 as NF4Quantizer

NF4 = dict(train_type="qlora", precision="bf16")
FORMS = {
    "nf4": dict(bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
    "fp4-single": dict(bnb_4bit_quant_type="fp4"),
    "nf4-words": dict(
        bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_quant_storage=torch.bfloat16
    ),
    "nf4-skip": dict(
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        llm_int8_skip_modules=["lm_head", "v_proj"],
    ),
    "int8": dict(load_in_8bit=True, load_in_4bit=False),
}


@pytest.fixture(scope="module")
def quantised(models, tmp_path_factory):
    """(model, form) -> folder that transformers and bitsandbytes wrote."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    made = {}

    def folder(model: str, form: str) -> str:
        if (model, form) not in made:
            made[model, form] = str(tmp_path_factory.mktemp(f"{model}-{form}"))
            config = BitsAndBytesConfig(**dict(load_in_4bit=True) | FORMS[form])
            loaded = AutoModelForCausalLM.from_pretrained(
                models(model), quantization_config=config, dtype=torch.bfloat16
            )
            loaded.save_pretrained(made[model, form])
            tiny.tokenizer().save_pretrained(made[model, form])
        return made[model, form]

    return folder


def own_load(folder: str, **extra):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **extra)


def edited(source: str, target: Path, change=None, **config) -> str:
    """A copy of a folder with other tensors and other entries of config.json."""
    for file in Path(source).iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    if change:
        tensors = {k: v.contiguous() for k, v in change(load_file(target / "model.safetensors")).items()}
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    said = json.loads((target / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps(said))
    return str(target)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("model, form", [("llama-odd", "nf4"), ("llama", "fp4-single"), ("llama", "nf4-words")])
@pytest.mark.parametrize("world", [1, 3])
def test_the_bits_are_those_of_the_folder(pool, quantised, model, form, world):
    folder = quantised(model, form)
    files = load_file(Path(folder) / "model.safetensors")
    for low_memory in (True, False) if world > 1 else (True,):
        parts = pool.run(world, "load_only", folder, NF4 | dict(low_memory=low_memory))[-1]["parts"]
        names = [name.removesuffix(".absmax") for name in files if name.endswith(".weight.absmax")]
        assert len(names) == 14
        for name in names:
            stem = name.removesuffix("weight").replace("proj.", "proj.base_layer.")
            assert raw(parts[f"{stem}weight"]).equal(raw(files[name]))
            assert raw(parts[f"{stem}absmax"]).equal(raw(files[f"{name}.absmax"]))
            if "single" not in form:
                assert raw(parts[f"{stem}absmax2"]).equal(raw(files[f"{name}.nested_absmax"]))
                said = next(files[key] for key in files if key.startswith(f"{name}.quant_state"))
                offset = json.loads(bytes(said.tolist()))["nested_offset"]
                assert parts[f"{stem}offset"].view(torch.float32).item() == offset
            else:
                assert f"{stem}absmax2" not in parts


def test_modules_that_the_folder_leaves_plain_stay_plain(pool, quantised):
    folder = quantised("llama", "nf4-skip")
    files = load_file(Path(folder) / "model.safetensors")
    parts = pool.run(2, "load_only", folder, NF4)[0]["parts"]
    name = "model.layers.1.self_attn.{}_proj.base_layer.weight"
    assert parts[name.format("v")].equal(files["model.layers.1.self_attn.v_proj.weight"])
    assert parts[name.format("q")].dtype == torch.uint8
    assert any("v_proj.lora_A" in n for n in parts)


TRAINED = [("qlora", 1, "nf4"), ("custom_qlora", 2, "nf4"), ("bnb_dora", 2, "nf4"), ("qlora", 2, "fp4-single")]


@pytest.mark.parametrize("train_type, world, form", TRAINED)
def test_a_trained_adapter_loads_on_transformers_own_load(pool, quantised, tmp_path, train_type, world, form):
    """Trained on the folder, saved, and loaded by PEFT over the folder as transformers loads it."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    ids, output = [[5, 9, 33, 71, 204, 8]], str(tmp_path / "out")
    flags = dict(train_type=train_type, precision="fp32")
    ours = pool.run(world, "logits", quantised("llama", form), flags, ids, 3, output)[0]
    base = AutoModelForCausalLM.from_pretrained(quantised("llama", form), dtype=torch.float32)
    theirs = PeftModel.from_pretrained(torch.nn.Module.float(base), output).eval()
    assert type(theirs.base_model.model.model.layers[0].mlp.up_proj.base_layer).__name__ == "Linear4bit"
    for module in theirs.modules():  # computes in fp32, as this run did
        if hasattr(module, "compute_dtype"):
            module.compute_dtype = module.weight.quant_state.dtype = torch.float32
    theirs.enable_input_require_grads()  # without a backward pass to come, bitsandbytes rounds more on CPUs
    wanted = theirs(torch.tensor(ids)).logits
    with theirs.disable_adapter():
        before = theirs(torch.tensor(ids)).logits
    assert (ours - wanted).abs().max() < 2e-4 < 0.02 < (wanted - before).abs().max()


@pytest.mark.parametrize("model, form", [("llama", "nf4"), ("llama", "fp4-single"), ("llama-in96", "nf4"), ("llama", "int8")])
def test_rows_are_dequantised_as_the_libraries_do(quantised, model, form):
    """Any rows of any weight, also where blocks go across rows (96 columns)."""
    import bitsandbytes.functional as bnb

    loaded, stored = own_load(quantised(model, form)), prequantized.open_weights(Path(quantised(model, form)))
    for name, module in loaded.named_modules():
        weight = getattr(module, "weight", None)
        if weight is None:
            continue
        if form == "int8" and "proj" in name:
            wanted = bnb.int8_vectorwise_dequant(weight.data, weight.SCB).to(torch.bfloat16)
        elif "proj" in name:
            wanted = bnb.dequantize_4bit(weight.data, weight.quant_state)
        else:
            wanted = weight.data
        assert stored.shape[f"{name}.weight"] == tuple(wanted.shape)
        assert stored.tensor(f"{name}.weight").equal(wanted), name
        if wanted.ndim > 1:
            assert stored.rows(f"{name}.weight", 7, 19).equal(wanted[7:19])
    assert set(stored.file) == set(stored.shape) == {n for n, _ in loaded.named_parameters()}


@pytest.mark.parametrize("train_type", ["full", "lora", "custom_lora", "hqq_lora", "dora", "hqq_dora"])
def test_other_train_types_dequantise(pool, quantised, models, tmp_path, train_type):
    """They train just as on a plain folder with the dequantised weights, and say so."""
    folder = quantised("llama", "nf4")
    stored = prequantized.open_weights(Path(folder))
    tensors = {name: stored.tensor(name) for name in stored.file}
    plain = edited(models("llama"), tmp_path, lambda _: tensors)
    flags = dict(train_type=train_type)
    got = pool.run(2, "fit", folder, flags, 2)[0]
    wanted = pool.run(2, "fit", plain, flags, 2)[0]
    assert got["losses"] == wanted["losses"] and got["norms"] == wanted["norms"]
    assert "14 bitsandbytes 4-bit weights are dequantised" in got["facts"]["notes"][0]
    assert wanted["facts"]["notes"] == []


def fp8(tensors: dict, block: tuple[int, int], name: str = "weight_scale_inv") -> dict:
    """Linears of the blocks in FP8, a scale for each block; the last ones may be smaller."""
    made = {}
    for key, value in tensors.items():
        if "proj" not in key:
            made[key] = value.bfloat16()
            continue
        grid = [math.ceil(size / part) for size, part in zip(value.shape, block)]
        scales, packed = torch.empty(grid), torch.empty(value.shape, dtype=torch.float8_e4m3fn)
        for i in range(grid[0]):
            for j in range(grid[1]):
                at = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
                scales[i, j] = value[at].abs().max() / 448
                packed[at] = (value[at] / scales[i, j]).to(torch.float8_e4m3fn)
        made[key], made[f"{key.removesuffix('weight')}{name}"] = packed, scales
    return made


def test_fp8_is_read_as_transformers_dequantises_it(models, tmp_path):
    from transformers import FineGrainedFP8Config

    said = dict(quant_method="fp8", weight_block_size=[32, 32], activation_scheme="dynamic")
    folder = edited(models("llama"), tmp_path, lambda t: fp8(t, (32, 32)), quantization_config=said, dtype="bfloat16")
    loaded = own_load(folder, quantization_config=FineGrainedFP8Config(dequantize=True, weight_block_size=(32, 32)))
    stored = prequantized.open_weights(tmp_path)
    for name, parameter in loaded.named_parameters():
        assert stored.tensor(name).equal(parameter.data), name
    assert stored.rows("model.layers.0.mlp.up_proj.weight", 30, 70).equal(
        loaded.model.layers[0].mlp.up_proj.weight.data[30:70]
    )


@pytest.mark.parametrize("block, name", [((48, 40), "weight_scale_inv"), ((1, 10**6), "weight_scale"), ((10**6, 10**6), "weight_scale")])
def test_fp8_with_smaller_last_blocks_with_scales_of_rows_and_one_for_all(models, tmp_path, block, name):
    method = "fp8" if "inv" in name else "compressed-tensors"
    said = dict(quant_method=method, format="float-quantized")
    said |= dict(weight_block_size=list(block)) if "inv" in name else {}
    edited(models("llama"), tmp_path, lambda t: fp8(t, block, name), quantization_config=said, dtype="bfloat16")
    files, stored = load_file(tmp_path / "model.safetensors"), prequantized.open_weights(tmp_path)
    key = "model.layers.0.mlp.down_proj.weight"
    packed, scales = files[key].float(), files[f"{key.removesuffix('weight')}{name}"]
    rows, columns = (torch.arange(size) // part for size, part in zip(packed.shape, block))
    wanted = (packed * scales[rows][:, columns]).bfloat16()
    assert stored.rows(key, 0, 64).equal(wanted) and stored.rows(key, 45, 51).equal(wanted[45:51])
    plain = load_file(Path(models("llama")) / "model.safetensors")[key]
    assert (wanted - plain).abs().max() < 0.08 * plain.abs().max()


def test_fp8_trains(pool, models, tmp_path):
    """A 4-bit train type quantises what it reads: as over a plain folder of the same weights."""
    said = dict(quant_method="fp8", weight_block_size=[32, 32], activation_scheme="dynamic")
    one, other = tmp_path / "fp8", tmp_path / "plain"
    one.mkdir(), other.mkdir()
    edited(models("llama"), one, lambda t: fp8(t, (32, 32)), quantization_config=said, dtype="bfloat16")
    stored = prequantized.open_weights(one)
    edited(models("llama"), other, lambda _: {name: stored.tensor(name) for name in stored.file})
    got = pool.run(2, "fit", str(one), dict(train_type="qlora"), 2)[0]
    wanted = pool.run(2, "fit", str(other), dict(train_type="qlora"), 2)[0]
    assert got["losses"] == wanted["losses"] and "FP8" in got["facts"]["notes"][0]


def test_mxfp4_experts(tmp_path):
    """By hand: values of E2M1, low half of a byte first, times 2^(exponent - 127), columns before rows."""
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (3, 6, 2, 16), dtype=torch.uint8)
    scales = torch.randint(120, 130, (3, 6, 2), dtype=torch.uint8)
    save_file({"x.proj_blocks": blocks, "x.proj_scales": scales, "n.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(dict(quantization_config=dict(quant_method="mxfp4"))))
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    halves = torch.stack([blocks & 15, blocks >> 4], -1).view(3, 6, 2, 32)
    wide = values[(halves & 7).long()] * torch.where(halves > 7, -1.0, 1.0) * (scales.float() - 127).exp2()[..., None]
    wanted = wide.view(3, 6, 64).transpose(1, 2).bfloat16()
    stored = prequantized.open_weights(tmp_path)
    assert stored.shape == {"x.proj": (3, 64, 6), "n.weight": (4,)} and not stored.problems
    assert stored.tensor("x.proj").equal(wanted) and stored.rows("x.proj", 1, 2).equal(wanted[1:2])


@pytest.mark.parametrize(
    "said, named",
    [
        (dict(quant_method="gptq", bits=4), "(gptq)"),
        (dict(quant_method="awq"), "(awq)"),
        (dict(quant_method="compressed-tensors", format="pack-quantized"), "compressed-tensors pack-quantized"),
        (dict(bits=4), "(unknown method)"),
    ],
)
def test_what_is_not_read_is_refused_by_name_before_anything(models, tmp_path, said, named):
    folder = edited(models("llama"), tmp_path, quantization_config=said)
    problems = checks.surroundings(train.Config(model_name=str(folder), output_dir=str(tmp_path / "out")))
    assert len(problems) == 1 and named in problems[0] and "use the model they were made from" in problems[0]


def test_damaged_folders_are_named(quantised, tmp_path):
    one, other, third = (tmp_path / name for name in "abc")
    [folder.mkdir() for folder in (one, other, third)]
    source, key = quantised("llama", "nf4"), "model.layers.0.mlp.up_proj.weight"
    edited(source, one, lambda t: {k: v for k, v in t.items() if k != f"{key}.absmax"})
    with pytest.raises(train.UserError, match="absmax missing"):
        prequantized.open_weights(one).match([])
    edited(source, other, lambda t: t | {key: t[key][:-1]})
    with pytest.raises(train.UserError, match="does not hold"):
        prequantized.open_weights(other).match([])
    table = f"{key}.nested_quant_map"
    edited(source, third, lambda t: t | {table: t[table] * 2})
    with pytest.raises(train.UserError, match="not of one kind that bitsandbytes writes"):
        prequantized.open_weights(third).quantizer(NF4Quantizer, None)


@pytest.mark.parametrize("merge_base", ["original", "dequantized"])
def test_merging_into_a_quantised_folder(pool, quantised, tmp_path, merge_base):
    """A plain folder: the folder's own weights, dequantised, with the adapter on them; not quantised twice."""
    folder, output, merged = quantised("llama", "nf4"), str(tmp_path / "out"), tmp_path / "merged"
    flags = dict(train_type="qlora")
    facts = pool.run(1, "fit", folder, flags, 1)[0]["facts"]
    pool.run(1, "logits", folder, flags, [[5, 9]], 2, output)
    run = dict(config={}, model=facts | dict(fingerprint=checkpoint.fingerprint(Path(folder))))
    (Path(output) / "run.json").write_text(json.dumps(run))
    merge.merge(output, str(merged), merge_base=merge_base)
    assert "quantization_config" not in json.loads((merged / "config.json").read_text())
    loaded, adapter = own_load(folder), load_file(Path(output) / "adapter_model.safetensors")
    import bitsandbytes.functional as bnb

    weight = loaded.model.layers[0].mlp.up_proj.weight
    wanted = bnb.dequantize_4bit(weight.data, weight.quant_state).float()
    stem = "base_model.model.model.layers.0.mlp.up_proj"
    wanted += 2 * adapter[f"{stem}.lora_B.weight"].float() @ adapter[f"{stem}.lora_A.weight"].float()
    found = load_file(merged / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    assert found.dtype == torch.bfloat16 and torch.allclose(found.float(), wanted, rtol=2**-8, atol=1e-6)


# ----------------------------------------------------------------------------------------------- GGUF


def write_gguf(path: Path, model) -> None:
    """A llama model as GGUF, fp32, with q and k in llama.cpp's order of rows, and the tiny tokenizer."""
    import gguf
    import numpy as np

    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    inner = json.loads(tiny.tokenizer().backend_tokenizer.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(sorted(inner["vocab"], key=inner["vocab"].get))
    writer.add_token_types([3, 3] + [1] * (len(inner["vocab"]) - 2))
    writer.add_token_merges([" ".join(pair) for pair in inner["merges"]])
    writer.add_bos_token_id(0), writer.add_eos_token_id(1), writer.add_pad_token_id(1)
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
             "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
             "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    for name, tensor in model.state_dict().items():
        name = name.removesuffix(".weight")
        if name.startswith("model.layers."):
            _, _, number, rest = name.split(".", 3)
            heads = dict(attn_q=config.num_attention_heads, attn_k=config.num_key_value_heads).get(names[rest])
            if heads:
                tensor = tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
            name = f"blk.{number}.{names[rest]}"
        else:
            name = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}[name]
        writer.add_tensor(f"{name}.weight", np.ascontiguousarray(tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf(tmp_path, monkeypatch, capsys):
    """Converted once into the cache: the model's weights in bf16, with its tokenizer; then found there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file, model = tmp_path / "small.gguf", tiny.model("llama")
    write_gguf(file, model)
    assert checkpoint.check_folder(str(file)) == [] and not checkpoint.is_ready(str(file))
    folder = checkpoint.find_folder(str(file))
    assert str(folder) in capsys.readouterr().out and folder.is_relative_to(tmp_path / "cache")
    found = load_file(folder / "model.safetensors")
    assert set(found) == set(model.state_dict())
    assert all(found[name].equal(tensor.bfloat16()) for name, tensor in model.state_dict().items())
    made = train.vocabulary.tokenizer(folder)
    assert made("Two plus two is four.")["input_ids"] == tiny.tokenizer()("Two plus two is four.")["input_ids"]
    assert checkpoint.find_folder(str(file)) == folder and not capsys.readouterr().out
    assert len(list(folder.parent.iterdir())) == 1


@pytest.mark.parametrize("content, text", [(b"nothing of it", "begin with GGUF"), (b"GGUF" + bytes(60), "cannot be converted")])
def test_broken_gguf_is_one_message(tmp_path, monkeypatch, content, text):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "small.gguf"
    file.write_bytes(content)
    code = train.main(["--model_name", str(file), "--output_dir", str(tmp_path / "out")])
    assert code == 2
    assert checkpoint.check_folder(str(tmp_path / "no.gguf")) == [f"--model_name {tmp_path / 'no.gguf'}: no such file"]
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    problems = checkpoint.check_folder(str(file))
    if not problems:
        with pytest.raises(train.UserError) as refused:
            checkpoint.find_folder(str(file))
        problems = [str(refused.value)]
    assert text in problems[0] and problems[0].count("\n") == 0
