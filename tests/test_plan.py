"""The planner: its bytes are those of real steps on real tensors, quick plans are exact ones, the allocator's model keeps
its books, a tensor on the wrong device or a value read inside the step fails, and what people see."""

import dataclasses
import json
import random
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

import train
from pool import forks
from scripts import plan
from scripts.cuda_allocator import MIB, CachingAllocator

GIB = 2**30


class Planner:
    """Calls plan_cases.NAME(*args) in processes of their own, where the fake accelerator is: each on one core."""

    def __init__(self, processes: ProcessPoolExecutor):
        self.processes = processes

    def __call__(self, name: str, *args):
        return self.processes.submit(call, name, args).result()

    def each(self, *calls: tuple) -> list:
        """The results of several calls (name, *args), which are made side by side."""
        return [job.result() for job in [self.processes.submit(call, name, args) for name, *args in calls]]


@pytest.fixture(scope="module")
def planner():
    with ProcessPoolExecutor(2, forks(), torch.set_num_threads, (1,)) as processes:
        yield Planner(processes)


def call(name: str, args: tuple):
    import plan_cases

    plan_cases.plan_trace.register()
    return getattr(plan_cases, name)(*args)


# -------------------------------------------------------------------------------------------- against real steps


def test_persistent_bytes_are_those_of_real_shards(planner, models):
    """Parameters, worlds 1 to 4; odd sizes, so that shards are uneven."""
    experts, ends = ("mixtral", {}), ("llama-tied", dict(quantize_embeddings=8))
    cases = [(train_type, world, ("llama", {})) for train_type in train.TRAIN_TYPES for world in (1, 2, 3, 4)]
    cases += [("qlora", 2, experts), ("hqq_lora", 3, experts), ("full", 4, experts), ("qlora", 3, ends)]
    calls = [
        ("shards", models(model, train_type), dict(train_type=train_type, **flags), world)
        for train_type, world, (model, flags) in cases
    ]
    for case, (made, found) in zip(cases, planner.each(*calls)):
        assert made == found and found > 0, case


CASES = [
    (train_type, checkpointing, offload)
    for number, train_type in enumerate(train.TRAIN_TYPES)
    for checkpointing, offload in (
        [(True, True), (True, False), (False, True), (False, False)]
        if train_type in ("full", "qlora")
        else [(number % 3 > 0, number % 2 == 0)]
    )
]


@pytest.mark.parametrize("train_type, checkpointing, offload", CASES)
def test_peak_is_that_of_real_steps(planner, models, train_type, checkpointing, offload):
    """On a fake CPU to a tenth of a percent, as the same operations run. On the fake accelerator, where all places are
    added up, to 5%: there torch steps all parameters together, as it does on CUDA."""
    flags = dict(train_type=train_type, use_gradient_checkpointing=checkpointing, use_cpu_offload=offload)
    folder = models("llama", train_type)
    kinds = ["gpu", "cpu"] if checkpointing == offload else ["gpu"]
    calls = [("planned", folder, flags, 2, kind) for kind in kinds]
    real, fake, *same = planner.each(("real", folder, flags, 2), *calls)
    if same:
        assert same[0]["together"] == pytest.approx(real["peak"], rel=1e-3 if train_type != "qlora" else 2e-3)
    assert fake["together"] == pytest.approx(real["peak"], rel=0.05)
    assert fake["state_bytes"] == real["state_bytes"] > 0
    assert fake["parameters_bytes"] == real["parameters_bytes"]
    assert (fake["peaks"]["pinned"] > 0) == offload


def test_peak_with_quantised_embeddings_is_that_of_real_steps(planner, models):
    flags = dict(train_type="qlora", quantize_embeddings=8)
    folder = models("llama")
    real, planned = planner.each(("real", folder, flags, 2), ("planned", folder, flags, 2, "gpu"))
    assert planned["together"] == pytest.approx(real["peak"], rel=0.05)


def closed_form(shape: dict, world: int, rank: int) -> int:
    """Bytes of QLoRA's shards, from the shapes alone: NF4 with two levels of statistics, bf16 for the rest, bf16
    adapters."""
    hidden, mlp, vocabulary = shape["hidden_size"], shape["intermediate_size"], shape["vocab_size"]
    keys = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    linears = [(hidden, hidden), (keys, hidden), (keys, hidden), (hidden, hidden)]
    linears += [(mlp, hidden), (mlp, hidden), (hidden, mlp)]

    def rows(count: int) -> int:
        return -(-count // world)

    block = sum(
        rows(out) * (inner // 2 + inner // 64) + rows(-(-out * inner // 64 // 256)) * 4 + 4
        + 2 * (rows(rank) * inner + rows(out) * rank)
        for out, inner in linears
    )
    block += 2 * 2 * rows(hidden)
    return shape["num_hidden_layers"] * block + 2 * (2 * rows(vocabulary) * hidden + rows(hidden))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_persistent_bytes_of_a_70b_in_closed_form(planner, world):
    flags = dict(lora_rank=64, precision="bf16")
    assert planner("shard_bytes", "Llama-2-70B", flags, 3, world) == closed_form(
        plan.SHAPES["Llama-2-70B"] | dict(num_hidden_layers=3), world, 64
    )


# ------------------------------------------------------------------------------------------------ quick and exact


@pytest.mark.parametrize(
    "flags, depth",
    [
        (dict(train_type="qlora", wrap_policy="decoder_attention_mlp"), 12),
        (dict(train_type="full", use_cpu_offload=True), 16),
    ],
)
def test_quick_is_exact(planner, flags, depth):
    """Allocated, pinned and pageable memory of every phase, for blocks of Llama-2-7B."""
    flags = flags | dict(batch_size=1, lora_rank=64, precision="bf16")
    quick, exact = planner("quick_and_exact", "Llama-2-7B", flags, depth)
    assert quick.keys() == exact.keys()
    for key, value in exact.items():
        assert abs(quick[key] - value) < 0.02 * GIB, key
    assert exact["backward", "accelerator"] > GIB / 2


def test_no_change_is_proposed_that_training_refuses():
    """Accumulation, and an adapter, do not go with --optim_in_backward."""
    flags = dict(model_name="Llama-2-7B", train_type="full", batch_size=4, apply_gradient_clipping=False)
    for changes in (dict(batch_size=1, gradient_accumulation_steps=4), dict(train_type="qlora")):
        assert plan.changed(train.Config(**flags), changes)[1] == changes
        assert plan.changed(train.Config(**flags, optim_in_backward=True), changes)[1] == {}
    assert plan.changed(train.Config(**flags), dict(batch_size=4))[1] == {}


# ----------------------------------------------------------------------------------------------- device placement


@pytest.mark.parametrize("precision", train.PRECISIONS)
def test_every_type_and_precision_runs_on_a_device_that_is_not_the_cpu(planner, models, precision):
    """Offload on for every other type, and the other way round with the next precision."""
    shift, calls = list(train.PRECISIONS).index(precision), []
    for number, train_type in enumerate(train.TRAIN_TYPES):
        flags = dict(train_type=train_type, precision=precision, use_cpu_offload=(number + shift) % 2 == 0)
        calls.append(("planned", models("llama-one", train_type), flags, 2, "gpu", True, 1))
    for train_type, found in zip(train.TRAIN_TYPES, planner.each(*calls)):
        assert not any(found["blocking"].values()), (train_type, found["blocking"])


@pytest.mark.parametrize(
    "flags",
    [
        dict(packing=True),
        dict(no_sync=True, gradient_accumulation_steps=2),
        dict(use_activation_cpu_offload=True),
        dict(reentrant_checkpointing=True, lora_dropout=0.1, wrap_policy="decoder_attention_mlp"),
        dict(train_type="dora", wrap_policy="decoder_attention_mlp"),
        dict(sharding_strategy="hybrid_full_shard", hybrid_shard_size=1),
        dict(low_memory=False, optimizer="fused_adamw"),
    ],
    ids=lambda flags: next(iter(flags)),
)
def test_other_switches_run_on_it(planner, models, flags):
    assert planner("planned", models("llama"), flags, 2, "gpu", True, 1)["peaks"]["accelerator"] > 0


@pytest.mark.parametrize("name", ["llama-tied", "qwen2", "gemma2"])
def test_other_models_run_on_it(planner, models, name):
    """Gemma 2 attends by plain products, in windows, and caps its scores."""
    real, found = planner.each(("real", models(name), {}, 2), ("planned", models(name), {}, 2, "gpu"))
    assert found["together"] == pytest.approx(real["peak"], rel=0.05)


@pytest.mark.parametrize(
    "mistake, error",
    [
        ("wrong_device", "FakeTensorDeviceMismatchError"),
        ("value_read", "DataDependentOutputException"),
        ("shards_left", "FakeTensorDeviceMismatchError"),
    ],
)
def test_mistakes_do_not_pass(planner, models, mistake, error):
    assert planner("with_mistake", models("llama"), mistake) == error


# ------------------------------------------------------------------------------------------------- the allocator


def test_allocator_keeps_its_books():
    allocator, rng, live = CachingAllocator(), random.Random(0), {}
    for key in range(6000):
        if live and rng.random() < 0.5:
            chosen = rng.choice(list(live))
            del live[chosen]
            allocator.release(chosen)
        else:
            live[key] = -(-rng.choice([700, 90_000, 3 * MIB, 40 * MIB]) * rng.randint(1, 9) // 512) * 512
            allocator.allocate(key, live[key], rng.randint(0, 2))
        if key % 500 == 0:
            blocks = list(allocator.blocks.values())
            assert sum(block.size for block in blocks) == allocator.reserved
            free = sorted(block.address for block in blocks if not block.used)
            assert free == sorted(address for pool in allocator.free.values() for _, address in pool)
            assert allocator.reserved >= sum(block.size for block in blocks if block.used) >= sum(live.values())
    for key in list(live):
        allocator.release(key)
    allocator.empty_cache()
    assert allocator.reserved == 0 and not allocator.blocks  # everything merged back to whole segments


def test_allocator_sizes_and_retries():
    """The numbers of c10/cuda/CUDACachingAllocator.cpp."""
    sizes = {512: 2, MIB: 2, MIB + 512: 20, 9 * MIB: 20, 10 * MIB: 10, 11 * MIB + 512: 12}
    for size, wanted in sizes.items():
        allocator = CachingAllocator()
        allocator.allocate(0, size, 0)
        assert allocator.reserved == wanted * MIB
    allocator = CachingAllocator(100 * MIB)
    allocator.allocate(0, 60 * MIB, 0)
    allocator.release(0)
    allocator.allocate(1, 80 * MIB, 1)  # what another stream has cached is given back, not used
    assert (allocator.retries, allocator.failed, allocator.peak) == (1, False, 80 * MIB)
    allocator.allocate(2, 30 * MIB, 1)
    assert allocator.failed


# ---------------------------------------------------------------------------------------------- what people see


def test_command(planner, models, tmp_path):
    """The whole command on a tiny model: the report, and the same as JSON."""
    out = tmp_path / "plan.json"
    code, text = planner("command", ["--plan", "--world_size", "2", "--model_name", models("llama"), "--plan_json", str(out)])
    found = json.loads(out.read_text())
    assert code == 0 and "verdict: fits" in text and max(map(len, text.splitlines())) <= 110
    assert found["verdict"] == "fits" and found["mode"] == "exact" and found["world_size"] == 2
    assert found["largest"]["batch_size"] > 4 and found["reserved"] >= found["allocated"]
    assert sum(found["parts"].values()) == found["allocated"]
    assert f"--batch_size {found['largest']['batch_size']}" in text


def test_what_does_not_fit_gets_changes(planner, models, tmp_path):
    out = tmp_path / "plan.json"
    flags = ["--plan", "--world_size", "2", "--model_name", models("llama"), "--plan_json", str(out), "--train_type", "full"]
    small = ["--gpu_memory", "0.8025", "--batch_size", "8", "--context_length", "64"]
    small += ["--use_gradient_checkpointing", "false"]
    code, text = planner("command", flags + small)
    found = json.loads(out.read_text())
    assert code == 0 and found["verdict"] == "does not fit" and found["changes"]
    assert "--use_gradient_checkpointing true" in text
    for before, row in zip([found, *found["changes"]], found["changes"]):
        assert before["allocated"] - row["allocated"] == row["gain"] > 0


def test_named_shapes():
    for name, shape in [
        ("meta-llama/Llama-2-70b-hf", "Llama-2-70B"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "Llama-3-8B"),
        ("meta-llama/Llama-3.1-70B", "Llama-3-70B"),
        ("mistralai/Mistral-7B-v0.1", "Mistral-7B"),
        ("01-ai/Yi-34B", "Yi-34B"),
        ("Qwen/Qwen3-32B", "Qwen3-32B"),
    ]:
        assert plan.model_content(name) == plan.SHAPES[shape]
    with pytest.raises(train.UserError, match="Llama-2-70B"):
        plan.model_content("no-such/model")


def test_changes_are_legal_for_every_type():
    for train_type in train.TRAIN_TYPES:
        config = train.Config(train_type=train_type, plan="quick")
        for change, _ in plan.CHANGES:
            made, flags = plan.changed(config, change(config))
            assert all(getattr(made, name) == value for name, value in flags.items())
            assert train.TRAIN_TYPES[made.train_type].new_blocks == config.type.new_blocks


def test_flags_that_plan_takes():
    parsed = train.parse(["--plan", "--batch_size", "2"])
    assert (parsed.plan, parsed.batch_size) == ("quick", 2)
    assert train.parse(["--plan", "exact"]).plan == "exact"
    with pytest.raises(train.UserError, match="--plan fast: choose from quick, exact"):
        train.parse(["--plan", "fast"])
    assert dataclasses.replace(parsed, plan=None).plan is None


def test_a_run_looks_at_its_memory(planner, models):
    """Parameters, gradients and two states of full fp32 training, and a block, by the sizes of real tensors."""
    folder, flags = models("llama"), dict(train_type="full", precision="fp32")
    parameters = planner("real", folder, flags, 1, 0)["parameters_bytes"]
    block = planner("block_bytes", folder)
    needed = 4 * parameters + block
    assert planner("room", folder, needed - 1, flags)[1].startswith("this run cannot fit")
    said, error = planner("room", folder, needed, flags)
    assert said.startswith("warning: memory is tight") and not error
    assert planner("room", folder, needed - 1, flags | dict(force=True))[1] == ""
    assert planner("room", folder, 2 * needed, flags) == ("", "")
    stepped = flags | dict(optim_in_backward=True, apply_gradient_clipping=False)  # never has all gradients
    assert not planner("room", folder, needed - parameters, stepped)[1]
    assert planner("room", folder, needed - parameters - 1, stepped)[1]
