"""--compile: compiled blocks give the numbers of eager ones, with few compilations, and say what they lack."""

import pytest

import train
from scripts import compiled
from test_parity import TOLERANCE, distance

# What a compiler fuses is rounded elsewhere, and Adam divides rounding by itself: hence the last number, for
# weights, of which most of the distance is in entries whose gradient is all but zero.
ROUNDING = {"fp32": (1e-6, 5e-5, 3e-3), "bf16": (2e-3, 2e-2, None)}

CASES = [  # (train type, other flags, processes, backend); eager ones take half the time, and show what is captured
    ("full", dict(use_gradient_checkpointing=False, use_activation_cpu_offload=True), 1, "aot_eager"),
    ("lora", dict(reentrant_checkpointing=True), 2, "eager"),
    ("custom_lora", dict(lora_dropout=0.2), 1, "eager"),
    ("qlora", dict(use_cpu_offload=True, use_activation_cpu_offload=True), 2, "aot_eager"),
    ("custom_qlora", dict(use_gradient_checkpointing=False), 1, "eager"),
    ("hqq_lora", dict(use_activation_cpu_offload=True), 1, "eager"),
    ("dora", dict(precision="bf16"), 1, "eager"),
    ("bnb_dora", dict(reentrant_checkpointing=True), 1, "eager"),
    ("hqq_dora", dict(use_gradient_checkpointing=False, use_cpu_offload=True), 2, "eager"),
    ("llama_pro", dict(wrap_policy="decoder_attention_mlp"), 1, "eager"),
    ("bnb_llama_pro", dict(use_gradient_checkpointing=False), 2, "eager"),
    ("hqq_llama_pro", dict(use_cpu_offload=True), 1, "eager"),
]


def compare(pool, models, train_type: str, flags: dict, world: int, backend: str) -> None:
    flags = dict(train_type=train_type, batch_size=4 // world) | flags
    folder = models("llama-one", train_type)
    wanted = pool.run(world, "fit", folder, flags)[0]
    found = pool.run(world, "compiled_fit", folder, flags | dict(compile=True), backend)[0]
    precision = flags.get("precision", "fp32")
    loss, norm, weight = ROUNDING[precision]
    assert found["losses"] == pytest.approx(wanted["losses"], rel=loss)
    assert found["norms"][0] == pytest.approx(wanted["norms"][0], rel=max(1e-6, TOLERANCE[precision][1]))
    assert found["norms"] == pytest.approx(wanted["norms"], rel=norm)
    assert found["frozen_after"] == wanted["frozen"]
    if weight:
        assert distance(found["end"], wanted["end"]) <= weight * distance(wanted["end"], wanted["start"])
    assert found["graphs"] and found["graphs"] == found["graphs_later"]  # later lengths compile nothing
    assert found["breaks"] == 0  # a block is one graph


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_every_train_type(pool, models, case):
    """Traced and differentiated by torch.compile, run by eager kernels: what is captured, and how often."""
    assert {case[0] for case in CASES} == set(train.TRAIN_TYPES)
    compare(pool, models, *case)


def test_generated_kernels(pool, models):
    """One case through the real compiler; adapters on one linear, so that there is little to compile."""
    flags = dict(lora_target_modules="q_proj", use_gradient_checkpointing=False)
    compare(pool, models, "custom_lora", flags, 1, "inductor")


def test_what_it_lacks_is_said_beforehand(monkeypatch):
    assert compiled.problems(0) == []
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "g++ is not found" in compiled.problems(0)[0]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "triton" in compiled.problems(1)[0]


def test_a_failing_compiler_is_one_short_message():
    import torch

    def broken(graph, inputs):
        raise RuntimeError("no such\ninstruction")

    forward = compiled.explained(torch.compile(lambda x: x.sin() + 1, backend=broken))
    with pytest.raises(train.UserError, match="--compile true: .*no such") as caught:
        forward(torch.ones(3))
    assert "\n" not in str(caught.value)


def test_a_plan_says_that_it_is_of_eager_blocks(monkeypatch, capsys):
    from scripts import plan

    def stop(config, *args):
        assert not config.compile
        raise train.UserError("stop")

    monkeypatch.setattr(plan, "plan", stop)
    with pytest.raises(train.UserError, match="stop"):
        plan.answer(train.Config(compile=True, plan="quick"))
    assert "without --compile" in capsys.readouterr().out
