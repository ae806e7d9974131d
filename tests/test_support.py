"""docs/support.md is what the tests and the checks say today."""

import pytest

import support_matrix
from support_matrix import ROOT, Row, cell, flags_in, items, words_in


def test_the_page_is_that_of_the_tests():
    found = (ROOT / "docs" / "support.md").read_text()
    assert found == support_matrix.document(), "run: python tests/support_matrix.py"


def test_flags_are_read_off_parameters_bodies_and_command_lines():
    case = ("qlora", dict(use_cpu_offload=True, other=1), 2, "eager")
    assert flags_in(case) == {("train_type", "qlora"), ("use_cpu_offload", True)}
    assert flags_in(True, "on_experts") == {("lora_experts", True)}
    assert words_in("--packing true --context_length 256 --nothing 3") == {("packing", True), ("context_length", "256")}
    of_test = {item.flags for item in items("test_trained.test_precisions")}
    assert all({("train_type", "full"), ("freeze", "embed_tokens,layers.0,layers.1.mlp,*input_layernorm*")} <= i for i in of_test)
    assert {dict(i)["precision"] for i in of_test} == set(support_matrix.train.PRECISIONS) - {"fp32"}
    packed = items("test_models.test_packed_documents_are_alone")  # the type stands in the body
    assert {dict(item.flags)["train_type"] for item in packed} == {"full"}


def test_cells():
    notes = []
    assert cell(Row("", dict(n_bits=4)), "qlora", [], notes) == "no (1)" and "not with TYPE" in notes[0]
    assert cell(Row("", dict(n_bits=4)), "hqq_dora", [], notes) == "·"
    (item,) = items("test_slurm.test_two_nodes")
    assert cell(Row("", {}), "qlora", [item], notes) == "[✓][slurm]"
    with pytest.raises(AssertionError, match="refused, and there is a test of it"):
        cell(Row("", dict(n_bits=4)), "qlora", [item], notes)
