"""Promises of scripts/data.py and scripts/demo.py: what is supervised, who sees what, what is refused."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from scripts import data, demo, formats
from scripts.data import IGNORE, DataError, Sample

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
    assert data.kebab_flags(argv) == ["x_y.py", "--max-new-tokens", "my_file", "--out-dir=a_b", "--n-k"]
