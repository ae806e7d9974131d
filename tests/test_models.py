"""Every model family trains under every train type with no line of code of its own, and what its structure does
not say is asked for by name."""

import itertools
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import pages
import tiny
from scripts import merge, models
from test_parity import AFTER_ADAM, reference_fit, reference_model
from test_result import IDS, plain_logits, stored_names
from train import TRAIN_TYPES

SPLIT = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FUSED = ["o_proj", "qkv_proj", "gate_up_proj", "down_proj"]
DENSE = ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]
ENDS, TIED = ["model.embed_tokens", "model.norm", "lm_head"], []
# Name in tiny.py: (its name in docs/models.md, the blocks, what of them is a unit, units beside the blocks, linears).
FAMILIES = {
    "llama": ("Llama 2", "model.layers", "self_attn", ENDS, SPLIT),
    "llama3": ("Llama 3", "model.layers", "self_attn", ENDS, SPLIT),
    "mistral": ("Mistral", "model.layers", "self_attn", ENDS, SPLIT),
    "qwen2": ("Qwen2", "model.layers", "self_attn", ENDS, SPLIT),
    "qwen3": ("Qwen3", "model.layers", "self_attn", TIED, SPLIT),
    "gemma2": ("Gemma 2", "model.layers", "self_attn", TIED, SPLIT),
    "gemma3": ("Gemma 3 (text)", "model.layers", "self_attn", TIED, SPLIT),
    "phi3": ("Phi-3, Phi-4", "model.layers", "self_attn", ENDS, FUSED),
    "phi4": ("Phi-4-mini", "model.layers", "self_attn", TIED, FUSED),
    "olmo2": ("OLMo 2", "model.layers", "self_attn", ENDS, SPLIT),
    "smollm3": ("SmolLM3", "model.layers", "self_attn", TIED, SPLIT),
    "granite": ("Granite", "model.layers", "self_attn", ENDS, SPLIT),
    "gpt_neox": (
        "GPT-NeoX, Pythia",
        "gpt_neox.layers",
        "attention",
        ["gpt_neox.embed_in", "gpt_neox.final_layer_norm", "lm_head"],
        DENSE,
    ),
    "falcon": ("Falcon-40B", "transformer.h", "self_attention", TIED, DENSE),
    "falcon-7b": ("Falcon-7B", "transformer.h", "self_attention", TIED, DENSE),
    "falcon-rw": ("Falcon-RW", "transformer.h", "self_attention", TIED, DENSE),
    "starcoder2": ("StarCoder2", "model.layers", "self_attn", TIED, [*SPLIT[:4], "c_fc", "c_proj"]),
    "cohere": ("Cohere", "model.layers", "self_attn", TIED, SPLIT),
    "cohere2": ("Cohere 2", "model.layers", "self_attn", TIED, SPLIT),
}
CELLS = list(itertools.product(FAMILIES, TRAIN_TYPES))


def rotated(types: list[str], count: int) -> list[tuple[str, str]]:
    """`count` of the types for each family, in turn: each type comes with several families."""
    turn = itertools.cycle(types)
    return [(family, next(turn)) for family in FAMILIES for _ in range(count)]


# PEFT's own implementation stands for the custom ones, which give its numbers.
LIBRARIES = [(family, "full") for family in FAMILIES]
LIBRARIES += rotated([t for t in TRAIN_TYPES if t != "full" and "custom" not in t], 2)
MERGED = rotated(["lora", "dora", "custom_lora"], 1)
SAVED = rotated(["qlora", "hqq_lora", "bnb_dora", "custom_qlora", "hqq_dora"], 1)


# --------------------------------------------------------------------------------------------- what is trained


def assert_same(found: dict, wanted: dict) -> None:
    """Losses, gradient norms, and (of SGD) each trained weight's change, which is that of its gradients."""
    assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-6)
    assert found["norms"] == pytest.approx(wanted["norms"], rel=2e-6)
    changes = {name: (tensor - wanted["start"][name]).norm() for name, tensor in wanted["end"].items()}
    least = 1e-6 * torch.stack(list(changes.values())).norm()
    for name, change in changes.items():
        assert torch.equal(found["start"][name], wanted["start"][name])
        rounding = least + 1e-7 * wanted["end"][name].norm()
        assert (found["end"][name] - wanted["end"][name]).norm() <= 1e-4 * change + rounding, name


SGD = dict(optimizer="sgd", lr=0.1)


@pytest.mark.parametrize("family, train_type", CELLS)
def test_two_ranks_are_one(pool, models, family, train_type):
    """On two ranks attention and MLP are units of their own."""
    folder, flags = models(family, train_type), SGD | dict(train_type=train_type)
    (wanted,) = pool.run(1, "fit", folder, flags | dict(batch_size=4), 2)
    found = pool.run(2, "fit", folder, flags | dict(batch_size=2, wrap_policy="decoder_attention_mlp"), 2)[0]
    assert_same(found, wanted)
    assert found["frozen"] == found["frozen_after"] == wanted["frozen_after"]
    assert all(not torch.equal(tensor, found["start"][name]) for name, tensor in found["end"].items())


@pytest.mark.parametrize("family, train_type", LIBRARIES)
def test_one_process_is_the_libraries(pool, models, family, train_type):
    folder = models(family, train_type)
    (found,) = pool.run(1, "fit", folder, dict(train_type=train_type, batch_size=4), 2)
    reference, _ = reference_model(folder, train_type, found["start"], FAMILIES[family][4])
    losses, norms = reference_fit(reference, tiny.samples(8), 4, 2)
    assert found["losses"][0] == pytest.approx(losses[0], rel=1e-6)
    assert found["losses"] == pytest.approx(losses, rel=AFTER_ADAM)
    assert found["norms"][0] == pytest.approx(norms[0], rel=2e-6)
    assert found["norms"] == pytest.approx(norms, rel=3 * AFTER_ADAM)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_found(pool, models, family):
    """The snapshot: units, targets, and nearly all of the blocks' parameters quantised."""
    flags = dict(train_type="qlora", wrap_policy="decoder_attention_mlp")
    facts = pool.run(1, "fit", models(family), flags, 1)[0]["facts"]
    _, blocks, attention, ends, linears = FAMILIES[family]
    parts = [f"{blocks}.{n}{part}" for n in (0, 1) for part in (f".{attention}", ".mlp", "")]
    assert facts["units"] == [*parts, *ends, "root"]
    assert facts["targets"] == linears
    found = facts["structure"]
    assert found["blocks"] == f"{blocks}.*" and found["share"] >= 0.95
    assert [name.split(".")[-1] for name in found["linears"]] == linears
    assert all("norm" in name or "ln_" in name or "bias" in name for name in found["not_quantized"])


# ----------------------------------------------------------------------------------------------------- results


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loaded_model_is_transformers(pool, models, tmp_path, family):
    """Before any step: its own load gives the same logits; and the folder that is saved again, too."""
    flags, output = dict(train_type="full"), tmp_path / "out"
    found = pool.run(2, "logits", models(family), flags, IDS, 0, str(output))[0]
    assert torch.allclose(found, plain_logits(models(family)), atol=2e-5)
    assert torch.allclose(found, plain_logits(str(output)), atol=2e-5)
    assert stored_names(output / "model.safetensors") == stored_names(Path(models(family), "model.safetensors"))


@pytest.mark.parametrize("family, train_type", MERGED)
def test_adapters_load_and_merge(pool, models, tmp_path, family, train_type):
    output, merged = str(tmp_path / "out"), str(tmp_path / "merged")
    found = pool.run(2, "logits", models(family), dict(train_type=train_type), IDS, 3, output)[0]
    assert torch.allclose(found, plain_logits(models(family), output), atol=2e-5)
    merge.merge(output, merged)
    assert torch.allclose(found, plain_logits(merged), atol=1e-4)
    assert stored_names(Path(merged, "model.safetensors")) == stored_names(Path(models(family), "model.safetensors"))
    assert not torch.allclose(found, plain_logits(models(family)), atol=1e-3)


@pytest.mark.parametrize("family, train_type", SAVED)
def test_adapters_load_over_the_quantised_base(pool, models, tmp_path, family, train_type):
    output, base = str(tmp_path / "out"), TRAIN_TYPES[train_type].base
    found = pool.run(2, "logits", models(family), dict(train_type=train_type), IDS, 3, output)[0]
    assert torch.allclose(found, plain_logits(models(family), output, base), atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_new_blocks_are_identities(models, family):
    assert torch.equal(plain_logits(models(family, "llama_pro")), plain_logits(models(family)))


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "olmo2"])
def test_new_blocks_start_gently_where_a_norm_follows(pool, models, family):
    """A step of rate 1e-4 changes what Adam's step of 1e-4 on a block's weights can: not the whole block."""
    flags = dict(train_type="llama_pro", batch_size=8, lr=1e-4)
    (found,) = pool.run(1, "fit", models(family, "llama_pro"), flags, 2, 8)
    assert 0 < found["losses"][0] - found["losses"][1] < 0.1
    assert found["norms"][0] < 20


# --------------------------------------------------------------------------------------- attention, long texts


@pytest.mark.parametrize("attention", ["auto", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_are_alone(pool, models, family, attention):
    """Also across the ends of sliding windows."""
    samples = tiny.samples(9, seed=3)
    packed = [samples[0:3], samples[3:6], samples[6:9]]
    others = [s._replace(ids=[2 + i % 7 for i in s.ids], labels=[x if x < 0 else 9 for x in s.labels]) for s, *_ in packed]
    (found,) = pool.run(1, "packed_losses", models(family), packed, others, attention, "full")
    for alone, inside, swapped in zip(found["alone"], found["packed"], found["swapped"]):
        assert inside == pytest.approx(alone, rel=2e-6)
        assert swapped[1:] == inside[1:] and swapped[0] != inside[0]


def chosen(models, monkeypatch, family: str, wanted="auto", compute=torch.bfloat16, installed=True, cards=1,
           graphs=False) -> str:  # fmt: skip
    """The attention of a model, where flash-attn is (or is not) installed."""
    import train

    spec = (lambda name: object() if installed else None)
    monkeypatch.setattr(train.models.importlib.util, "find_spec", spec)
    model = train.empty_model(Path(models(family)), compute)
    set_ = []
    monkeypatch.setattr(type(model), "set_attn_implementation", lambda self, name: set_.append(name))
    flags = SimpleNamespace(attn_implementation=wanted, numbers=SimpleNamespace(compute=compute), compile=graphs)
    train.models.choose_attention(model, flags, cards)
    return set_[-1] if set_ else model.config._attn_implementation


@pytest.mark.parametrize(
    "family, options, attention",
    [
        ("llama", {}, "flash_attention_2"),
        ("mistral", {}, "flash_attention_2"),
        ("gemma3", {}, "flash_attention_2"),
        ("llama", dict(installed=False), "documents"),
        ("llama", dict(cards=0), "documents"),
        ("llama", dict(cards=0, graphs=True), "sdpa"),
        ("gemma3", dict(compute=torch.float32), "documents"),
        ("llama", dict(wanted="eager"), "sdpa"),  # an override is given to transformers, and not looked at here
        ("gemma2", {}, "eager"),
        ("falcon-7b", {}, "flash_attention_2"),
        ("falcon-rw", {}, "sdpa"),
    ],
)
def test_attention_is_chosen_by_model(models, monkeypatch, family, options, attention):
    assert chosen(models, monkeypatch, family, **options) == attention


def refused(work) -> str:
    from scripts.flags import UserError

    with pytest.raises(UserError) as caught:
        work()
    return str(caught.value)


def test_attention_can_be_overridden_where_the_model_has_it(models):
    import train

    for wanted in ("eager", "sdpa"):
        model = train.empty_model(Path(models("llama")), torch.float32, wanted)
        assert model.config._attn_implementation == wanted
    message = refused(lambda: train.empty_model(Path(models("gemma2")), torch.float32, "sdpa"))
    assert message.startswith("--attn_implementation sdpa: Gemma2ForCausalLM does not support")


ROPES = [("llama", "linear:4"), ("llama", "yarn:2"), ("llama", "llama3:8"), ("llama3", "yarn:4")]
ROPES += [("gemma3", "yarn:4"), ("gpt_neox", "linear:2"), ("falcon", "yarn:2"), ("smollm3", "llama3:4")]


@pytest.mark.parametrize("family, scaling", ROPES)
def test_rope_scaling_is_transformers(pool, models, tmp_path, family, scaling):
    """The run's logits are those of transformers with the configuration that its documentation gives, and the
    saved folder has it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    output, (kind, factor) = tmp_path / "out", scaling.split(":")
    flags = dict(train_type="full", rope_scaling=scaling)
    (found,) = pool.run(1, "logits", models(family), flags, IDS, 0, str(output))
    config = AutoConfig.from_pretrained(models(family))
    length = 64 if family == "llama3" else 512  # the texts that it was made for
    wanted = dict(rope_type=kind, factor=float(factor))
    if kind != "linear":
        wanted["original_max_position_embeddings"] = length
    if kind == "llama3":
        wanted |= dict(low_freq_factor=1.0, high_freq_factor=4.0)
    old = config.rope_parameters.get("full_attention", config.rope_parameters)
    wanted |= {key: old[key] for key in ("rope_theta", "partial_rotary_factor") if key in old}
    if family == "gemma3":
        wanted = config.rope_parameters | dict(full_attention=wanted)
    config.rope_parameters, config.max_position_embeddings = wanted, int(float(factor) * length)
    reference = AutoModelForCausalLM.from_pretrained(models(family), config=config, dtype=torch.float32)
    with torch.no_grad():
        logits = reference(input_ids=torch.tensor(IDS)).logits
    assert torch.allclose(found, logits, atol=2e-5)
    assert not torch.allclose(found, plain_logits(models(family)), atol=1e-4)
    assert torch.allclose(found, plain_logits(str(output)), atol=2e-5)
    assert AutoConfig.from_pretrained(output).max_position_embeddings == config.max_position_embeddings


@pytest.mark.parametrize("train_type", ["lora", "full"])
def test_rope_scaling_goes_with_the_result(pool, models, tmp_path, train_type):
    """run.json of an adapter says it; generate.py and merge.py read it there."""
    from scripts import generate

    output = tmp_path / "out"
    flags = dict(model_name=models("llama"), train_type=train_type, rope_scaling="yarn:4", max_steps=2)
    flags |= dict(dataset="dummy", dataset_samples=4, output_dir=str(output), save_steps=-1)
    (result,) = pool.run(1, "whole_run", flags)
    assert result["code"] == 0, result["message"]
    said = json.loads((output / "run.json").read_text())["model"]["rope"]
    assert said["max_position_embeddings"] == 2048 and said["rope_parameters"]["rope_type"] == "yarn"
    model, _ = generate.read_model(generate.locate(str(output)))
    assert model.config.rope_parameters == said["rope_parameters"]
    if train_type == "lora":
        config = Path(models("llama")) / "config.json"
        merge.merge(str(output), str(tmp_path / "merged"))
        config = json.loads((tmp_path / "merged" / "config.json").read_text())
        assert config["rope_parameters"] == said["rope_parameters"]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor(IDS)).logits
        assert torch.allclose(logits, plain_logits(str(tmp_path / "merged")), atol=2e-5)


@pytest.mark.parametrize("family, scaling", [("falcon-rw", "yarn:4"), ("phi4", "yarn:4")])
def test_rope_scaling_that_a_model_cannot_have(models, family, scaling):
    import train

    message = refused(lambda: train.empty_model(Path(models(family)), torch.float32, "auto", scaling))
    assert "no RoPE" in message if family == "falcon-rw" else "longrope" in message


@pytest.mark.parametrize("text", ["yarn", "yarn:1", "yarn:0.5", "dynamic:4", "linear:x", "linear:inf", "linear:nan"])
def test_rope_scaling_that_makes_no_sense(text):
    assert f"--rope_scaling {text}: wanted TYPE:FACTOR" in refused(lambda: models.parse_rope(text))


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("train_type", ["lora", "qlora"])
def test_long_texts_take_linear_memory(pool, models, train_type, offload):
    """In hidden states (64 numbers) per position. Kept from forward to backward: the inputs of two blocks and of
    the last norm, the gradient that the loss has made, and RoPE's sines and cosines, a quarter each; offloaded,
    the norm's input comes twice, for each operator that saves it. Most at a time: one block's intermediate values
    above that. No tensor is larger than the MLP's inner state, two: not as attention's scores, nor as all logits.
    """
    flags = dict(train_type=train_type, use_activation_cpu_offload=offload)
    one, two = (pool.run(1, "long_step", models("llama"), flags, n)[0] for n in (1024, 2048))
    kept, most = ((two[kind] - one[kind]) / 1024 / (64 * 4) for kind in ("between", "most"))
    assert kept == pytest.approx(5.5 if offload else 4.5, rel=0.03)
    assert most <= 25
    assert two["largest"] == 2 * 2048 * 64 * 4


# ------------------------------------------------------------------------------------- unknown architectures


@pytest.fixture(scope="module")
def made_up_folder(tmp_path_factory):
    import made_up

    return str(made_up.save(tmp_path_factory.mktemp("made_up")))


def example() -> str:
    """The row of "Add support for a new model"."""
    return re.search(r'^    "made_up": Row\(.*\),$', pages.section("Add support for a new model"), re.M).group().strip()


TRUST = SGD | dict(train_type="qlora", trust_remote_code=True, batch_size=4)


def test_a_new_model_is_one_row(pool, made_up_folder, tmp_path):
    """What the documented row gives trains, alike on one and on two ranks, and what is saved loads."""
    import made_up

    row, fit, flags = example(), "fit", dict(train_type="full", trust_remote_code=True)
    (wanted,) = pool.run(1, "with_rows", row, fit, made_up_folder, TRUST, 3)
    found = pool.run(2, "with_rows", row, fit, made_up_folder, TRUST | dict(batch_size=2), 3)[0]
    assert_same(found, wanted)
    assert found["facts"]["structure"] == dict(
        blocks="model.stage_*",
        kind="Stage",
        linears=["mix", "up", "down"],
        not_quantized=["mix.bias", "up.bias", "down.bias"],
        share=20480 / 20736,
    )
    assert found["facts"]["units"] == ["model.stage_0", "model.stage_1", "model.stage_2", "model.table", "out", "root"]
    output = tmp_path / "out"
    (logits,) = pool.run(1, "with_rows", row, "logits", made_up_folder, flags, IDS, 2, str(output))
    with torch.no_grad():
        assert torch.allclose(logits, made_up.load(output)(torch.tensor(IDS)).logits, atol=2e-5)
    assert not torch.allclose(logits, made_up.load(Path(made_up_folder))(torch.tensor(IDS)).logits, atol=1e-3)


@pytest.mark.parametrize(
    "rows, wanted",
    [
        ("", 'no repeated decoder block found in it; add a row to MODELS in scripts/models.py: "made_up": Row(blocks='),
        ('"made_up": Row(blocks="model.stages.*")', "made_up: no module is called model.stages.*"),
        ('"made_up": Row(blocks="model.stage_*")', "the loss here would not be the model's"),
    ],
)
def test_what_cannot_be_found_is_asked_for(pool, made_up_folder, rows, wanted):
    (message,) = pool.run(1, "with_rows", rows, "fit", made_up_folder, TRUST, 1)
    assert wanted in message


def test_code_of_its_own_needs_a_flag(pool, models, made_up_folder, tmp_path):
    import train

    message = refused(lambda: train.empty_model(Path(made_up_folder), torch.float32))
    assert "--trust_remote_code true" in message and made_up_folder in message
    flags = dict(model_name=made_up_folder, train_type="lora", dataset="dummy", output_dir=str(tmp_path / "out"))
    (result,) = pool.run(1, "whole_run", flags)
    assert result["code"] == 2 and "--trust_remote_code true" in result["message"]


def test_verbose_says_what_was_found(pool, made_up_folder, tmp_path):
    flags = dict(model_name=made_up_folder, verbose=True, dataset="dummy", dataset_samples=4, max_steps=1)
    flags |= TRUST | dict(output_dir=str(tmp_path / "out"), save_steps=-1)
    (result,) = pool.run(1, "with_rows", example(), "whole_run", flags)
    assert result["code"] == 0, result["message"]
    lines = result["printed"].splitlines()
    assert "blocks  model.stage_*: 3 x Stage, 98.77% of their parameters quantised" in lines
    assert "linears mix, up, down" in lines and "plain   mix.bias, up.bias, down.bias" in lines
    assert "unit    model.stage_0" in lines
    assert any(line.startswith("train") and "on mix, up, down" in line for line in lines)


@pytest.mark.parametrize(
    "kind, changes",
    [("hyperclovax", dict(logits_scaling=0.5)), ("granite", dict(logits_scaling=3.0)), ("cohere", dict(logit_scale=0.3))],
)
def test_the_losses_logits_are_the_models(kind, changes, monkeypatch):
    """Each model's own forward says so, and a wrong row is noticed."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from scripts.loss import logit_transform

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **tiny.SIZES | changes))
    models.check_logits(model, logit_transform(model.config))
    wrong = models.Row(logits=lambda config: lambda logits: logits * 0.9)
    monkeypatch.setitem(models.MODELS, kind, wrong)
    message = refused(lambda: models.check_logits(model, logit_transform(model.config)))
    assert message.startswith(f"{kind} (") and "MODELS in scripts/models.py" in message


def test_masks_in_old_checkpoints_are_left_out(pool, models, tmp_path):
    """GPT-NeoX's causal masks, which are no weights, and not even numbers."""
    from test_load import copy_model

    def add_masks(tensors: dict) -> dict:
        ones = {f"gpt_neox.layers.{n}.attention.bias": torch.ones(1, 1, 8, 8).bool() for n in (0, 1)}
        rest = {f"gpt_neox.layers.{n}.attention.masked_bias": torch.tensor(-1e9) for n in (0, 1)}
        return tensors | ones | rest

    flags = dict(train_type="qlora", precision="bf16")
    folder = copy_model(models("gpt_neox"), tmp_path / "m", add_masks)
    wanted, found = (pool.run(1, "load_only", path, flags)[0] for path in (models("gpt_neox"), folder))
    assert found["digests"] == wanted["digests"]


class Doubled(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class WithParts(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) + self.lora(x)


class Same(torch.nn.Linear):
    def forward(self, x):
        return x @ self.weight.T + self.bias


def test_linears_are_known_by_what_they_compute():
    found = [models.is_plain(kind) for kind in (torch.nn.Linear, Same, Doubled, WithParts, torch.nn.Bilinear)]
    assert found == [True, True, False, False, False]


def test_renamed_tensors_are_those_of_transformers():
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from scripts.checkpoint import RENAMED

    for name, (pattern, replacement) in RENAMED.items():
        (known,) = get_checkpoint_conversion_mapping(name)
        assert (known.source_patterns, known.target_patterns) == ([pattern], [replacement])


# -------------------------------------------------------------------------------------------------------- docs


def table() -> list[str]:
    """The table of docs/models.md: P where two ranks are compared with one process, L where that is compared with the
    libraries, S where a saved result is loaded by PEFT or transformers, and merged."""
    tests = dict(P=CELLS, L=LIBRARIES, S=[*MERGED, *SAVED, *((family, "full") for family in FAMILIES)])
    lines = ["| model | " + " | ".join(f"`{t}`" for t in TRAIN_TYPES) + " |", "|---" * (len(TRAIN_TYPES) + 1) + "|"]
    for family, (name, *_) in FAMILIES.items():
        cells = ["".join(key for key, known in tests.items() if (family, t) in known) for t in TRAIN_TYPES]
        lines.append(f"| {name} (`{family}`) | " + " | ".join(f"[{cell}][models]" for cell in cells) + " |")
    return lines


def test_the_documented_table_is_that_of_the_tests():
    assert "\n".join(table()) in pages.TEXT, "\n".join(table())
    assert "[models]: ../tests/test_models.py" in pages.TEXT
    assert f"for {len(TRAIN_TYPES)} train types and {len(FAMILIES)} families" in pages.TEXT
