"""Flags and what they name: good ones become a configuration, bad ones a short message and nothing on disk."""

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tiny
import train
from frozen_flags import FILE, compared, lines
from scripts.flags import ELSEWHERE, option, run_script
from train import Config, UserError, parse

ROOT = Path(train.__file__).parent
TRAIN = [sys.executable, str(ROOT / "train.py")]


def quick(*argv: str) -> Config:
    return parse(list(argv))


def test_defaults_and_types():
    config = quick()
    assert config == Config()
    config = quick(
        "--lr", "1e-4", "--batch_size=3", "--use_cpu_offload", "true", "--no_sync", "--low_memory", "False"
    )
    assert (config.lr, config.batch_size, config.use_cpu_offload, config.no_sync, config.low_memory) == (
        1e-4,
        3,
        True,
        True,
        False,
    )


def test_both_spellings():
    assert quick("--batch-size", "3", "--output-dir=a-b_c").output_dir == "a-b_c"
    for short in ("fp16_autocast", "bf16_autocast", "bf16_buffers_autocast"):
        assert (
            quick("--precision", short).precision
            == quick("--precision", f"mp_{short}").precision
            == f"mp_{short}"
        )


def test_the_command_line_is_frozen():
    """Whoever removes or changes a flag does it knowingly."""
    assert not (said := compared(FILE.read_text().splitlines(), lines(Config))), said


def test_what_a_changed_command_line_says():
    old = ["batch_size int 4", "lr float or nothing None", "seed int 42"]
    assert compared(old, old) == ""
    added = compared(old, [*old, "new bool False"])
    assert added.startswith("+ new bool False\n") and "breaks" not in added and "tests/frozen_flags.py" in added
    for new in (old[:2], [*old[:2], "seed int 43"], [*old[:2], "seed int 43", "new bool False"]):
        said = compared(old, new)
        assert "- seed int 42\n" in said and "breaks" in said and "CHANGELOG" in said
        assert all(f"+ {line}\n" in said for line in new[2:]) and "batch_size" not in said


def test_types_choices_and_defaults_are_frozen():
    @dataclasses.dataclass
    class Two:
        b: float | None = option(None, "")
        a: str = option("x", "", ("y", "x"))

    assert lines(Two) == ["a str 'x' from x, y", "b float or nothing None"]


FSDP_QLORA = """--world_size 2 --master_port 12356 --model_name meta-llama/Llama-2-7b-hf
 --gradient_accumulation_steps 4 --batch_size 8 --context_length 512 --precision bf16 --train_type {}
 --use_gradient_checkpointing true --use_cpu_offload false --use_activation_cpu_offload false --log_to wandb
 --dataset alpaca"""
FOUR_A100 = """--world_size 4 --master_port 12356 --model_name meta-llama/Llama-2-70b-hf
 --gradient_accumulation_steps 4 --batch_size 2 --context_length 512 --precision bf16_buffers_autocast
 --train_type {} --use_gradient_checkpointing true {}--use_cpu_offload false --log_to stdout --dataset
 alpaca"""
ALL_FLAGS = """--lora_rank 64 --lora_alpha 16 --lora_dropout 0.1 --lora_target_modules all --lr 1e-5
 --apply_gradient_clipping false --grad_norm 0.3 --wd 0.1 --optimizer adamw --lr_scheduler constant
 --loading_workers -1 --master_addr localhost --seed 42 --project_name fsdp_qlora --num_epochs 1
 --dataset_samples 512 --sharding_strategy full_shard --low_memory true --no_sync false --verbose false
 --save_model false --max_steps -1 --reentrant_checkpointing true"""


def test_fsdp_qloras_example_for_two_24_gb_cards():
    config = quick(
        *"""--model_name meta-llama/Llama-2-70b-hf --batch_size 2 --context_length 512 --precision bf16
        --train_type qlora --use_gradient_checkpointing true --use_cpu_offload true --dataset alpaca
        --reentrant_checkpointing true""".split()
    )
    assert (config.batch_size, config.context_length, config.precision) == (2, 512, "bf16")
    assert config.use_cpu_offload and config.use_gradient_checkpointing and config.reentrant_checkpointing
    assert config.type == train.TrainType("nf4", "peft") and config.world_size == -1


@pytest.mark.parametrize(
    "train_type, extra, wanted",
    [
        ("full", "", ("plain", None, False)),
        ("lora", "", ("plain", "peft", False)),
        ("custom_lora", "", ("plain", "custom", False)),
        ("qlora", "--reentrant_checkpointing true", ("nf4", "peft", False)),
        ("custom_qlora", "--reentrant_checkpointing true", ("nf4", "custom", False)),
        ("hqq_lora", "", ("hqq", "custom", False)),
        ("bnb_dora", "", ("nf4", "dora", False)),
        ("hqq_dora", "", ("hqq", "dora", False)),
        ("bnb_llama_pro", "--llama_pro_path /path/to/llama_pro_weights_directory", ("nf4", None, True)),
        ("hqq_llama_pro", "--llama_pro_path /path/to/llama_pro_weights_directory", ("hqq", None, True)),
    ],
)
def test_fsdp_qloras_train_types(train_type, extra, wanted):
    config = quick(*FSDP_QLORA.format(train_type).split(), *extra.split())
    kind = config.type
    assert (kind.base, kind.adapter, kind.new_blocks) == wanted
    assert (config.world_size, config.master_port, config.batch_size, config.log_to) == (2, 12356, 8, "wandb")
    assert config.reentrant_checkpointing == ("reentrant" in extra)
    assert not quick(*FSDP_QLORA.format(train_type).split(), *extra.split(), *ALL_FLAGS.split()).save_model


def test_fsdp_qloras_examples_for_four_a100s():
    """The first loses a line continuation in that README: what the shell passes on is the part before it."""
    lost = FOUR_A100.format("custom_qlora", "--reentrant_checkpointing true\n").split("--use_cpu_offload")[0]
    for text, kind in [(lost, "nf4"), (FOUR_A100.format("hqq_lora", ""), "hqq")]:
        config = quick(*text.split())
        assert config.numbers == train.PRECISIONS["mp_bf16_buffers_autocast"] and config.type.base == kind
        assert (config.world_size, config.batch_size, config.gradient_accumulation_steps) == (4, 2, 4)
        assert config.reentrant_checkpointing == (kind == "nf4") and config.type.adapter == "custom"


@pytest.mark.parametrize("package", ["hqq", "bitsandbytes", "peft"])
def test_a_missing_package_is_named_for_every_type_that_needs_it(monkeypatch, package):
    find = train.checks.importlib.util.find_spec
    monkeypatch.setattr(
        train.checks.importlib.util, "find_spec", lambda name: None if name == package else find(name)
    )
    needs = {
        t
        for t, k in train.TRAIN_TYPES.items()
        if package in (train.checks.PACKAGES.get(k.base), train.checks.PACKAGES.get(k.adapter))
    }
    assert len(needs) >= 2
    for name, kind in train.TRAIN_TYPES.items():
        flags = ["--train_type", name, *(["--llama_pro_path", "x"] if kind.new_blocks else [])]
        if name in needs:
            with pytest.raises(UserError, match=f"--train_type {name} needs the package {package}"):
                quick(*flags)
        else:
            quick(*flags)


@pytest.mark.parametrize("optimizer", train.optim.OPTIMIZERS)
def test_a_missing_package_is_named_for_every_optimizer_that_needs_it(monkeypatch, optimizer):
    monkeypatch.setattr(train.checks.importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else name)
    config = train.Config(train_type="full", optimizer=optimizer)
    needed = f"--optimizer {optimizer} needs the package bitsandbytes: pip install bitsandbytes"
    assert (needed in train.checks.among(config)) == any(part in optimizer for part in ("8bit", "paged", "lion"))


def test_names_of_others_lead_to_flags_that_there_are():
    names = {spec.name for spec in dataclasses.fields(Config)}
    assert set(ELSEWHERE.values()) <= names and not names & set(ELSEWHERE)


def test_ctrl_c_is_no_traceback(monkeypatch, capsys):
    """While planning, and in the scripts; a run saves first (test_faults.py)."""

    def interrupted(config=None):
        raise KeyboardInterrupt

    monkeypatch.setattr(train.plan, "answer", interrupted)
    assert train.main(["--plan"]) == 130
    monkeypatch.setattr(sys, "argv", ["/any/where/merge.py"])
    with pytest.raises(SystemExit, match="130"):
        run_script(lambda: interrupted())
    assert capsys.readouterr().err == "train.py: stopped by Ctrl-C\nmerge.py: stopped by Ctrl-C\n"


BAD = {  # flags -> what the message must contain
    "--trian_type qlora": "unknown flag --trian_type (did you mean --train_type?)",
    "--learning_rate 1e-4": "unknown flag --learning_rate (did you mean --lr?)",  # what others call it
    "--model llama": "unknown flag --model (did you mean --model_name?)",  # how it begins
    "--zzzzz 1": "unknown flag --zzzzz",
    "stray": "unexpected argument 'stray'",
    "--train_type qlorra": "--train_type qlorra: did you mean qlora?",
    "--precision bf61": "--precision bf61: did you mean bf16?",
    "--sharding_strategy none": "--sharding_strategy none: choose from full_shard",
    "--wrap_policy x": "choose from decoder, decoder_attention_mlp",
    "--optimizer lyon": "--optimizer lyon",
    "--lr_scheduler cosin": "did you mean cosine?",
    "--log_to file": "choose from tqdm, stdout, wandb",
    "--batch_size 0": "--batch_size 0: must be at least 1",
    "--batch_size two": "--batch_size two: expected a whole number",
    "--batch_size": "--batch_size: expected one argument",
    "--context_length 0": "--context_length 0: must be at least 2",
    "--gradient_accumulation_steps -1": "must be at least 1",
    "--num_epochs 0": "--num_epochs 0",
    "--max_steps 0": "--max_steps 0",
    "--max_steps -2": "--max_steps -2",
    "--lr 0": "--lr 0.0: must be greater than 0",
    "--lr nan": "--lr nan: must be greater than 0",
    "--lr fast": "expected a number",
    "--wd -1": "--wd -1.0",
    "--grad_norm 0": "--grad_norm 0.0",
    "--warmup_ratio 0.1 --warmup_steps 3": "--warmup_ratio and --warmup_steps: give one",
    "--warmup_ratio 1.5": "--warmup_ratio 1.5: must be at most 1",
    "--min_lr 1e-5 --lr_scheduler constant": "--min_lr goes with --lr_scheduler cosine or linear",
    "--min_lr 0.1": "--min_lr 0.1: is above the peak rate",
    "--label_smoothing 1": "--label_smoothing 1.0: must be below 1",
    "--neftune_alpha -1": "--neftune_alpha -1.0: must be at least 0",
    "--train_type full --use_rslora true": "--use_rslora goes with an adapter train type, not with full",
    "--train_type full --loraplus_lr_ratio 2": "--loraplus_lr_ratio goes with an adapter train type",
    "--loraplus_lr_ratio 0": "--loraplus_lr_ratio 0.0: must be greater than 0",
    "--train_type full --optim_in_backward true": "--optim_in_backward needs --apply_gradient_clipping false",
    "--optim_in_backward true --apply_gradient_clipping false": "a full or llama_pro --train_type",
    "--train_type full --optim_in_backward true --apply_gradient_clipping false "
    "--gradient_accumulation_steps 2": "--optim_in_backward needs --gradient_accumulation_steps 1",
    "--train_type full --optim_in_backward true --apply_gradient_clipping false "
    "--precision fp16_autocast": "--optim_in_backward needs a --precision without loss scaling",
    "--lora_rank 0": "--lora_rank 0",
    "--lora_dropout 1": "--lora_dropout 1.0: must be below 1",
    "--use_cpu_offload maybe": "--use_cpu_offload maybe: expected true or false",
    "--seed -1": "--seed -1",
    "--world_size 0": "--world_size 0",
    "--world_size -5": "--world_size -5",
    "--master_port 70000": "--master_port 70000",
    "--eval_fraction 1": "--eval_fraction 1.0: must be below 1",
    "--eval_fraction 0.1 --eval_dataset dummy": "without --eval_dataset",
    "--eval_dataset /no.jsonl": "--eval_dataset: dataset '/no.jsonl'",
    "--eval_generate 2": "--eval_generate needs",
    "--attn_implementation flex_attention": "trains on accelerators only",
    "--attn_implementation flash_attention_2": "needs the package flash-attn",
    "--dataset_format x": "--dataset_format x: choose from auto",
    "--train_on x": "choose from completions, all, last",
    "--truncation left": "choose from right, left_prompt, drop",
    "--llama_pro_path x": "--llama_pro_path goes with a llama_pro train type",
    "--train_type bnb_llama_pro": "--train_type bnb_llama_pro needs --llama_pro_path",
    "--train_type llama_pro --llama_pro_path /no/such": "--llama_pro_path /no/such: no such folder",
    "--n_bits 4": "--n_bits goes with an hqq train type, not with qlora",
    "--train_type hqq_lora --n_bits 5": "--n_bits 5: choose from 8, 4, 3, 2",
    "--train_type hqq_dora --hqq_group_size 0": "--hqq_group_size 0: must be at least 8",
    "--model_name /no/such/folder": "/no/such/folder: no such folder",
    "--model_name {empty}": "no config.json",
    "--model_name {bins}": "only .bin weights",
    "--model_name {noweights}": "neither model.safetensors nor",
    "--model_name {holes}": "model-2.safetensors is missing",
    "--model_name {badindex}": "not a safetensors index",
    "--dataset /no/such.jsonl": "'/no/such.jsonl' is neither a file nor",
    "--dataset alpacca": "did you mean alpaca?",
    "--dataset {nothing}": "is empty; it needs",
    "--output_dir {full}": "not empty; choose another, or pass --overwrite_output_dir true",
    "--output_dir {file}": "is a file",
    "--output_dir /proc/here": "not writable",
}


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, str]:
    """Folders and files that are wrong in one way each."""
    root = tmp_path_factory.mktemp("places")
    made = {name: root / name for name in ("empty", "bins", "noweights", "holes", "badindex", "full")}
    for name, folder in made.items():
        folder.mkdir()
        if name != "empty":
            (folder / "config.json").write_text("{}")
    (made["bins"] / "pytorch_model.bin").write_bytes(b"x")
    (made["holes"] / "model-1.safetensors").write_bytes(b"x")
    index = '{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
    (made["holes"] / "model.safetensors.index.json").write_text(index)
    (made["badindex"] / "model.safetensors.index.json").write_text("[]")
    made["nothing"], made["file"] = root / "nothing.jsonl", root / "file"
    made["nothing"].write_text("")
    made["file"].write_text("x")
    return {name: str(path) for name, path in made.items()}


def outcome(capsys, monkeypatch, flags: list[str]) -> str:
    """What train.py prints to stderr for these flags; it must refuse them without starting anything."""
    monkeypatch.setattr(train.launcher, "Nodes", lambda *args: pytest.fail("a bad configuration was started"))
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert train.main(flags) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("flags", BAD)
def test_bad_flags(capsys, monkeypatch, tmp_path, places, flags):
    given = flags.format(**places).split()
    if "output_dir" not in flags:
        given += ["--output_dir", str(tmp_path / "out")]
    message = outcome(capsys, monkeypatch, given)
    assert message.startswith("train.py: error: ") and BAD[flags] in message
    assert len(message) < 500 and "Traceback" not in message and message.count("\n") <= 2
    assert not (tmp_path / "out").exists()


def test_all_problems_are_told_together(capsys, monkeypatch, tmp_path):
    message = outcome(
        capsys,
        monkeypatch,
        [
            "--batch_size",
            "0",
            "--lr",
            "x",
            "--presicion",
            "bf16",
            "--train_type",
            "lore",
            "--dataset",
            "/no.json",
            "--model_name",
            "/no/model",
            "--output_dir",
            "/proc/x",
        ],
    )
    for part in (
        "--batch_size 0",
        "--lr x",
        "--presicion",
        "--train_type lore",
        "/no.json",
        "/no/model",
        "/proc/x",
    ):
        assert part in message


def test_more_processes_than_accelerators():
    devices = train.checks.devices
    assert "only 2 accelerator(s) here" in devices(Config(world_size=3), 3, 2)[0]
    assert not devices(Config(world_size=2), 2, 2) and not devices(Config(world_size=9), 9, 0)
    assert not devices(Config(world_size=4), 2, 2)  # of each of two nodes


def test_every_flag_is_explained_and_grouped():
    groups = list(train.GROUPS)
    names = [spec.name for spec in dataclasses.fields(Config)]
    assert names[0] in groups and set(groups) <= set(names)  # so that no flag is outside a group
    assert all(len(spec.metadata["help"]) > 8 for spec in dataclasses.fields(Config))


@pytest.mark.parametrize("flags, code", [(["--help"], 0), (["--batch_size", "0"], 2)])
def test_help_and_errors_come_without_heavy_imports(flags, code):
    """Nothing heavier than torch; the time is a human's patience, not a benchmark."""
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *TRAIN[1:], *flags], capture_output=True, text=True, cwd="/"
    )
    assert done.returncode == code
    assert (done.stdout if code == 0 else done.stderr).count("--") >= 1
    assert time.monotonic() - start < 20
    for heavy in ("transformers", "peft", "bitsandbytes", "hqq", "accelerate", "wandb"):
        assert f"| {heavy}\n" not in done.stderr and f" {heavy}\n" not in done.stderr


def test_hub_id_offline_names_the_flag(capsys, monkeypatch, tmp_path):
    """An id that is neither a folder nor in the hub's cache, without network."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    message = outcome(
        capsys, monkeypatch, ["--model_name", "nobody/nothing", "--output_dir", str(tmp_path / "out")]
    )
    assert (
        "--model_name nobody/nothing" in message and "Traceback" not in message and message.count("\n") == 1
    )


def test_hub_cache_is_used_offline(tmp_path):
    """A model that is in the hub's cache is found there by its id."""
    home = tmp_path / "hub" / "models--someone--tiny"
    snapshot = home / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("0123abc")
    tiny.save_model("llama", str(snapshot))
    code = "from scripts.checkpoint import find_folder; print(find_folder('someone/tiny'))"
    env = dict(os.environ, HF_HUB_CACHE=str(tmp_path / "hub"), HF_HUB_OFFLINE="1")
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=env)
    assert found.stdout.strip() == str(snapshot), found.stderr
