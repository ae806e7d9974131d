"""What a run leaves behind loads elsewhere: PEFT and transformers alone give the logits of the model in
memory."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from reference import plain_base
from scripts import checkpoint
from train import TRAIN_TYPES

IDS = [[5, 9, 200, 31, 7, 120, 44, 2], [0, 17, 17, 90, 250, 3, 8, 61]]


def plain_logits(folder: str, adapter: str | None = None, base: str = "plain") -> torch.Tensor:
    """Logits from the libraries alone. Stays in train mode: in eval bitsandbytes repacks its weights to bf16
    on a CPU."""
    from peft import PeftModel

    model = plain_base(folder, base, [])
    model = PeftModel.from_pretrained(model, adapter) if adapter else model
    with torch.no_grad():
        return model.train()(input_ids=torch.tensor(IDS)).logits


def expanded_logits(folder: str, result: Path, base: str) -> torch.Tensor:
    """Logits of an expanded model with the trained blocks put in by hand."""
    model = plain_base(folder, base, checkpoint.new_blocks(Path(folder)))
    trained = load_file(result / "blocks.safetensors")
    left = model.load_state_dict(trained, strict=False)
    assert trained and not left.unexpected_keys
    with torch.no_grad():
        return model.train()(input_ids=torch.tensor(IDS)).logits


def stored_names(file: Path) -> set[str]:
    with safe_open(file, framework="pt") as handle:
        return set(handle.keys())


CASES = [(t, "llama") for t in TRAIN_TYPES]
CASES += [
    (t, model)
    for t in ("full", "qlora", "custom_lora", "bnb_dora")
    for model in ("llama-tied", "qwen2", "gemma2")
]


@pytest.mark.parametrize("train_type, model", CASES)
def test_reload_gives_the_same_logits(pool, models, tmp_path, train_type, model):
    output, kind = tmp_path / "out", TRAIN_TYPES[train_type]
    folder = models(model, train_type)
    found = pool.run(2, "logits", folder, dict(train_type=train_type), IDS, 3, str(output))[0]
    if kind.new_blocks:
        reloaded = expanded_logits(folder, output, kind.base)
        size = (output / "blocks.safetensors").stat().st_size
        assert (
            size < 0.6 * Path(folder, "model.safetensors").stat().st_size
        )  # the new blocks and nothing else
    elif kind.adapter:
        reloaded = plain_logits(folder, str(output), kind.base)
    else:
        reloaded = plain_logits(str(output))
    assert torch.allclose(found, reloaded, atol=2e-5)
    assert not torch.allclose(
        found, plain_logits(folder, base=kind.base), atol=1e-3
    )  # as a dead adapter would be


@pytest.mark.parametrize("train_type", [t for t in TRAIN_TYPES if TRAIN_TYPES[t].adapter])
def test_rslora_reloads_and_merges_with_its_scale(pool, models, tmp_path, train_type):
    """alpha / sqrt(rank): PEFT reads the same from the saved configuration, and so does the merge."""
    from scripts import merge

    output, flags = tmp_path / "out", dict(train_type=train_type, use_rslora=True)
    base = TRAIN_TYPES[train_type].base
    found = pool.run(2, "logits", models("llama"), flags, IDS, 3, str(output))[0]
    assert torch.allclose(found, plain_logits(models("llama"), str(output), base), atol=2e-5)
    if base == "plain":
        merge.main(adapter=str(output), output_dir=str(tmp_path / "merged"))
        assert torch.allclose(found, plain_logits(str(tmp_path / "merged")), atol=2e-5)
    plain = pool.run(2, "logits", models("llama"), dict(train_type=train_type), IDS, 3, str(tmp_path / "plain"))[0]
    assert not torch.allclose(found, plain, atol=1e-3)


@pytest.mark.parametrize("train_type", [t for t in TRAIN_TYPES if t != "full"])
def test_a_run_starts_from_the_base(pool, models, tmp_path, train_type):
    """Before any step the model is its base: adapters and new blocks change nothing yet."""
    folder, kind = models("llama", train_type), TRAIN_TYPES[train_type]
    found = pool.run(2, "logits", folder, dict(train_type=train_type), IDS, 0, str(tmp_path / "out"))[0]
    base = models("llama") if kind.new_blocks and kind.base == "plain" else folder
    wanted = plain_logits(base) if kind.base == "plain" else expanded_or_plain(folder, kind)
    assert torch.allclose(found, wanted, atol=2e-5)


def expanded_or_plain(folder: str, kind) -> torch.Tensor:
    new_blocks = checkpoint.new_blocks(Path(folder)) if kind.new_blocks else []
    with torch.no_grad():
        return plain_base(folder, kind.base, new_blocks).train()(input_ids=torch.tensor(IDS)).logits


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
    assert (config["r"], config["lora_alpha"], sorted(config["target_modules"])) == (8, 16, ["down_proj", "q_proj"])
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
