"""Promises of scripts/formats.py and scripts/tokens.py: what of a row is supervised, with every kind of
tokenizer and chat template, and which rows are refused."""

import datetime
import functools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scripts import data, formats, tokens
from scripts.data import IGNORE, DataError

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
ALTERNATE = (
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
)

# ------------------------------------------------ chat templates, in the structure that the models' own have

LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}" + ALTERNATE + "{% if "
    "loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>\\n' + system_message + "
    "'\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}"
    "{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}" + ALTERNATE + "{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
# From version 0.3 on the system prompt moves to the last question, so earlier text changes.
MISTRAL3 = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
    "{% set messages = messages[1:] %}{% endif %}{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{% if system is defined and (loop.last or loop.index0 == "
    "messages|length - 2) %}{{ '[INST] ' + system + '\\n\\n' + message['content'] + '[/INST]' }}{% else %}"
    "{{ '[INST] ' + message['content'] + '[/INST]' }}{% endif %}{% else %}"
    "{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = "
    "'<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + "
    "'<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}"
    "{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
LLAMA31 = (
    "{{- bos_token }}\n{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    '{%- set date_string = strftime_now("%d %b %Y") %}{%- else %}{%- set date_string = "26 Jul 2024" %}'
    '{%- endif %}{%- endif %}{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}'
    '{{- "Today Date: " + date_string + "\\n\\n<|eot_id|>" }}{%- for message in messages %}'
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + "
    "'<|eot_id|>' }}{%- endfor %}{%- if add_generation_prompt %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
)
QWEN2 = CHATML + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
# Thoughts are kept in the last answer only, and an empty one is written there where there was none.
QWEN3 = (
    "{%- set ns = namespace(last=messages|length - 1) %}{%- for message in messages %}"
    "{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}{%- set content = message.content %}{%- if message.role == 'assistant' %}"
    "{%- set thought = '' %}{%- if '</think>' in content %}"
    "{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{{- '<|im_start|>assistant\\n' }}{%- if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}"
    "{%- else %}{{- content }}{%- endif %}{{- '<|im_end|>\\n' }}{%- else %}"
    "{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}" + ALTERNATE + "{% if (message['role'] == 'assistant') %}"
    "{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
PHI3 = (
    "{% for message in messages %}{{'<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
ENDLESS = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)

HEADERS = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
TURNS = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
# style: kind of tokenizer, its BOS and EOS, more special tokens, template, what ends a turn
STYLES = {
    "llama2": ("metaspace", "<s>", "</s>", [], LLAMA2, "</s>"),
    "mistral": ("metaspace", "<s>", "</s>", [], MISTRAL, "</s>"),
    "llama3": ("bytes", "<|begin_of_text|>", "<|eot_id|>", HEADERS, LLAMA3, "<|eot_id|>"),
    "llama3.1": ("bytes", "<|begin_of_text|>", "<|end_of_text|>", HEADERS, LLAMA31, "<|eot_id|>"),
    "qwen2": ("bytes", None, "<|im_end|>", ["<|im_start|>", "<|endoftext|>"], QWEN2, "<|im_end|>"),
    "qwen3": ("bytes", None, "<|im_end|>", ["<|im_start|>", "<|endoftext|>"], QWEN3, "<|im_end|>"),
    "gemma": ("spaces", "<bos>", "<eos>", ["<start_of_turn>", "<end_of_turn>"], GEMMA, "<end_of_turn>"),
    "phi3": ("metaspace", "<s>", "<|endoftext|>", TURNS, PHI3, "<|end|>"),
    "smollm": ("bytes", "<|im_start|>", "<|im_end|>", [], QWEN2, "<|im_end|>"),
}


@functools.cache
def tokenizer(kind, bos, eos, specials, template):
    """A small tokenizer: byte-level BPE, or characters with bytes for the rest as SentencePiece has them."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = list(dict.fromkeys([token for token in (bos, eos, *specials) if token]))
    if kind == "bytes":
        merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("i", "n")]
        pieces = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
        inner = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
        inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    else:
        merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("i", "n")]
        pieces = ["<unk>", *special, *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
        pieces += [*map(chr, range(33, 127)), *map("".join, merges)]
        inner = Tokenizer(
            models.BPE({p: i for i, p in enumerate(pieces)}, merges, byte_fallback=True, unk_token="<unk>")
        )
        steps = [normalizers.Replace(" ", "▁")]
        if kind == "metaspace":
            steps.insert(0, normalizers.Prepend("▁"))
        inner.normalizer = normalizers.Sequence(steps)
        inner.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    inner.add_special_tokens(special)
    if bos:
        inner.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, inner.token_to_id(bos))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token=bos, eos_token=eos, chat_template=template,
        additional_special_tokens=specials or None,
    )  # fmt: skip


def style(name):
    kind, bos, eos, specials, template, end = STYLES[name]
    return tokenizer(kind, bos, eos, tuple(specials), template), end


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def sample_of(row, tok, context_length=100_000, truncation="right", **flags):
    table = tokens.build([("row 1", row)], formats.Renderer(tok, **flags), tok, context_length, truncation)
    return tokens.Samples([table])[0]


def supervised(sample, tok):
    return tok.decode([label for label in sample.labels if label != IGNORE])


def bare(text):
    """Without white space, which SentencePiece-like tokenizers do not always give back."""
    return "".join(text.split())


def chat(*contents, system=None):
    roles = ["user", "assistant"] * len(contents)
    turns = [{"role": role, "content": text} for role, text in zip(roles, contents)]
    return {"messages": [{"role": "system", "content": system}] * bool(system) + turns}


# --------------------------------------------------------------------------------------------- conversations

words = st.text(
    st.characters(exclude_categories=["Cs", "Co"], exclude_characters="▁<|"), min_size=1, max_size=12
).filter(lambda text: text.strip() and text.isprintable())
spaced = st.tuples(st.sampled_from(["", " ", "\n"]), words, st.sampled_from(["", " ", "\n\n"])).map("".join)
conversations = st.lists(st.tuples(spaced, spaced), min_size=1, max_size=4)
QUICK = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("name", STYLES)
@QUICK
@given(turns=conversations)
def test_every_answer_and_its_end_is_supervised_and_nothing_else(name, turns):
    tok, end = style(name)
    row = chat(*(text for turn in turns for text in turn))
    sample = sample_of(row, tok)
    wanted = "".join(answer + end for _, answer in turns)
    said = supervised(sample, tok).replace("<think>\n\n</think>\n\n", "")
    assert bare(said) == bare(wanted)
    rendered = rendered_text(tok, row)
    assert sample.ids == tok(rendered, add_special_tokens=False)["input_ids"]
    pairs = zip(sample.ids, sample.ids[1:])
    assert not any(a == b == tok.bos_token_id for a, b in pairs)


def rendered_text(tok, row):
    """The conversation as transformers renders it, up to the date."""
    text = tok.apply_chat_template(row["messages"], tokenize=False)
    return text.replace(datetime.date.today().strftime("%d %b %Y"), "26 Jul 2024")


@pytest.mark.parametrize("name", STYLES)
@QUICK
@given(turns=conversations)
def test_last_supervises_the_last_answer_and_all_supervises_all(name, turns):
    tok, end = style(name)
    row = chat(*(text for turn in turns for text in turn))
    last = supervised(sample_of(row, tok, train_on="last"), tok).replace("<think>\n\n</think>\n\n", "")
    assert bare(last) == bare(turns[-1][1] + end)
    sample = sample_of(row, tok, train_on="all")
    assert sample.labels == sample.ids


@pytest.mark.parametrize("name", STYLES)
def test_one_bos_if_the_template_writes_one(name):
    tok, _ = style(name)
    ids = sample_of(chat("hi", "yes"), tok).ids
    if tok.bos_token_id is not None and name != "smollm":
        assert ids.count(tok.bos_token_id) == ("bos_token" in tok.chat_template)
        assert "bos_token" not in tok.chat_template or ids[0] == tok.bos_token_id


def test_the_model_takes_over_where_generation_starts():
    for name in STYLES:
        tok, _ = style(name)
        row = chat("hi there", "yes", "more", "no")
        sample = sample_of(row, tok, train_on="last")
        start = next(t for t, label in enumerate(sample.labels) if label != IGNORE)
        assert sample.ids[:start] == data.chat_ids(row["messages"][:3], tok), name


def test_thoughts_are_learnt_in_the_last_answer_only():
    tok, _ = style("qwen3")
    thought = "<think>\nhm\n</think>\n\nyes"
    said = supervised(sample_of(chat("a", thought, "b", thought), tok), tok)
    assert said == "yes<|im_end|>" + thought + "<|im_end|>"


def test_a_date_in_the_template_is_the_same_every_day():
    tok, _ = style("llama3.1")
    assert "Today Date: 26 Jul 2024\n" in tok.decode(sample_of(chat("a", "b"), tok).ids)


def test_system_prompts_and_roles_are_the_templates_business():
    tok, end = style("llama2")
    assert "<<SYS>>\nbe brief\n<</SYS>>" in tok.decode(sample_of(chat("a", "b", system="be brief"), tok).ids)
    gemma, _ = style("gemma")
    with pytest.raises(DataError, match="row 1: .*refuses.*System role not supported"):
        sample_of(chat("a", "b", system="be brief"), gemma)
    first = {"messages": [{"role": "assistant", "content": "hi"}]}
    twice = {"messages": [dict(role="user", content="a"), *chat("b", "c")["messages"]]}
    for bad in (first, twice):
        with pytest.raises(DataError, match="row 1: .*must alternate"):
            sample_of(bad, tok)
    qwen, _ = style("qwen2")
    assert supervised(sample_of(first, qwen), qwen) == "hi<|im_end|>"
    assert supervised(sample_of(twice, qwen), qwen) == "c<|im_end|>"
    assert supervised(sample_of({"messages": first["messages"] * 2}, qwen), qwen) == "hi<|im_end|>" * 2


def test_a_template_that_changes_earlier_text_is_refused_but_for_the_last_answer():
    tok = tokenizer("metaspace", "<s>", "</s>", (), MISTRAL3)
    row = chat("a", "b", "c", "d", system="s")
    with pytest.raises(DataError, match="row 1: .*changes earlier text.*--train_on last"):
        sample_of(row, tok)
    assert bare(supervised(sample_of(row, tok, train_on="last"), tok)) == "d</s>"
    assert bare(supervised(sample_of(chat("a", "b", "c", "d"), tok), tok)) == "b</s>d</s>"


def test_a_template_without_end_of_turn_gets_one_eos():
    tok = tokenizer("bytes", None, "</s>", tuple(TURNS[:3]), ENDLESS)
    sample = sample_of(chat("a", "b", "c", "d"), tok)
    assert tok.decode(sample.ids).endswith("<|assistant|>\nd</s>") and supervised(sample, tok) == "bd</s>"


def test_the_opening_of_the_next_turn_is_no_end_of_turn():
    """This one closes the last answer only, so what follows the others belongs to the next question."""
    closing = "{% if loop.last and message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    once = ENDLESS.replace("{% endfor %}", closing)
    tok = tokenizer("bytes", None, "</s>", tuple(TURNS[:3]), once)
    assert supervised(sample_of(chat("a", "b", "c", "d"), tok), tok) == "bd\n</s>"


def test_a_first_token_is_never_predicted():
    tok = tokenizer("bytes", None, "</s>", (), None)
    table = tokens.build([("1", {"text": "ab"})], formats.Renderer(tok), tok, 1)
    assert table.facts["dropped"] == 1 and not len(table.cut)


def test_a_template_that_ignores_the_generation_prompt():
    tok = tokenizer("bytes", None, "<|im_end|>", ("<|im_start|>",), CHATML)
    assert supervised(sample_of(chat("a", "b", "c", "d"), tok), tok) == "b<|im_end|>d<|im_end|>"


def test_templates_that_drop_or_need_something_are_refused():
    first = tokenizer("bytes", None, "</s>", (), "{{ messages[0]['content'] }}")
    with pytest.raises(DataError, match="does not write every answer exactly once"):
        sample_of(chat("a", "b"), first)
    needs = tokenizer("bytes", None, "</s>", (), "{% for tool in tools %}{{ tool.name }}{% endfor %}")
    with pytest.raises(DataError, match="row 1: the chat template refuses the conversation"):
        sample_of(chat("a", "b"), needs)
    none = tokenizer("bytes", None, "</s>", (), None)
    with pytest.raises(DataError, match="has no chat template"):
        sample_of(chat("a", "b"), none)
    with pytest.raises(DataError, match="has no chat template"):
        formats.Renderer(none, dataset_format="alpaca", chat_template=True)


def test_a_conversation_without_answer_is_dropped():
    tok, _ = style("qwen2")
    table = tokens.build(
        [("1", {"messages": chat("a", "b")["messages"][:1]})], formats.Renderer(tok), tok, 99
    )
    assert table.facts["dropped"] == 1 and not len(table.cut)


# --------------------------------------------------------------------------------------------- other formats

ROWS = {
    "alpaca": ({"instruction": "add", "input": "1, 2", "output": "3"}, ["3"]),
    "prompt_completion": ({"prompt": "a b", "completion": " c"}, [" c"]),
    "question_answer": ({"question": "who?", "answer": "me", "context": "here"}, ["me"]),
    "guanaco": ({"text": "### Human: hi### Assistant: yo\n### Human: x### Assistant: y z"}, [" yo", " y z"]),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}, ["yo"],
    ),
    "messages": (chat("hi", "yo", "more", "no"), ["yo", "no"]),
    "text": ({"text": "just words"}, ["just words"]),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("chat_template", [False, True])
@pytest.mark.parametrize("forced", [False, True])
def test_formats(name, chat_template, forced):
    tok, end = style("qwen2")
    row, answers = ROWS[name]
    renderer = formats.Renderer(tok, name if forced else "auto", chat_template=chat_template)
    samples = tokens.Samples([tokens.build([("row 1", row)], renderer, tok, 4096)])
    assert renderer.name == name
    if renderer.chat:
        wanted = "".join(answer.strip() + end for answer in answers)
        if name == "prompt_completion":
            wanted = " c" + end
    else:
        wanted = "".join(answers) + tok.eos_token
    assert supervised(samples[0], tok) == wanted
    assert bool(renderer.chat) == (name in ("messages", "sharegpt") or chat_template and name != "text")


def test_prompts_of_questions():
    tok, _ = style("qwen2")
    with_context = tok.decode(sample_of(ROWS["question_answer"][0], tok).ids)
    assert with_context == "###Context:\nhere\n###Question:\nwho?\n###Answer:\nme<|im_end|>"
    without = tok.decode(sample_of({"question": "who?", "answer": "me"}, tok).ids)
    assert without == "###Question:\nwho?\n###Answer:\nme<|im_end|>"


@pytest.mark.parametrize(
    "columns", ["question=instruction,answer=response", "instruction=question, response=answer"]
)
def test_columns_are_mapped_whichever_way_round(columns):
    tok, _ = style("qwen2")
    row = {"instruction": "who?", "response": "me", "output": "no"}
    sample = sample_of(row, tok, columns=columns, dataset_format="question_answer")
    assert tok.decode(sample.ids) == "###Question:\nwho?\n###Answer:\nme<|im_end|>"


def test_swapped_columns():
    assert formats.rename({"a": 1, "b": 2}, [("a", "b"), ("b", "a")]) == {"a": 2, "b": 1}


@pytest.mark.parametrize(
    "row, flags, message",
    [
        (
            {"foo": "a", "bar": "b"},
            {},
            "no format fits the columns foo, bar; known.*alpaca: instruction, output",
        ),
        (
            {"question": "a", "answer": "b"},
            {"dataset_format": "alpaca"},
            '"instruction" is missing.*question',
        ),
        ({"question": "a", "answer": ""}, {}, '"answer" is empty'),
        ({"question": "a", "answer": " \n"}, {}, '"answer" is empty'),
        ({"question": "a", "answer": 3}, {}, '"answer" must be a string, not int'),
        ({"question": "a", "answer": "b", "context": 1}, {}, '"context" must be a string, not int'),
        ({"prompt": None, "completion": "b"}, {}, '"prompt" must be a string, not NoneType'),
        ({"text": ""}, {}, '"text" is empty'),
        ({"text": "\ud800"}, {}, "surrogate"),
        ({"text": "### Human: only"}, {}, 'no "### Assistant:" turn'),
        ([1], {}, "a row must be an object"),
        ({"messages": []}, {}, "must be a list of turns, not an empty one"),
        ({"messages": "hi"}, {}, "must be a list of turns, not str"),
        ({"messages": [{"role": "user"}]}, {}, 'turn 1 must be an object with "role" and "content"'),
        ({"messages": [{"role": "owl", "content": ""}]}, {}, "turn 1 has the unknown \"role\" 'owl'; known"),
        ({"messages": [{"role": 1, "content": ""}]}, {}, 'unknown "role" 1'),
        ({"messages": [{"role": "user", "content": 1}]}, {}, 'turn 1, "content" must be a string, not int'),
        (chat("a", " "), {}, "turn 2 is an empty answer"),
        ({"conversations": [{"from": "dog", "value": ""}]}, {}, "unknown \"from\" 'dog'"),
        ({"a": 1}, {"columns": "x=y"}, "dataset_columns names 'y', but the columns are a"),
        ({"a": 1}, {"columns": "x"}, "write field=column"),
        ({"a": 1}, {"dataset_format": "alpacca"}, "none of auto,.*did you mean alpaca"),
        ({"a": 1}, {"train_on": "some"}, "none of completions, all, last"),
    ],
)
def test_bad_rows_and_flags(row, flags, message):
    with pytest.raises(DataError, match=message):
        sample_of(row, style("qwen2")[0], **flags)


# ------------------------------------------------------------------------------------------------- truncation


def fitted(tok, truncation, context_length, answer="b" * 30, **flags):
    row = {"prompt": "0123456789" * 3, "completion": answer}
    try:
        return sample_of(row, tok, context_length, truncation, **flags)
    except IndexError:
        return None


def test_truncation():
    tok = tokenizer("bytes", "<s>", "</s>", (), None)
    whole = fitted(tok, "right", 62)
    assert len(whole.ids) == 62  # <s>, prompt, answer, </s>
    right = fitted(tok, "right", 40)
    assert right.ids == whole.ids[:40] and right.labels == whole.labels[:40]
    left = fitted(tok, "left_prompt", 40)
    assert tok.decode(left.ids) == "<s>" + "0123456789"[-8:] + "b" * 30 + "</s>"
    assert tok.decode(fitted(tok, "left_prompt", 20).ids) == "<s>" + "b" * 19
    plain = tokenizer("bytes", None, "</s>", (), None)
    assert plain.decode(fitted(plain, "left_prompt", 20).ids) == "9" + "b" * 19
    assert fitted(tok, "drop", 61) is None and fitted(tok, "drop", 62) == whole
    assert fitted(tok, "right", 31) is None  # nothing of the answer is left
    assert fitted(tok, "left_prompt", 40, train_on="all").ids == whole.ids[:40]


@QUICK
@given(turns=conversations, limit=st.integers(2, 80), truncation=st.sampled_from(tokens.TRUNCATIONS))
def test_truncated_samples_are_short_and_have_something_to_learn(turns, limit, truncation):
    tok, _ = style("llama3")
    row = chat(*(text for turn in turns for text in turn))
    table = tokens.build([("1", row)], formats.Renderer(tok), tok, limit, truncation)
    counts = tokens.Samples([table]).counts()
    assert counts.kept + counts.dropped == 1
    for sample in tokens.Samples([table]):
        assert 2 <= len(sample.ids) <= limit and sample.ids[0] == tok.bos_token_id
        assert any(label != IGNORE for label in sample.labels[1:])
        assert all(label in (i, IGNORE) for i, label in zip(sample.ids, sample.labels))


def test_skipping_counts_bad_rows_and_keeps_the_first_reason():
    tok, _ = style("qwen2")
    rows = [("line 1", {"text": "a"}), ("line 2", {"text": 1}), ("line 3", DataError("broken"))]
    rows += [("line 4", {"text": "b"})]
    with pytest.raises(DataError, match='line 2: "text" must be a string'):
        tokens.build(rows, formats.Renderer(tok), tok, 9)
    samples = tokens.Samples([tokens.build(rows, formats.Renderer(tok), tok, 9, skip_bad_rows=True)])
    assert (samples.counts().kept, samples.counts().skipped) == (2, 2)
    assert samples.problems == ['line 2: "text" must be a string, not int']
    with pytest.raises(DataError, match="all 2 rows were skipped; the first: line 2"):
        tokens.build(rows[1:3], formats.Renderer(tok, "text"), tok, 9, skip_bad_rows=True)


# ------------------------------------------------------------------------------------------------- real files

CONFIG = dict(
    dataset_samples=40, dataset_format="auto", dataset_columns="", chat_template=False, train_on="completions",
    truncation="right", packing=False, group_by_length=False, context_length=20_000, skip_bad_rows=False, seed=1,
)  # fmt: skip


@pytest.mark.skipif(not SHARED.is_dir(), reason="there is no ../shared/data beside the repository")
@pytest.mark.parametrize("file", ["gsm8k_test.jsonl", "alpaca_en_demo.json"])
@pytest.mark.parametrize("name", ["qwen2", "llama2", "gemma"])
@pytest.mark.parametrize("chat_template", [False, True])
def test_real_files(file, name, chat_template):
    tok, end = style(name)
    config = SimpleNamespace(**CONFIG | dict(dataset=str(SHARED / file), chat_template=chat_template))
    samples, counts = data.prepare(config, tok)
    text = (SHARED / file).read_text()
    rows = json.loads(text) if file.endswith(".json") else [*map(json.loads, text.splitlines())]
    assert counts.kept + counts.dropped == 40 and not counts.skipped
    assert not counts.dropped and not counts.truncated
    end = end if chat_template else tok.eos_token
    for sample, row in zip(samples, rows, strict=False):
        assert bare(supervised(sample, tok)) == bare((row.get("answer") or row["output"]) + end)
