"""Promises of scripts/data.py and scripts/demo.py: what is supervised, who sees what, what is refused."""

import gzip
import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from scripts import data, demo, formats, tokens
from scripts.data import IGNORE, DataError, Sample
from scripts.flags import kebab, quiet

ROWS = [
    {"instruction": "Add the numbers.", "input": "1 and 2", "output": "3"},
    {"instruction": "Greet  twice", "input": "", "output": "héllo\n  wörld 👋 "},
    {"instruction": "Say nothing.", "output": ""},
    {"instruction": "Indent", "output": "\n\n    return x"},
]


# ---------------------------------------------------------------------- tokenizers small enough to build here


def build_tokenizer(bos=False, eos_too=False, pad=None, merges=()):
    """Byte-level BPE with the given merges; `bos`/`eos_too`: a post-processor that adds them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    specials = ["<s>", "</s>", "<pad>"]
    pieces = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>" if eos_too else "<s> $A", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token=pad
    )


KINDS = {
    "plain": {},
    "bos": {"bos": True},
    "bos and eos": {"bos": True, "eos_too": True},
    "pad is eos": {"pad": "</s>"},
    "own pad": {"pad": "<pad>"},
    # ":\n" ends every prompt; the second and third merge reach across into a response that starts with "\n".
    "crossing": {"merges": [(":", "Ċ"), (":Ċ", "Ċ"), (":ĊĊ", "Ċ")]},
}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request):
    return build_tokenizer(**KINDS[request.param])


@pytest.fixture(scope="module")
def bpe():
    return build_tokenizer()


def one(row, tokenizer, context_length=4096):
    (sample,), _ = data.tokenize([row], tokenizer, context_length)
    return sample


# ------------------------------------------------------------------------------------------- tokens and masks


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["instruction"])
def test_ids_are_those_of_the_whole_text(tokenizer, row):
    prompt, response = data.render(row)
    whole = tokenizer(prompt + response)["input_ids"]
    if whole[-1] != tokenizer.eos_token_id:
        whole = whole + [tokenizer.eos_token_id]
    sample = one(row, tokenizer)
    assert sample.ids == whole
    assert all(label in (i, IGNORE) for i, label in zip(sample.ids, sample.labels, strict=True))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["instruction"])
def test_supervised_tokens_are_the_response_and_eos(tokenizer, row):
    sample = one(row, tokenizer)
    text = tokenizer.decode([label for label in sample.labels if label != IGNORE])
    wanted = row["output"] + "</s>"
    assert text.endswith(wanted)
    # Only a token that straddles the boundary may add a piece of the prompt.
    assert text == wanted or formats.PROMPT.endswith(text[: -len(wanted)])


def test_straddling_token_is_supervised():
    tokenizer = build_tokenizer(**KINDS["crossing"])
    sample = one(ROWS[3], tokenizer)
    first = next(label for label in sample.labels if label != IGNORE)
    assert tokenizer.decode([first]) == ":\n\n\n"


def test_one_bos_and_one_eos(tokenizer):
    adds_bos = tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id
    for row in ROWS:
        ids = one(row, tokenizer).ids
        assert ids.count(tokenizer.bos_token_id) == adds_bos
        assert ids.count(tokenizer.eos_token_id) == 1 and ids[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize("kind", ["bos", "bos and eos"])
def test_text_that_brings_its_own_bos_and_eos_gets_no_second(monkeypatch, kind):
    monkeypatch.setattr(formats, "PROMPT", "<s>" + formats.PROMPT)
    tokenizer = build_tokenizer(**KINDS[kind])
    ids = one({"instruction": "a", "output": "b</s>"}, tokenizer).ids
    assert ids.count(tokenizer.bos_token_id) == 1 and ids.count(tokenizer.eos_token_id) == 1


def test_prompt_ids_begin_the_training_ids(tokenizer):
    for row in [*ROWS[:3], *demo.examples("held_out")]:
        prompt = data.prompt_ids(data.render(row)[0], tokenizer)
        ids, labels = one(row, tokenizer)
        assert ids[: len(prompt)] == prompt
        assert set(labels[: len(prompt)]) == {IGNORE} and IGNORE not in labels[len(prompt) :]


def test_templates_do_not_end_in_a_space():
    assert not formats.PROMPT.endswith(" ") and not formats.PROMPT_WITH_INPUT.endswith(" ")


def test_eos_stays_supervised_where_it_pads():
    tokenizer = build_tokenizer(pad="</s>")
    samples, _ = data.tokenize(ROWS, tokenizer, 4096)
    targets = data.collate(samples, data.pad_id(tokenizer))["targets"]
    for sample, row in zip(samples, targets.tolist()):
        assert row[len(sample.ids) - 2] == tokenizer.eos_token_id
        assert set(row[len(sample.ids) - 1 :]) == {IGNORE}


def test_truncation_and_drops_are_counted(bpe):
    rows = [{"instruction": "a", "output": "b" * n} for n in (2, 50)]
    rows += [{"instruction": "a" * 500, "output": "b"}]
    prompt = len(data.prompt_ids(data.render(rows[0])[0], bpe))
    samples, counts = data.tokenize(rows, bpe, prompt + 10)
    assert counts == data.Counts(
        kept=2, truncated=1, dropped=1, supervised_tokens=3 + 10, total_tokens=2 * prompt + 3 + 10
    )
    assert samples[0].labels[-1] == bpe.eos_token_id
    assert len(samples[1].ids) == prompt + 10 and samples[1].labels[-1] != bpe.eos_token_id
    _, exact = data.tokenize(rows[:1], bpe, prompt + 3)
    assert exact.truncated == 0


def test_more_rows_than_one_piece_keep_their_order(bpe):
    rows = [{"instruction": "a", "output": str(n)} for n in range(2100)]
    samples, counts = data.tokenize(rows, bpe, 4096)
    assert counts.kept == 2100
    answers = [bpe.decode([label for label in sample.labels if label != IGNORE]) for sample in samples]
    assert answers == [f"{n}</s>" for n in range(2100)]


def test_nothing_left_is_an_error(bpe):
    with pytest.raises(DataError, match="none of the 4 rows.*--context_length"):
        data.tokenize(ROWS, bpe, 16)


def test_unusable_tokenizers_are_errors(bpe):
    class Slow:
        is_fast, eos_token_id = False, 1

    with pytest.raises(DataError, match="Slow is not a fast tokenizer"):
        data.tokenize(ROWS, Slow(), 64)
    endless = build_tokenizer()
    endless.eos_token = None
    with pytest.raises(DataError, match="no EOS"):
        data.tokenize(ROWS, endless, 64)


# ---------------------------------------------------------------------------------------------------- batches


def test_collate_shifts_and_pads_by_length():
    batch = data.collate([Sample([5, 6, 2], [IGNORE, 6, 2]), Sample([7, 2], [IGNORE, 2])], pad_id=2)
    assert batch["input_ids"].tolist() == [[5, 6, 2], [7, 2, 2]]
    assert batch["targets"].tolist() == [[6, 2, IGNORE], [2, IGNORE, IGNORE]]
    assert str(batch["input_ids"].dtype) == str(batch["targets"].dtype) == "torch.int64"


def test_collate_of_nothing_is_one_masked_row():
    batch = data.collate([], pad_id=3)
    assert batch["input_ids"].tolist() == [[3, 3]] and batch["targets"].tolist() == [[IGNORE, IGNORE]]


def test_pad_id_leaves_the_tokenizer_alone():
    own, none = build_tokenizer(pad="<pad>"), build_tokenizer()
    assert data.pad_id(own) == own.pad_token_id == 2
    assert data.pad_id(none) == none.eos_token_id and none.pad_token_id is None


# ------------------------------------------------------------------------------------------------------ order


def epoch(n, world, batch_size, accumulation, seed=0, number=0):
    """plan[rank][step][micro-batch] -> indices"""
    return [
        data.steps(
            n,
            seed=seed,
            epoch=number,
            batch_size=batch_size,
            accumulation=accumulation,
            rank=rank,
            world=world,
        )
        for rank in range(world)
    ]


def sets_per_step(plan):
    return [sorted(i for rank in step for micro in rank for i in micro) for step in zip(*plan, strict=True)]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("accumulation", [1, 2, 3])
@pytest.mark.parametrize("n", [1, 5, 12, 47, 48, 49])
def test_each_sample_once_and_ranks_in_step(world, accumulation, n):
    plan = epoch(n, world, 2, accumulation)
    assert sorted(i for step in sets_per_step(plan) for i in step) == list(range(n))
    assert {len(rank) for rank in plan} == {data.steps_per_epoch(n, 2, accumulation, world)}
    *full, last = zip(*plan)
    assert all(len(micro) == 2 for step in full for micros in step for micro in micros)
    assert {len(micros) for step in full for micros in step} <= {accumulation}
    left = n - len(full) * 2 * accumulation * world
    assert {len(micros) for micros in last} == {-(-left // (2 * world))}


def test_same_samples_per_step_for_the_same_global_batch():
    splits = [(1, 12, 1), (1, 2, 6), (2, 3, 2), (3, 4, 1), (4, 1, 3), (2, 6, 1)]
    first, *others = [sets_per_step(epoch(100, *split)) for split in splits]
    assert all(other == first for other in others)


def test_layout_of_a_window():
    """Micro-batch m of rank r is the step's window from (m * world + r) * batch_size on."""
    order = [i for step in epoch(24, 1, 1, 1)[0] for micro in step for i in micro]
    for rank, steps in enumerate(epoch(24, 2, 3, 2)):
        for s, step in enumerate(steps):
            for m, micro in enumerate(step):
                start = s * 12 + (m * 2 + rank) * 3
                assert micro == order[start : start + 3]


def test_order_depends_on_seed_and_epoch_only():
    assert epoch(50, 2, 2, 2, seed=1, number=3) == epoch(50, 2, 2, 2, seed=1, number=3)
    assert len({str(epoch(50, 1, 2, 1, seed, number)) for seed in range(3) for number in range(3)}) == 9


def test_order_is_not_that_of_the_file():
    assert epoch(50, 1, 50, 1)[0][0][0] != list(range(50))


# ---------------------------------------------------------------------------------------------------- reading


FULL = [row for row in ROWS if row["output"]]


def write(folder, name, text):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


@pytest.mark.parametrize(
    "name, text",
    [
        ("a.json", json.dumps(FULL)),
        ("a.jsonl", "\n".join(json.dumps(row, ensure_ascii=False) for row in FULL) + "\n\n"),
        ("a.JSONL", "\r\n".join(map(json.dumps, FULL))),
        ("bom.json", b"\xef\xbb\xbf" + json.dumps(FULL).encode()),
        ("bom.jsonl", b"\xef\xbb\xbf" + "\n".join(map(json.dumps, FULL)).encode()),
    ],
)
def test_reads_alpaca(tmp_path, name, text):
    path = write(tmp_path, name, text)
    assert data.load(path) == FULL
    assert data.load(path, samples=2) == FULL[:2]


def test_line_separators_inside_a_string_do_not_cut_a_row(tmp_path):
    row = {"instruction": "a\u2028b\x85c", "output": "d"}
    assert data.load(write(tmp_path, "a.jsonl", json.dumps(row, ensure_ascii=False))) == [row]


def test_null_input_is_no_input(tmp_path):
    (row,) = data.load(write(tmp_path, "a.jsonl", '{"instruction": "a", "input": null, "output": "b"}'))
    assert data.render(row) == data.render({"instruction": "a", "output": "b"})


def test_braces_in_a_row_are_text():
    row = {"instruction": "{input} {0} %s", "input": "{instruction}", "output": "{}"}
    prompt, response = data.render(row)
    assert "\n{input} {0} %s\n" in prompt and "\n{instruction}\n" in prompt and response == "{}"


GOOD = '{"instruction": "a", "output": "b"}\n'


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("empty.json", "", "empty.json is empty"),
        ("empty.jsonl", "\n \n", "empty.jsonl is empty"),
        ("none.json", "[]", "none.json is empty"),
        ("bad.json", '[\n{"instruction": "a",\n"output" "b"}]', "bad.json, line 3: not valid JSON"),
        ("bad.jsonl", GOOD + '{"instruction": \n' + GOOD, "bad.jsonl, line 2: not valid JSON"),
        ("lines.json", GOOD + GOOD, r"lines.json, line 2: not valid JSON.*name it \.jsonl"),
        ("object.json", GOOD, "object.json holds one dict; it must be a list"),
        ("row.jsonl", GOOD + "\n[1]", "row.jsonl, line 3: a row must be an object"),
        ("row.json", "[1]", "row.json, row 1: a row must be an object"),
        (
            "key.jsonl",
            GOOD + '{"instruction": "a", "text": "b"}',
            'key.jsonl, line 2: "output" is missing.*text',
        ),
        ("key.json", '[{"output": "a"}]', 'key.json, row 1: "instruction" is missing'),
        ("type.jsonl", '{"instruction": "a", "output": 3}', 'line 1: "output" must be a string, not int'),
        ("type.json", '[{"instruction": null, "output": ""}]', 'row 1: "instruction" must be a string'),
        ("in.jsonl", '{"instruction": "a", "input": [], "output": ""}', '"input" must be a string, not list'),
        ("latin.jsonl", b'{"instruction": "\xe9"}', "latin.jsonl, line 1: not UTF-8 text"),
        ("table.txt", "a,b", r"table.txt has an unknown extension; convert it to \.json, \.jsonl, \.csv"),
        ("head.csv", "a,b", "head.csv is empty"),
    ],
)
def test_bad_files_are_errors_that_name_the_place(tmp_path, name, text, message):
    with pytest.raises(DataError, match=message):
        data.load(write(tmp_path, name, text))


def test_unknown_names_are_errors_that_name_the_closest(tmp_path):
    with pytest.raises(DataError, match=r"'dummmy' is neither a file.*demo, dummy.*did you mean dummy\?"):
        data.load("dummmy")
    write(tmp_path, "train.jsonl", GOOD)
    with pytest.raises(DataError, match=r"did you mean .*train\.jsonl\?"):
        data.load(str(tmp_path / "trian.jsonl"))
    with pytest.raises(DataError, match="neither a file"):
        data.load(str(tmp_path))


@pytest.mark.parametrize("samples", [0, -1])
def test_no_samples_is_an_error(samples):
    with pytest.raises(DataError, match="at least 1"):
        data.load("dummy", samples=samples)


# ---------------------------------------------------------------------------------------------- built-in sets


def test_dummy_set_is_many_rows_of_about_one_length(bpe):
    samples, counts = data.tokenize(data.load("dummy"), bpe, 4096)
    lengths = {len(sample.ids) for sample in samples}
    assert counts.kept >= 200 and max(lengths) - min(lengths) <= 1
    assert data.load("dummy") == data.load("dummy")
    row = random.Random(0).choice(data.load("dummy"))
    left, right = [int(word) for word in row["instruction"].strip("?").split() if word.isdigit()]
    assert row["output"] == str(left + right)


def test_demo_set_sizes_and_form():
    train, held_out = demo.examples("train"), demo.examples("held_out")
    assert (len(train), len(held_out)) == (600, 60) and data.load("demo") == train
    for row in train + held_out:
        assert set(row) == {"instruction", "input", "output"} and formats.check(row, "alpaca")
        assert row["output"].startswith("select ") and row["output"].endswith(";")
        assert not set("{}") & set("".join(row.values()))


def test_demo_set_is_the_same_on_every_machine():
    assert demo.examples("train", 7) == demo.examples("train")[:7]
    assert demo.examples("train", 20, seed=1) != demo.examples("train", 20)
    assert demo.examples("train", 1) == [
        {
            "instruction": "Which rivers have country Germany and depth less than 20? Show the name.",
            "input": "table rivers (id, name, country, sea, length, depth)",
            "output": "select t.name from rivers as t where t.country = 'Germany' and t.depth < 20;",
        }
    ]


@pytest.mark.parametrize("seed", [0, 1])
def test_demo_splits_share_no_question(seed):
    train, held_out = (
        {(row["instruction"], row["input"]) for row in rows}
        for rows in (demo.examples("train", 2000), demo.examples("held_out", seed=seed))
    )
    assert len(train) == 2000 and len(held_out) == 60 and not train & held_out


def test_demo_held_out_asks_tables_for_what_training_never_does():
    def kind(row):
        words = r"'[^']*'|\d+|t\.\w+|\b(avg|sum|min|max|asc|desc)\b|[<>]"
        return row["input"], re.sub(words, "_", row["output"])

    known = {kind(row) for row in demo.examples("train", 3000)}
    unseen = sum(kind(row) not in known for row in demo.examples("held_out"))
    assert 15 <= unseen <= 45


def test_unknown_split_is_an_error():
    with pytest.raises(ValueError, match="'test'; it must be one of train, held_out"):
        demo.examples("test")


def test_demo_model_on_disk_needs_no_network(monkeypatch, tmp_path):
    folder = tmp_path / "qshard" / "SmolLM2-135M-Instruct"
    folder.mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(demo, "_from_hub", lambda download: pytest.fail("asked") if download else None)
    assert demo.model_folder(progress=pytest.fail) == folder


def test_demo_model_out_of_reach_says_what_to_pass(monkeypatch, tmp_path):
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: retrying\nERROR: no route to host")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(demo, "_from_hub", lambda download: None)
    monkeypatch.setattr(demo.subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(RuntimeError, match="ERROR: no route to host.*--model_name FOLDER"):
        demo.model_folder(progress=lambda line: None)
    assert not list((tmp_path / "qshard").iterdir())


def test_flags_in_both_spellings():
    argv = ["x_y.py", "--max_new_tokens", "my_file", "--out_dir=a_b", "--n-k"]
    assert kebab(argv) == ["x_y.py", "--max-new-tokens", "my_file", "--out-dir=a_b", "--n-k"]


# ---------------------------------------------------------------------------------- one entry for every source

QA = [{"question": f"What is {n}?", "answer": f"It is {n}."} for n in range(10)]
CONFIG = dict(
    dataset_samples=None, dataset_format="auto", dataset_columns="", chat_template=False,
    train_on="completions", truncation="right", packing=False, group_by_length=False, context_length=512,
    skip_bad_rows=False, seed=1, model_name="",
)  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def prepare(dataset, tok, **flags):
    return data.prepare(SimpleNamespace(**CONFIG | flags, dataset=str(dataset)), tok)


def answers(samples, tok):
    return [tok.decode([i for i in sample.labels if i != IGNORE]).removesuffix("</s>") for sample in samples]


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def table(rows):
    cells = [[f'"{value}"' for value in row.values()] for row in rows]
    return "\n".join(map(",".join, [list(rows[0]), *cells]))


def save_as(folder, kind, rows=QA):
    """The rows in a file or folder of this kind; the text that names it."""
    import datasets

    texts = {".json": json.dumps, ".jsonl": lines, ".csv": table}
    name, packed = kind.removesuffix(".gz"), kind.endswith(".gz")
    if name in texts:
        text = texts[name](rows).encode()
        return write(folder, f"rows{kind}", gzip.compress(text) if packed else text)
    made = datasets.Dataset.from_list(rows)
    if kind == ".parquet":
        made.to_parquet(folder / "rows.parquet")
        return str(folder / "rows.parquet")
    split = datasets.DatasetDict({"train": made, "test": made.select(range(3))})
    (made if kind == "folder" else split).save_to_disk(folder / "saved")
    return str(folder / "saved") + (":test" if kind == "split" else "")


KINDS_OF_FILES = [".json", ".json.gz", ".jsonl", ".jsonl.gz", ".csv", ".csv.gz", ".parquet"]


@pytest.mark.parametrize("kind", [*KINDS_OF_FILES, "folder", "splits", "split"])
def test_every_kind_of_source(tmp_path, bpe, kind):
    samples, counts = prepare(save_as(tmp_path, kind), bpe)
    wanted = [row["answer"] for row in QA][: 3 if kind == "split" else 10]
    assert answers(samples, bpe) == wanted and counts.kept == len(samples) == len(wanted)
    again, same = prepare(save_as(tmp_path / "b", kind) if kind[0] != "." else tmp_path / f"rows{kind}", bpe)
    assert same == counts and again.fingerprint == samples.fingerprint


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The cache of `datasets` with owner/some_set in it, and no network."""
    import datasets

    rows = save_as(tmp_path, ".parquet")
    root = tmp_path / "hub"
    with quiet():
        datasets.load_dataset("parquet", data_files={"train": rows, "test": rows}, cache_dir=str(root))
    (found,) = root.glob("parquet/*/*/*/dataset_info.json")
    target = root / "owner___some_set" / "default" / "0.0.0" / ("a" * 40)
    shutil.copytree(found.parent, target)
    for file in target.glob("parquet-*"):
        file.rename(file.with_name(file.name.replace("parquet-", "some_set-")))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", root)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def test_hub_datasets_come_from_the_local_cache_when_offline(hub, bpe, monkeypatch):
    for name in ("owner/some_set", "owner/some_set:test", "owner/some_set:train@main"):
        samples, _ = prepare(name, bpe)
        assert answers(samples, bpe) == [row["answer"] for row in QA]
    assert len(prepare("owner/some_set:train[:4]", bpe)[0]) == 4
    monkeypatch.setitem(data.SOURCES, "alpaca_sample", "owner/some_set")
    monkeypatch.setattr(data, "ALPACA_SAMPLE", 6)
    assert len(prepare("alpaca_sample", bpe)[0]) == 6
    assert len(prepare("alpaca_sample", bpe, dataset_samples=2)[0]) == 2
    with pytest.raises(DataError, match=r'owner/some_set:no: Unknown split "no".*train.*test'):
        prepare("owner/some_set:no", bpe)
    with pytest.raises(DataError, match="owner/unknown"):
        prepare("owner/unknown", bpe)


def test_names_of_the_ancestor():
    names = {"alpaca", "alpaca_sample", "dummy", "guanaco", "sql", "orca_math", "demo"}
    assert set(data.SOURCES) == names
    assert all(len(data.parse_sources(name)) == 1 for name in names)


def test_weights_are_relative_to_the_largest(tmp_path, bpe):
    a = write(tmp_path, "a.jsonl", lines(QA))
    b = write(tmp_path, "b.jsonl", lines([dict(row, answer="b" + row["answer"]) for row in QA * 2]))
    samples, counts = prepare(f"{a}=0.8, {b}=0.2", bpe)
    found = answers(samples, bpe)
    assert len(samples) == counts.kept == 15 and found[:10] == [row["answer"] for row in QA]
    assert len({answer for answer in found[10:] if answer.startswith("b")}) >= 3
    assert counts.total_tokens == sum(samples.lengths) == sum(len(s.ids) for s in samples)
    assert answers(prepare(f"{a}=0.8, {b}=0.2", bpe)[0], bpe) == found
    assert answers(prepare(f"{a}=0.8, {b}=0.2", bpe, seed=2)[0], bpe)[10:] != found[10:]
    assert len(prepare(f"{a},{b}", bpe)[0]) == 30 and len(prepare(f"{a},{b}", bpe, dataset_samples=4)[0]) == 8
    for bad, message in (
        ("=x", "'x' is not a number"),
        ("=0", "above 0"),
        ("=-1", "above 0"),
        ("=inf", "above"),
    ):
        with pytest.raises(DataError, match=message):
            data.parse_sources(a + bad)


def test_another_set_for_evaluation_is_not_limited(tmp_path, bpe):
    config = SimpleNamespace(**CONFIG | dict(dataset="dummy", dataset_samples=2))
    path = write(tmp_path, "a.jsonl", lines(QA))
    assert len(data.prepare(config, bpe)[0]) == 2 and len(data.prepare(config, bpe, dataset=path)[0]) == 10


def test_a_path_with_a_comma_or_an_equals_sign(tmp_path, bpe):
    for name in ("a,b.jsonl", "a=1.jsonl"):
        assert len(prepare(write(tmp_path, name, lines(QA)), bpe)[0]) == 10


GOOD_QA = '{"question": "a", "answer": "b"}\n'


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("a.jsonl", GOOD_QA + "{\n", r"a\.jsonl, line 2: not valid JSON"),
        ("a.jsonl", GOOD_QA.encode() + b'{"question": "\xff"}\n', r"line 2: not UTF-8 text"),
        ("a.jsonl", GOOD_QA + '{"question": "a", "answer": 1}', 'line 2: "answer" must be a string, not int'),
        ("a.jsonl", GOOD_QA + '\n{"question": "a"}', 'line 3: "answer" is missing; the row has question'),
        ("a.jsonl", GOOD_QA + '{"question": "a", "answer": ""}', 'line 2: "answer" is empty'),
        ("a.jsonl", "[" * 100_000, "line 1: not valid JSON"),
        ("a.json", "[" + GOOD_QA + GOOD_QA + "]", r"a\.json, line 2: not valid JSON"),
        ("a.json", "[" + GOOD_QA + ",]", r"a\.json, line 2: not valid JSON"),
        ("a.json", "[" + GOOD_QA, r"a\.json, line 2: not valid JSON"),
        ("a.json", b'[{"question":\n "\xff"}]', r"a\.json, line 2: not UTF-8"),
        ("a.json", "[" * 100_000, r"a\.json, line 1: not valid JSON"),
        ("a.csv", "question,answer\na,b,c", r"a\.csv, line 2: has more fields than the header"),
        ("a.csv", "question,answer\na", r"a\.csv, line 2: has fewer fields than the header; missing: answer"),
        ("a.csv", 'question,answer\na,"b', r"a\.csv, line 2: not valid CSV"),
        ("a.csv", b"question,answer\na,\xff", r"a\.csv, line 2: not UTF-8"),
        ("a.parquet", "PAR1", "is not a readable parquet file"),
        ("a.jsonl.gz", "no gzip", "is damaged"),
        ("a.jsonl.gz", gzip.compress(lines(QA).encode())[:-9], "is damaged"),
        (
            "a.jsonl",
            GOOD_QA.replace("question", "foo"),
            "line 1: no format fits the columns foo, answer; known",
        ),
    ],
)
def test_bad_files_of_all_kinds(tmp_path, bpe, name, text, message):
    text = text if isinstance(text, bytes) else text.encode()
    with pytest.raises(DataError, match=message):
        prepare(write(tmp_path, name, text), bpe)


def test_skip_bad_rows_goes_on(tmp_path, bpe):
    text = b'{"question": 1}\n' + GOOD_QA.encode() + b'{\n{"question": "\xff"}\n[1]\n' + GOOD_QA.encode()
    samples, counts = prepare(write(tmp_path, "a.jsonl", text), bpe, skip_bad_rows=True)
    assert (counts.kept, counts.skipped, len(samples)) == (2, 4, 2)
    assert len(samples.problems) == 1 and "a.jsonl, line 1: " in samples.problems[0]


def test_marks_long_lines_and_quotes_are_accepted(tmp_path, bpe):
    long = {"question": "a", "answer": "x" * 1_000_000}
    samples, counts = prepare(write(tmp_path, "a.jsonl", b"\xef\xbb\xbf" + lines([long]).encode()), bpe)
    assert counts.truncated == 1 and samples.lengths == [512]
    text = '\ufeffquestion,answer\r\n"a ""b""\nc","d, e"\r\n'
    samples, _ = prepare(write(tmp_path, "a.csv", text), bpe)
    assert prepare(write(tmp_path, "long.csv", table([long])), bpe)[0].lengths == [512]
    assert 'a "b"\nc\n' in bpe.decode(samples[0].ids) and answers(samples, bpe) == ["d, e"]


def test_a_folder_that_was_not_saved_by_datasets(tmp_path, bpe):
    with pytest.raises(DataError, match="neither a file nor a folder that"):
        prepare(tmp_path, bpe)
    with pytest.raises(DataError, match="has the splits train, test; choose one with"):
        prepare(save_as(tmp_path, "splits") + ":dev", bpe)


def test_samples_are_a_sequence(tmp_path, bpe):
    samples, _ = prepare(write(tmp_path, "a.jsonl", lines(QA)), bpe)
    assert samples[-1] == samples[9] and samples[2:4] == [samples[2], samples[3]]
    assert [len(sample.ids) for sample in samples] == samples.lengths
    with pytest.raises(IndexError):
        samples[10]
    for train_on in ("completions", "all"):
        samples, counts = prepare(tmp_path / "a.jsonl", bpe, train_on=train_on)
        predicted = sum(label != IGNORE for sample in samples for label in sample.labels[1:])
        assert counts.supervised_tokens == predicted
    assert data.collate(samples[:2], 0)["input_ids"].shape[0] == 2


@pytest.mark.parametrize("fraction", [0, 0.5])
def test_samples_can_be_found_in_their_files(tmp_path, fraction):
    """Whatever was skipped, dropped, held out or left out by a weight before them; each answer says its own line."""
    build_tokenizer().save_pretrained(tmp_path / "model")
    rows = ["", "", "{", '{"question": 1}', json.dumps(dict(question="long " * 99, answer="x"))]
    rows += [json.dumps(dict(question="a", answer=f"at {n}")) for n in range(6, 26)]
    a, table = write(tmp_path, "a.jsonl", "\n".join(rows)), "question,answer\n"
    for n in range(3, 33, 2):  # each question has two lines
        table += f'"b\nb",at {n}\n'
    b = write(tmp_path, "b.csv", table)
    c = write(tmp_path, "c.json", json.dumps([dict(question="c", answer=f"at {n}") for n in range(1, 9)]))
    flags = CONFIG | dict(dataset=f"{a},{b}=0.4,{c}", skip_bad_rows=True, truncation="drop", context_length=50)
    flags |= dict(eval_dataset=None, eval_fraction=fraction, add_tokens="", trust_remote_code=False)
    (tmp_path / "model" / "config.json").write_text('{"vocab_size": 400}')
    for again in range(2):  # the second time from disk
        held = data.load_all(SimpleNamespace(**flags), tmp_path / "model")
        said = [answer.removeprefix("at ") for answer in answers(held.train, held.tokenizer)]
        assert len(said) == (17 if fraction else 34)
        kinds = {a: "line", b: "line", c: "row"}
        for i, number in enumerate(said):
            found = held.places([i])
            assert found in [f"{kind} {number} of {path}" for path, kind in kinds.items()]
        assert {held.places([i]).split()[-1] for i in range(len(said))} == set(kinds)
        last = f"rows {', '.join(map(str, sorted(map(int, said[-2:]))))} of {c}"
        assert held.places([0, len(said) - 1, len(said) - 2]) == f"line {said[0]} of {a}; {last}"
        assert held.places([0] * 40) == f"lines {', '.join(said[:1] * 32)} of {a}; and 8 more"


# --------------------------------------------------------------------------------------------- tokens on disk


def test_the_second_start_tokenises_nothing(tmp_path, bpe, monkeypatch):
    path = write(tmp_path, "a.jsonl", lines(QA))
    first, counts = prepare(path, bpe)
    monkeypatch.setattr(tokens, "build", lambda *args: pytest.fail("tokenised again"))
    second, same = prepare(path, bpe)
    assert list(second) == list(first) and same == counts and repr(second) == repr(first)
    assert isinstance(second.tables[0].ids, np.memmap)
    copy = write(tmp_path, "b.jsonl", lines(QA))
    assert len(prepare(copy, bpe)[0]) == 10


def test_whatever_changes_tokens_makes_new_ones(tmp_path):
    path, keys = tmp_path / "a.jsonl", set()
    changes = [
        {},
        dict(train_on="all"),
        dict(context_length=60),
        dict(truncation="drop"),
        dict(dataset_samples=3),
    ]
    changes += [dict(skip_bad_rows=True), dict(dataset_format="question_answer")]
    for kind in ({}, dict(bos=True)):
        for flags in changes:
            for rows in (QA, QA[:5]):
                write(tmp_path, path.name, lines(rows))
                prepare(path, build_tokenizer(**kind), **flags)
                keys = set((tmp_path / "cache" / "qshard" / "tokens").glob("*.safetensors"))
    assert len(keys) == 2 * len(changes) * 2
    tok = build_tokenizer()
    tok.chat_template = "{{ messages[0].content }}"
    prepare(path, tok)
    assert len([*(tmp_path / "cache" / "qshard" / "tokens").glob("*.safetensors")]) == len(keys) + 1


def test_a_broken_file_of_tokens_is_made_again(tmp_path, bpe):
    path = write(tmp_path, "a.jsonl", lines(QA))
    first = list(prepare(path, bpe)[0])
    (kept,) = tokens.cache_folder().glob("*.safetensors")
    whole = kept.read_bytes()
    for broken in (b"", whole[:5], whole[:60], whole[:-3], b"\xff" * len(whole)):
        kept.write_bytes(broken)
        assert list(prepare(path, bpe)[0]) == first and kept.read_bytes() == whole
    assert not list(tokens.cache_folder().glob("*.tmp"))


def test_no_place_for_tokens_is_no_problem(tmp_path, bpe, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", write(tmp_path, "file", ""))
    assert len(prepare("dummy", bpe)[0]) == 256


JOB = """
import sys; sys.path[:0] = {paths!r}
from types import SimpleNamespace
from scripts import data, tokens
import test_data
build = tokens.build
def noted(*args, **kwargs):
    print("tokenised", flush=True)
    return build(*args, **kwargs)
tokens.build = noted
samples, _ = data.prepare(SimpleNamespace(**test_data.CONFIG, dataset={path!r}), test_data.build_tokenizer())
print(samples.fingerprint)
"""


def test_two_jobs_share_one_empty_cache(tmp_path, bpe):
    path = write(tmp_path, "a.jsonl", lines(QA * 300))
    root = Path(data.__file__).parents[1]
    code = JOB.format(paths=[str(root), str(root / "tests")], path=path)
    jobs = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in "ab"]
    printed = [job.communicate()[0].split() for job in jobs]
    assert {lines[-1] for lines in printed} == {prepare(path, bpe)[0].fingerprint}
    assert sum("tokenised" in lines for lines in printed) == 1


# ------------------------------------------------------------------------------------- a look at what is trained


def show(*flags):
    script = Path(data.__file__)
    return subprocess.run([sys.executable, str(script), *flags], capture_output=True, text=True, cwd="/")


def test_the_command_shows_what_is_trained_on(tmp_path):
    build_tokenizer().save_pretrained(tmp_path / "model")
    rows = [*QA, {"question": "x", "answer": ""}]
    path = write(tmp_path, "a.jsonl", lines(rows))
    flags = [
        "--dataset",
        path,
        "--model_name",
        str(tmp_path / "model"),
        "--skip_bad_rows",
        "true",
        "--show=2",
    ]
    done = show(*flags, "--png", str(tmp_path / "a.png"))
    assert done.returncode == 0, done.stderr
    assert "kept 10 samples (0 cut), dropped 0, skipped 1 bad rows" in done.stdout
    assert 'a.jsonl, line 11: "answer" is empty' in done.stdout and "##" in done.stdout
    assert len(re.findall(r"###Answer:\n⟦It is \d\.</s>⟧", done.stdout)) == 2 and "\033" not in done.stdout
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    done = show(*flags[:4])
    assert done.returncode == 2 and "line 11" in done.stderr and "Traceback" not in done.stderr
    done = show("--dataset", "dummy", "--model-name", str(tmp_path / "none"))
    assert done.returncode == 2 and "Traceback" not in done.stderr


def test_colours_on_a_terminal(bpe):
    sample = Sample(bpe("ab")["input_ids"], [IGNORE, bpe("b")["input_ids"][0]])
    assert data.marked(sample, bpe, color=True) == "a\033[32mb\033[0m"
    assert data.marked(sample, bpe, color=False) == "a⟦b⟧"
