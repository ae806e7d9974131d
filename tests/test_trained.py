"""What is trained: patterns choose parameters of a full run, modules are trained in full beside adapters;
each against plain PyTorch and PEFT with the same requires_grad, and what is saved loads and merges there."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tiny
import train
from reference import plain_base
from scripts import generate, merge, trained
from scripts.flags import UserError
from test_parity import AFTER_ADAM, alone, assert_agrees, assert_close, distance, reference_fit  # noqa: F401
from train import PRECISIONS, TRAIN_TYPES

IDS = [[5, 9, 200, 31, 7, 120, 44, 2], [0, 17, 17, 90, 250, 3, 8, 61]]
ADAPTERS = [name for name, kind in TRAIN_TYPES.items() if kind.adapter]
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def names(model: str = "llama") -> list[str]:
    return list(dict(tiny.model(model).named_parameters(remove_duplicate=False)))


def configuration(**flags) -> train.Config:
    return train.Config(**dict(train_type="full") | flags)


# ---------------------------------------------------------------------------------------------------- patterns


@pytest.mark.parametrize(
    "pattern, wanted",
    [
        ("*", r".*"),
        ("model.layers.0.*", r"model\.layers\.0\..*"),
        ("layers.1", r"model\.layers\.1\..*"),
        ("model.layers", r"model\.layers\..*"),
        ("*embed_tokens*", r"model\.embed_tokens\.weight"),
        ("embed_tokens", r"model\.embed_tokens\.weight"),
        ("lm_head", r"lm_head\.weight"),
        ("norm", r"model\.norm\.weight"),
        ("*norm*", r".*norm\.weight"),
        ("*_proj", r".*_proj\.(weight|bias)"),
        ("q_proj.bias", r".*\.q_proj\.bias"),
        ("bias", r".*\.bias"),
        ("layers.0-1.mlp", r".*\.mlp\..*"),
        ("layers.1-1.mlp.up_proj", r".*\.1\.mlp\.up_proj\.weight"),
        ("*.[qk]_proj.*", r".*\.[qk]_proj\..*"),
        ("model.layers.?.self_attn.o_proj.weight", r".*\.o_proj\.weight"),
    ],
)
def test_a_pattern_matches_runs_of_whole_parts(pattern, wanted):
    known = names("qwen2")
    found = {name for name in known if re.fullmatch(wanted, name)}
    assert trained.matches(pattern, known) == found != set()


@pytest.mark.parametrize(
    "pattern", ["embed", "layer", "layers.2", "ayers.0", "layers.0-2", "layers.1-0", "q_pro"]
)
def test_parts_are_not_cut(pattern):
    assert not trained.matches(pattern, names("qwen2"))


def test_numbers_are_not_cut():
    known = [f"model.layers.{n}.w" for n in range(12)]
    assert trained.matches("layers.1", known) == {known[1]}
    assert trained.matches("layers.0-9", known) == set(known[:10])
    assert trained.matches("layers.9-11", known) == set(known[9:])
    assert not trained.matches("layers.5-999999999999", known)


def refused(folder: str, *texts: str, **flags) -> None:
    """The reason comes from `build`, before it has opened any weights or asked for a process group."""
    with pytest.raises(UserError) as error:
        train.build(configuration(**flags), Path(folder), train.Runtime(0, 0, 1, 1, torch.device("cpu"), lambda: 0))
    for text in texts:
        assert re.search(text, str(error.value)), str(error.value)


def test_patterns_without_a_match_are_refused(models):
    folder = models("llama")
    refused(folder, "--freeze embed_token: .*did you mean embed_tokens", freeze="embed_token,lm_head")
    refused(folder, r"--freeze layer\.0-1: .*mean .*layers\.0", r"norms: .*norm", freeze="layer.0-1,norms")
    refused(folder, "--trainable xyzzy: .*no name is like it", trainable="xyzzy")
    refused(folder, "--freeze .*: nothing is left to train", freeze="*")
    refused(folder, "nothing is left to train", trainable="norm", freeze="*norm*")


# Each combination's own reason; (flag, value) of what is refused.
@pytest.mark.parametrize("train_type", TRAIN_TYPES)
def test_flags_fit_the_train_type(train_type):
    kind, refusals = TRAIN_TYPES[train_type], {}
    argv = ["--train_type", train_type, *(["--llama_pro_path", "x"] if kind.new_blocks else [])]
    for flag, value in (("trainable", "norm"), ("freeze", "norm"), ("train_embeddings", "true"),
                        ("modules_to_save", "norm")):  # fmt: skip
        try:
            train.parse([*argv, f"--{flag}", value])
        except UserError as error:
            refusals[flag] = str(error)
    patterns, modules = {"trainable", "freeze"}, {"train_embeddings", "modules_to_save"}
    assert set(refusals) == (patterns | modules if kind.new_blocks else patterns if kind.adapter else modules)
    why = "new blocks" if kind.new_blocks else "modules_to_save" if kind.adapter else "--trainable says"
    assert all(why in text and text.startswith(f"--{flag}: {train_type}") for flag, text in refusals.items())


# ------------------------------------------------------------------------------------- full, partly frozen

# flags -> what is trained, as a pattern of its own.
CHOICES = [
    ("llama", dict(freeze="*embed_tokens*,layers.0-0"), r"model\.(layers\.1|norm)\..*|lm_head.*"),
    ("llama", dict(freeze="layers.0.mlp,*norm*"), r".*embed.*|lm_head.*|.*attn.*_proj.*|.*\.1\.mlp.*"),
    ("llama", dict(trainable="*norm*,layers.1", freeze="q_proj"), r".*norm.*|.*\.1\.(?!.*q_proj).*"),
    ("llama", dict(trainable="lm_head"), r"lm_head.weight"),
    ("llama", dict(trainable="embed_tokens"), r"model.embed_tokens.weight"),
    ("llama-tied", dict(freeze="lm_head"), r"model\.(layers|norm)\..*"),
    ("llama-tied", dict(freeze="*embed_tokens*,layers.0"), r"model\.(layers\.1|norm)\..*"),
    ("llama-tied", dict(trainable="lm_head"), r"model.embed_tokens.weight"),
    ("qwen2", dict(trainable="bias"), r".*bias"),
]
ids = dict(
    ids=lambda value: ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else None
)


def reference(folder: str, wanted: str):
    """transformers' own model with requires_grad set by a regular expression; and its parameters."""
    model = plain_base(folder, "plain", [])
    named = dict(model.named_parameters())
    for name, parameter in named.items():
        parameter.requires_grad_(re.fullmatch(wanted, name) is not None)
    return model, named


REENTRANT = [(model, flags | dict(reentrant_checkpointing=True), wanted) for model, flags, wanted in CHOICES]


@pytest.mark.parametrize(
    "model, flags, wanted", [*CHOICES, *REENTRANT[:1], *REENTRANT[3:5], REENTRANT[6]], **ids
)
def test_against_plain_pytorch(alone, models, model, flags, wanted):  # noqa: F811
    """Losses, norms, weights, counts; and what is frozen keeps its bytes."""
    found = alone(model, dict(train_type="full", batch_size=4, **flags))
    plain, named = reference(models(model), wanted)
    chosen = {name for name, p in named.items() if p.requires_grad}
    assert set(found["start"]) == chosen and found["frozen"].keys() == named.keys() - chosen
    assert found["facts"]["trained_parameters"] == sum(named[name].numel() for name in chosen)
    losses, norms = reference_fit(plain, tiny.samples(8), 4, 4)
    assert found["losses"] == pytest.approx(losses, rel=1e-6)
    assert found["norms"][0] == pytest.approx(norms[0], rel=1e-6)
    assert found["norms"] == pytest.approx(norms, rel=10 * AFTER_ADAM)
    ends = {name: named[name].detach() for name in chosen}
    assert distance(found["end"], ends) <= 2e-3 * distance(found["end"], found["start"])
    assert all(not torch.equal(found["end"][name], found["start"][name]) for name in chosen)
    assert found["frozen_after"] == found["frozen"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_frozen_first_blocks_are_not_computed_again(reentrant):
    """No backward comes there: one forward each, where blocks that are trained have two."""
    blocks, calls = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4)), []
    for number, block in enumerate(blocks):
        block.requires_grad_(number > 1)
        block.forward = lambda x, n=number, forward=block.forward: (calls.append(n), forward(x))[1]
    train.activations.recompute_blocks(blocks, reentrant)
    hidden = torch.ones(2, 4)
    for block in blocks:
        hidden = block(hidden)
    hidden.sum().backward()
    assert sorted(calls) == [0, 1, 2, 2, 3, 3]
    assert all((block.weight.grad is not None) == (number > 1) for number, block in enumerate(blocks))


MIXED = dict(train_type="full", freeze="embed_tokens,layers.0,layers.1.mlp,*input_layernorm*")


@pytest.mark.parametrize("model, world", [("llama", 2), ("llama", 3), ("llama-tied", 4)])
def test_world_sizes(pool, models, alone, model, world):  # noqa: F811
    """One unit wholly frozen, one mixed."""
    wanted = alone(model, MIXED | dict(batch_size=12), 4, 24)
    for found in pool.run(world, "fit", models(model), MIXED | dict(batch_size=12 // world), 4, 24):
        assert_close(found, wanted)


@pytest.mark.parametrize(
    "model, switches",
    [
        ("llama", dict(wrap_policy="decoder_attention_mlp", sharding_strategy="shard_grad_op")),
        ("llama-tied", dict(reentrant_checkpointing=True, use_cpu_offload=True)),
        ("llama", dict(reentrant_checkpointing=True, wrap_policy="decoder_attention_mlp",
                       use_activation_cpu_offload=True)),
        ("llama-tied", dict(use_gradient_checkpointing=False, sharding_strategy="ddp")),
        ("llama", dict(no_sync=True, gradient_accumulation_steps=2, batch_size=1,
                       sharding_strategy="hybrid_full_shard")),
    ],
    **ids,
)  # fmt: skip
def test_switches(pool, models, alone, model, switches):  # noqa: F811
    wanted = alone(model, MIXED | dict(batch_size=8))
    assert_close(
        pool.run(4, "fit", models(model), MIXED | dict(batch_size=2) | switches, local_world=2)[0], wanted
    )


@pytest.mark.parametrize("precision", [p for p in PRECISIONS if p != "fp32"])
def test_precisions(pool, models, alone, precision):  # noqa: F811
    """Frozen and trained parameters of one unit in the dtypes that the mode gives each."""
    flags = MIXED | dict(precision=precision, reentrant_checkpointing=precision == "mp_bf16")
    wanted = alone("llama-tied", flags | dict(batch_size=4))
    found = pool.run(2, "fit", models("llama-tied"), flags | dict(batch_size=2))[0]
    assert_close(found, wanted, precision)
    exact = alone("llama-tied", MIXED | dict(batch_size=4))
    assert found["losses"] == pytest.approx(exact["losses"], rel=3e-3)
    assert found["frozen_after"] == found["frozen"]
    assert all(not torch.equal(tensor, found["start"][name]) for name, tensor in found["end"].items())


@pytest.mark.parametrize(
    "flags, wanted",
    [
        (MIXED, r"model\.layers\.1\.(self_attn|post).*|.*\.norm\..*"),
        (dict(train_type="qlora", train_embeddings=True), r".*lora_.*|model.embed_tokens.weight"),
        (dict(train_type="bnb_dora", modules_to_save="norm,lm_head"), r".*lora_.*|.*norm.*|.*embed_tokens.*"),
    ],
    **ids,
)
def test_gradients_and_optimiser_state_for_what_is_trained(pool, models, flags, wanted):
    """Under mp_bf16: trained in fp32, frozen in bf16; a tied parameter comes once."""
    for found in pool.run(2, "gradients", models("llama-tied"), flags | dict(precision="mp_bf16")):
        chosen = {name for name in found["dtypes"] if re.fullmatch(wanted, name)}
        assert found["graded"] == chosen == set(found["trained"])
        assert found["held"] == found["facts"]["trained_parameters"]
        assert found["own"] == len(found["trained"]) == len(chosen)
        assert all(found["dtypes"][name] == torch.float32 for name in chosen)
        plain = {dtype for name, dtype in found["dtypes"].items() if name not in chosen}
        assert plain <= {torch.uint8, torch.bfloat16}


# ------------------------------------------------------------------------------------ full, partly frozen: saved


def logits(model, sequences=IDS) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor(sequences)).logits.float()


def loaded(folder) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


@pytest.mark.parametrize("model", ["llama", "llama-tied"])
@pytest.mark.parametrize("case", ["logits", "small_files"])
def test_full_folder_is_whole(pool, models, tmp_path, model, case):
    output, flags = tmp_path / "out", dict(train_type="full", freeze="embed_tokens,layers.0")
    found = pool.run(2, case, models(model), flags, IDS, 3, str(output))[0]
    assert torch.allclose(found, logits(loaded(output)), atol=2e-5)
    assert (found - logits(loaded(models(model)))).abs().max() > 1e-2


def all_tensors(folder) -> dict[str, torch.Tensor]:
    return {n: t for file in Path(folder).glob("model*.safetensors") for n, t in load_file(file).items()}


@pytest.mark.parametrize("model", ["llama", "llama-tied"])
@pytest.mark.parametrize(
    "precision, stored", [("mp_bf16", "float32"), ("mp_bf16", "bfloat16"), ("bf16", "bfloat16")]
)
def test_frozen_weights_are_the_bases(pool, models, tmp_path, model, precision, stored):
    """All in one dtype. mp_bf16 holds frozen weights rounded to bf16: fp32 ones come from the base again."""
    base, output = tmp_path / "base", tmp_path / "out"
    loaded(models(model)).to(getattr(torch, stored)).save_pretrained(base)
    flags = dict(train_type="full", freeze="lm_head,layers.0", precision=precision)
    pool.run(2, "logits", str(base), flags, IDS, 1, str(output))
    before, after = all_tensors(base), all_tensors(output)
    assert set(before) == set(after)
    wanted = torch.float32 if precision == "mp_bf16" else torch.bfloat16
    assert {tensor.dtype for tensor in after.values()} == {wanted}
    assert json.loads((output / "config.json").read_text())["dtype"] == str(wanted).removeprefix("torch.")
    tied = "lm_head.weight" not in before
    frozen = {
        n for n in before if ".0." in n or n == ("model.embed_tokens.weight" if tied else "lm_head.weight")
    }
    same = {n for n in before if torch.equal(before[n].to(wanted), after[n])}
    assert same == frozen and len(frozen) == 10


# ---------------------------------------------------------------------------------------- modules beside adapters


@pytest.mark.parametrize(
    "flags, texts",
    [
        (dict(modules_to_save="embed_token"), ["--modules_to_save embed_token: .*mean embed_tokens"]),
        (dict(modules_to_save="lm_head,normal"), ["--modules_to_save normal: .*norm"]),
        (dict(modules_to_save="rotary_emb"), ["has no weights"]),
        (dict(modules_to_save="layers"), ["is a list of modules"]),
        (dict(modules_to_save="layers.0,down_proj"), ["layers.0.mlp.down_proj is inside another"]),
        (dict(modules_to_save="proj"), ["no linear of the blocks"]),
        (dict(modules_to_save="q_proj", lora_target_modules="q_proj,k_proj"), ["q_proj is trained in full"]),
    ],
    **ids,
)
@pytest.mark.parametrize("train_type", ["lora", "custom_qlora"])
def test_names_without_a_sense_are_refused(models, train_type, flags, texts):
    refused(models("llama"), *texts, train_type=train_type, **flags)


def saved_names(model: str, **flags) -> tuple[set[str], list[str]]:
    module = train.empty_model(Path(model), torch.float32)
    found = trained.find_saved(module, configuration(train_type="qlora", **flags))
    return set(found), trained.written_names(module, found)


def test_names_as_pefts(models):
    """Endings as PEFT reads them; and what is written gives PEFT just these."""
    norms = {f"model.layers.{n}.{kind}_layernorm" for n in (0, 1) for kind in ("input", "post_attention")}
    for flags, found, written in [
        (
            dict(modules_to_save="norm"),
            norms | {"model.norm"},
            ["input_layernorm", "norm", "post_attention_layernorm"],
        ),
        (dict(modules_to_save="model.norm"), {"model.norm"}, ["model.norm"]),
        (
            dict(modules_to_save="1.mlp.up_proj"),
            {"model.layers.1.mlp.up_proj"},
            ["model.layers.1.mlp.up_proj"],
        ),
        (dict(modules_to_save="mlp"), {f"model.layers.{n}.mlp" for n in (0, 1)}, ["mlp"]),
        (dict(train_embeddings=True), {"model.embed_tokens", "lm_head"}, ["embed_tokens", "lm_head"]),
    ]:
        assert saved_names(models("llama"), **flags) == (found, written)
    for flags in (
        dict(train_embeddings=True),
        dict(modules_to_save="lm_head"),
        dict(modules_to_save="embed_tokens"),
    ):
        found, written = saved_names(models("llama-tied"), **flags)
        assert (found, written) == ({"model.embed_tokens", "lm_head"}, ["embed_tokens", "lm_head"])
    assert saved_names(models("llama"), modules_to_save="lm_head") == ({"lm_head"}, ["lm_head"])


def peft_reference(folder: str, kind, start: dict, modules: list[str], plain: tuple):
    """The base from the libraries with PEFT's own adapter and modules_to_save, at the same start; and its
    parameters under our names."""
    from peft import LoraConfig, get_peft_model

    base = plain_base(folder, kind.base, [], plain)
    tied = base.config.tie_word_embeddings and "embed_tokens" in modules
    settings = LoraConfig(r=8, lora_alpha=16, use_dora=kind.adapter == "dora", target_modules=LINEARS,
                          modules_to_save=list(modules), ensure_weight_tying=tied)  # fmt: skip
    model = get_peft_model(base, settings)
    named = {}
    for name, parameter in model.named_parameters():
        name = name.removeprefix("base_model.model.").replace(".modules_to_save.default", "")
        if parameter.requires_grad:
            named[name.replace("vector.default.weight", "vector").replace(".default.", ".")] = parameter
    assert set(start) == set(named)
    with torch.no_grad():
        for name, tensor in start.items():
            if "lora_" not in name:
                assert torch.equal(named[name], tensor)
            named[name].copy_(tensor)
    return model, named


EMBEDDINGS = ["embed_tokens", "lm_head"]
# train type, model, flags, what PEFT is told, linears that stay plain
BESIDE = [
    ("lora", "llama", dict(train_embeddings=True), EMBEDDINGS, ()),
    ("lora", "llama-tied", dict(train_embeddings=True), EMBEDDINGS, ()),
    ("qlora", "llama-tied", dict(train_embeddings=True, modules_to_save="norm"), [*EMBEDDINGS, "norm"], ()),
    ("qlora", "llama", dict(modules_to_save="down_proj,model.norm"), ["down_proj", "model.norm"], ("down_proj",)),
    ("qlora", "qwen2", dict(modules_to_save="layers.0.self_attn.q_proj"), ["layers.0.self_attn.q_proj"],
     ("model.layers.0.self_attn.q_proj",)),
    ("custom_lora", "gemma2", dict(modules_to_save="embed_tokens"), EMBEDDINGS, ()),
    ("custom_qlora", "llama", dict(modules_to_save="layers.1.mlp,lm_head"), ["layers.1.mlp", "lm_head"],
     tuple(f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down"))),
    ("hqq_lora", "llama-tied", dict(modules_to_save="lm_head,o_proj"), [*EMBEDDINGS, "o_proj"], ("o_proj",)),
    ("dora", "llama-tied", dict(train_embeddings=True), EMBEDDINGS, ()),
    ("bnb_dora", "llama", dict(train_embeddings=True, modules_to_save="up_proj"), [*EMBEDDINGS, "up_proj"], ("up_proj",)),
    ("hqq_dora", "llama", dict(modules_to_save="norm"), ["norm"], ()),
    *((t, "llama", dict(train_embeddings=True), EMBEDDINGS, ()) for t in ("custom_lora", "hqq_lora")),
    *((t, "llama", dict(modules_to_save="norm"), ["norm"], ()) for t in ("lora", "dora")),
]  # fmt: skip


@pytest.mark.parametrize("train_type, model, flags, modules, plain", BESIDE, **ids)
def test_against_peft(alone, models, train_type, model, flags, modules, plain):  # noqa: F811
    kind = TRAIN_TYPES[train_type]
    found = alone(model, dict(train_type=train_type, batch_size=4, **flags))
    peft, named = peft_reference(models(model), kind, found["start"], modules, plain)
    count = sum(parameter.numel() for parameter in named.values())
    assert found["facts"]["trained_parameters"] == count
    losses, norms = reference_fit(peft, tiny.samples(8), 4, 4)
    assert_agrees(found, losses, norms, named, 10 * AFTER_ADAM)
    assert all(not torch.equal(tensor, found["start"][name]) for name, tensor in found["end"].items())
    assert found["frozen_after"] == found["frozen"]


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("train_type, model", [("qlora", "llama-tied"), ("hqq_dora", "llama")])
def test_world_sizes_beside_adapters(pool, models, alone, train_type, model, world):  # noqa: F811
    """SGD: under Adam the head's rows of words that do not occur move by gradients that are mostly rounding."""
    flags = dict(train_type=train_type, train_embeddings=True, modules_to_save="norm,layers.1.mlp.down_proj",
                 optimizer="sgd", lr=0.1)  # fmt: skip
    wanted = alone(model, flags | dict(batch_size=12), 4, 24)
    for found in pool.run(world, "fit", models(model), flags | dict(batch_size=12 // world), 4, 24):
        assert_close(found, wanted)


@pytest.mark.parametrize(
    "precision, switches",
    [
        ("mp_bf16", dict(reentrant_checkpointing=True, use_cpu_offload=True)),
        ("mp_fp16_autocast", dict()),
        ("mp_bf16_buffers_autocast", dict(wrap_policy="decoder_attention_mlp")),
    ],
    **ids,
)
def test_precisions_beside_adapters(pool, models, alone, precision, switches):  # noqa: F811
    flags = dict(train_type="custom_qlora", train_embeddings=True, modules_to_save="norm,o_proj")
    wanted = alone("llama-tied", flags | dict(precision=precision, batch_size=4))
    mixed = flags | dict(precision=precision, batch_size=2) | switches
    found = pool.run(2, "fit", models("llama-tied"), mixed)[0]
    assert_close(found, wanted, precision)
    exact = alone("llama-tied", flags | dict(batch_size=4))
    assert found["losses"] == pytest.approx(exact["losses"], rel=3e-3)


# ---------------------------------------------------------------------------------- modules beside adapters: saved


def with_peft(base, adapter):
    from peft import PeftModel

    return PeftModel.from_pretrained(base, adapter)


@pytest.mark.parametrize("train_type, model, flags, modules, plain", BESIDE, **ids)
def test_peft_loads_what_is_saved(pool, models, tmp_path, train_type, model, flags, modules, plain):
    """PEFT alone gives the logits of the model in memory, and has a place for every tensor of the file; merged,
    by PEFT and by scripts/merge.py, the base's 16- or 32-bit weights give the same logits."""
    folder, output, kind = models(model), tmp_path / "out", TRAIN_TYPES[train_type]
    found = pool.run(2, "logits", folder, dict(train_type=train_type, **flags), IDS, 3, str(output))[0]
    # In train mode: in eval bitsandbytes repacks its weights to bf16 on a CPU.
    reloaded = with_peft(plain_base(folder, kind.base, [], plain), output)
    assert torch.allclose(found, logits(reloaded.train()), atol=2e-5)
    from peft import get_peft_model_state_dict

    stored = load_file(output / "adapter_model.safetensors")
    assert {name.removesuffix(".weight") if "magnitude" in name else name for name in
            get_peft_model_state_dict(reloaded)} == set(stored)  # fmt: skip
    plainly = with_peft(loaded(folder), output).eval()
    wanted = logits(plainly)
    merge.merge(str(output), str(tmp_path / "merged"))
    merged = loaded(tmp_path / "merged")
    assert torch.allclose(logits(merged), wanted, atol=2e-5)
    unloaded = plainly.merge_and_unload()
    assert torch.allclose(logits(merged), logits(unloaded), atol=2e-5)
    assert (
        merged.config.tie_word_embeddings
        == unloaded.config.tie_word_embeddings
        == (model in ("llama-tied", "gemma2"))
    )
    before, after = all_tensors(folder), all_tensors(tmp_path / "merged")
    assert set(before) == set(after)
    if (
        kind.base != "plain" and not plain
    ):  # merged into what was trained against, nothing but rounding is lost
        write_run(output, folder, kind)
        merge.merge(str(output), str(tmp_path / "dequantized"), merge_base="dequantized")
        assert torch.allclose(logits(loaded(tmp_path / "dequantized")), found, atol=2e-5)


def write_run(output: Path, folder: str, kind) -> None:
    """run.json as far as merging reads it: how the base was quantised."""
    quantizer = train.QUANTIZERS[kind.base](configuration(precision="fp32")).recipe
    (output / "run.json").write_text(json.dumps(dict(config={}, model=dict(quantizer=quantizer))))


def test_a_16_bit_base_with_trained_embeddings(pool, models, tmp_path):
    """The usual pair on disk: a bf16 base, and an adapter whose modules are fp32. Loaded as generate.py does."""
    base, output = tmp_path / "base", tmp_path / "out"
    loaded(models("llama-tied")).bfloat16().save_pretrained(base)
    tiny.tokenizer().save_pretrained(base)
    flags = dict(train_type="qlora", train_embeddings=True, precision="mp_bf16")
    pool.run(2, "logits", str(base), flags, IDS, 3, str(output))
    model, tokenizer = generate.read_model(generate.locate(str(output)))
    wanted = logits(model)
    assert len(generate.greedy(model, tokenizer, IDS, 4)) == 2
    merge.merge(str(output), str(tmp_path / "merged"))
    merged = loaded(tmp_path / "merged")
    assert merged.dtype == torch.bfloat16 and merged.lm_head.weight is merged.model.embed_tokens.weight
    trained_embeddings = load_file(output / "adapter_model.safetensors")["base_model.model.lm_head.weight"]
    assert trained_embeddings.dtype == torch.float32
    assert torch.equal(merged.lm_head.weight, trained_embeddings.bfloat16())
    apart = (logits(merged) - wanted).abs().max()
    assert apart < 0.1 < 0.3 < (logits(loaded(base)) - wanted).abs().max()
