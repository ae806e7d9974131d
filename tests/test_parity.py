"""Every switch gives the numbers of one process, and one process gives those of plain transformers, PEFT,
bitsandbytes."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import tiny
from reference import plain_base
from scripts import checkpoint
from train import PRECISIONS, SHARDINGS, TRAIN_TYPES

# Largest relative deviation of (losses, gradient norms, trained weights) from one process. fp32 differs only
# in the order of sums. In the others each rank rounds its own gradients; what is stated is about twice what
# was seen. Losses alone would not show a wrong gradient factor (Adam divides it away): the norms do.
AFTER_ADAM = 1e-5  # later norms in fp32: Adam divides by the square root of gradients that are all rounding
TOLERANCE = {
    "fp32": (1e-6, 1e-6, 1e-4),
    "bf16": (1e-3, 8e-3, None),
    "mp_bf16": (1e-3, 5e-3, None),
    "mp_fp16_autocast": (2e-4, 1e-3, None),
    "mp_bf16_autocast": (5e-4, 4e-3, None),
    "mp_bf16_buffers_autocast": (1e-3, 8e-3, None),
}


def assert_close(found: dict, wanted: dict, precision: str = "fp32") -> None:
    loss, norm, weight = TOLERANCE[precision]
    assert found["losses"] == pytest.approx(wanted["losses"], rel=loss)
    assert found["norms"][0] == pytest.approx(wanted["norms"][0], rel=norm)
    assert found["norms"] == pytest.approx(wanted["norms"], rel=max(norm, AFTER_ADAM))
    assert all(torch.equal(found["start"][name], wanted["start"][name]) for name in wanted["start"])
    if weight:
        for name, tensor in wanted["end"].items():
            change = (tensor - wanted["start"][name]).norm()
            # Adam turns a gradient that is zero but for rounding (a key's bias) into a step: hence the
            # factor.
            assert (found["end"][name] - tensor).norm() <= 10 * weight * change, name
        assert distance(found["end"], wanted["end"]) <= weight * distance(wanted["end"], wanted["start"])


def distance(one: dict, other: dict) -> float:
    return sum((one[name] - other[name]).square().sum().item() for name in other) ** 0.5


@pytest.fixture(scope="module")
def alone(pool, models):
    """Results of one process, computed once per set of flags."""
    known = {}

    def fit(model: str, flags: dict, *args) -> dict:
        key = (model, repr(sorted(flags.items())), args)
        if key not in known:
            (known[key],) = pool.run(1, "fit", models(model, flags["train_type"]), flags, *args)
        return known[key]

    return fit


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("train_type", TRAIN_TYPES)
def test_world_sizes(pool, models, alone, train_type, world):
    """A global batch of 12, cut into 1, 2, 3, 4 parts: shards of 300, 128, 64 and 8 rows do not divide by 3.
    """
    wanted = alone("llama", dict(train_type=train_type, batch_size=12), 4, 24)
    flags = dict(train_type=train_type, batch_size=12 // world)
    for found in pool.run(world, "fit", models("llama", train_type), flags, 4, 24):
        assert_close(found, wanted)


@pytest.mark.parametrize("model", ["llama-tied", "qwen2", "gemma2"])
@pytest.mark.parametrize("train_type", ["full", "qlora"])
def test_other_models(pool, models, alone, model, train_type):
    """Tied embeddings, biases, soft caps."""
    wanted = alone(model, dict(train_type=train_type, batch_size=4))
    found = pool.run(2, "fit", models(model, train_type), dict(train_type=train_type, batch_size=2))[0]
    assert_close(found, wanted)


@pytest.mark.parametrize("precision", [p for p in PRECISIONS if p != "fp32"])
@pytest.mark.parametrize("train_type", TRAIN_TYPES)
def test_precisions(pool, models, alone, train_type, precision):
    wanted = alone("llama", dict(train_type=train_type, precision=precision, batch_size=4))
    found = pool.run(
        2, "fit", models("llama", train_type), dict(train_type=train_type, precision=precision, batch_size=2)
    )[0]
    assert_close(found, wanted, precision)
    exact = alone("llama", dict(train_type=train_type, batch_size=4))
    assert found["losses"] == pytest.approx(exact["losses"], rel=3e-3)  # and the mode trains what fp32 trains


SWITCHES = [
    *(dict(sharding_strategy=s) for s in SHARDINGS),
    dict(wrap_policy="decoder_attention_mlp"),
    dict(use_gradient_checkpointing=False),
    dict(reentrant_checkpointing=True),
    dict(reentrant_checkpointing=True, wrap_policy="decoder_attention_mlp", use_cpu_offload=True),
    dict(use_cpu_offload=True),
    dict(use_activation_cpu_offload=True),
    dict(use_activation_cpu_offload=True, use_gradient_checkpointing=False),
    dict(use_cpu_offload=True, use_activation_cpu_offload=True, sharding_strategy="hybrid_full_shard"),
    dict(no_sync=True, gradient_accumulation_steps=2, batch_size=1),
    dict(no_sync=True, gradient_accumulation_steps=2, batch_size=1, sharding_strategy="hybrid_shard_grad_op"),
    dict(use_cpu_offload=True, gradient_accumulation_steps=2, batch_size=1),
    dict(low_memory=False),
    dict(prefetch_units=0),
    dict(prefetch_units=0, use_cpu_offload=True, reentrant_checkpointing=True),
    dict(prefetch_units=3, wrap_policy="decoder_attention_mlp"),
    dict(prefetch_units=2, sharding_strategy="shard_grad_op", use_gradient_checkpointing=False),
    dict(reshard_last_block=False),
    dict(reshard_last_block=False, wrap_policy="decoder_attention_mlp", no_sync=True,
         gradient_accumulation_steps=2, batch_size=1),
]


@pytest.mark.parametrize("switches", SWITCHES, ids=lambda s: ",".join(f"{k}={v}" for k, v in s.items()))
@pytest.mark.parametrize("train_type", ["full", "qlora"])
def test_switches(pool, models, alone, train_type, switches):
    """Four ranks, as two nodes of two, against one process without the switch."""
    wanted = alone("llama", dict(train_type=train_type, batch_size=8))
    flags = dict(train_type=train_type, batch_size=2) | switches
    assert_close(pool.run(4, "fit", models("llama", train_type), flags, local_world=2)[0], wanted)


# The values of SWITCHES, several at a time, for the train types that are not compared under each by itself.
TOGETHER = {
    "offloaded": dict(sharding_strategy="shard_grad_op", use_cpu_offload=True, reentrant_checkpointing=True, prefetch_units=0),
    "in parts": dict(sharding_strategy="hybrid_full_shard", wrap_policy="decoder_attention_mlp", prefetch_units=3,
                     use_activation_cpu_offload=True),
    "copied": dict(sharding_strategy="ddp", use_gradient_checkpointing=False, low_memory=False),
    "accumulated": dict(sharding_strategy="hybrid_shard_grad_op", no_sync=True, gradient_accumulation_steps=2, batch_size=1,
                        reshard_last_block=False),
}  # fmt: skip


@pytest.mark.parametrize("switches", TOGETHER.values(), ids=TOGETHER)
@pytest.mark.parametrize("train_type", [t for t in TRAIN_TYPES if t not in ("full", "qlora")])
def test_switches_together(pool, models, alone, train_type, switches):
    """As test_switches."""
    wanted = alone("llama", dict(train_type=train_type, batch_size=8))
    flags = dict(train_type=train_type, batch_size=2) | switches
    assert_close(pool.run(4, "fit", models("llama", train_type), flags, local_world=2)[0], wanted)


FORWARD = ["gather 0", "gather 1"]


@pytest.mark.parametrize(
    "flags, backward",
    [
        (dict(prefetch_units=0), ["use 1", "gather 1", "use 0", "gather 0"]),
        (dict(), ["gather 1", "use 1", "gather 0", "use 0"]),
        (dict(prefetch_units=3), ["gather 1", "gather 0", "use 1", "use 0"]),
        # Recomputation calls the attention and MLP of block 0 in backward: they must not gather block 1 again.
        (dict(prefetch_units=3, wrap_policy="decoder_attention_mlp"), ["gather 1", "use 1", "gather 0", "use 0"]),
        (dict(reshard_last_block=False), ["use 1", "gather 0", "use 0"]),
        (dict(sharding_strategy="shard_grad_op"), ["use 1", "use 0"]),
    ],
    ids=str,
)
def test_when_blocks_are_gathered(pool, models, flags, backward):
    """Forward, then backward, which reaches block 1 first."""
    found = pool.run(2, "gathers", models("llama"), dict(train_type="qlora") | flags)
    assert found == [FORWARD + backward] * 2


@pytest.mark.parametrize("precision", ["mp_bf16", "mp_fp16_autocast"])
@pytest.mark.parametrize(
    "switches",
    [
        dict(sharding_strategy="hybrid_full_shard"),
        dict(sharding_strategy="ddp"),
        dict(use_cpu_offload=True),
        dict(reentrant_checkpointing=True),
    ],
    ids=str,
)
def test_switches_mixed_precision(pool, models, alone, precision, switches):
    wanted = alone("llama", dict(train_type="custom_qlora", precision=precision, batch_size=8))
    flags = dict(train_type="custom_qlora", precision=precision, batch_size=2) | switches
    assert_close(pool.run(4, "fit", models("llama"), flags, local_world=2)[0], wanted, precision)


@pytest.mark.parametrize("train_type", TRAIN_TYPES)
def test_bitwise_on_two_ranks(pool, models, train_type):
    """Two ranks do the additions of two micro-batches on one: not a bit differs."""
    (wanted,) = pool.run(
        1,
        "fit",
        models("llama", train_type),
        dict(train_type=train_type, batch_size=1, gradient_accumulation_steps=2),
    )
    found = pool.run(2, "fit", models("llama", train_type), dict(train_type=train_type, batch_size=1))[0]
    assert all(torch.equal(found["end"][name], tensor) for name, tensor in wanted["end"].items())


@pytest.mark.parametrize("train_type", ["full", "qlora"])
def test_split_of_the_batch_does_not_matter(pool, models, alone, train_type):
    """(batch, accumulation, world) = (4,1,1) = (1,4,1) = (1,2,2) = (1,1,4), with unequal numbers of
    supervised tokens, two examples (so, in the last split, ranks) without any, and a last window that is not
    full: 10 examples, 3 steps."""
    masked = (3, 7)
    wanted = alone("llama", dict(train_type=train_type, batch_size=4), 3, 10, masked)
    for batch, accumulation, world in [(1, 4, 1), (1, 2, 2), (1, 1, 4), (2, 2, 1)]:
        flags = dict(train_type=train_type, batch_size=batch, gradient_accumulation_steps=accumulation)
        for found in pool.run(world, "fit", models("llama", train_type), flags, 3, 10, masked):
            assert_close(found, wanted)


@pytest.mark.parametrize("types", [("lora", "custom_lora"), ("qlora", "custom_qlora")])
def test_own_lora_is_pefts(alone, types):
    one, other = (alone("llama", dict(train_type=t, batch_size=4, lora_target_modules="all")) for t in types)
    assert one["losses"] == other["losses"]
    assert all(torch.equal(one["end"][name], tensor) for name, tensor in other["end"].items())


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("train_type", TRAIN_TYPES)
def test_all_that_is_trained_moves_and_nothing_else(alone, train_type, precision):
    result = alone("llama", dict(train_type=train_type, precision=precision, batch_size=4))
    still = [name for name, tensor in result["end"].items() if torch.equal(tensor, result["start"][name])]
    assert not still
    assert result["frozen_after"] == result["frozen"]


@pytest.mark.parametrize(
    "checkpointing", [dict(reentrant_checkpointing=r, use_gradient_checkpointing=True) for r in (True, False)]
)
def test_checkpointed_adapters_move(pool, models, checkpointing):
    """With frozen embeddings, reentrant checkpointing silently trains nothing unless its input requires grad.
    """
    result = pool.run(
        2, "fit", models("llama-tied"), dict(train_type="qlora", precision="mp_bf16", **checkpointing), 2
    )[0]
    assert all(not torch.equal(tensor, result["start"][name]) for name, tensor in result["end"].items())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_packed_bytes_survive_gathering(pool, models, precision):
    assert all(pool.run(2, "unsharded_bytes", models("llama"), dict(train_type="qlora", precision=precision)))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_rope_is_fp32(alone, pool, models, precision):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    wanted = LlamaRotaryEmbedding(tiny.model("llama").config).inv_freq
    for result in pool.run(2, "fit", models("llama"), dict(train_type="qlora", precision=precision), 1):
        found = {n: b for n, b in result["buffers"].items() if "inv_freq" in n}
        assert found and all(b.dtype == torch.float32 and torch.equal(b, wanted) for b in found.values())


def test_overflow_on_one_rank_skips_the_step_on_all(pool, models):
    flags = dict(train_type="custom_lora", precision="mp_fp16_autocast", apply_gradient_clipping=True)
    for result in pool.run(2, "fp16_overflow", models("llama"), flags):
        assert result == dict(skipped=True, scale=32768.0, moved=True)


def test_clipping_is_the_same_in_fp16_and_fp32(alone):
    """Unscaled before clipped: with a limit far below the norm, weights move alike."""
    flags = dict(
        train_type="custom_lora",
        batch_size=4,
        optimizer="sgd",
        lr=1.0,
        apply_gradient_clipping=True,
        grad_norm=0.1,
    )
    one, other = (alone("llama", flags | dict(precision=p)) for p in ("fp32", "mp_fp16_autocast"))
    for name, tensor in one["end"].items():
        assert torch.allclose(
            other["end"][name] - other["start"][name], tensor - one["start"][name], atol=5e-4
        )
    change = torch.cat([(t - one["start"][n]).flatten() for n, t in one["end"].items()]).norm()
    assert 0.1 < change < 1.0  # four steps of norm 0.1 with momentum, not of norm 0.5


# ------------------------------------------------------------------------------------- independent references


LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def reference_model(folder: str, train_type: str, start: dict, linears: list[str] = LINEARS):
    """The same model from the libraries alone, with PEFT's adapters, at the same start; and its named
    parameters."""
    from peft import LoraConfig, get_peft_model

    kind = TRAIN_TYPES[train_type]
    new_blocks = checkpoint.new_blocks(Path(folder)) if kind.new_blocks else []
    model = plain_base(folder, kind.base, new_blocks)
    if not kind.adapter:
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point():
                parameter.requires_grad_(name in start)
        return model, dict(model.named_parameters())
    dora = kind.adapter == "dora"
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, use_dora=dora, target_modules=linears))
    named = {
        n.replace("base_model.model.", "")
        .replace("vector.default.weight", "vector")
        .replace(".default.", "."): p
        for n, p in model.named_parameters()
    }
    assert set(start) == {n for n, p in named.items() if p.requires_grad}
    with torch.no_grad():
        for name, tensor in start.items():
            if "magnitude" in name:  # PEFT computed its own from the same weights
                assert torch.allclose(named[name], tensor, rtol=1e-6)
            named[name].copy_(tensor)
    return model, named


def padded(samples: list) -> dict:
    """One batch with an attention mask, as transformers takes it."""
    longest = max(len(s.ids) for s in samples)
    rows = [(s, longest - len(s.ids)) for s in samples]
    return dict(
        input_ids=torch.tensor([s.ids + [1] * n for s, n in rows]),
        attention_mask=torch.tensor([[1] * len(s.ids) + [0] * n for s, n in rows]),
        labels=torch.tensor([s.labels + [-100] * n for s, n in rows]),
    )


def plain_loss(model, batch: dict) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


def reference_fit(model, samples: list, batch_size: int, count: int, loss_of=plain_loss):
    """A plain loop: padded batches with an attention mask, whole logits, cross-entropy, AdamW, one process.
    """
    from scripts import data

    model.train()  # in eval mode bitsandbytes repacks weights for bf16 on a CPU
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    windows = data.steps(
        len(samples), seed=1, epoch=0, batch_size=batch_size, accumulation=1, rank=0, world=1
    )
    losses, norms = [], []
    for (chosen,) in (windows * count)[:count]:
        loss = loss_of(model, padded([samples[i] for i in chosen]))
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trained, float("inf")).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def assert_agrees(found: dict, losses: list, norms: list, named: dict, after_first: float) -> None:
    """What `fit` found against a reference's losses, gradient norms (exact for the first step, within
    `after_first` later) and parameters at the end."""
    assert found["losses"] == pytest.approx(losses, rel=1e-6)
    assert found["norms"][0] == pytest.approx(norms[0], rel=1e-6)
    assert found["norms"] == pytest.approx(norms, rel=after_first)
    ends = {name: named[name].detach() for name in found["end"]}
    assert distance(found["end"], ends) <= 2e-3 * distance(found["end"], found["start"])


REFERENCES = [(t, "llama") for t in TRAIN_TYPES if "custom" not in t]
REFERENCES += [(t, model) for t in ("full", "lora", "qlora", "bnb_dora") for model in ("llama-tied", "qwen2")]


@pytest.mark.parametrize("train_type, model", REFERENCES)
def test_against_the_libraries(alone, models, train_type, model):
    found = alone(model, dict(train_type=train_type, batch_size=4))
    reference, named = reference_model(models(model, train_type), train_type, found["start"])
    losses, norms = reference_fit(reference, tiny.samples(8), 4, 4)
    assert_agrees(found, losses, norms, named, 3 * AFTER_ADAM)
    ends = {name: named[name].detach() for name in found["end"]}
    for name, tensor in found["end"].items():  # a key's gradients nearly vanish: it strays further
        assert (ends[name] - tensor).norm() <= 2e-2 * (tensor - found["start"][name]).norm(), name
