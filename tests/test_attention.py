"""Attention inside documents is attention with a mask between them: numbers and gradients, windows, shapes."""

import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tiny
from scripts import attention, data, packing
from scripts.flags import UserError


def positions(rows: list[list[int]]) -> torch.Tensor:
    """Rows of documents of these lengths, filled up like packing's."""
    longest = max(map(sum, rows))
    filled = [[*row, longest - sum(row)] for row in rows]
    return torch.tensor([[t for size in row for t in range(size)] for row in filled])


@given(st.lists(st.lists(st.integers(1, 150), min_size=1, max_size=5), min_size=1, max_size=3))
def test_groups_hold_every_document_once(rows):
    where = positions(rows)
    *groups, place = attention.documents(where) or [torch.arange(where.numel()).view(where.shape)] * 2
    elements = torch.cat([group.flatten() for group in groups])
    assert elements[place.flatten()].tolist() == list(range(where.numel()))
    starts = (where == 0).flatten().nonzero().flatten().tolist()
    length = dict(zip(starts, torch.tensor([*starts, where.numel()]).diff().tolist()))
    assert sorted(int(i) for group in groups for i in group[:, 0]) == starts or len(starts) == len(where)
    for group in groups:
        for first in group[:, 0].tolist():
            assert group.shape[1] <= max(attention.SHORTEST, 2**0.5 * length[first] + 1e-6)


def masked(query, key, value, where, window):
    """The same in fp64 with a dense mask, from the definition."""
    document = (where == 0).flatten().cumsum(0).view(where.shape)
    t = torch.arange(where.shape[1])
    seen = (document[:, :, None] == document[:, None, :]) & (t[:, None] >= t)
    seen &= (t[:, None] - t < window) if window else True
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5
    return scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1) @ value


@pytest.mark.parametrize("window", [None, 5, 40])
@pytest.mark.parametrize("rows", [[[70, 3, 40], [1, 33]], [[20, 20]], [[50], [50]]], ids=str)
def test_equals_a_mask(rows, window):
    torch.manual_seed(0)
    where, module = positions(rows), types.SimpleNamespace(num_key_value_groups=2, is_causal=True)
    q, k, v = (torch.randn(*where.shape[:1], heads, where.shape[1], 8, dtype=torch.float64, requires_grad=True)
               for heads in (4, 2, 2))
    found, _ = attention.attend(module, q, k, v, None, attention.documents(where), window, scaling=8**-0.5)
    wanted = masked(q, k, v, where, window).transpose(1, 2)
    weight = torch.randn_like(wanted)
    grads = [torch.autograd.grad((x * weight).sum(), (q, k, v)) for x in (found, wanted)]
    for a, b in zip([found, *grads[0]], [wanted, *grads[1]]):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("given", [dict(), dict(documents=(), position_bias=1), dict(documents=(), mask=1)])
def test_models_that_do_more_are_refused(given):
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(UserError, match="SimpleNamespace.*--attn_implementation sdpa"):
        attention.attend(types.SimpleNamespace(), q, q, q, given.pop("mask", None), **given)


def test_full_rows_need_no_groups():
    assert attention.documents(positions([[7], [7]])) == ()


def test_models_with_other_layers_keep_their_masks():
    config = types.SimpleNamespace(_attn_implementation="sdpa", layer_types=["full_attention"] * 2)
    model = types.SimpleNamespace(config=config, _supports_attention_backend=True)
    assert attention.suits(model)
    for change in (dict(layer_types=["full_attention", "chunked_attention"]), dict(_attn_implementation="eager")):
        changed = types.SimpleNamespace(config=types.SimpleNamespace(**vars(config) | change))
        assert not attention.suits(types.SimpleNamespace(**vars(model) | vars(changed)))


def test_batches_of_a_run_are_not_padded():
    """Rows of unequal examples become one row; targets stay those of the examples."""
    samples = tiny.samples(4, seed=1)
    held = data.Held.__new__(data.Held)
    held.train, held.lengths, held.pad = samples, [len(s.ids) for s in samples], 0
    flat, padded = (held.collate([[0], [1], [2], [3]], False, flat) for flat in (True, False))
    assert flat["input_ids"].shape == (1, sum(held.lengths)) and padded["input_ids"].shape[0] == 4
    sent = [packing.arguments(batch, "cpu")[0]["labels"].tolist() for batch in (flat, padded)]
    assert sent[0] == sent[1]


@pytest.mark.parametrize("model", ["llama", "mistral"])
def test_a_whole_model_equals_padded_rows(pool, models, model):
    """Loss and gradients of a model with groups of documents are those of transformers with padded rows."""
    found = pool.run(1, "flat_and_padded", models(model))[0]
    assert found["attention"] == [attention.NAME, "sdpa"] and found["lengths"][0] < found["lengths"][1]
    assert found["losses"][0] == pytest.approx(found["losses"][1], rel=2e-6)
    for a, b in zip(*found["norms"]):
        assert a == pytest.approx(b, rel=2e-5)
