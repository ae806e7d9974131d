"""Vocabularies: added tokens get rows that are trained, saved and merged; ids without a row and tokens that no
one has trained are named."""

import json
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import tiny
import train
from scripts import checkpoint, checks, data, generate, merge, tokens, vocabulary
from test_prequantized import edited

NEW = ["<|im_start|>", "<|im_end|>", "quokka"]
ENDS = ["model.embed_tokens.weight", "lm_head.weight"]


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("tokens") / "new.txt"
    path.write_text("\n".join(NEW) + "\n\n")
    return str(path)


def test_files_of_tokens(tmp_path):
    file = tmp_path / "tokens"
    file.write_text("<|a|>\n\n  b c \n[SEP]\n")
    assert [(t.content, t.special) for t in vocabulary.read(str(file))] == [
        ("<|a|>", True),
        ("b c", False),
        ("[SEP]", False),
    ]
    file.write_text('["<|a|>", {"content": "<tool>", "special": true}, "x"]')
    assert [(t.content, t.special) for t in vocabulary.read(str(file))] == [
        ("<|a|>", True),
        ("<tool>", True),
        ("x", False),
    ]
    for text in ("", "a\nb\na\n", '["a", 3]', '["a"', "[{}]"):
        file.write_text(text)
        assert len(vocabulary.check(str(file))) == 1
    assert "No such file" in vocabulary.check(str(tmp_path / "none"))[0]
    assert vocabulary.check("") == []


@pytest.mark.parametrize("model", ["llama", "llama-tied"])
@pytest.mark.parametrize("train_type", ["full", "custom_lora"])
def test_new_rows_are_the_mean_and_the_same_at_every_world(pool, models, file, model, train_type):
    """The start is transformers' own resize without its (1e-9) noise; the same bits at worlds 1 to 4."""
    reference = tiny.model(model)
    reference.resize_token_embeddings(303, mean_resizing=False)
    old = tiny.model(model).state_dict()
    flags = dict(train_type=train_type, add_tokens=file, lr=1e-3)
    alone = pool.run(1, "fit", models(model), flags, 3)[0]
    for name in ENDS[: 1 if model.endswith("tied") else 2]:
        found = next(t for n, t in alone["start"].items() if n.endswith(name))
        assert found.shape == reference.state_dict()[name].shape and found[:300].equal(old[name])
        assert torch.allclose(found[300:], old[name].double().mean(0).float().expand(3, -1), atol=1e-7, rtol=0)
        moved = not next(t for n, t in alone["end"].items() if n.endswith(name))[300:].equal(found[300:])
        assert moved == (name == ENDS[1] or model.endswith("tied"))  # the samples have none of the new ids
    for world in (2, 3, 4) if train_type == "full" else (3,):
        other = pool.run(world, "fit", models(model), flags | dict(batch_size=2), 3)[0]
        for name, tensor in alone["start"].items():
            assert other["start"][name].equal(tensor)


@pytest.mark.parametrize("train_type", [t for t in train.TRAIN_TYPES if train.TRAIN_TYPES[t].adapter])
def test_losses_do_not_depend_on_the_world(pool, models, file, train_type):
    flags = dict(train_type=train_type, add_tokens=file, lr=1e-3)
    one = pool.run(1, "fit", models("llama-tied"), flags | dict(batch_size=4), 3)[0]
    two = pool.run(2, "fit", models("llama-tied"), flags, 3)[0]
    assert one["losses"] == pytest.approx(two["losses"], abs=2e-6)
    assert one["norms"] == pytest.approx(two["norms"], rel=1e-5)
    assert one["facts"]["modules_to_save"] == ["embed_tokens", "lm_head"]


def run_flags(models, model: str, file: str, tmp_path, **flags) -> dict:
    rows = [dict(messages=[dict(role="user", content=f"quokka {n}?"), dict(role="assistant", content=f"quokka {n}.")])
            for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = tmp_path / "base"
    if not folder.exists():
        folder.mkdir()
        edited(models(model), folder)
        template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" \
                   "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        (folder / "chat_template.jinja").write_text(template)
    usual = dict(model_name=str(folder), dataset=str(tmp_path / "rows.jsonl"), add_tokens=file, lr=1e-3,
                 output_dir=str(tmp_path / "out"), save_steps=-1, async_save=False, seed=3)
    return usual | flags


@pytest.mark.parametrize("model, train_type", [("llama", "qlora"), ("llama-tied", "lora")])
def test_adapters_load_with_peft_generate_and_merge(pool, models, file, tmp_path, model, train_type):
    from peft import AutoPeftModelForCausalLM, PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    flags = run_flags(models, model, file, tmp_path, train_type=train_type, max_steps=2)
    result = pool.run(2, "whole_run", flags)[0]
    assert result["code"] == 0, result["message"]
    assert "model.embed_tokens.weight: 300 rows, now 303" in result["printed"]
    output, base = Path(flags["output_dir"]), flags["model_name"]
    made = AutoTokenizer.from_pretrained(output)
    assert made.convert_tokens_to_ids(NEW) == [300, 301, 302]
    assert made.decode(made("a quokka<|im_end|>")["input_ids"], skip_special_tokens=True) == "a quokka"
    saved = load_file(output / "adapter_model.safetensors")
    embedding = saved["base_model.model.model.embed_tokens.weight"]
    assert embedding.shape[0] == 303 and not embedding[300].equal(embedding[301])
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    plain.resize_token_embeddings(len(made), mean_resizing=False)
    peft = PeftModel.from_pretrained(plain, output).eval()
    ids = torch.tensor([made("quokka<|im_end|> two")["input_ids"]])
    own, _ = generate.read_model(generate.locate(str(output)))
    by_peft = AutoPeftModelForCausalLM.from_pretrained(output).eval()
    merge.merge(str(output), str(tmp_path / "merged"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        wanted = peft(ids).logits
        for other in (own, by_peft, merged):
            assert (other(ids).logits - wanted).abs().max() < 1e-4
    assert wanted.shape[-1] == 303 and merged.config.vocab_size == 303
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").convert_tokens_to_ids(NEW) == [300, 301, 302]


def test_full_models_are_saved_whole_and_runs_resume(pool, models, file, tmp_path):
    from transformers import AutoModelForCausalLM

    flags = run_flags(models, "llama-tied", file, tmp_path, train_type="full", num_epochs=2)
    assert pool.run(2, "whole_run", flags)[0]["code"] == 0
    other = flags | dict(output_dir=str(tmp_path / "other"))
    assert pool.run(2, "whole_run", other, 1)[0]["code"] == train.launcher.STOPPED
    assert pool.run(2, "whole_run", other | dict(resume="auto"))[0]["code"] == 0
    one, two = (load_file(Path(f["output_dir"]) / "model.safetensors") for f in (flags, other))
    assert set(one) == set(two) and all(tensor.equal(two[name]) for name, tensor in one.items())
    loaded = AutoModelForCausalLM.from_pretrained(flags["output_dir"])
    assert loaded.config.vocab_size == 303 and loaded.get_output_embeddings().weight.shape[0] == 303
    assert loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight


def test_a_padded_vocabulary_works_and_takes_new_tokens_without_growing(pool, models, file, tmp_path):
    wider = lambda t: t | {name: torch.cat([t[name], t[name][:20]]) for name in ENDS}  # noqa: E731
    folder = edited(models("llama"), tmp_path, wider, vocab_size=320)
    data_file = tiny.write_alpaca(tmp_path / "rows.jsonl")
    config = train.Config(model_name=folder, dataset=str(data_file), add_tokens=file)
    held = data.load_all(config, Path(folder))
    assert vocabulary.size(held.tokenizer) == 303
    result = pool.run(2, "fit", folder, dict(train_type="qlora", add_tokens=file), 1)[0]
    assert result["facts"]["notes"] == []
    assert next(t for n, t in result["start"].items() if "embed_tokens" in n).shape[0] == 320


def test_a_vocabulary_that_is_too_small_is_an_error_before_training(models, tmp_path):
    shorter = lambda t: t | {name: t[name][:290] for name in ENDS}  # noqa: E731
    folder = edited(models("llama"), tmp_path, shorter, vocab_size=290)
    rows = tiny.write_alpaca(tmp_path / "rows.jsonl")
    highest = max(tiny.tokenizer()(rows.read_text())["input_ids"])
    assert highest >= 290
    with pytest.raises(train.UserError) as refused:
        train.data.load_all(train.Config(model_name=folder, dataset=str(rows)), Path(folder))
    assert "290 rows" in str(refused.value) and "--add_tokens" in str(refused.value)
    named = int(str(refused.value).split(" the id ")[1].split(",")[0])
    assert named >= 290 and repr(tiny.tokenizer().convert_ids_to_tokens(named)) in str(refused.value)


def test_flags_that_do_not_go_together(models, file, tmp_path):
    with pytest.raises(train.UserError, match="--add_tokens: llama_pro trains its new blocks"):
        train.parse(["--train_type", "llama_pro", "--llama_pro_path", "x", "--add_tokens", file])
    config = train.Config(train_type="full", add_tokens=file, freeze="lm_head")
    with pytest.raises(train.UserError, match="must leave embedding and head trained"):
        train.trained.choose(train.empty_model(Path(models("llama")), torch.float32), config)
    missing = str(tmp_path / "none")
    problems = checks.surroundings(train.Config(add_tokens=missing, output_dir=str(tmp_path / "out")))
    assert len(problems) == 1 and "--add_tokens" in problems[0] and "none: No such file" in problems[0]


def held_of(text: str, file: str) -> types.SimpleNamespace:
    made = tiny.tokenizer()
    made.add_tokens(vocabulary.read(file))
    ids = np.array(made(text)["input_ids"], np.int32)
    table = tokens.Table(ids, ids * 0, np.array([0, len(ids)]), np.zeros(1, np.uint8), np.ones(1, int), {})
    return types.SimpleNamespace(tokenizer=made, train=types.SimpleNamespace(tables=[table]))


@pytest.mark.parametrize("change, named", [("small", NEW[:1]), ("same", NEW[:2]), ("none", []), ("trained", [])])
def test_untrained_tokens_are_named(models, tmp_path, file, change, named):
    """Rows that are far smaller than the others, or equal; nothing is said of trained or unused ones."""
    torch.manual_seed(0)
    rows = torch.randn(3, 64) * 0.1
    rows[0] *= 0.01 if change in ("small", "trained") else 1
    rows[1] = rows[0] if change == "same" else rows[1]
    rows[2] = 0  # not in the data
    wider = lambda t: t | {name: torch.cat([t[name], rows]) for name in ENDS}  # noqa: E731
    folder = Path(edited(models("llama"), tmp_path, wider, vocab_size=303))
    module, said = train.empty_model(folder, torch.float32), []
    module.requires_grad_(change == "trained")
    held = held_of("<|im_start|>two plus two<|im_end|>", file)
    for adapter in (True, False):
        vocabulary.warn(module, folder, held, adapter, lambda label, text: said.append((label, text)))
    assert len(said) == 2 * bool(named)
    for (label, text), adapter in zip(said, (True, False)):  # only beside an adapter there is such a flag
        assert label == "warning" and f"the data have {', '.join(named)}, whose" in text
        assert ("--train_embeddings true" in text) == adapter
    stored = checkpoint.Checkpoint(folder)
    assert stored.shape[ENDS[0]] == (303, 64)
