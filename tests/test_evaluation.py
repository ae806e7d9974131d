"""Packed examples do not see each other; the loss on held-out examples is exact; both in real runs."""

import json
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import tiny
import train
from reference import plain_base
from test_run import forked, rows


PACKED = [("full", model, way) for model in ("llama", "qwen2", "gemma2") for way in ("auto", "eager", "one row")]
PACKED += [(train_type, "llama", "auto") for train_type in train.TRAIN_TYPES if train_type != "full"]


@pytest.mark.parametrize("train_type, model, attention", PACKED)
def test_packed_documents_are_alone(pool, models, train_type, model, attention):
    """Losses of documents are those outside the row (to rounding); another document before them changes no bit."""
    samples = tiny.samples(9, seed=3)
    rng = random.Random(0)
    others = [s._replace(ids=[rng.randrange(2, 300) for _ in s.ids]) for s in samples[::3]]
    others = [s._replace(labels=[-100 if x == -100 else i for x, i in zip(s.labels, s.ids)]) for s in others]
    packed = [samples[0:3], samples[3:6], samples[6:9]]
    (found,) = pool.run(1, "packed_losses", models(model, train_type), packed, others, attention, train_type)
    for alone, inside, swapped in zip(found["alone"], found["packed"], found["swapped"]):
        assert inside == pytest.approx(alone, rel=2e-6)
        assert swapped[1:] == inside[1:] and swapped[0] != inside[0]


def plain_loss(folder: str, samples: list) -> tuple[float, int]:
    model, total, count = plain_base(folder, "plain", []), 0.0, 0
    for sample in samples:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([sample.ids])).logits[0, :-1]
        labels = torch.tensor(sample.labels[1:])
        total += F.cross_entropy(logits, labels, reduction="sum").item()
        count += int((labels != -100).sum())
    return total / count, count


@pytest.mark.parametrize("world, batch_size", [(1, 3), (2, 2), (3, 4), (4, 1)])
def test_held_out_loss_is_exact(pool, models, world, batch_size):
    """For every number of ranks and batch size, remainders included; and all ranks give the same answers."""
    loss, tokens = plain_loss(models("llama"), tiny.samples(11))
    results = pool.run(
        world, "evaluated", models("llama"), dict(train_type="lora", batch_size=batch_size), 11
    )
    for found in results:
        assert (
            found["loss"] == pytest.approx(loss, rel=1e-6) and found["tokens"] == tokens and found["training"]
        )
        assert found["answers"] == results[0]["answers"] and len(found["answers"]) == 2


def test_answers_are_greedy_ones(pool, models):
    (found,) = pool.run(1, "evaluated", models("llama"), dict(train_type="lora"), 2)
    model, tokenizer, sample = plain_base(models("llama"), "plain", []), tiny.tokenizer(), tiny.samples(2)[0]
    start = next(t for t, label in enumerate(sample.labels) if label != -100)
    ids = torch.tensor([sample.ids[:start]])
    out = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False, pad_token_id=1
    )
    assert found["answers"][0][1] == tokenizer.decode(out[0, start:], skip_special_tokens=True)


@pytest.mark.parametrize("world", [1, 2])
def test_the_first_held_out_loss_is_that_of_the_untrained_model(pool, models, tmp_path, world):
    """It changes no bit of the training, and does not come again when a run goes on."""
    dataset = tiny.write_alpaca(tmp_path / "rows.jsonl", 20)
    flags = dict(model_name=models("llama"), train_type="lora", dataset=str(dataset), eval_fraction=0.3)
    flags |= dict(log_to="stdout", save_steps=2, lora_dropout=0.1)
    found = {}
    for name, extra in {
        "without": dict(max_steps=3),
        "with": dict(max_steps=2, eval_steps=2),
        "with ": dict(max_steps=3, eval_steps=2, resume="auto"),
    }.items():
        output = tmp_path / name.strip()
        done = pool.run(world, "whole_run", flags | extra | dict(output_dir=str(output)))
        assert {one["code"] for one in done} == {0}, done
        found[name] = rows(output)
    config = train.Config(**flags | dict(output_dir="unused"))
    loss, _ = plain_loss(models("llama"), train.data.load_all(config, Path(models("llama"))).eval)
    assert found["with"][0]["eval_loss"] == pytest.approx(loss, rel=1e-6)
    evals = [[row["step"] for row in one if "eval_loss" in row] for one in found.values()]
    assert evals == [[3], [0, 2], [0, 2, 3]]
    one, other = ([row["loss"] for row in found[name] if "loss" in row] for name in ("without", "with "))
    assert one == other and len(one) == 3


def test_evaluations_and_saves_are_left_out_of_the_next_steps_seconds(pool, models, tmp_path):
    dataset = tiny.write_alpaca(tmp_path / "rows.jsonl", 20)
    flags = dict(model_name=models("llama"), train_type="lora", dataset=str(dataset), output_dir=str(tmp_path / "out"))
    flags |= dict(eval_fraction=0.3, eval_steps=2, save_steps=3, max_steps=5, log_to="stdout")
    assert pool.run(1, "clocks_set", flags) == [[0, 2, 3, 4, 5]]


def test_a_run_with_packing_and_evaluation(nursery, models, tmp_path):
    dataset, output = tiny.write_alpaca(tmp_path / "rows.jsonl", 40), tmp_path / "out"
    done = forked(
        nursery,
        models("llama"),
        dataset,
        output,
        *"--packing true --context_length 256 --eval_fraction 0.2".split(),
        *"--eval_steps 2 --eval_generate 1 --batch_size 2 --num_epochs 2 --log_to stdout".split(),
    )
    assert done.returncode == 0, done.stderr
    found = rows(output)
    steps = [row for row in found if "loss" in row]
    evals = [row for row in found if "eval_loss" in row]
    assert evals[-1]["step"] == steps[-1]["step"] and evals[-1]["eval_loss"] < evals[0]["eval_loss"]
    assert all(
        row["eval_perplexity"] == pytest.approx(2.718281828459045 ** row["eval_loss"]) for row in evals
    )
    losses = {row["step"]: row["eval_loss"] for row in evals}
    assert list(losses) == [*range(0, len(steps), 2), len(steps)]
    assert found[0] == evals[0] and done.stdout.index("step 0/") < done.stdout.index("step 1/")
    lowest = min(losses, key=losses.get)
    said = json.loads((output / "run.json").read_text())["summary"]
    assert (said["eval_loss_first"], said["eval_loss_last"]) == (losses[0], losses[len(steps)])
    assert (said["eval_loss_lowest"], said["eval_lowest_step"]) == (losses[lowest], lowest)
    last = f"eval    loss {losses[0]:.3f} -> {losses[len(steps)]:.3f}, lowest {losses[lowest]:.3f} at step {lowest}"
    assert last in done.stdout.splitlines()
    assert "eval loss" in done.stdout and ">>>" in done.stdout and "eval    0.2: 8 examples" in done.stdout
    kept = json.loads((output / "run.json").read_text())
    assert (
        kept["data"]["kept"] == 32 and sum(row["tokens"] for row in steps) == 2 * kept["data"]["total_tokens"]
    )
    used = kept["data"]["total_tokens"] / (len(steps) / 2 * 4 * 256)
    assert used > 0.5  # rows are filled: without packing there would be four times as many steps


def test_group_by_length_and_an_eval_dataset(nursery, models, tmp_path):
    dataset, other = (tiny.write_alpaca(tmp_path / name, n) for name, n in (("a.jsonl", 13), ("b.jsonl", 5)))
    done = forked(
        nursery,
        models("llama"),
        dataset,
        tmp_path / "out",
        *f"--eval_dataset {other} --group_by_length true".split(),
        *"--batch_size 2 --train_type custom_lora".split(),
    )
    assert done.returncode == 0, done.stderr
    found = rows(tmp_path / "out")
    assert sum("eval_loss" in row for row in found) == 1 and sum("loss" in row for row in found) == 4
