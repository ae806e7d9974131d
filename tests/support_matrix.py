"""docs/support.md from the tests: which train type was compared with what, under which switch, and what is refused.

    python tests/support_matrix.py            # writes docs/support.md

No cell is written by hand: they are read off the parameters of the tests that ROWS and COMPARED name, and off the flags
in their bodies; the messages come from the checks that a run makes.
"""

import ast
import dataclasses
import functools
import importlib
import inspect
import itertools
import re
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/slurm")]
import conftest  # noqa: E402, F401  the environment of the tests

import cases  # noqa: E402
import train  # noqa: E402
from scripts import merge  # noqa: E402

TYPES = tuple(train.TRAIN_TYPES)
FLAGS = {spec.name for spec in dataclasses.fields(train.Config)}
ALIASES = {"on_experts": "lora_experts"}  # parameters of tests that are flags under another name

# Tests that compare losses, gradient norms and weights under flags with a run without them, with one process, or with
# a reference of its own. What they show is in their parameters.
COMPARED = (
    "test_parity.test_world_sizes test_parity.test_precisions test_parity.test_switches test_parity.test_switches_together "
    "test_parity.test_switches_mixed_precision test_trained.test_against_plain_pytorch test_trained.test_world_sizes "
    "test_trained.test_switches test_trained.test_precisions test_trained.test_against_peft "
    "test_trained.test_world_sizes_beside_adapters test_trained.test_precisions_beside_adapters "
    "test_models.test_two_ranks_are_one test_moe.test_against_the_libraries_and_at_two_ranks "
    "test_moe.test_other_worlds test_moe.test_switches test_moe.test_precisions "
    "test_optim.test_steps_in_backward_are_the_same_steps "
    "test_quantized_ends.test_a_run_is_that_over_the_rounded_weights test_quantized_ends.test_precisions "
    "test_load.test_hqq_shards_are_the_whole_in_every_width test_result.test_rslora_reloads_and_merges_with_its_scale"
).split()


class Row(NamedTuple):
    label: str
    flags: dict = {}  # what the checks are asked about, and what a test must have set
    tests: str = ""  # names; without them, COMPARED
    match: str = "value"  # of a test's flags: "value", "any" (set to something), "none" (all tests named count)
    beside: dict = {}  # further flags for the checks
    count: str = ""  # parameter of the tests whose different values are counted


def switch(name: str, value, **more) -> Row:
    said = str(value).lower() if isinstance(value, bool) else value
    return Row(f"`--{name} {said}`", {name: value}, **more)


def named(name: str, value, **more) -> Row:
    """A flag that takes names: whichever they are."""
    return Row(f"`--{name}`", {name: value}, match="any", **more)


def of(label: str, tests: str, **more) -> Row:
    return Row(label, tests=tests, match="none", **more)


WORLDS = "test_parity.test_world_sizes"
LIBRARIES = (
    "test_parity.test_against_the_libraries test_models.test_one_process_is_the_libraries "
    "test_parity.test_own_lora_is_pefts"
)
MERGES = (
    "test_models.test_adapters_load_and_merge test_trained.test_peft_loads_what_is_saved "
    "test_run.test_trained_saved_merged test_moe.test_adapters_reload_and_merge test_moe.test_new_blocks"
)
PACKED = "test_evaluation.test_packed_documents_are_alone test_models.test_packed_documents_are_alone"
SLURM = "test_slurm.test_two_nodes test_slurm.test_three_nodes_with_one_process_each"
QUANTISED = (
    "test_prequantized.test_a_trained_adapter_loads_on_transformers_own_load "
    "test_prequantized.test_other_train_types_dequantise"
)

ROWS = {
    "Numbers": [
        of("one process is transformers, PEFT, bitsandbytes, hqq", LIBRARIES),
        of("2, 3, 4 processes are one", WORLDS),
        of("2 processes are one, bit for bit", "test_parity.test_bitwise_on_two_ranks"),
        of("peak of `--plan exact` is that of real steps", "test_plan.test_peak_is_that_of_real_steps"),
    ],
    "Precision": [
        switch("precision", "fp32", tests=WORLDS, match="none"),
        *(switch("precision", name) for name in train.PRECISIONS if name != "fp32"),
    ],
    "Sharding": [
        switch("sharding_strategy", "full_shard", tests=WORLDS, match="none"),
        *(switch("sharding_strategy", name) for name in train.SHARDINGS if name != "full_shard"),
        switch("wrap_policy", "decoder_attention_mlp"),
        switch("prefetch_units", 0),
        switch("prefetch_units", 3),
        switch("reshard_last_block", False),
    ],
    "Memory": [
        switch("use_cpu_offload", True),
        switch("use_activation_cpu_offload", True),
        switch("use_gradient_checkpointing", True, tests=WORLDS, match="none"),
        switch("use_gradient_checkpointing", False),
        switch("reentrant_checkpointing", True),
        switch("low_memory", False),
        switch("no_sync", True),
        switch("quantize_embeddings", 8),
        switch("optim_in_backward", True, beside=dict(apply_gradient_clipping=False)),
        of("`--compile true`", "test_compile.test_every_train_type"),
    ],
    "Data": [
        of("packed documents do not see each other", PACKED + " test_moe.test_packing"),
        switch("packing", True, tests="test_resume.test_other_switches test_resume.test_another_split_of_packed_rows "
                                      "test_evaluation.test_a_run_with_packing_and_evaluation"),
    ],
    "What is trained": [
        named("n_bits", 4),
        switch("use_rslora", True),
        switch("lora_experts", True),
        switch("train_embeddings", True),
        named("modules_to_save", "norm"),
        named("trainable", "norm"),
        named("freeze", "norm"),
        named("add_tokens", "tokens.txt", tests="test_vocabulary.test_new_rows_are_the_mean_and_the_same_at_every_world "
              "test_vocabulary.test_losses_do_not_depend_on_the_world "
              "test_vocabulary.test_adapters_load_with_peft_generate_and_merge")._replace(match="none"),
    ],
    "Long runs": [
        of("`--resume`, bit for bit", "test_resume.test_train_types"),
        of("`--resume` with other processes or sharding", "test_resume.test_another_split test_resume.test_another_split_of_packed_rows"),
    ],
    "Result": [
        of("saved, it loads with the same logits", "test_result.test_reload_gives_the_same_logits"),
        of("scripts/merge.py gives the model", MERGES),
    ],
    "Models": [
        of("families: 2 processes are one", "test_models.test_two_ranks_are_one", count="family"),
        of("families: one process is the libraries", "test_models.test_one_process_is_the_libraries", count="family"),
        of("mixtures of experts: libraries, 2 processes",
           "test_moe.test_against_the_libraries_and_at_two_ranks", count="model"),
        of("base in bitsandbytes 4-bit", QUANTISED),
    ],
    "Many nodes": [
        of("a SLURM cluster of CPU nodes, `fsdp_multi_node.sh`", SLURM),
        of("srun alone, `hybrid_full_shard`", "test_slurm.test_hybrid_with_one_task_per_process"),
        of("torchrun on two machines", "test_slurm.test_torchrun_without_slurm"),
    ],
    "GPU": [of("anything, on a CUDA card", "")],
}  # fmt: skip


# ------------------------------------------------------------------------------------------ what a test has set


class Item(NamedTuple):
    file: str
    values: dict  # parameters
    flags: frozenset  # (flag, value)


def flags_in(value, name: str = "") -> set:
    """(flag, value) pairs in a parameter, whatever it is made of; a train type's name is one wherever it stands."""
    name = ALIASES.get(name, name)
    if isinstance(value, dict):
        return {pair for key, one in value.items() for pair in flags_in(one, key)}
    if isinstance(value, (tuple, list)):
        return {pair for one in value for pair in flags_in(one)}
    if name in FLAGS:
        return {(name, value)}
    return {("train_type", value)} if isinstance(value, str) and value in TYPES else set()


def words_in(text: str) -> set:
    """Flags of a command line."""
    found = re.findall(r"--(\w+) (\w+)", text)
    return {(name, {"true": True, "false": False}.get(value, value)) for name, value in found if name in FLAGS}


def flags_of_body(function, module) -> tuple[set, set]:
    """What the body sets: (flags, train types that only stand there by name)."""
    flags, names = set(), set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        if isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant):
            flags |= flags_in({node.arg: node.value.value} if node.arg else {})
        elif isinstance(node, ast.Name) and isinstance(known := getattr(module, node.id, None), dict):
            flags |= flags_in({key: one for key, one in known.items() if key in FLAGS})
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            flags |= words_in(node.value)
            names |= flags_in(node.value)
            if inspect.isfunction(case := getattr(cases, node.value, None)):
                names |= {pair for pair in flags_of_body(case, cases)[0] if pair[0] == "train_type"}
    return flags, names


def parameters(function) -> list[dict]:
    """The parameters of each of the items that pytest makes of a test."""
    axes = []
    for mark in (m for m in getattr(function, "pytestmark", ()) if m.name == "parametrize"):
        names = mark.args[0].replace(" ", "").split(",") if isinstance(mark.args[0], str) else list(mark.args[0])
        values = [value.values if hasattr(value, "marks") else value for value in mark.args[1]]  # pytest.param(...)
        axes.append([dict(zip(names, value if len(names) > 1 else (value,), strict=True)) for value in values])
    return [{name: value for part in parts for name, value in part.items()} for parts in itertools.product(*axes)]


@functools.cache
def items(test: str) -> list[Item]:
    module_name, name = test.split(".")
    module = importlib.import_module(module_name)
    function = inspect.unwrap(getattr(module, name))
    body, names = flags_of_body(function, module)
    if module_name == "test_slurm":
        body |= flags_in(module.FLAGS)
    file = Path(inspect.getfile(module)).relative_to(ROOT).as_posix()
    made = []
    for values in parameters(function):
        flags = flags_in(values)
        flags |= {pair for pair in body if pair[0] != "train_type" or "train_type" not in dict(flags)}
        if "train_type" not in dict(flags):
            flags |= names or {("train_type", train.Config.train_type)}
        made.append(Item(file, values, frozenset(flags)))
    return made


# ------------------------------------------------------------------------------------------------------ cells


def matches(row: Row, item: Item) -> bool:
    if row.match == "any":
        return all(dict(item.flags).get(name) for name in row.flags)
    return row.match == "none" or all(pair in item.flags for pair in row.flags.items())


def shown(row: Row) -> dict[str, list[Item]]:
    """Train type -> the items of the row's tests that are about it."""
    tests = row.tests.split() if row.tests or row.match == "none" else COMPARED
    found = [item for test in tests for item in items(test) if matches(row, item)]
    return {t: some for t in TYPES if (some := [item for item in found if ("train_type", t) in item.flags])}


def refusal(row: Row, train_type: str) -> str:
    """What a run says to the row's flags under this train type; empty if nothing."""
    if row.tests == MERGES and train_type == "full":
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text("{}")
            try:
                merge.find_reader(Path(folder))
            except merge.UserError as error:
                return f"scripts/merge.py: {error}".replace(folder, "output")
    expanded = "expanded" if train.TRAIN_TYPES[train_type].new_blocks else None
    config = train.Config(train_type=train_type, llama_pro_path=expanded, **row.flags, **row.beside)
    checks = train.checks
    problems = [*checks.combinations(config), *checks.train_type(config), *checks.optimisation(config)]
    return re.sub(rf"(?<![\w-])(?<!--train_type ){train_type}(?!\w)", "TYPE", "; ".join(problems))


def cell(row: Row, train_type: str, items_: list[Item], notes: list[str]) -> str:
    if reason := refusal(row, train_type):
        assert not items_, f"{row.label}, {train_type}: refused, and there is a test of it"
        notes += [reason] if reason not in notes else []
        return f"no ({notes.index(reason) + 1})"
    files = list(dict.fromkeys(Path(item.file).stem.removeprefix("test_") for item in items_))
    count = len({item.values[row.count] for item in items_}) if row.count and items_ else ""
    return " ".join(f"[{count or '✓'}][{file}]" for file in files[:2]) or "·"


HEAD = """# Support

Made from the tests by `python tests/support_matrix.py`; a test makes it again and compares. **✓** leads to the file of
the tests that show it (numbers: so many families or models), **no** means refused, with the message below, and a dot
that it is neither refused nor tried. All on CPUs: **nothing was tried on a GPU**; `bash tests/gpu/run.sh` is for that.

A switch counts as shown where losses, gradient norms and weights under it were compared with those of one process, of a
run without it, or of plain PyTorch, transformers, PEFT, bitsandbytes and hqq. Families of models one by one:
[models.md](models.md).
"""


def document() -> str:
    notes: list[str] = []
    lines = [HEAD.strip()]
    files = {}
    for group, rows in ROWS.items():
        lines += ["", f"## {group}", "", "| | " + " | ".join(f"`{t}`" for t in TYPES) + " |"]
        lines += ["|---" + "|:-:" * len(TYPES) + "|"]
        for row in rows:
            found = shown(row)
            files |= {Path(i.file).stem.removeprefix("test_"): i.file for some in found.values() for i in some}
            cells = [cell(row, t, found.get(t, []), notes) for t in TYPES]
            lines.append(f"| {row.label} | " + " | ".join(cells) + " |")
    lines += ["", "## Refused", "", *(f"{number}. `{note}`" for number, note in enumerate(notes, 1)), ""]
    lines += [f"[{name}]: ../{file}" for name, file in sorted(files.items())]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (ROOT / "docs" / "support.md").write_text(document())
