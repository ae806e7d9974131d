"""Bad inputs of every kind: exit code 2, one short message with the cause and the remedy, nothing written. The
commands run as they are, in forks of one process that has imported everything (tests/nursery.py); test_flags.py
has flags and their combinations by themselves."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import train
from scripts.flags import type_of

ROOT = Path(train.__file__).parent
TRAIN = "--model_name {p}/llama --dataset {p}/rows.jsonl --output_dir {p}/never --max_steps 1 --world_size 1 "
LOOK = "data.py --model_name {p}/llama --dataset {p}/"
ALPACA = '{"instruction": "a", "output": "b"}\n'

# Files of one mistake each.
FILES = {
    "rows.jsonl": ALPACA * 12,
    "one.jsonl": ALPACA,
    "blank.jsonl": "\n\n",
    "broken.jsonl": ALPACA + "{nope\n",
    "object.json": '{"a": 1}',
    "numbers.json": "[1, 2]",
    "columns.jsonl": '{"foo": "a", "bar": "b"}\n',
    "null.jsonl": '{"instruction": null, "output": "b"}\n',
    "silent.jsonl": '{"instruction": "a", "output": ""}\n',
    "chat.jsonl": '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}\n',
    "header.csv": "instruction,output\n",
    "latin.jsonl": '{"instruction": "caf\xe9", "output": "b"}\n'.encode("latin1"),
    "broken.parquet": b"PAR1xxxx",
    "broken.jsonl.gz": b"no gzip",
    "notes.txt": "hello",
    "short.gguf": b"GGUF" + bytes(10),
    "other.gguf": b"nope",
    "part-00001-of-00002.gguf": b"GGUF" + bytes(10),
    "no_tokens.txt": "\n",
    "twice.txt": "<x>\n<x>\n",
    "object_of_tokens.json": '{"a": 1}',
    "word.flags": "train_type qlora\n",
    "typo.flags": "# fine so far\ntrian_type: qlora\n",
    "full/here": "x",
    "ended/run.json": '{"summary": {}}',
    "empty/checkpoint-5/x": "",
    "damaged/checkpoint-5/state.json": "{nope",
    "run/metrics.jsonl": '{"step": 1, "loss": 2.0}\n',
    "run_without_steps/metrics.jsonl": "",
    "adapter_unreadable/adapter_config.json": "{nope",
    "adapter_unreadable/adapter_model.safetensors": "",
}
CHANGES = {  # folder -> changes of a good config.json
    "unknown_type": dict(model_type="zorglub", architectures=["Zorglub"]),
    "encoder": dict(model_type="t5", architectures=["T5"]),
    "heads": dict(num_attention_heads=3),
    "text_size": dict(hidden_size="64"),
    "layers": dict(num_hidden_layers=3),
    "no_blocks": dict(num_hidden_layers=0),
    "gptq": dict(quantization_config=dict(quant_method="gptq", bits=4)),
    "own_code": dict(model_type="xx", auto_map=dict(AutoConfig="x.C", AutoModelForCausalLM="x.M")),
    "rope": dict(rope_parameters=dict(rope_type="zigzag", rope_theta=1e4)),
}
ADAPTERS = {"adapter_no_base": "/no/base", "adapter_short": "{p}/llama", "adapter_no_weights": "{p}/llama"}

# Command -> what its message must contain. {p}: the folder of all the files; environment variables stand in front.
CASES = {
    # model folders
    "--model_name {p}/unreadable": ["--model_name", "config.json: cannot be read"],
    "--model_name {p}/unknown_type": ["unknown_type", "cannot build this model"],
    "--model_name {p}/encoder": ["encoder", "cannot build this model", "T5Config"],
    "--model_name {p}/heads": ["heads", "hidden size (64) is not a multiple of the number of attention heads (3)"],
    "--model_name {p}/text_size": ["text_size", "'hidden_size' expected int, got str"],
    "--model_name {p}/layers": ["layers does not fit the model", "model.layers.2.self_attn.q_proj.weight: missing"],
    "--model_name {p}/short": ["short does not fit the model", "model.safetensors: cannot be read"],
    "--model_name {p}/no_blocks": ["no repeated decoder block found", "add a row to MODELS"],
    "--model_name {p}/gptq": ["--model_name", "quantised already (gptq)", "use the model they were made from"],
    "--model_name {p}/own_code": ["own_code", "needs its own code", "--trust_remote_code true"],
    "--model_name {p}/rope": ["rope", "zigzag"],
    "--model_name {p}/no_tokenizer": ["no_tokenizer", "no tokenizer", "copy the files"],
    "--model_name {p}/bad_tokenizer": ["bad_tokenizer: no tokenizer can be loaded", "copy the tokenizer's files"],
    "--model_name {p}/short.gguf": ["short.gguf: cannot be converted", "use the safetensors version"],
    "--model_name {p}/other.gguf": ["--model_name", "no GGUF file"],
    "--model_name {p}/part-00001-of-00002.gguf": ["one of several parts", "put them together first"],
    "--model_name {p}/none.gguf": ["--model_name", "no such file"],
    "--model_name a/b/c": ["--model_name a/b/c: no such folder"],
    "--model_name {p}/notes.txt": ["--model_name", "no such folder"],
    "HF_HUB_CACHE={p}/never --model_name nobody/nothing": ["--model_name nobody/nothing", "the hub gave"],
    "--train_type llama_pro --llama_pro_path {p}/llama": ["no llama_pro.json", "scripts/block_expansion.py"],
    # datasets: their names
    "--dataset {p}/notes.txt": ["--dataset", "unknown extension; convert it to .json"],
    "--dataset {p}/full": ["--dataset", "name one file in it"],
    "--dataset {p}/rows.jsonl=much": ["--dataset", "the weight 'much' is not a number"],
    "--dataset {p}/rows.jsonl=0": ["--dataset", "a weight must be above 0"],
    "--dataset https://example.com/rows.jsonl": ["--dataset", "neither a file nor a built-in set"],
    "--dataset nobody/nothing": ["dataset nobody/nothing", "owner/name[:split]"],
    "--eval_dataset {p}/columns.jsonl": ["columns.jsonl, line 1: no format fits", "--dataset_columns"],
    "--dataset {p}/one.jsonl --eval_fraction 0.5": ["--eval_fraction 0.5 of 1 samples leaves none"],
    # datasets: their rows, by the script that looks at them with the same code
    LOOK + "blank.jsonl": ["blank.jsonl is empty; it needs at least one row"],
    LOOK + "broken.jsonl": ["broken.jsonl, line 2: not valid JSON"],
    LOOK + "object.json": ["object.json holds one dict; it must be a list"],
    LOOK + "numbers.json": ["numbers.json", "row 1"],
    LOOK + "columns.jsonl": ["line 1: no format fits the columns foo, bar"],
    LOOK + "null.jsonl": ['null.jsonl, line 1: "instruction"'],
    LOOK + "silent.jsonl": ['"output" is empty; there is nothing to learn'],
    LOOK + "chat.jsonl": ["the tokenizer has no chat template", "instruct version"],
    LOOK + "header.csv": ["header.csv is empty"],
    LOOK + "latin.jsonl": ["latin.jsonl, line 1: not UTF-8", "save the file as UTF-8"],
    LOOK + "broken.parquet": ["broken.parquet is not a readable parquet file"],
    LOOK + "broken.jsonl.gz": ["broken.jsonl.gz is damaged"],
    LOOK + "rows.jsonl --dataset_columns foo": ["dataset_columns is 'foo'; write field=column"],
    LOOK + "rows.jsonl --dataset_columns instruction=nope": ["rows.jsonl, line 1", "--dataset_columns field=column"],
    LOOK + "rows.jsonl --dataset_format guanaco": ['"text" is missing; the row has'],
    LOOK + "rows.jsonl --context_length 2": ["raise --context_length or shorten the prompts"],
    LOOK + "rows.jsonl --png /no/x.png": ["--png /no/x.png", "there is no folder /no"],
    # files of tokens and of flags, checkpoints, output folders
    "--add_tokens {p}/no_tokens.txt": ["--add_tokens", "no token in it; give one token a line"],
    "--add_tokens {p}/twice.txt": ["--add_tokens", "<x> more than once"],
    "--add_tokens {p}/object_of_tokens.json": ["--add_tokens", "is no JSON list"],
    "--add_tokens {p}/none.txt": ["--add_tokens", "No such file"],
    "--add_tokens {p}": ["--add_tokens", "Is a directory"],
    "@{p}/none.flags": ["@{p}/none.flags: No such file", "--flag=@"],
    "@{p}/word.flags": ["word.flags, line 1: 'train_type qlora' is no flag", "`flag: value`"],
    "@{p}/typo.flags": ["unknown flag --trian_type (did you mean --train_type?)"],
    "@{p}/latin.jsonl": ["@{p}/latin.jsonl: 'utf-8' codec can't decode"],
    "--resume {p}/empty": ["--resume", "no state.json in it", "there are {p}/empty/checkpoint-5"],
    "--resume {p}/damaged/checkpoint-5": ["damaged", "--resume auto takes the newest whole one"],
    "--resume auto --output_dir {p}/damaged": ["every checkpoint in {p}/damaged is damaged; remove them"],
    "--output_dir {p}/empty": ["holds checkpoint-5 of an earlier run; --resume auto goes on"],
    "--resume auto --output_dir {p}/ended": ["ended holds the result of a run that has ended", "another --output_dir"],
    "--output_dir {p}/full": ["--output_dir", "not empty", "--overwrite_output_dir true"],
    "--output_dir {p}/notes.txt/x": ["--output_dir", "notes.txt is a file; name a folder"],
    "--error_dir {p}/notes.txt": ["--error_dir", "is a file; name a folder"],
    "--error_dir /proc/x": ["--error_dir /proc/x: /proc is not writable", "choose another folder"],
    "--profile true --profiling_output /proc/x --max_steps 9": ["--profiling_output /proc/x: /proc is not writable"],
    "--plan quick --plan_json {p}/none/x.json": ["--plan_json", "there is no folder {p}/none"],
    "--plan quick --plan_json {p}": ["--plan_json", "is a folder; name a file"],
    "--plan quick --model_name {p}/unreadable": ["unreadable/config.json: cannot be read"],
    "--plan quick --model_name {p}/unknown_type": ["{p}/unknown_type: transformers cannot build this model"],
    "--plan quick --model_name nobody/nothing": ["--model_name nobody/nothing: --plan needs", "Llama-2-7B"],
    # flags that the model does not go with, and empty or endless values
    "--lora_target_modules nope_proj": ["--lora_target_modules nope_proj", "there are q_proj"],
    "--modules_to_save nope": ["--modules_to_save nope: matches no module"],
    "--train_type full --freeze *": ["--freeze *: nothing is left to train"],
    "--train_type hqq_lora --hqq_group_size 48": ["a multiple of --hqq_group_size 48; 64 would do"],
    "--lora_experts true": ["--lora_experts: llama has no experts"],
    "--sharding_strategy hybrid_full_shard --hybrid_shard_size 3": ["do not divide", "set --hybrid_shard_size"],
    "--hybrid_shard_size 2": ["--hybrid_shard_size goes with --sharding_strategy hybrid_full_shard"],
    "--plan_json x.json": ["--plan_json goes with --plan"],
    "--resume=": ["--resume '': has no value"],
    "--output_dir=": ["--output_dir '': has no value"],
    "--model_name=": ["--model_name '': has no value"],
    "--lr inf": ["--lr inf: must be a finite number"],
    "--timeout_minutes 1e300": ["--timeout_minutes 1e+300: must be at most 525600"],
    # ports, processes, torchrun's and SLURM's variables, packages, keys
    "--world_size 1000000": ["--world_size 1000000", "at most 32 per core"],
    "--master_addr no.such.host.invalid": ["--master_addr no.such.host.invalid: no such host", "leave it out"],
    "RANK=0": ["RANK=0 set, but WORLD_SIZE, MASTER_ADDR, MASTER_PORT not: set all of them, or none"],
    "RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=x": ["MASTER_PORT=x is no number"],
    "RANK=5 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=29999": ["RANK=5 does not fit WORLD_SIZE=2"],
    "RANK=-1 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=29999": ["RANK=-1 is no number"],
    "RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=99999": ["MASTER_PORT=99999", "65535"],
    "RANK=0 WORLD_SIZE=1 LOCAL_RANK=3 LOCAL_WORLD_SIZE=1 MASTER_ADDR=localhost MASTER_PORT=29999": ["LOCAL_RANK=3"],
    "SLURM_STEP_ID=0": ["SLURM_STEP_ID=0 set, but"],
    "WANDB_MODE=online NETRC=/no/netrc --log_to wandb": ["--log_to wandb: no API key", "WANDB_MODE=offline"],
    "launch_check.py --master_port 99999999": ["--master_port 99999999", "65535"],
    "launch_check.py --world_size 0": ["--world_size 0: must be at least 1"],
    # the other scripts
    "merge.py --adapter {p}/run": ["pass --output_dir FOLDER"],
    "merge.py --adapter {p}/none --output_dir {p}/never": ["--adapter", "no such folder"],
    "merge.py --adapter {p}/full --output_dir {p}/never": ["none of adapter_config.json", "saved its final result"],
    "merge.py --adapter {p}/llama --output_dir {p}/never": ["already a whole model"],
    "merge.py --adapter {p}/adapter_unreadable --output_dir {p}/never": ["adapter_config.json: cannot be read"],
    "merge.py --adapter {p}/adapter_no_base --output_dir {p}/never": ["/no/base: no such folder; pass --base"],
    "merge.py --adapter {p}/adapter_short --output_dir {p}/never": ["adapter_model.safetensors: cannot be read"],
    "merge.py --adapter {p}/adapter_short --output_dir {p}/never --dtype int4": ["--dtype int4: choose from keep"],
    "generate.py --adapter {p}/run": ["pass either --prompt TEXT or --eval FILE"],
    "generate.py --prompt hi --adapter {p}/none": ["there is no folder", "--adapter takes"],
    "generate.py --prompt hi --adapter {p}/adapter_unreadable": ["adapter_config.json: cannot be read"],
    "generate.py --prompt hi --adapter {p}/adapter_no_base": ["/no/base", "pass --base FOLDER"],
    "generate.py --prompt hi --adapter {p}/adapter_no_weights": ["adapter_model.safetensors is missing"],
    "generate.py --prompt hi --adapter {p}/adapter_short": ["cannot load the adapter", "--base"],
    "generate.py --prompt hi --adapter {p}/short": ["cannot load {p}/short"],
    "generate.py --prompt hi --adapter {p}/llama --max_new_tokens 0": ["--max_new_tokens 0: must be at least 1"],
    "generate.py --eval {p}/columns.jsonl --adapter {p}/llama": ['line 1: "instruction" is missing'],
    "block_expansion.py --model_name {p}/llama": ["pass --model_name FOLDER_OR_ID and --output_dir FOLDER"],
    "block_expansion.py --model_name /no --output_dir {p}/never": ["--model_name /no: no such folder"],
    "block_expansion.py --model_name {p}/llama --output_dir {p}/full": ["--output_dir", "not empty"],
    "block_expansion.py --model_name {p}/llama --output_dir {p}/never --expansion_rate 5": ["--expansion_rate 5.0"],
    "block_expansion.py --model_name {p}/short --output_dir {p}/never": ["model.safetensors: cannot be read"],
    "plot_metrics.py {p}/none": ["{p}/none: no such folder"],
    "plot_metrics.py {p}/full": ["no metrics.jsonl in it; name the --output_dir of a run"],
    "plot_metrics.py {p}/run_without_steps": ["no step is in it yet"],
    "plot_metrics.py {p}/run --output {p}/plot.pdf": ["--output", "must end in .png"],
    "plot_metrics.py {p}/run --output /no/x.png": ["--output /no/x.png: there is no folder /no"],
}


@pytest.fixture(scope="module")
def places(tmp_path_factory, models) -> Path:
    root = tmp_path_factory.mktemp("bad")
    for name, content in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    good = Path(models("llama"))
    for name in ("llama", "unreadable", "short", "no_tokenizer", "bad_tokenizer", *CHANGES):
        shutil.copytree(good, root / name)
    for name, changes in CHANGES.items():
        content = json.loads((good / "config.json").read_text()) | changes
        (root / name / "config.json").write_text(json.dumps(content))
    (root / "unreadable" / "config.json").write_text("{nope")
    (root / "bad_tokenizer" / "tokenizer.json").write_text("{nope")
    weights = (good / "model.safetensors").read_bytes()
    (root / "short" / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    for file in (root / "no_tokenizer").glob("tokenizer*"):
        file.unlink()
    for name, base in ADAPTERS.items():
        (root / name).mkdir()
        recipe = dict(peft_type="LORA", r=4, lora_alpha=8, target_modules=["q_proj"], task_type="CAUSAL_LM")
        recipe["base_model_name_or_path"] = base.replace("{p}", str(root))
        (root / name / "adapter_config.json").write_text(json.dumps(recipe))
        if name != "adapter_no_weights":
            (root / name / "adapter_model.safetensors").write_bytes(b"xx")
    return root


def parts_of(command: str) -> tuple[str, list[str], dict[str, str]]:
    """script, arguments and environment of a row's command"""
    words = command.split()
    env = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    words = [word for word in words if not re.match(r"[A-Z_]+=", word)]
    if words and re.fullmatch(r"\w+\.py", words[0]):
        return str(ROOT / "scripts" / words[0]), words[1:], env
    return train.__file__, TRAIN.split() + words, env


def files_of(root: Path) -> dict:
    return {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()} | {
        path: None for path in root.rglob("*") if path.is_dir()
    }


@pytest.mark.parametrize("command", CASES)
def test_bad_input(nursery, places, command):
    script, argv, env = parts_of(command)
    before = files_of(places)
    words = [word.replace("{p}", str(places)) for word in argv]
    done = nursery.run(script, *words, cwd=places.parent, **{k: v.replace("{p}", str(places)) for k, v in env.items()})
    said = done.stderr
    assert done.returncode == 2, said
    assert said.startswith(f"{Path(script).name}: error: ") and said.count("error: ") == 1, said
    lines = 10 if "does not fit" in said and "cannot be read" not in said else 3  # of missing tensors eight are named
    assert "Traceback" not in said and said.count("\n") <= lines and len(said) < 900, said
    for part in CASES[command]:
        assert part.replace("{p}", str(places)) in said
    assert files_of(places) == before, "something was written"


def test_the_table_is_long_enough():
    assert len(CASES) >= 60


def bad_value(spec) -> str:
    """A value that the flag cannot take."""
    if spec.metadata["choices"]:
        return "zzz"
    return {bool: "maybe", int: "1.5", float: "fast", str: ""}[type_of(spec)]


def test_every_flag_refuses_a_bad_value(capsys):
    """Names it, with what it takes; all of them in one go. Texts that may be empty have no bad value."""
    flags = [s for s in dataclasses.fields(train.Config) if bad_value(s) or s.default != ""]
    assert train.main([f"--{spec.name}={bad_value(spec)}" for spec in flags]) == 2
    said = capsys.readouterr().err
    for spec in flags:
        reason = r": (expected|choose|has no value|did you)"
        assert re.search(rf"--{spec.name} '?{bad_value(spec)}'?{reason}", said), spec.name


def test_as_a_person_runs_it(places):
    """The real interpreter, a few times."""
    for command in ("--model_name {p}/layers --batch_size=0", "merge.py --adapter {p}/llama", "--help nothing"):
        script, argv, env = parts_of(command)
        words = [word.replace("{p}", str(places)) for word in argv]
        done = subprocess.run([sys.executable, script, *words], capture_output=True, text=True, cwd=places)
        assert done.returncode == 2 and not done.stdout
        assert done.stderr.startswith(f"{Path(script).name}: error: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("package", ["wandb", "tensorboard"])
def test_a_missing_logger(monkeypatch, capsys, package):
    find = train.checks.importlib.util.find_spec
    monkeypatch.setattr(train.checks.importlib.util, "find_spec", lambda name: None if name == package else find(name))
    assert train.main(["--log_to", package]) == 2
    assert f"--log_to {package} needs the package {package}: pip install" in capsys.readouterr().err


