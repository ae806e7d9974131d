"""Mixtures of experts: loading, quantised stacks, adapters on experts, the auxiliary loss, and what is saved;
against transformers, PEFT, bitsandbytes and hqq."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import tiny
from reference import plain_base
from scripts import block_expansion, experts, merge, prequantized
from scripts.data import Sample
from test_load import copy_model
from test_parity import AFTER_ADAM, assert_close, distance, padded, reference_fit
from test_prequantized import edited
from train import QUANTIZERS, TRAIN_TYPES

MODELS = ("mixtral", "qwen3-moe", "gpt-oss")
IDS = [[5, 9, 200, 31, 7, 120, 44, 2], [0, 17, 17, 90, 250, 3, 8, 61]]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


@pytest.fixture(scope="module")
def stacked(models, tmp_path_factory):
    """The same model as transformers saves it with the experts' matrices in one tensor."""
    from transformers import AutoModelForCausalLM

    def folder(name: str) -> str:
        path = tmp_path_factory.mktemp(name)
        model = AutoModelForCausalLM.from_pretrained(models(name), dtype=torch.float32)
        model.save_pretrained(path, save_original_format=False)
        tiny.tokenizer().save_pretrained(path)
        return str(path)

    return folder


@pytest.fixture(scope="module")
def alone(pool, models):
    known = {}

    def fit(model: str, flags: dict) -> dict:
        key = (model, repr(sorted(flags.items())))
        if key not in known:
            (known[key],) = pool.run(1, "fit", models(model, flags["train_type"]), flags, 3, 12)
        return known[key]

    return fit


# ------------------------------------------------------------------------------------------------- references


def by_library(matrix: torch.Tensor, base: str) -> torch.Tensor:
    """What a matrix is after quantising it with the library and back."""
    if base == "plain":
        return matrix
    if base == "nf4":
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit

        return dequantize_4bit(*quantize_4bit(matrix, quant_type="nf4", compress_statistics=True))
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    linear = torch.nn.Linear(*matrix.shape[::-1], bias=False)
    linear.weight.data = matrix.clone()
    config = BaseQuantizeConfig(4, 64, axis=1)
    return HQQLinear(linear, config, compute_dtype=torch.float32, device="cpu").dequantize()


def library_model(folder: str, base: str):
    """transformers' own model over bitsandbytes' or hqq's weights, each expert's matrix quantised by itself."""
    model = plain_base(folder, base, [])
    with torch.no_grad():
        for module in experts.find(model).values():
            for name in ("gate_up_proj", "down_proj"):
                for matrix in getattr(module, name):
                    matrix.copy_(by_library(matrix.clone(), base))
    return model


def adapted(model, targets: list[str], on_experts: bool, start: dict):
    """The model with PEFT's adapters at the given start, and its parameters under our names."""
    from peft import LoraConfig, get_peft_model

    parameters = ["experts.gate_up_proj", "experts.down_proj"] if on_experts else None
    config = LoraConfig(r=8, lora_alpha=16, target_modules=targets, target_parameters=parameters)
    model = get_peft_model(model, config)
    named = {
        n.removeprefix("base_model.model.").replace(".default.", "."): p for n, p in model.named_parameters()
    }
    assert set(start) == {n for n, p in named.items() if p.requires_grad}
    with torch.no_grad():
        for name, tensor in start.items():
            named[name].copy_(tensor)
    return model, named


def library_fit(model, batch_size: int, count: int, **options):
    """A plain loop; the loss is transformers' own."""
    return reference_fit(
        model, tiny.samples(12), batch_size, count, lambda model, batch: model(**batch, **options).loss
    )


REFERENCES = [(m, t, False) for m in MODELS for t in ("full", "qlora")]
REFERENCES += [("mixtral", "hqq_lora", True), ("gpt-oss", "hqq_lora", False), ("qwen3-moe", "lora", True)]
REFERENCES += [("mixtral", "qlora", True), ("gpt-oss", "custom_qlora", True), ("qwen3-moe", "custom_lora", True)]


@pytest.mark.parametrize("model, train_type, on_experts", REFERENCES)
def test_against_the_libraries_and_at_two_ranks(pool, models, alone, model, train_type, on_experts):
    flags = dict(train_type=train_type, lora_experts=on_experts)
    found, kind = alone(model, flags | dict(batch_size=4)), TRAIN_TYPES[train_type]
    facts = found["facts"]
    assert set(facts["targets"]) == set(ATTENTION if kind.adapter else ())
    reference = library_model(models(model), kind.base)
    named = dict(reference.named_parameters())
    if kind.adapter:
        reference, named = adapted(reference, ATTENTION, on_experts, found["start"])
    losses, norms = library_fit(reference, 4, 3)
    assert found["losses"] == pytest.approx(losses, rel=2e-6)
    assert found["norms"] == pytest.approx(norms, rel=3 * AFTER_ADAM)
    ends = {name: named[name].detach() for name in found["end"]}
    assert distance(found["end"], ends) <= 2e-3 * distance(found["end"], found["start"])
    assert_close(pool.run(2, "fit", models(model), flags | dict(batch_size=2), 3, 12)[0], found)


@pytest.mark.parametrize("world", [3, 4])
@pytest.mark.parametrize("model, train_type, on_experts", [("qwen3-moe", "full", False), ("mixtral", "qlora", True)])
def test_other_worlds(pool, models, alone, model, train_type, on_experts, world):
    """Five experts on three ranks, or one to a rank; batches of 12."""
    flags = dict(train_type=train_type, lora_experts=on_experts)
    wanted = alone(model, flags | dict(batch_size=12))
    assert_close(pool.run(world, "fit", models(model), flags | dict(batch_size=12 // world), 3, 12)[-1], wanted)


SWITCHES = [
    dict(use_gradient_checkpointing=False, wrap_policy="decoder_attention_mlp"),
    dict(reentrant_checkpointing=True, use_cpu_offload=True),
    dict(use_activation_cpu_offload=True, gradient_accumulation_steps=2, batch_size=1),
    dict(sharding_strategy="ddp"),
    dict(low_memory=False),
]


@pytest.mark.parametrize("switches", SWITCHES, ids=lambda s: ",".join(s))
@pytest.mark.parametrize("train_type, on_experts", [("full", False), ("qlora", True)])
def test_switches(pool, models, alone, train_type, on_experts, switches):
    flags = dict(train_type=train_type, lora_experts=on_experts)
    wanted = alone("mixtral", flags | dict(batch_size=4))
    assert_close(pool.run(2, "fit", models("mixtral"), flags | dict(batch_size=2) | switches, 3, 12)[0], wanted)


@pytest.mark.parametrize("precision", ["mp_bf16", "mp_bf16_autocast"])
def test_precisions(pool, models, alone, precision):
    flags = dict(train_type="qlora", lora_experts=True, batch_size=4)
    found = pool.run(1, "fit", models("gpt-oss"), flags | dict(precision=precision), 3, 12)[0]
    assert found["losses"] == pytest.approx(alone("gpt-oss", flags)["losses"], rel=3e-3)


# ---------------------------------------------------------------------------------------------------- loading


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("train_type", ["full", "qlora", "hqq_lora"])
def test_both_layouts_and_all_worlds_give_the_same_bits(pool, models, stacked, model, train_type):
    flags = dict(train_type=train_type, precision="bf16")
    wanted = pool.run(1, "load_only", models(model), flags)[0]
    assert any("experts" in name for name in wanted["digests"])
    assert pool.run(1, "load_only", stacked(model), flags)[0]["digests"] == wanted["digests"]
    results = pool.run(3, "load_only", models(model), flags)
    assert all(result["digests"] == wanted["digests"] for result in results)
    assert sum(result["local"] for result in results) == wanted["local"]
    assert sum(result["bytes_read"] for result in results) <= wanted["bytes_read"]
    for result in pool.run(2, "load_only", stacked(model), flags | dict(low_memory=False)):
        assert result["digests"] == wanted["digests"]


@pytest.mark.parametrize("model", ["mixtral", "gpt-oss"])
def test_bits_are_those_of_each_experts_matrix(pool, models, model):
    from bitsandbytes.functional import quantize_4bit
    from transformers import AutoModelForCausalLM

    parts = pool.run(3, "load_only", models(model), dict(train_type="qlora"))[0]["parts"]
    plain = AutoModelForCausalLM.from_pretrained(models(model), dtype=torch.float32)
    for name, module in experts.find(plain).items():
        for stack in ("gate_up_proj", "down_proj"):
            assert f"{name}.{stack}" not in parts and not any("gate" in n for n in parts if "router" in n)
            for expert, matrix in enumerate(getattr(module, stack).detach()):
                packed, state = quantize_4bit(matrix.contiguous(), quant_type="nf4", compress_statistics=True)
                wanted = dict(weight=packed, absmax=state.absmax, absmax2=state.state2.absmax, offset=state.offset)
                for part, tensor in wanted.items():
                    ours = parts[f"{name}.{stack}.{part}"].unflatten(0, (module.num_experts, -1))[expert]
                    theirs = tensor.contiguous().view(-1).view(torch.uint8)
                    assert torch.equal(ours.flatten(), theirs), (name, stack, part)


@pytest.mark.parametrize("train_type, world", [("qlora", 2), ("hqq_lora", 2), ("lora", 1)])
def test_experts_in_mxfp4_are_read_as_what_they_stand_for(pool, models, tmp_path, train_type, world):
    """A gpt-oss folder as its hub has it, and the same experts' values in plain weights: the same run."""
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    [path.mkdir() for path in (packed, plain)]
    folder = models("gpt-oss")
    settings = dict(quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn"])
    torch.manual_seed(0)

    def pack(tensors: dict) -> dict:
        made = {name: tensor for name, tensor in tensors.items() if not name.endswith("_proj")}
        for name in tensors.keys() - made.keys():
            experts, columns, rows = tensors[name].shape
            made[f"{name}_blocks"] = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
            made[f"{name}_scales"] = torch.randint(118, 123, (experts, rows, columns // 32), dtype=torch.uint8)
        return made

    edited(folder, packed, pack, quantization_config=settings)
    stored = prequantized.open_weights(packed)
    assert len(stored.packed) == 4
    edited(folder, plain, lambda t: {n: stored.tensor(n) if n in stored.packed else w for n, w in t.items()})
    flags = dict(train_type=train_type, precision="bf16")
    (wanted, *_), (found, *_) = (pool.run(world, "fit", str(f), flags, 2, 8) for f in (plain, packed))
    assert found["losses"] == wanted["losses"] and found["norms"] == wanted["norms"]
    assert "4 MXFP4 weights" in found["facts"]["notes"][0]


def test_no_rank_holds_more_than_a_matrix(models):
    """What is read at once is rows of one expert's matrix, not a block's stack."""
    from scripts.checkpoint import Checkpoint, find_slots
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(models("mixtral")))
    stored, slots = Checkpoint(Path(models("mixtral"))), find_slots(model)
    experts.translate(stored, slots, experts.Names(model))
    matched = stored.match(slots)
    assert {slot.shape for slot in matched.values() if slot.expert is not None} == {(256, 64), (64, 128)}
    wanted = load_file(Path(models("mixtral")) / "model.safetensors")
    start = "model.layers.1.block_sparse_moe.experts.2"
    joined = torch.cat([wanted[f"{start}.w1.weight"], wanted[f"{start}.w3.weight"]])
    name = "model.layers.1.mlp.experts.gate_up_proj.2"
    for low, high in ((0, 256), (100, 130), (7, 9), (128, 256), (5, 5)):
        assert torch.equal(stored.rows(name, low, high), joined[low:high])
    read = stored.bytes_read
    assert stored.rows(name, 120, 140).shape == (20, 64) and stored.bytes_read - read == 20 * 64 * 4


def test_experts_that_do_not_fit_are_named(pool, models, tmp_path):
    lost = "model.layers.1.block_sparse_moe.experts.2.w3.weight"

    def change(tensors):
        tensors["model.layers.0.block_sparse_moe.experts.9.w1.weight"] = tensors.pop(lost)
        return tensors

    folder = copy_model(models("mixtral"), tmp_path / "m", change)
    (message,) = pool.run(1, "refused", folder, dict(train_type="full"))
    assert "layers.1.mlp.experts.gate_up_proj.2: missing" in message
    assert "experts.9.w1.weight: not in the model" in message


# ------------------------------------------------------------------------------------------- auxiliary loss


def test_auxiliary_loss_is_transformers(pool, models):
    """With one micro-batch, padding left out; in training only."""
    flags = dict(train_type="full", batch_size=4)
    folder = models("mixtral-balanced")
    (found,) = pool.run(1, "fit", folder, flags, 3, 12)
    losses, norms = library_fit(plain_base(folder, "plain", []), 4, 3)
    assert found["losses"] == pytest.approx(losses, rel=2e-6)
    assert found["norms"] == pytest.approx(norms, rel=3 * AFTER_ADAM)
    without, _ = library_fit(plain_base(folder, "plain", []), 4, 1, output_router_logits=False)
    assert found["losses"][0] > without[0] + 0.3
    held_out, trained = pool.run(1, "smoothed_evaluation", folder, flags)[0]
    assert trained > held_out + 0.3


@pytest.mark.parametrize("train_type", ["full", "qlora"])
def test_auxiliary_loss_over_micro_batches_and_ranks(pool, models, train_type):
    """Two ranks have the micro-batches that one process accumulates: each counts as its share of tokens."""
    folder, samples = models("mixtral-balanced"), tiny.samples(6)
    flags = dict(train_type=train_type, lora_experts=train_type == "qlora")
    halves = [samples[:2], samples[2:]]
    (wanted,) = pool.run(1, "routed_apart", folder, flags, halves)
    assert_close(pool.run(2, "routed_apart", folder, flags, halves)[1], wanted)
    if train_type == "full":
        model, total, count = plain_base(folder, "plain", []).train(), 0.0, 0
        for half in halves:
            given = padded(half)
            supervised = int((given["labels"][:, 1:] != -100).sum())
            total, count = total + supervised * model(**given).loss.item(), count + supervised
        assert wanted["losses"][0] == pytest.approx(total / count, rel=2e-6)


# ------------------------------------------------------------------------------------------------- routing


@pytest.fixture(scope="module")
def apart(models, tmp_path_factory) -> str:
    """Tokens below 150 go to experts 0 and 1, the others to 2 and 3; nobody to one of the last block's."""

    def change(tensors):
        tensors["model.embed_tokens.weight"][:, 0] = 20 * (1 - 2 * (torch.arange(300) >= 150).float())
        for name in [n for n in tensors if n.endswith("block_sparse_moe.gate.weight")]:
            tensors[name].zero_()[:, 0] = torch.tensor([1.0, 0.5, -1.0, -0.5])
        return tensors

    return copy_model(models("mixtral"), tmp_path_factory.mktemp("apart"), change)


@pytest.mark.parametrize(
    "flags",
    [
        dict(train_type="full"),
        dict(train_type="qlora", lora_experts=True),
        dict(train_type="hqq_lora", use_gradient_checkpointing=False),
    ],
    ids=str,
)
def test_ranks_with_different_experts(pool, apart, flags):
    ids = [torch.tensor(s.ids[:6]) % 140 + 2 for s in tiny.samples(2)]  # of one length: no padding
    low, high = ([Sample(i.tolist(), [-100] + i[1:].tolist()) for i in part] for part in (ids, [i + 150 for i in ids]))
    (wanted,) = pool.run(1, "routed_apart", apart, flags, [low, high])
    results = pool.run(2, "routed_apart", apart, flags, [low, high])
    assert [result["hit"] for result in results] == [{0, 1}, {2, 3}] and wanted["hit"] == {0, 1, 2, 3}
    assert_close(results[0], wanted)
    (one_sided,) = pool.run(1, "routed_apart", apart, flags, [low])  # experts that nobody uses
    still = pool.run(2, "routed_apart", apart, flags, [low, low])
    assert still[0]["hit"] == {0, 1} and one_sided["losses"] == pytest.approx(still[0]["losses"], rel=1e-5)


def test_no_value_is_read_from_tensors_without_values():
    """As a memory planner runs it: with a fake model, rows are taken to be spread evenly."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert experts.rows_per_expert(torch.tensor([0, 2, 2, 3]), 5) == [1, 0, 2, 1, 0]
    with FakeTensorMode():
        counts = experts.rows_per_expert(torch.zeros(11, dtype=torch.long), 4)
        assert sum(counts) == 11 and max(counts) - min(counts) <= 1


# ------------------------------------------------------------------------------------------------- results


def read_logits(folder: str, adapter: str | None = None, base: str = "plain") -> torch.Tensor:
    from peft import PeftModel

    model = library_model(folder, base)
    model = PeftModel.from_pretrained(model, adapter) if adapter else model
    with torch.no_grad():
        return model.train()(input_ids=torch.tensor(IDS)).logits


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", ["hub", "stacked"])
def test_full_models_reload(pool, models, stacked, tmp_path, model, layout):
    """In the base's layout; for the hub's, that is what transformers itself saves."""
    folder, output = models(model) if layout == "hub" else stacked(model), tmp_path / "out"
    flags = dict(train_type="full", freeze="layers.0.mlp.experts")
    found = pool.run(3, "logits", folder, flags, IDS, 2, str(output))[0]
    assert torch.allclose(found, read_logits(str(output)), atol=2e-5)
    assert not torch.allclose(found, read_logits(folder), atol=1e-3)
    before, after = (load_file(Path(path) / "model.safetensors") for path in (folder, output))
    assert {n: t.shape for n, t in before.items()} == {n: t.shape for n, t in after.items()}
    kept = [n for n in before if "layers.0." in n and "experts" in n]
    assert kept and all(torch.equal(before[n], after[n]) for n in kept)


ADAPTERS = [("mixtral", "qlora", True), ("qwen3-moe", "custom_lora", True), ("gpt-oss", "hqq_lora", True)]
ADAPTERS += [("mixtral", "bnb_dora", False), ("qwen3-moe", "lora", False)]


@pytest.mark.parametrize("model, train_type, on_experts", ADAPTERS)
@pytest.mark.parametrize("layout", ["hub", "stacked"])
def test_adapters_reload_and_merge(pool, models, stacked, tmp_path, model, train_type, on_experts, layout):
    folder, output = models(model) if layout == "hub" else stacked(model), tmp_path / "out"
    base, flags = TRAIN_TYPES[train_type].base, dict(train_type=train_type, lora_experts=on_experts)
    found = pool.run(2, "logits", folder, flags, IDS, 3, str(output))[0]
    assert torch.allclose(found, read_logits(folder, str(output), base), atol=3e-5)
    assert not torch.allclose(found, read_logits(folder, base=base), atol=1e-3)
    write_run(output, folder, base)
    merge.merge(str(output), str(tmp_path / "merged"))
    assert torch.allclose(read_logits(str(tmp_path / "merged")), read_logits(folder, str(output)), atol=3e-5)
    if base != "plain":
        merge.merge(str(output), str(tmp_path / "deep"), merge_base="dequantized")
        assert torch.allclose(read_logits(str(tmp_path / "deep")), found, atol=3e-5)


def write_run(output: Path, folder: str, base: str) -> None:
    import json

    from scripts.checkpoint import fingerprint

    settings = SimpleNamespace(n_bits=4, hqq_group_size=64, numbers=SimpleNamespace(compute=torch.float32))
    recipe = None if base == "plain" else QUANTIZERS[base](settings).recipe
    said = dict(folder=folder, fingerprint=fingerprint(Path(folder)), quantizer=recipe)
    (output / "run.json").write_text(json.dumps(dict(config={}, model=said)))


@pytest.mark.parametrize("train_type", ["llama_pro", "bnb_llama_pro"])
@pytest.mark.parametrize("model", ["mixtral", "gpt-oss"])
def test_new_blocks(pool, models, tmp_path, model, train_type):
    """Expanded, trained, and merged again."""
    folder, output = str(tmp_path / "pro"), tmp_path / "out"
    block_expansion.main(model_name=models(model), output_dir=folder, expansion_rate=0.5)
    flags = dict(train_type=train_type, llama_pro_path=folder)
    assert torch.allclose(read_logits(folder), read_logits(models(model)), atol=2e-5)
    found = pool.run(2, "logits", folder, flags, IDS, 2, str(output))[0]
    merge.merge(str(output), str(tmp_path / "merged"), base=folder)
    merged = read_logits(str(tmp_path / "merged"))
    assert torch.allclose(found, merged, atol=2e-5) == (train_type == "llama_pro")
    assert not torch.allclose(merged, read_logits(models(model)), atol=1e-3)


def test_a_run_goes_on(pool, models, tmp_path):
    from test_resume import assert_same, interrupted

    rows = tiny.write_alpaca(tmp_path / "rows.jsonl")

    def flags(output: Path, **extra) -> dict:
        base = dict(model_name=models("mixtral-balanced"), dataset=str(rows), output_dir=str(output), lora_rank=4)
        return base | dict(train_type="qlora", lora_experts=True, num_epochs=2, save_steps=3, packing=False) | extra

    assert_same(*interrupted(pool, 2, flags, tmp_path))


def test_packing(pool, models):
    """Documents in one row have the losses that they have alone."""
    samples = tiny.samples(4, longest=12)
    (found,) = pool.run(1, "packed_losses", models("mixtral"), [samples[:2]], [samples[2]], "eager", "full")
    assert found["packed"][0] == pytest.approx(found["alone"][0], rel=1e-5)
    assert found["swapped"][0][1] == pytest.approx(found["alone"][0][1], rel=1e-5)


# ------------------------------------------------------------------------------------------------- refusals


def test_refusals(pool, models):
    import train

    for model, reason, flags in (
        ("mixtral-balanced", "--reentrant_checkpointing true: ", dict(reentrant_checkpointing=True)),
        ("qwen3-moe", "takes these names for the experts'", dict(lora_target_modules="q_proj,gate_proj")),
        ("mixtral", "--modules_to_save mlp: experts cannot", dict(modules_to_save="mlp")),
        ("llama", "has no experts", dict(lora_experts=True)),
    ):
        (message,) = pool.run(1, "refused", models(model), flags | dict(train_type="lora"))
        assert reason in message
    (compiled,) = pool.run(1, "refused", models("mixtral"), dict(train_type="qlora", compile=True))
    assert "which rows go to which expert" in compiled
    for argv, reason in (
        (["--train_type", "bnb_dora"], "PEFT has no DoRA for experts"),
        (["--train_type", "full"], "goes with a LoRA train type"),
        (["--train_type", "qlora", "--lora_dropout", "0.1"], "no --lora_dropout for experts"),
    ):
        with pytest.raises(train.UserError, match=reason):
            train.parse([*argv, "--lora_experts", "true"])
