"""scripts/generate.py as a command, on tiny results: it streams, scores, and names what is missing."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tiny
import train
from test_run import together

SCRIPT = Path(train.__file__).parent / "scripts" / "generate.py"


@pytest.fixture(scope="module")
def results(pool, models, tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("results")
    for train_type in ("qlora", "full"):
        pool.run(
            2, "logits", models("llama"), dict(train_type=train_type), [[5, 6]], 2, str(root / train_type)
        )
    return {name: str(root / name) for name in ("qlora", "full")}


def generate(*flags: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(SCRIPT), *flags], capture_output=True, text=True, cwd="/")


@pytest.mark.parametrize("kind, before", [("qlora", "base"), ("full", None)])
def test_answers_and_scores(results, tmp_path, kind, before):
    rows = tiny.write_alpaca(tmp_path / "rows.jsonl", 3)
    done, asked = together(
        lambda: generate("--adapter", results[kind], "--eval", str(rows), "--max_new_tokens", "4", "--show=1"),
        lambda: generate("--adapter", results[kind], "--prompt", "What is two plus two?", "--max-new-tokens", "4"),
    )
    assert done.returncode == 0, done.stderr
    assert (
        "exact match: " + (f"{before} 0/3 (0.0%), adapter" if before else "model") + " 0/3 (0.0%)"
        in done.stdout
    )
    assert "expected: It is" in done.stdout
    assert asked.returncode == 0 and asked.stdout.strip() and not asked.stderr, asked.stderr


def test_questions_are_rendered_as_in_training():
    """Plain and chat prompts are what the tokens of a training example begin with."""
    from types import SimpleNamespace

    from scripts import data, generate

    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"
    tokenizer.chat_template += "{% if add_generation_prompt %}[assistant]{% endif %}"
    for chat in (False, True):
        config = SimpleNamespace(
            dataset="demo",
            dataset_samples=3,
            dataset_format="auto",
            dataset_columns="",
            chat_template=chat,
            train_on="completions",
            context_length=400,
            truncation="right",
            skip_bad_rows=False,
            seed=1,
        )
        samples, _ = data.prepare(config, tokenizer)
        for row, sample in zip(data.load("demo", 3), samples):
            ids = generate.question_ids(tokenizer, row["instruction"], row["input"], chat)
            assert list(sample.ids[: len(ids)]) == ids and sample.labels[len(ids)] != -100


def test_what_is_missing_is_named(results, tmp_path):
    for flags, text in [
        (["--adapter", "/no/such", "--prompt", "x"], "no folder /no/such"),
        (["--adapter", str(tmp_path), "--prompt", "x"], "neither adapter_config.json nor config.json"),
        (["--adapter", results["qlora"]], "either --prompt TEXT or --eval FILE"),
        (["--adapter", results["qlora"], "--base", "/gone", "--prompt", "x"], "--base FOLDER"),
    ]:
        done = generate(*flags)
        assert done.returncode == 2 and text in done.stderr and "Traceback" not in done.stderr


def test_a_base_that_moved_is_named(results, tmp_path):
    shutil.copytree(results["qlora"], tmp_path / "adapter")
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(
        config.read_text().replace('"base_model_name_or_path": "/', '"base_model_name_or_path": "/moved/')
    )
    done = generate("--adapter", str(tmp_path / "adapter"), "--prompt", "x")
    assert done.returncode == 2 and "/moved/" in done.stderr and "pass --base" in done.stderr
