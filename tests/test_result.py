"""What a run leaves behind loads elsewhere: PEFT and transformers alone give the logits of the model in
memory."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from train import TRAIN_TYPES

IDS = [[5, 9, 200, 31, 7, 120, 44, 2], [0, 17, 17, 90, 250, 3, 8, 61]]


def plain_logits(folder: str, adapter: str | None = None, quantized: bool = False) -> torch.Tensor:
    """Logits from the libraries alone. Stays in train mode: in eval bitsandbytes repacks its weights to bf16
    on a CPU."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    nf4 = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    extra = dict(quantization_config=nf4) if quantized else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **extra)
    model = PeftModel.from_pretrained(model, adapter) if adapter else model
    with torch.no_grad():
        return model.train()(input_ids=torch.tensor(IDS)).logits


def stored_names(file: Path) -> set[str]:
    with safe_open(file, framework="pt") as handle:
        return set(handle.keys())


@pytest.mark.parametrize("model", ["llama", "llama-tied", "qwen2", "gemma2"])
@pytest.mark.parametrize("train_type", TRAIN_TYPES)
def test_reload_gives_the_same_logits(pool, models, tmp_path, train_type, model):
    output = tmp_path / "out"
    found = pool.run(2, "logits", models(model), dict(train_type=train_type), IDS, 3, str(output))[0]
    if train_type == "full":
        reloaded = plain_logits(str(output))
    else:
        reloaded = plain_logits(models(model), str(output), quantized="qlora" in train_type)
    assert torch.allclose(found, reloaded, atol=2e-5)
    assert not torch.allclose(
        found, plain_logits(models(model)), atol=1e-3
    )  # a dead adapter would give the base's


def test_adapter_folder(pool, models, tmp_path):
    """Keys as PEFT writes them itself, and a configuration that says what was trained on what."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    output = tmp_path / "out"
    pool.run(
        3,
        "logits",
        models("llama"),
        dict(train_type="custom_qlora", lora_target_modules="q_proj,down_proj"),
        IDS,
        1,
        str(output),
    )
    config = json.loads((output / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (8, 16, ["down_proj", "q_proj"])
    assert config["base_model_name_or_path"] == models("llama") and config["task_type"] == "CAUSAL_LM"
    model = AutoModelForCausalLM.from_pretrained(models("llama"))
    model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "down_proj"]))
    assert stored_names(output / "adapter_model.safetensors") == set(get_peft_model_state_dict(model))
    assert {p.name for p in output.iterdir()} >= {
        "adapter_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_full_folder_in_several_files(pool, models, tmp_path):
    """Files of a bounded size with an index; the tied head is written once; no temporary names are left."""
    output = tmp_path / "out"
    (found,) = pool.run(1, "small_files", models("llama-tied"), dict(train_type="full"), IDS, 2, str(output))
    files = sorted(output.glob("model-*-of-*.safetensors"))
    assert len(files) > 2 and not list(output.glob("*.part"))
    names = set().union(*map(stored_names, files))
    assert "lm_head.weight" not in names
    assert torch.allclose(found, plain_logits(str(output)), atol=2e-5)


@pytest.mark.parametrize("precision", ["bf16", "mp_bf16", "mp_fp16_autocast"])
def test_saved_dtype_is_the_trained_one(pool, models, tmp_path, precision):
    output = tmp_path / "out"
    pool.run(2, "logits", models("llama"), dict(train_type="full", precision=precision), IDS, 1, str(output))
    wanted = "bfloat16" if precision == "bf16" else "float32"
    assert json.loads((output / "config.json").read_text())["dtype"] == wanted
    with safe_open(output / "model.safetensors", framework="pt") as handle:
        assert all(str(handle.get_tensor(name).dtype) == f"torch.{wanted}" for name in handle.keys())
