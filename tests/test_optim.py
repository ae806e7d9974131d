"""Optimisers against those of torch and bitsandbytes on plain tensors, their state by name, steps inside
backward, and regularisation against its definitions."""

import math
from types import SimpleNamespace

import pytest
import torch

import cases
import tiny
import train
from scripts import neftune, optim
from scripts.flags import UserError

STEPS, RATE, DECAY, RATIO = 5, 1e-2, 0.1, 4.0
BNB = {  # their own classes, on plain tensors
    "adamw_8bit": "AdamW8bit",
    "paged_adamw_32bit": "PagedAdamW32bit",
    "paged_adamw_8bit": "PagedAdamW8bit",
    "lion": "Lion",
    "lion_8bit": "Lion8bit",
}


def plain_run(make, dtype=torch.float32) -> dict[str, torch.Tensor]:
    """The same steps on whole tensors in this process; `make(groups)` -> optimiser. Groups by hand: no decay on
    one dimension, lora_B four times as fast, the rate falling linearly after a first step at the peak."""
    named = {k: torch.nn.Parameter(t.to(dtype)) for k, t in cases.optimizer_numbers(0).items()}
    rate = {k: RATE * (RATIO if k == "a.lora_B.weight" else 1) for k in named}
    decay = {k: 0.0 if k == "norm.weight" else DECAY for k in named}
    groups = [dict(params=[p], lr=rate[k], weight_decay=decay[k]) for k, p in named.items()]
    optimizer = make(groups)
    for step in range(1, STEPS + 1):
        for group, name in zip(optimizer.param_groups, named):
            group["lr"] = rate[name] * (STEPS - step + 1) / STEPS
        for name, grad in cases.optimizer_numbers(step).items():
            named[name].grad = grad.to(dtype)
        optimizer.step()
    return {name: p.detach() for name, p in named.items()}


def bnb_run(name: str) -> dict[str, torch.Tensor]:
    import bitsandbytes

    betas = (0.9, 0.99) if "lion" in name else (0.9, 0.95)
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    manager.initialize()

    def make(groups):
        manager.override_config(groups[0]["params"][0], "optim_bits", 32)  # the embedding, as they advise
        return getattr(bitsandbytes.optim, BNB[name])(groups, betas=betas)

    try:
        return plain_run(make)
    finally:
        manager.initialize()


@pytest.mark.filterwarnings("ignore:Paged optimizers")
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", BNB)
def test_shards_give_bitsandbytes_bits(pool, name, world):
    """Shards of whole blocks of 256 and states that fit: not a bit differs from the whole tensors."""
    wanted = bnb_run(name)
    for found in pool.run(world, "optimizer_run", name, STEPS):
        for key, tensor in wanted.items():
            assert torch.equal(found["end"][key], tensor), key
        wide = {k.split(".", 1)[1] for k, t in found["state"].items() if t.dtype == torch.uint8}
        assert wide == ({"a.lora_A.weight", "a.lora_B.weight"} if "8bit" in name else set())


class Lion64(torch.optim.Optimizer):
    """Algorithm 2 of arXiv:2302.06675."""

    def __init__(self, groups):
        super().__init__(groups, dict(lr=0.0, weight_decay=0.0))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                update = torch.sign(0.9 * m + 0.1 * p.grad)
                p -= group["lr"] * (update + group["weight_decay"] * p)
                self.state[p]["m"] = 0.99 * m + 0.01 * p.grad


TORCH = {
    "adamw": lambda g: torch.optim.AdamW(g, betas=(0.9, 0.95)),
    "adam": lambda g: torch.optim.Adam(g, betas=(0.9, 0.95)),
    "sgd": lambda g: torch.optim.SGD(g, momentum=0.9),
    "adadelta": torch.optim.Adadelta,
    "lion": Lion64,
}
TORCH |= {"fused_" + name: TORCH[name] for name in ("adamw", "adam")} | dict(paged_adamw_32bit=TORCH["adamw"])


@pytest.mark.parametrize("name", TORCH)
def test_shards_give_the_numbers_of_fp64(pool, name):
    start, wanted = cases.optimizer_numbers(0), plain_run(TORCH[name], torch.float64)
    for found in pool.run(2, "optimizer_run", name, STEPS):
        for key, tensor in wanted.items():
            change = (tensor - start[key]).norm()
            rounding = 1e-7 * tensor.norm()
            assert (found["end"][key] - tensor).norm() <= 2e-5 * change + rounding and change > 4e-5 * tensor.norm()


def test_every_optimizer_has_a_reference():
    assert set(optim.OPTIMIZERS) == set(BNB) | set(TORCH)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", optim.OPTIMIZERS)
def test_state_by_name_goes_on_bit_for_bit(pool, name, world):
    """State and weights into new tensors after step 2: parameters and every state at the end are those of an
    undisturbed run."""
    straight = pool.run(world, "optimizer_run", name, STEPS)
    resumed = pool.run(world, "optimizer_run", name, STEPS, 2)
    for one, other in zip(straight, resumed):
        assert one["groups"] == other["groups"] and set(one["state"]) == set(other["state"])
        assert all(torch.equal(t, other["end"][k]) for k, t in one["end"].items())
        assert all(torch.equal(t, other["state"][k]) for k, t in one["state"].items())
        assert {k.split(".", 1)[1] for k in one["state"]} == set(cases.SHAPES)


def small_config(**flags) -> train.Config:
    return cases.configuration("unused", **dict(train_type="lora", lr=RATE, wd=DECAY) | flags)


def parameters() -> dict[str, torch.nn.Parameter]:
    return {name: torch.nn.Parameter(t) for name, t in cases.optimizer_numbers(0).items()}


def test_state_of_another_optimizer_is_refused():
    named = parameters()
    for name, other in [("adamw", "lion"), ("lion", "adamw"), ("lion", "lion_8bit"), ("sgd", "adam")]:
        optimizer = optim.make_optimizer(named, small_config(optimizer=name))
        for key, parameter in named.items():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        keys = list(optim.state_tensors(optimizer, named))
        if (name, other) == ("sgd", "adam"):
            keys = [*keys, "exp_avg.gone.weight"]
        with pytest.raises(UserError, match="optimiser state does not fit"):
            optim.allocate_state(optim.make_optimizer(named, small_config(optimizer=other)), named, keys)


@pytest.mark.parametrize("name", optim.OPTIMIZERS)
def test_no_value_is_read_in_a_step(name):
    """So that a step can be planned on tensors without values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        named = {k: torch.nn.Parameter(torch.empty(shape)) for k, shape in cases.SHAPES.items()}
        optimizer = optim.make_optimizer(named, small_config(optimizer=name))
        for _ in range(2):
            for parameter in named.values():
                parameter.grad = torch.empty_like(parameter)
            optimizer.step()
        assert len(optimizer.state) == len(named)


def test_embeddings_of_a_model_keep_32_bits(pool, models):
    """Tied or not; norms are too small for 8 bits."""
    flags = dict(train_type="full", optimizer="adamw_8bit", batch_size=2)
    for model in ("llama", "llama-tied"):
        for found in pool.run(2, "state_kinds", models(model), flags):
            assert found["state1.model.embed_tokens.weight"] == "torch.float32"
            assert found["state2.model.layers.1.mlp.up_proj.weight"] == "torch.uint8"
            assert found["state1.model.norm.weight"] == "torch.float32"
            assert ("state1.lm_head.weight" in found) == (model == "llama")
            assert found.get("state1.lm_head.weight", "torch.uint8") == "torch.uint8"


def test_overflow_skips_a_local_step_on_all_ranks(pool, models):
    flags = dict(train_type="custom_lora", precision="mp_fp16_autocast", optimizer="lion")
    for result in pool.run(2, "fp16_overflow", models("llama"), flags):
        assert result == dict(skipped=True, scale=32768.0, moved=True)


# ------------------------------------------------------------------------------------- other world sizes, 8 bit


@pytest.mark.parametrize("key", ["state1", "state2"])
@pytest.mark.parametrize("worlds", [(2, 3), (3, 1), (1, 4), (4, 2)])
def test_8bit_state_for_another_world_size(key, worlds):
    """Three ranks' rows do not divide 40, and rows of 100 do not divide into blocks. Each piece is dequantised
    as bitsandbytes does it, and after requantising lies within half a gap of the code book."""
    import bitsandbytes.functional as B

    torch.manual_seed(0)
    whole = torch.randn(40, 100) * torch.logspace(-4, 0, 40)[:, None]
    whole = whole if key == "state1" else whole.square()
    book = B.create_dynamic_map(signed=key == "state1")
    pieces, rows, first = [], [], 0
    for part in whole.chunk(worlds[0]):
        codes, state = B.quantize_blockwise(part.contiguous(), code=book, blocksize=256)
        pieces.append((first, codes, state.absmax))
        rows.append(B.dequantize_blockwise(codes, state))
        first += len(part)
    pieces.append((40, pieces[0][1][:0], pieces[0][2][:0]))  # a rank without rows
    gap = book.sort().values.diff().max() / 2
    first = 0
    for part in torch.cat(rows).chunk(worlds[1]):
        found = optim.dequantized(key, pieces, first, first + len(part))
        assert torch.equal(found, part)
        codes, absmax = optim.requantized(key, found)
        own, state = B.quantize_blockwise(part.contiguous(), code=book, blocksize=256)
        assert torch.equal(codes, own) and torch.equal(absmax, state.absmax)
        again = optim.dequantized(key, [(0, codes, absmax)], 0, len(part))
        scale = absmax.repeat_interleave(256)[: part.numel()].view(part.shape)
        assert ((again - part).abs() <= gap * scale * 1.001).all()
        first += len(part)
    assert optim.dequantized(key, pieces, 40, 40).shape == (0, 100)
    assert [len(t) for t in optim.requantized(key, whole[:0])] == [0, 0]


# ------------------------------------------------------------------------------------------------------- groups


def test_groups_are_loraplus_and_base_rate_comes_first():
    """PEFT's own LoRA+ puts the same parameters at the higher rate."""
    from peft import LoraConfig, get_peft_model
    from peft.optimizers import create_loraplus_optimizer

    model = get_peft_model(tiny.model("llama"), LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    reference = create_loraplus_optimizer(model, torch.optim.AdamW, lr=RATE, loraplus_lr_ratio=RATIO)
    wanted = {p: g["lr"] for g in reference.param_groups for p in g["params"]}
    backwards = dict(reversed(trained.items()))  # lora_B comes first
    groups = optim.param_groups(backwards, small_config(loraplus_lr_ratio=RATIO))
    assert {p: g["lr"] for g in groups for p in g["params"]} == wanted
    assert [g["lr"] for g in groups] == [RATE, RATE * RATIO]


def test_decay_is_for_matrices(models):
    """Of a whole model: all but norms and biases decay, each parameter is in one group."""
    model = tiny.model("qwen2")
    groups = optim.param_groups(dict(model.named_parameters()), small_config(train_type="full"))
    decayed = {id(p) for g in groups if g["weight_decay"] == DECAY for p in g["params"]}
    still = {id(p) for g in groups if g["weight_decay"] == 0 for p in g["params"]}
    names = {n for n, p in model.named_parameters() if id(p) in still}
    assert names == {n for n, _ in model.named_parameters() if "norm" in n or n.endswith("bias")}
    assert not decayed & still and len(decayed) + len(still) == len(list(model.parameters()))


# ---------------------------------------------------------------------------------------------- in the backward


IN_BACKWARD = [
    (2, "llama-tied", dict(train_type="full", optimizer="adamw")),
    (2, "llama", dict(train_type="full", optimizer="adamw_8bit", precision="mp_bf16")),
    (1, "llama", dict(train_type="full", optimizer="sgd")),
    (2, "llama", dict(train_type="full", use_cpu_offload=True, wrap_policy="decoder_attention_mlp")),
    (2, "llama-tied", dict(train_type="full", reentrant_checkpointing=True)),
    (4, "llama", dict(train_type="bnb_llama_pro", sharding_strategy="hybrid_full_shard")),
    (2, "llama", dict(train_type="llama_pro")),
    (2, "llama", dict(train_type="hqq_llama_pro")),
]


@pytest.mark.parametrize("world, model, flags", IN_BACKWARD, ids=str)
def test_steps_in_backward_are_the_same_steps(pool, models, world, model, flags):
    """Losses, norms and weights, bit for bit, with weight decay and a schedule."""
    folder = models(model, flags["train_type"])
    flags = flags | dict(wd=0.1, lr_scheduler="cosine", apply_gradient_clipping=False)
    wanted = pool.run(world, "fit", folder, flags, local_world=2 if world == 4 else None)[0]
    found = pool.run(
        world, "fit", folder, flags | dict(optim_in_backward=True), local_world=2 if world == 4 else None
    )[0]
    assert found["losses"] == wanted["losses"] and found["norms"] == wanted["norms"]
    assert all(torch.equal(found["end"][name], tensor) for name, tensor in wanted["end"].items())
    assert any(not torch.equal(found["start"][name], tensor) for name, tensor in wanted["end"].items())


@pytest.mark.parametrize("world", [1, 2])
def test_steps_in_backward_free_gradients(pool, models, world):
    """Alive at once: one unit's gradients (of four: embedding, two blocks, norm and head), not all."""
    flags = dict(train_type="full", optimizer="adamw")
    whole = pool.run(world, "gradient_bytes", models("llama"), flags)[0]
    found = pool.run(world, "gradient_bytes", models("llama"), flags | dict(optim_in_backward=True))[0]
    assert whole["most"] >= whole["whole"] == found["whole"]
    assert found["most"] < 0.5 * whole["most"]


def test_a_gradient_in_two_parts_is_refused():
    named = parameters()
    optim.make_optimizer(named, small_config(train_type="full", optim_in_backward=True))
    weight = named["a.lora_A.weight"]
    weight.sum().backward()
    with pytest.raises(RuntimeError, match="in two parts"):
        weight.sum().backward()


# ---------------------------------------------------------------------------------------------------- schedules


@pytest.mark.parametrize("total", [1, 2, 7, 100, 1003])
@pytest.mark.parametrize("flags, warmup", [
    (dict(), lambda total: max(1, round(0.1 * total))),
    (dict(warmup_ratio=0.5), lambda total: max(1, round(0.5 * total))),
    (dict(warmup_steps=3), lambda total: 3),
    (dict(warmup_steps=0), lambda total: 1),
    (dict(warmup_ratio=0.0), lambda total: 1),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("floor", [None, 0.0, 0.25])
@pytest.mark.parametrize("name", optim.SCHEDULES)
def test_rates_by_their_definition(name, floor, flags, warmup, total):
    """Rises by equal steps to the peak at the end of the warm-up, falls (not under constant), and ends exactly at
    --min_lr; without it at a tenth (cosine) or one of its own steps above zero (linear)."""
    config = small_config(lr_scheduler=name, min_lr=None if floor is None else floor * RATE, **flags)
    rates, top = observed_rates(config, total), warmup(total)
    if name == "constant" and not flags:
        top = 1
    assert rates[:top] == pytest.approx([RATE * step / top for step in range(1, top + 1)][:total])
    if total <= top:
        return
    left = total - top
    end = {"constant": 1.0, "linear": 1 / (left + 1), "cosine": 0.1}[name]
    end = end if floor is None or name == "constant" else floor
    assert rates[-1] == pytest.approx(end * RATE, abs=1e-12)
    for step in range(top + 1, total):
        way = (step - top) / left
        fall = {"constant": 1.0, "linear": 1 - way, "cosine": math.cos(math.pi * way / 2) ** 2}[name]
        assert rates[step - 1] == pytest.approx(RATE * (end + (1 - end) * fall))


def observed_rates(config, total: int) -> list[float]:
    """What a group at the base rate sees, once the one at RATIO times it is seen to move with it."""
    named = dict(w=torch.nn.Parameter(torch.zeros(1, 1)), lora_B=torch.nn.Parameter(torch.zeros(1, 1)))
    optimizer = optim.make_optimizer(named, train.dataclasses.replace(config, optimizer="sgd", loraplus_lr_ratio=RATIO))
    schedule, rates = optim.make_schedule(optimizer, config, total), []
    for _ in range(total):
        one, other = (group["lr"] for group in optimizer.param_groups)
        assert other == pytest.approx(RATIO * one)
        rates.append(schedule.get_last_lr()[0])
        assert one == rates[-1]
        optimizer.step()
        schedule.step()
    return rates


# ------------------------------------------------------------------------------------------------------- NEFTune


class Recorder(torch.nn.Module):
    """An embedding and a base model around it, as transformers builds them."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 16)
        self.base_model = SimpleNamespace()

    def get_input_embeddings(self):
        return self.embedding


class Base(torch.nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding

    def forward(self, input_ids, position_ids=None):
        return self.embedding(input_ids)


def noised(alpha: float):
    model = Recorder()
    model.base_model = Base(model.embedding)
    before = set(dict(model.named_parameters()))
    neftune.add_noise(model, alpha)
    assert set(dict(model.named_parameters())) == before
    return model


def test_noise_is_transformers():
    """The same draws, the same scale, on padded rows; none in evaluation."""
    from transformers.integrations.neftune import neftune_post_forward_hook

    model, ids = noised(5.0), torch.randint(0, 50, (3, 12))
    plain = torch.nn.Embedding.from_pretrained(model.embedding.weight.detach()).train()
    plain.neftune_noise_alpha = 5.0
    plain.register_forward_hook(neftune_post_forward_hook)
    torch.manual_seed(1)
    wanted = plain(ids)
    torch.manual_seed(1)
    found = model.base_model(ids)
    assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)
    assert (found - model.embedding.weight[ids]).abs().max() > 0.1
    assert torch.equal(model.eval().base_model(ids), model.embedding.weight[ids])


def test_packed_documents_have_noise_of_their_own_length():
    """Rows of documents of 3 + 5 and 8 tokens: per document uniform in +-alpha / sqrt(length * width)."""
    model, ids = noised(2.0), torch.zeros(2, 8, dtype=torch.long)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7]])
    noise = torch.stack([
        model.base_model(ids, position_ids=positions) - model.embedding.weight[ids] for _ in range(400)
    ]).detach()  # fmt: skip
    for row, start, length in [(0, 0, 3), (0, 3, 5), (1, 0, 8)]:
        part, limit = noise[:, row, start : start + length], 2.0 / math.sqrt(length * 16)
        assert 0.999 * limit < part.abs().max() <= limit * 1.0001
        assert part.std().item() == pytest.approx(limit / math.sqrt(3), rel=0.02) and abs(part.mean()) < 0.02 * limit
    late = model.base_model(ids) - model.embedding.weight[ids]  # without positions: not measured by those before
    assert late.abs().max() <= 2.0 / math.sqrt(8 * 16) * 1.0001


@pytest.mark.parametrize("train_type", ["full", "qlora"])
def test_noise_is_drawn_once_a_step(pool, models, train_type):
    """Recomputing blocks, in both forms, sees the noise of the first pass; and there is noise."""
    flags = dict(train_type=train_type, neftune_alpha=20.0)
    known = [
        pool.run(2, "fit", models("llama"), flags | more, 2)[0]
        for more in (
            dict(use_gradient_checkpointing=False),
            dict(use_gradient_checkpointing=True),
            dict(reentrant_checkpointing=True),
            dict(neftune_alpha=0.0),
        )
    ]
    for found in known[1:3]:
        assert found["losses"] == known[0]["losses"]
        assert all(torch.equal(t, found["end"][name]) for name, t in known[0]["end"].items())
    assert known[3]["losses"][0] != known[0]["losses"][0] and set(known[3]["end"]) == set(known[0]["end"])


def test_smoothing_is_for_training_only(pool, models):
    """One step over all samples, in training and in evaluation, against cross-entropy of whole logits."""
    model, samples = tiny.model("llama"), tiny.samples(4)
    wanted = []
    for smoothing in (0.0, 0.2):
        total, count = 0.0, 0
        for sample in samples:
            logits, labels = model(torch.tensor([sample.ids])).logits[0, :-1], torch.tensor(sample.labels[1:])
            total += torch.nn.functional.cross_entropy(
                logits.double(), labels, reduction="sum", label_smoothing=smoothing
            ).item()
            count += int((labels != -100).sum())
        wanted.append(total / count)
    flags = dict(train_type="full", label_smoothing=0.2, batch_size=4)
    (found,) = pool.run(1, "smoothed_evaluation", models("llama"), flags)
    assert found == pytest.approx(wanted, rel=1e-6) and abs(wanted[1] - wanted[0]) > 0.01
