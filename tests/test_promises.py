"""Numbers that stay the same for ever: a checkpoint holds a step, and what is trained on next, and with which random
numbers, is worked out anew. Were these to change, resumed runs would go on with other data and other noise, and no
comparison of two runs of one version would show it. So here, and only here, literal values stand."""

import pytest
import torch

import train
from scripts import adapters, packing, state

BROKEN = "checkpoints of earlier versions would go on differently: keep the old numbers, or refuse such checkpoints"
LENGTHS = [5, 9, 3, 7, 7, 2, 8, 4]


def test_order_of_the_data():
    assert packing.permutation(12, 42, 0) == [9, 3, 7, 0, 10, 5, 8, 2, 11, 6, 1, 4], BROKEN
    assert packing.permutation(12, 42, 1) == [7, 11, 0, 6, 8, 4, 2, 1, 5, 3, 10, 9], BROKEN
    assert packing.permutation(8, 7, -1) == [0, 3, 7, 2, 1, 5, 6, 4], BROKEN
    assert packing.grouped(LENGTHS, 42, 0, 2) == [7, 0, 5, 2, 3, 4, 6, 1], BROKEN


def test_packing_and_its_split_into_steps():
    config = train.Config(packing=True, context_length=16, batch_size=1)
    assert packing.rows_of_epoch(LENGTHS, config, 0) == [[1, 3], [6, 4], [0, 7, 2, 5]], BROKEN
    assert packing.rows_of_epoch(LENGTHS, config, 1) == [[1, 4], [6, 3], [0, 7, 2, 5]], BROKEN
    plans = [packing.plan(LENGTHS, config, epoch=1, rank=rank, world=2) for rank in (0, 1)]
    assert plans == [[[[[1, 4]]], [[[6, 3]]]], [[[[0, 7, 2, 5]]], [[]]]], BROKEN


@pytest.mark.parametrize("own", ["lora_A.weight", "lora_A.default.weight"])
def test_start_of_adapters(own):
    """torch's CPU generator and kaiming_uniform_ are part of the promise."""
    found = adapters.initial(f"model.layers.0.self_attn.q_proj.{own}", (4, 8), 42)
    wanted = [0.22921361029148102, 0.029253706336021423, 0.16523823142051697, 0.3253355324268341]
    assert [*found[0, :3].tolist(), found[3, 7].item()] == wanted, BROKEN


def test_random_numbers_of_a_step():
    """Dropout and noise on a CPU."""
    state.seed_step(42, step=7, rank=1)
    assert torch.rand(2).tolist() == [0.7272170782089233, 0.18972337245941162], BROKEN
