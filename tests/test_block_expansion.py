"""Block expansion: an expanded model gives its base's logits bit for bit, in every family, and is a complete
folder."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import tiny
import train
from scripts import block_expansion, checkpoint
from scripts.flags import UserError

SCRIPT = Path(train.__file__).parent / "scripts" / "block_expansion.py"
FOUR = dict(num_hidden_layers=4)
FAMILIES = {
    "exp-llama": ("llama", FOUR | dict(attention_bias=True, mlp_bias=True)),
    "exp-mistral": ("mistral", FOUR | dict(sliding_window=32)),
    "exp-qwen2": ("qwen2", FOUR),  # biases on q, k, v; layer_types
    "exp-qwen3": ("qwen3", FOUR | dict(head_dim=16)),  # q and k norms
    "exp-gemma2": (
        "gemma2",
        FOUR | tiny.MODELS["gemma2"][1],
    ),  # norms after projections, layer types alternate
    "exp-phi3": ("phi3", FOUR),  # fused projections
    "exp-neox": ("gpt_neox", FOUR),  # parallel residual, LayerNorm, biases
    "exp-gpt2": ("gpt2", FOUR),  # c_proj twice in a block, transposed weights
    "exp-mixtral": ("mixtral", FOUR | dict(num_local_experts=4)),
}
IDS = torch.arange(2, 98).view(2, 48)  # longer than the sliding windows


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """name -> folder of a tiny model of that family, made when first asked for."""
    made = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(tiny.MODELS, name, FAMILIES[name])
                tiny.save_model(name, made[name])
        return made[name]

    return folder


def copied(source: Path, target: Path, **changes) -> Path:
    """A copy of a model folder with changed values in its config.json."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | changes))
    return target


def model(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return model(folder)(input_ids=IDS).logits


def dtypes_and_shapes(folder: Path) -> dict[str, tuple]:
    stored = checkpoint.Checkpoint(folder)
    return {name: (stored.dtype[name], stored.shape[name]) for name in stored.file}


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_the_bases(base, tmp_path, name):
    new = block_expansion.expand(str(base(name)), str(tmp_path / "out"), 0.5)
    assert new == [2, 5]
    expanded = logits(tmp_path / "out")
    assert torch.equal(expanded, logits(base(name)))
    assert len({expanded.flatten()[i].item() for i in range(0, 1000, 100)}) == 10  # no constant, no NaN


def test_new_blocks_are_copies_with_zero_outputs(base, tmp_path):
    """Weights and biases of the two output projections are zero; all else is the block's before it."""
    block_expansion.expand(str(base("exp-neox")), str(tmp_path / "out"), 0.25)
    before = load_file(base("exp-neox") / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    zero = {
        f"{part}.{kind}" for part in ("attention.dense", "mlp.dense_4h_to_h") for kind in ("weight", "bias")
    }
    copies = {k.removeprefix("gpt_neox.layers.4."): v for k, v in after.items() if ".layers.4." in k}
    assert len(copies) == sum(".layers.3." in name for name in before) and zero < set(copies)
    for inner, tensor in copies.items():
        original = before[f"gpt_neox.layers.3.{inner}"]
        assert torch.equal(tensor, torch.zeros_like(original) if inner in zero else original), inner
        assert original.any()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize(
    "layers, rate, positions",
    [(32, 0.1, [10, 21, 32]), (4, 1.0, [1, 3, 5, 7]), (5, 0.4, [2, 5]), (2, 0.01, [2]), (7, 0.3, [3, 7])],
)
def test_positions(layers, rate, positions):
    count = block_expansion.count_new(layers, rate)
    assert checkpoint.new_positions(layers, count) == positions
    origins = block_expansion.find_origins(layers, positions)
    assert [o for p, o in enumerate(origins) if p not in positions] == list(range(layers))
    assert all(origins[p] == origins[p - 1] for p in positions) and len(origins) == layers + count


@pytest.mark.parametrize("rate", [0, -0.5, 1.5, float("nan"), float("inf")])
def test_rates_that_make_no_sense(base, tmp_path, rate):
    text = "gives 6 new blocks, but the model has 4" if rate == 1.5 else "must be a number greater than 0"
    with pytest.raises(UserError, match=f"--expansion_rate {rate}: {text}"):
        block_expansion.expand(str(base("exp-llama")), str(tmp_path / "out"), rate)
    assert not (tmp_path / "out").exists()


def test_configuration(base, tmp_path):
    """A new block has its origin's type, also where the base's config.json leaves the list to the model."""
    source = copied(base("exp-gemma2"), tmp_path / "base", eos_token_id=[1, 3, 5, 7])
    config = json.loads((source / "config.json").read_text())
    kinds = config.pop("layer_types")
    assert kinds == ["sliding_attention", "full_attention"] * 2
    (source / "config.json").write_text(json.dumps(config))
    block_expansion.expand(str(source), str(tmp_path / "out"), 0.5)
    expanded = json.loads((tmp_path / "out" / "config.json").read_text())
    assert expanded["num_hidden_layers"] == 6 and expanded["eos_token_id"] == [1, 3, 5, 7]
    assert expanded["layer_types"] == [kinds[i] for i in (0, 1, 1, 2, 3, 3)]
    assert torch.equal(logits(tmp_path / "out"), logits(source))


def test_the_models_own_name_of_the_layer_count(base, tmp_path):
    config = json.loads((base("exp-gpt2") / "config.json").read_text())
    config["n_layer"] = config.pop("num_hidden_layers", 4)
    source = copied(base("exp-gpt2"), tmp_path / "base")
    (source / "config.json").write_text(json.dumps(config))
    block_expansion.expand(str(source), str(tmp_path / "out"), 0.25)
    expanded = json.loads((tmp_path / "out" / "config.json").read_text())
    assert expanded["n_layer"] == 5 and "num_hidden_layers" not in expanded


def test_folder(base, tmp_path):
    """Everything that a model folder has, and where the blocks came from."""
    source = copied(base("exp-llama"), tmp_path / "base")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "README.md").write_text("the base's card")
    block_expansion.expand(str(source), str(tmp_path / "out"), 0.25)
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert names == {p.name for p in source.iterdir()} - {"README.md"} | {"llama_pro.json"}
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    said = json.loads((tmp_path / "out" / "llama_pro.json").read_text())
    assert said == dict(
        new_blocks=[4], base=str(source), base_fingerprint=checkpoint.fingerprint(source), original_layers=4
    )
    assert checkpoint.new_blocks(tmp_path / "out") == [4]


def test_files_stay_split(base, tmp_path):
    source = tmp_path / "base"
    source.mkdir()
    model(base("exp-llama")).save_pretrained(source, max_shard_size="100KB")
    files = checkpoint.weight_files(source)
    assert len(files) > 3
    block_expansion.expand(str(source), str(tmp_path / "out"), 0.5)
    index = json.loads((tmp_path / "out" / checkpoint.INDEX).read_text())
    assert sorted(set(index["weight_map"].values())) == files
    size = 0
    for file in files:
        with safe_open(tmp_path / "out" / file, framework="pt") as handle:
            assert set(handle.keys()) == {n for n, f in index["weight_map"].items() if f == file}
            size += sum(handle.get_tensor(name).nbytes for name in handle.keys())
    assert index["metadata"]["total_size"] == size
    assert torch.equal(logits(tmp_path / "out"), logits(source))


def test_experts_in_one_parameter_and_half_precision(base, tmp_path):
    """MoE weights under the names they have in memory: 3-D experts.down_proj."""
    source = copied(base("exp-mixtral"), tmp_path / "base", dtype="bfloat16")
    state = {k: v.bfloat16() for k, v in model(base("exp-mixtral")).state_dict().items()}
    assert state["model.layers.0.mlp.experts.down_proj"].ndim == 3
    save_file(state, source / "model.safetensors")
    block_expansion.expand(str(source), str(tmp_path / "out"), 0.25)
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert after["model.layers.4.mlp.experts.down_proj"].dtype == torch.bfloat16
    assert not after["model.layers.4.mlp.experts.down_proj"].any()
    assert not after["model.layers.4.self_attn.o_proj.weight"].any()
    assert after["model.layers.4.mlp.experts.gate_up_proj"].any()
    assert torch.equal(logits(tmp_path / "out"), logits(source))


@pytest.mark.parametrize("name", ["exp-llama", "exp-gemma2"])
def test_generation_with_cache(base, tmp_path, name):
    block_expansion.expand(str(base(name)), str(tmp_path / "out"), 0.5)
    expanded, plain = model(tmp_path / "out"), model(base(name))
    numbers = [m.layer_idx for m in expanded.modules() if hasattr(m, "layer_idx") and hasattr(m, "o_proj")]
    assert numbers == list(range(6))
    settings = dict(do_sample=False, max_new_tokens=8, min_new_tokens=8, pad_token_id=1)
    found = [
        m.generate(IDS[:1], use_cache=cache, **settings) for m in (expanded, plain) for cache in (True, False)
    ]
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_one_tensor_at_a_time(base, tmp_path, monkeypatch):
    """When a tensor is read, the one before is gone."""
    import weakref

    alive, most, read = set(), [0], checkpoint.Checkpoint.tensor

    def watched(self, name):
        tensor = read(self, name)
        alive.add(name)
        weakref.finalize(tensor, alive.discard, name)
        most[0] = max(most[0], len(alive))
        return tensor

    monkeypatch.setattr(checkpoint.Checkpoint, "tensor", watched)
    block_expansion.expand(str(base("exp-llama")), str(tmp_path / "out"), 0.5)
    assert most == [1]


def test_a_failure_leaves_nothing(base, tmp_path, monkeypatch):
    """The disk fills up in the middle."""
    read, count = checkpoint.Checkpoint.tensor, [0]

    def failing(self, name):
        count[0] += 1
        if count[0] == 20:
            raise OSError(28, "No space left on device")
        return read(self, name)

    monkeypatch.setattr(checkpoint.Checkpoint, "tensor", failing)
    for existing in (False, True):
        count[0] = 0
        if existing:
            (tmp_path / "out").mkdir()
        with pytest.raises(OSError, match="No space"):
            block_expansion.expand(str(base("exp-llama")), str(tmp_path / "out"), 0.5)
        assert (tmp_path / "out").exists() == existing and not list(tmp_path.rglob("out/*"))


def renamed(source: Path, target: Path, old: str, new: str) -> Path:
    copied(source, target)
    state = load_file(source / "model.safetensors")
    save_file(
        {name.replace(old, new): tensor for name, tensor in state.items()}, target / "model.safetensors"
    )
    return target


def test_unknown_projections_are_refused_with_the_blocks_tensors(base, tmp_path):
    source = renamed(base("exp-llama"), tmp_path / "a", "self_attn.o_proj", "self_attn.strange")
    with pytest.raises(UserError, match=r"(?s)no attention output.*self_attn\.strange\.weight"):
        block_expansion.expand(str(source), str(tmp_path / "out"), 0.5)
    source = renamed(base("exp-llama"), tmp_path / "b", "mlp.", "side.")
    state = load_file(source / "model.safetensors")
    state |= {f"model.layers.{i}.per_layer_projection.weight": torch.ones(2, 2) for i in range(4)}
    save_file(state, source / "model.safetensors")
    with pytest.raises(UserError, match="what per_layer_projection adds"):
        block_expansion.expand(str(source), str(tmp_path / "out"), 0.5)


def test_blocks_that_go_by_their_number_are_refused(tmp_path, monkeypatch):
    """Every other block has experts: moved by one, a block would be built as something else."""
    kind = ("qwen2_moe", FOUR | dict(num_experts=4, decoder_sparse_step=2))
    monkeypatch.setitem(tiny.MODELS, "by-number", kind)
    tiny.save_model("by-number", tmp_path / "base")
    with pytest.raises(UserError, match="block 2 .* block 1 of the base"):
        block_expansion.expand(str(tmp_path / "base"), str(tmp_path / "out"), 0.5)
    assert not (tmp_path / "out").exists()


def test_new_blocks_from_a_name(tmp_path):
    for name, found in (("llama_blk_exp-32-35", [10, 21, 32]), ("x/blk_exp-4-6", [2, 5])):
        (tmp_path / name).mkdir(parents=True)
        assert checkpoint.new_blocks(tmp_path / name) == found
    for name in ("llama", "blk_exp-32-32", "blk_exp-4-9", "blk_exp-0-1"):
        with pytest.raises(UserError, match="no expanded model"):
            checkpoint.new_blocks(tmp_path / name)
    (tmp_path / "llama_pro.json").write_text('{"new_blocks": "all"}')
    with pytest.raises(UserError, match="new_blocks is no list"):
        checkpoint.new_blocks(tmp_path)


def test_command(base, tmp_path):
    def run(*flags: str) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, str(SCRIPT), *flags], capture_output=True, text=True, cwd="/")

    out = str(tmp_path / "out")
    done = run("--model_name", str(base("exp-llama")), "--output-dir", out, "--expansion_rate=0.3")
    assert done.returncode == 0 and not done.stderr and "new blocks 4" in done.stdout, done.stderr
    done = run("--model_name", str(base("exp-llama")), "--output_dir", out)
    assert (
        done.returncode == 2
        and done.stderr == f"block_expansion.py: error: --output_dir {out}: not empty; choose another\n"
    )


@pytest.mark.parametrize("text", ["no such folder", "cannot be read", "quantised already", "of 5 layers"])
def test_bad_bases(base, tmp_path, text, capsys):
    source = copied(base("exp-llama"), tmp_path / "base", **{"num_hidden_layers": 5} if "5" in text else {})
    if text == "no such folder":
        source = Path("/no/such")
    elif text == "cannot be read":
        (source / "model.safetensors").write_bytes(b"no tensors in here")
    elif text == "quantised already":
        config = json.loads((source / "config.json").read_text()) | dict(quantization_config=dict(bits=4))
        (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit) as stop:
        block_expansion.main(str(source), str(tmp_path / "out"))
    assert text in str(stop.value) and str(stop.value).startswith("block_expansion.py: ")
    assert not (tmp_path / "out").exists()
