"""Merging: the merged folder, loaded by transformers alone, is the base with its adapter. And the streaming
writer that it uses."""

import json
import shutil
import subprocess
import sys
import weakref
from pathlib import Path

import numpy
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import tiny
import train
from scripts import block_expansion, checkpoint, merge
from scripts.checkpoint import Entry
from scripts.flags import UserError

SCRIPT = Path(train.__file__).parent / "scripts" / "merge.py"
IDS = torch.arange(2, 50).view(2, 24)
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RECIPES = {
    "nf4": dict(name="nf4", block=64, double_quantized=True),
    "hqq": dict(name="hqq", n_bits=4, group_size=64, axis=1, dtype="float32"),
}


def model(folder: str | Path, **kwargs):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **dict(dtype="auto") | kwargs).eval()


def logits(found) -> torch.Tensor:
    found = model(found) if isinstance(found, (str, Path)) else found
    with torch.no_grad():
        return found(input_ids=IDS).logits.float()


def make_adapter(base: str, folder: Path, targets=SEVEN, **options):
    """A PEFT folder with random A, B, magnitudes and modules_to_save. Returns PEFT's model."""
    from peft import LoraConfig, get_peft_model

    settings = dict(r=8, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM") | options
    torch.manual_seed(3)
    peft = get_peft_model(model(base), LoraConfig(**settings))
    for name, parameter in peft.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
        elif "magnitude" in name:
            parameter.data *= 1 + 0.1 * torch.randn_like(parameter)
        elif "modules_to_save" in name:
            parameter.data += 0.05 * torch.randn_like(parameter)
    peft.save_pretrained(folder, save_embedding_layers=False)
    return peft.eval()


def write_run(folder: Path, base: str | Path, quantizer=None, **config) -> None:
    """run.json as far as merging reads it."""
    said = dict(folder=str(base), fingerprint=checkpoint.fingerprint(Path(base)), quantizer=quantizer)
    settings = dict(lora_rank=8, lora_alpha=16) | config
    (folder / "run.json").write_text(json.dumps(dict(config=settings, model=said)))


@pytest.fixture
def lora(models, tmp_path) -> Path:
    make_adapter(models("llama"), tmp_path / "lora")
    write_run(tmp_path / "lora", models("llama"), RECIPES["nf4"])
    return tmp_path / "lora"


def edit(file: Path, **changes) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


# --------------------------------------------------------------------------------------------- merged weights


@pytest.mark.parametrize(
    "options", [{}, dict(use_rslora=True), dict(use_dora=True)], ids=["lora", "rslora", "dora"]
)
@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2", "gemma2"])
def test_merged_is_the_base_with_its_adapter(models, tmp_path, name, options):
    """Weights as PEFT's own merge gives them, logits as PEFT's model does."""
    peft = make_adapter(models(name), tmp_path / "adapter", **options)
    with_adapter = logits(peft)
    facts = merge.merge(str(tmp_path / "adapter"), str(tmp_path / "out"))
    assert torch.allclose(logits(tmp_path / "out"), with_adapter, atol=1e-5)
    assert (with_adapter - logits(models(name))).abs().max() > 0.1
    theirs, ours = peft.merge_and_unload().state_dict(), load_file(tmp_path / "out" / "model.safetensors")
    assert set(ours) == set(load_file(Path(models(name)) / "model.safetensors"))
    assert all(torch.allclose(ours[n], theirs[n], atol=1e-6) for n in ours)
    assert facts["scaling"] == (16 / 8**0.5 if options.get("use_rslora") else 2.0)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize(
    "modules",
    [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head", "norm"], ["layers.0.mlp", "k_proj"]],
    ids=str,
)
@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_modules_trained_in_full(models, tmp_path, name, modules, tie):
    """Tied weights stay tied where the adapter has them so; where it has not, the merged model has both, and
    says so, as PEFT's has."""
    if tie and name == "llama":
        return
    peft = make_adapter(models(name), tmp_path / "adapter", modules_to_save=modules, ensure_weight_tying=tie)
    with_adapter = logits(peft)
    facts = merge.merge(str(tmp_path / "adapter"), str(tmp_path / "out"))
    unloaded, merged = peft.merge_and_unload(), model(tmp_path / "out")
    assert torch.allclose(logits(merged), with_adapter, atol=2e-5)
    assert torch.allclose(logits(merged), logits(unloaded), atol=2e-5)
    assert merged.config.tie_word_embeddings == unloaded.config.tie_word_embeddings
    theirs, ours = unloaded.state_dict(), load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.allclose(ours[n], theirs[n], atol=1e-6) for n in ours)
    embeddings = set(modules) & {"embed_tokens", "lm_head"}
    apart = name == "llama" or bool(embeddings) and not tie
    assert ("lm_head.weight" in ours) == apart
    assert (len(facts["modules_to_save"]) >= len(modules)) and not facts["modules_to_save"] == []


def test_modules_that_do_not_fit_are_refused(models, tmp_path):
    lora = tmp_path / "adapter"
    make_adapter(models("llama"), lora, modules_to_save=["lm_head", "norm"])
    shutil.copy(lora / "adapter_model.safetensors", tmp_path / "kept")
    start = "base_model.model."
    for change, text in [
        (lambda s: s.pop(f"{start}lm_head.weight"), "lm_head: of modules_to_save, but without tensors"),
        (lambda s: s.pop(f"{start}model.norm.weight"), "model.norm.weight: of modules_to_save, but missing"),
        (lambda s: s.update({f"{start}lm_head.weight": torch.ones(3, 64)}), r"\(3, 64\), .*\(300, 64\)"),
        (lambda s: s.update({f"{start}model.embed_tokens.weight": torch.ones(2)}), "nor of its modules"),
    ]:
        shutil.copy(tmp_path / "kept", lora / "adapter_model.safetensors")
        change_tensors(lora, change)
        refused(text, lora, tmp_path / "out")


def test_folder(lora, models, tmp_path):
    """A complete model folder, and where it came from; config.json and tokenizer are the base's."""
    base = Path(models("llama"))
    (lora / "chat_template.jinja").write_text("{{ messages }}")
    merge.merge(str(lora), str(tmp_path / "out"))
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert names == {p.name for p in base.iterdir()} | {"merge.json"}
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (base / name).read_bytes()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == json.loads((base / "config.json").read_text())
    assert json.loads((tmp_path / "out" / "merge.json").read_text()) == dict(
        adapter=str(lora), base=str(base), base_fingerprint=checkpoint.fingerprint(base),
        merge_base="original", quantizer=None, dtype="keep", kind="lora", r=8, lora_alpha=16, stacks=0,
        use_rslora=False, scaling=2.0,
        targets=sorted(SEVEN), linears=14, modules_to_save=[],
    )  # fmt: skip


def test_the_adapters_tokenizer_comes_first(lora, models, tmp_path):
    """A folder of train.py has the tokenizer of the run."""
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(lora)
    merge.merge(str(lora), str(tmp_path / "out"))
    for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (lora / name).read_bytes()
    assert (tmp_path / "out" / "generation_config.json").is_file()


@pytest.mark.parametrize("flag, dtype", [("keep", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")])
def test_dtypes(models, tmp_path, flag, dtype):
    """Computed in fp32 and rounded once, to the base's dtype or another."""
    half = tmp_path / "half"
    model(models("llama")).bfloat16().save_pretrained(half)
    make_adapter(str(half), tmp_path / "adapter", ["q_proj", "down_proj"])
    merge.merge(str(tmp_path / "adapter"), str(tmp_path / "out"), dtype=flag)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype
    merged, base = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", half))
    assert all(tensor.dtype == getattr(torch, dtype) for tensor in merged.values())
    trained = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    module = "model.layers.1.mlp.down_proj"
    a, b = (trained[f"base_model.model.{module}.lora_{kind}.weight"].float() for kind in "AB")
    wanted = (
        (base[f"{module}.weight"].double() + 2 * b.double() @ a.double()).float().to(getattr(torch, dtype))
    )
    found = merged[f"{module}.weight"]
    if dtype == "float32":
        assert torch.allclose(found, wanted, atol=1e-6)
    else:  # an error in fp32's last digit seldom crosses a rounding boundary
        assert (found != wanted).float().mean() < 1e-3
    assert torch.equal(merged["lm_head.weight"], base["lm_head.weight"].to(getattr(torch, dtype)))


def test_beyond_fp16(models, tmp_path):
    large = tmp_path / "large"
    shutil.copytree(models("llama"), large)
    state = load_file(large / "model.safetensors")
    state["model.norm.weight"][5] = 1e5
    save_file(state, large / "model.safetensors")
    make_adapter(str(large), tmp_path / "adapter")
    with pytest.raises(UserError, match="model.norm.weight: has values that are not finite .* float16"):
        merge.merge(str(tmp_path / "adapter"), str(tmp_path / "out"), dtype="fp16")
    assert not (tmp_path / "out").exists()


def test_a_base_in_several_files(models, tmp_path):
    base = tmp_path / "base"
    model(models("llama")).save_pretrained(base, max_shard_size="100KB")
    peft = make_adapter(str(base), tmp_path / "adapter", use_dora=True)
    merge.merge(str(tmp_path / "adapter"), str(tmp_path / "out"))
    assert checkpoint.weight_files(tmp_path / "out") == checkpoint.weight_files(base)
    assert len(checkpoint.weight_files(base)) > 2
    assert torch.allclose(logits(tmp_path / "out"), logits(peft), atol=1e-5)


def test_one_base_tensor_at_a_time(lora, tmp_path, monkeypatch):
    """When a base tensor is read, the one before is gone, and of the adapter one linear's tensors at most."""
    alive, most, read = set(), dict(base=0, adapter=0), checkpoint.Checkpoint.tensor

    def watched(self, name):
        tensor = read(self, name)
        alive.add(name)
        weakref.finalize(tensor, alive.discard, name)
        adapter = sum(name.startswith("base_model") for name in alive)
        most.update(base=max(most["base"], len(alive) - adapter), adapter=max(most["adapter"], adapter))
        return tensor

    monkeypatch.setattr(checkpoint.Checkpoint, "tensor", watched)
    merge.merge(str(lora), str(tmp_path / "out"))
    assert most == dict(base=1, adapter=2)


# -------------------------------------------------------------------------------------------- quantised bases


@pytest.mark.parametrize("options", [{}, dict(use_dora=True)], ids=["lora", "dora"])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_dequantized_is_the_model_that_was_trained(models, tmp_path, name, options):
    """transformers' and bitsandbytes' 4-bit base with PEFT's adapter. In train mode: in eval bitsandbytes
    repacks its weights to bf16 on a CPU."""
    from peft import PeftModel
    from transformers import BitsAndBytesConfig

    make_adapter(models(name), tmp_path / "adapter", **options)
    write_run(tmp_path / "adapter", models(name), RECIPES["nf4"])
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    base = model(models(name), dtype=torch.float32, quantization_config=nf4)
    wanted = logits(PeftModel.from_pretrained(base, tmp_path / "adapter").train())
    facts = merge.merge(str(tmp_path / "adapter"), str(tmp_path / "out"), merge_base="dequantized")
    assert facts["quantizer"] == RECIPES["nf4"]
    assert torch.allclose(logits(tmp_path / "out"), wanted, atol=2e-5)
    merge.merge(str(tmp_path / "adapter"), str(tmp_path / "original"))
    assert (logits(tmp_path / "original") - wanted).abs().max() > 0.01


@pytest.mark.parametrize("kind", RECIPES)
def test_only_quantised_linears_change(models, tmp_path, kind):
    """With a run's quantiser: every linear of the blocks is rounded, adapted or not; embeddings, norms and
    biases are not."""
    make_adapter(models("qwen2"), tmp_path / "adapter", ["q_proj"])
    write_run(tmp_path / "adapter", models("qwen2"), RECIPES[kind])
    merge.merge(str(tmp_path / "adapter"), str(tmp_path / "out"), merge_base="dequantized")
    base, merged = (load_file(Path(f) / "model.safetensors") for f in (models("qwen2"), tmp_path / "out"))
    changed = {name for name in base if not torch.equal(base[name], merged[name])}
    assert changed == {n for n in base if n.endswith("proj.weight")}
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(merged[name], merge.dequantized(base[name], RECIPES[kind]))
    assert 0.01 < (merged[name] - base[name]).norm() / base[name].norm() < 0.15


def test_the_runs_own_quantisers_agree():
    """`dequantized` is what the training path computes with."""
    from types import SimpleNamespace

    quantize = pytest.importorskip("scripts.quantize")
    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(1))
    settings = SimpleNamespace(n_bits=4, hqq_group_size=64, numbers=SimpleNamespace(compute=torch.float32))
    for kind, recipe in RECIPES.items():
        quantizer = quantize.QUANTIZERS[kind](settings)
        parts = SimpleNamespace(**quantizer.quantize(weight))
        assert quantizer.recipe.items() >= recipe.items()
        assert torch.equal(
            quantizer.dequantize(parts, weight.shape, torch.float32), merge.dequantized(weight, recipe)
        )


# ------------------------------------------------------------------------------------------- Llama-Pro blocks


@pytest.fixture
def llama_pro(models, tmp_path) -> Path:
    """A result of a llama_pro run over an expanded model in bf16: its new block, in fp32, trained."""
    model(models("llama")).bfloat16().save_pretrained(tmp_path / "base")
    (new,) = block_expansion.expand(str(tmp_path / "base"), str(tmp_path / "expanded"), 0.5)
    state = load_file(tmp_path / "expanded" / "model.safetensors")
    prefix = f"model.layers.{new}."
    torch.manual_seed(4)
    trained = {k: v.float() + 0.1 * torch.randn(v.shape) for k, v in state.items() if k.startswith(prefix)}
    (tmp_path / "result").mkdir()
    save_file(trained, tmp_path / "result" / "blocks.safetensors")
    write_run(tmp_path / "result", tmp_path / "expanded", RECIPES["nf4"])
    return tmp_path / "result"


@pytest.mark.parametrize("merge_base", merge.MERGE_BASES)
def test_blocks_take_their_place(llama_pro, tmp_path, merge_base):
    facts = merge.merge(str(llama_pro), str(tmp_path / "out"), merge_base=merge_base)
    assert (facts["kind"], facts["blocks"], facts["base"]) == ("llama_pro", [2], str(tmp_path / "expanded"))
    trained = load_file(llama_pro / "blocks.safetensors")
    base, merged = (load_file(tmp_path / f / "model.safetensors") for f in ("expanded", "out"))
    assert set(base) == set(merged)
    for name, tensor in merged.items():
        rounded = merge_base == "dequantized" and "proj" in name and name not in trained
        assert torch.equal(tensor, trained.get(name, base[name]).bfloat16()) != rounded, name
    model(tmp_path / "out")
    assert not (tmp_path / "out" / "llama_pro.json").exists()


def test_blocks_of_another_model(llama_pro, models, tmp_path):
    trained = load_file(llama_pro / "blocks.safetensors")
    gone = trained.pop("model.layers.2.mlp.up_proj.weight")
    save_file(trained | {"model.layers.0.mlp.up_proj.weight": gone}, llama_pro / "blocks.safetensors")
    with pytest.raises(UserError) as error:
        merge.merge(str(llama_pro), str(tmp_path / "out"))
    assert "model.layers.2.mlp.up_proj.weight: missing" in str(error.value)
    assert "model.layers.0.mlp.up_proj.weight: not in the base's new blocks [2]" in str(error.value)
    (llama_pro / "run.json").unlink()
    with pytest.raises(UserError, match="run.json does not name the base"):
        merge.merge(str(llama_pro), str(tmp_path / "out"))
    with pytest.raises(UserError, match="no expanded model"):
        merge.merge(str(llama_pro), str(tmp_path / "out"), base=models("llama"))


# --------------------------------------------------------------------------------------------------- refusals


def refused(text: str, *args, **kwargs) -> None:
    out = Path(args[1])
    with pytest.raises(UserError, match=text):
        merge.merge(*map(str, args), **kwargs)
    assert not out.exists()


def test_another_base_is_refused(lora, models, tmp_path):
    found, wanted = (checkpoint.fingerprint(Path(models(name))) for name in ("llama-odd", "llama"))
    refused(f"{found}, run.json has {wanted}", lora, tmp_path / "out", base=models("llama-odd"))
    (lora / "run.json").unlink()
    refused(
        "the adapter does not fit the base:\n.*has shape", lora, tmp_path / "out", base=models("llama-odd")
    )
    refused("the adapter does not fit the base:\n.*has no", lora, tmp_path / "out", base=models("mixtral"))


def test_a_base_that_moved_is_named(lora, models, tmp_path):
    edit(lora / "adapter_config.json", base_model_name_or_path="/moved")
    refused("adapter_config.json names the base /moved: no such folder; pass --base", lora, tmp_path / "out")
    merge.merge(str(lora), str(tmp_path / "out"), base=models("llama"))
    edit(lora / "adapter_config.json", base_model_name_or_path=None)
    refused("does not name the base; pass --base", lora, tmp_path / "other")


@pytest.mark.parametrize(
    "config, text", [(dict(lora_rank=4), "lora_rank 4, r 8"), (dict(lora_alpha=32), "32.*16")]
)
def test_contradictions_are_refused(lora, models, tmp_path, config, text):
    write_run(lora, models("llama"), **config)
    refused(f"differ: .*{text}", lora, tmp_path / "out")


def change_tensors(folder: Path, change) -> None:
    state = load_file(folder / "adapter_model.safetensors")
    change(state)
    save_file(state, folder / "adapter_model.safetensors")


def test_tensors_that_do_not_fit_are_refused(lora, tmp_path):
    start = "base_model.model.model.layers."
    shutil.copy(lora / "adapter_model.safetensors", tmp_path / "kept")
    for change, text in [
        (lambda s: s.pop(f"{start}1.mlp.up_proj.lora_B.weight"), "layers.1.mlp.up_proj: has A, wanted A, B"),
        (lambda s: s.update({"base_model.model.lm_head.weight": torch.ones(2)}), "neither LoRA's nor DoRA's"),
        (
            lambda s: s.update({f"{start}0.mlp.up_proj.lora_A.weight": torch.ones(4, 64)}),
            r"\(4, 64\), .*\(8, 64\)",
        ),
        (lambda s: [s.pop(n) for n in list(s) if "1.mlp.up_proj" in n], "without tensors.*\n.*1.mlp.up_proj"),
        (lambda s: [s.pop(n) for n in list(s) if "up_proj" in n], "without tensors.*\n *up_proj"),
        (
            lambda s: s.update({k: v * float("nan") for k, v in s.items() if "0.mlp" in k}),
            "layers.0.* not finite",
        ),
    ]:
        shutil.copy(tmp_path / "kept", lora / "adapter_model.safetensors")
        change_tensors(lora, change)
        refused(text, lora, tmp_path / "out")


def test_other_kinds_of_adapters_are_refused(lora, tmp_path):
    for option in (dict(rank_pattern={"q_proj": 4}), dict(bias="all"), dict(modules_to_save=["lm_head"]),
                   dict(fan_in_fan_out=True), dict(init_lora_weights="pissa"),
                   dict(peft_type="IA3")):  # fmt: skip
        before = (lora / "adapter_config.json").read_text()
        edit(lora / "adapter_config.json", **option)
        refused(f"{next(iter(option))}", lora, tmp_path / "out")
        (lora / "adapter_config.json").write_text(before)
    edit(lora / "adapter_config.json", use_dora=True)
    refused("has A, B, wanted A, B, magnitude", lora, tmp_path / "out")


def test_an_adapter_on_a_tied_head_is_refused(models, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(models("llama-tied"), base)
    state = load_file(base / "model.safetensors")
    save_file(
        state | {"lm_head.weight": state["model.embed_tokens.weight"].clone()}, base / "model.safetensors"
    )
    make_adapter(models("llama"), tmp_path / "adapter", ["lm_head"])
    refused("lm_head: tied", tmp_path / "adapter", tmp_path / "out", base=str(base))
    merge.merge(str(tmp_path / "adapter"), str(tmp_path / "out"))


def test_dequantized_needs_a_recipe(lora, models, tmp_path):
    for said, text in [(None, "was not quantised"), (dict(name="int7"), "not known here: int7")]:
        write_run(lora, models("llama"), said)
        refused(text, lora, tmp_path / "out", merge_base="dequantized")
    edit(lora / "run.json", model={})
    refused("does not say how", lora, tmp_path / "out", merge_base="dequantized")
    (lora / "run.json").unlink()
    refused("has no run.json", lora, tmp_path / "out", merge_base="dequantized")
    merge.merge(str(lora), str(tmp_path / "out"))


def test_command(lora, models, tmp_path):
    def run(*flags: str) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, str(SCRIPT), *flags], capture_output=True, text=True, cwd="/")

    done = run("--adapter", str(lora), "--output_dir", str(tmp_path / "out"), "--dtype=bf16")
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert "merged lora (14 linears, r 8, scaling 2) into the original weights" in done.stdout
    done = run("--adapter", models("llama"), "--output-dir", str(tmp_path / "other"))
    assert done.returncode == 2 and "already a whole model" in done.stderr and done.stderr.count("\n") == 1


def test_bad_flags(lora, tmp_path):
    out = str(tmp_path / "out")
    for flags, text in [
        (dict(adapter="/no/such"), "no such folder"),
        (dict(adapter=str(tmp_path)), "none of adapter_config.json"),
        (dict(adapter=str(lora), merge_base="other"), "choose from original, dequantized"),
        (dict(adapter=str(lora), dtype="fp8"), "choose from keep, bf16, fp16, fp32"),
        (dict(adapter=str(lora), output_dir=str(lora)), "not empty"),
        (dict(adapter=str(lora), output_dir=""), "pass --output_dir"),
    ]:
        with pytest.raises(SystemExit, match=text):
            merge.main(**dict(output_dir=out) | flags)
        assert not Path(out).exists()


# ------------------------------------------------------------------------------------------------- the writer


def entries(tensors: dict) -> dict:
    return {n: Entry(str(t.dtype)[6:], tuple(t.shape), lambda t=t: t) for n, t in tensors.items()}


def test_every_dtype_reads_back(tmp_path):
    """Odd numbers of small elements first: what follows must lie aligned. Scalars and empty tensors too."""
    torch.manual_seed(5)
    tensors = {}
    for number, dtype in enumerate(reversed(checkpoint.STORED)):
        for shape in ((3, 3), (), (0, 4)):
            whole = (torch.randn(shape) * 10).to(getattr(torch, dtype))
            tensors[f"{number}.{dtype}.{len(tensors)}"] = whole
    tensors["strided"] = torch.randn(6, 4).t()
    checkpoint.write_part(tmp_path / "x.safetensors", entries(tensors))
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors.part"]
    data = (tmp_path / "x.safetensors.part").read_bytes()
    size = int.from_bytes(data[:8], "little")
    head = json.loads(data[8 : 8 + size])
    assert size % 8 == 0 and head.pop("__metadata__") == {"format": "pt"}
    assert not any(said["data_offsets"][0] % tensors[name].itemsize for name, said in head.items())
    with safe_open(tmp_path / "x.safetensors.part", framework="pt") as handle:
        assert handle.metadata() == {"format": "pt"} and set(handle.keys()) == set(tensors)
        for name, tensor in tensors.items():
            found = handle.get_tensor(name)
            assert found.dtype == tensor.dtype and torch.equal(found, tensor), name


def test_a_tensor_that_is_not_as_announced(tmp_path):
    for tensor in (torch.ones(3), torch.ones(2).half()):
        with pytest.raises(ValueError, match="announced as float32"):
            checkpoint.write_part(tmp_path / "x.safetensors", {"w": Entry("float32", (2,), lambda: tensor)})
    with pytest.raises(UserError, match="w: F8_E4M3"):
        checkpoint.write_part(tmp_path / "x.safetensors", {"w": Entry("F8_E4M3", (2,), lambda: tensor)})
    assert not list(tmp_path.iterdir())


class Sharded:
    """Stands for a sharded parameter; counts the gathered tensors that are alive."""

    alive = most = gathered = 0

    def __init__(self, *shape: int):
        self.shape, self.dtype = shape, torch.bfloat16

    def detach(self):
        return self

    def full_tensor(self) -> torch.Tensor:
        memory = numpy.full(self.shape, 0x4000, dtype=numpy.int16)  # 2.0; lives as long as any view of it
        Sharded.gathered, Sharded.alive = Sharded.gathered + 1, Sharded.alive + 1
        Sharded.most = max(Sharded.most, Sharded.alive)
        weakref.finalize(memory, lambda: setattr(Sharded, "alive", Sharded.alive - 1))
        return torch.from_numpy(memory).view(self.dtype)


@pytest.mark.parametrize("limit, files", [(2**31, 1), (1000, 5)])
@pytest.mark.parametrize("main", [True, False])
def test_saving_holds_one_gathered_tensor(tmp_path, monkeypatch, main, limit, files):
    monkeypatch.setattr(checkpoint, "SAVED_FILE_BYTES", limit)
    for name in ("alive", "most", "gathered"):
        monkeypatch.setattr(Sharded, name, 0)
    parameters = {f"w{n}": Sharded(10, 20 + n) for n in range(8)}
    checkpoint.write_tensors(tmp_path, "blocks", parameters, main)
    assert (Sharded.most, Sharded.gathered) == (1, 8)
    if not main:
        assert not list(tmp_path.iterdir())
        return
    stored = checkpoint.Checkpoint(tmp_path, "blocks")
    assert stored.shape == {name: p.shape for name, p in parameters.items()} and len(stored.handles) == files
    assert not list(tmp_path.glob("*.part")) and (stored.tensor("w5") == 2).all()
