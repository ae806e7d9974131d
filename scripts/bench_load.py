"""Measures what loading needs: private memory, bytes read per process and time, beside the quantised size and
transformers' own loading in 4 bits.

    python scripts/bench_load.py [--layers 18] [--worlds 1,2,4] [--train_types custom_qlora,hqq_lora]

Writes a random Llama checkpoint of 1.06 billion parameters (bf16, several files) once, loads it with
train.py's own code, and prints a row per number of processes, with --low_memory on and off. Memory: the
largest growth of private (anonymous) resident memory over what it was before loading, sampled every 5 ms;
mapped checkpoint pages are page cache, and are not counted. Its limit is 1.15 times what is held and the
largest piece that each process reads at once. Times: medians of loading with low_memory in turn with theirs,
in runs of their own, the slowest process of each; the ratio is that of each pair.
"""
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from any folder
from scripts.flags import run_script

ROOT = Path(__file__).resolve().parents[1]


def write_checkpoint(folder: Path, layers: int) -> None:
    """Tensor by tensor: a file per block, and an index."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig
    width, inner, heads, vocabulary = 2048, 5632, 16, 32000
    config = LlamaConfig(hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
                         num_attention_heads=heads, vocab_size=vocabulary, dtype="bfloat16",
                         architectures=["LlamaForCausalLM"])
    config.save_pretrained(folder)
    square, wide, tall, norm = (width, width), (inner, width), (width, inner), (width,)
    block = {f"self_attn.{n}_proj": square for n in "qkvo"} | {
        "mlp.gate_proj": wide, "mlp.up_proj": wide, "mlp.down_proj": tall, "input_layernorm": norm,
        "post_attention_layernorm": norm}
    files = [{f"model.layers.{i}.{n}.weight": shape for n, shape in block.items()} for i in range(layers)]
    files.append({"model.embed_tokens.weight": (vocabulary, width), "lm_head.weight": (vocabulary, width),
                  "model.norm.weight": norm})
    where = {}
    for number, shapes in enumerate(files):
        file = f"model-{number:05}.safetensors"
        save_file({n: torch.randn(shape).bfloat16() * 0.02 for n, shape in shapes.items()}, folder / file)
        where |= dict.fromkeys(shapes, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps(dict(metadata={}, weight_map=where)))


def private_bytes() -> int:
    """Anonymous resident memory of this process."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


class Peak(threading.Thread):
    """The largest value of private_bytes while it runs."""

    def __init__(self):
        super().__init__(daemon=True)
        self.start_bytes = self.peak = private_bytes()
        self.done = False

    def run(self) -> None:
        while not self.done:
            self.peak = max(self.peak, private_bytes())
            time.sleep(0.005)

    def growth(self) -> int:
        self.done = True
        return max(self.peak, private_bytes()) - self.start_bytes


def ours(folder: str, train_type: str, low_memory: bool) -> dict:
    """One process of several: train.py's own loading."""
    import torch
    import train
    from scripts import optim, quantize
    quantize.load_bitsandbytes()  # before the measurement, as the model's code below
    runtime = train.start_runtime()
    config = train.Config(model_name=folder, train_type=train_type, precision="bf16", low_memory=low_memory)
    train.empty_model(Path(folder), torch.bfloat16)
    peak, start = Peak(), time.perf_counter()
    peak.start()
    model = train.build(config, Path(folder), runtime)
    seconds = time.perf_counter() - start
    held = optim.local_bytes(model.module.parameters())
    row = dict(peak=peak.growth(), held=held, read=model.facts["bytes_read"], seconds=seconds,
               rank=runtime.rank)
    del model
    train.stop_runtime()
    return row


def theirs(folder: str, train_type: str) -> dict:
    """One process: transformers' own 4-bit load, or, for HQQ, which it does not load on a CPU, its plain load
    and hqq's own quantiser."""
    import bitsandbytes  # noqa: F401
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig
    from transformers.models.llama import modeling_llama  # noqa: F401
    nf4 = dict(quantization_config=BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16))
    hqq = train_type.startswith("hqq")
    if hqq:
        from hqq.core.quantize import BaseQuantizeConfig
        from hqq.models.hf.base import AutoHQQHFModel
    peak, start = Peak(), time.perf_counter()
    peak.start()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **({} if hqq else nf4))
    if hqq:
        AutoHQQHFModel.quantize_model(model, quant_config=BaseQuantizeConfig(4, 64, axis=1),
                                      compute_dtype=torch.bfloat16, device="cpu")
    seconds = time.perf_counter() - start
    return dict(peak=peak.growth(), held=0, read=0, seconds=seconds, rank=0, model=type(model).__name__)


def start(folder: Path, train_type: str, world: int, threads: int, low_memory: bool = True,
          exact: bool = False) -> list[dict]:
    """Loads in `world` processes (0: theirs, in one), which share `threads` threads. A row for each."""
    env = dict(os.environ, OMP_NUM_THREADS=str(max(1, threads // max(1, world))), HF_HUB_OFFLINE="1")
    if exact:  # what is freed goes back to the system at once, so that what is measured is what is in use
        env |= dict(MALLOC_MMAP_THRESHOLD_="65536")
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                   f"--nproc-per-node={max(1, world)}", __file__, "--one_of", str(world), "--folder",
                   str(folder), "--train_types", train_type, "--low_memory", str(low_memory)]
        done = subprocess.run(command, env=env | dict(BENCH_OUT=out), capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr[-3000:])
        return [json.loads(path.read_text()) for path in sorted(Path(out).iterdir())]


def slice_bytes(folder: Path, world: int, quantizer) -> int:
    """The largest part of a tensor that a rank reads at once: its rows, or a whole weight that is quantised
    whole."""
    from scripts import checkpoint
    stored = checkpoint.Checkpoint(folder)
    def part(name, shape):
        whole = not quantizer.by_rows and "layers" in name and len(shape) > 1
        return 2 * math.prod(shape) // (1 if whole else world)
    return max(part(name, shape) for name, shape in stored.shape.items())


def report(folder: Path, train_type: str, worlds: list[int], threads: int, rounds: int) -> None:
    """Times in turn, theirs and ours, then memory; a row for each number of processes."""
    import train
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    seconds: dict[int, list[float]] = {world: [] for world in (0, *worlds)}
    for _ in range(rounds):
        for world, taken in seconds.items():
            taken.append(max(row["seconds"] for row in start(folder, train_type, world, threads)))
    (other,) = start(folder, train_type, 0, threads, exact=True)
    print(f"{train_type:<13} {'theirs':>9} {'':>10} {other['peak'] / 2**20:>9.0f} {'':>8} {'':>8} {'':>12} "
          f"{statistics.median(seconds[0]):>8.1f}", flush=True)
    for world in worlds:
        for low in (True, False):
            rows = start(folder, train_type, world, threads, low, exact=True)
            peak, held = (sum(row[key] for row in rows) for key in ("peak", "held"))
            limit = 1.15 * held + world * slice_bytes(folder, world, train.QUANTIZERS[
                train.TRAIN_TYPES[train_type].base])
            ratio = statistics.median(a / b for a, b in zip(seconds[world], seconds[0]))
            taken = f"{statistics.median(seconds[world]):>8.1f} {ratio:>5.2f}" if low else ""
            print(f"{train_type:<13} {world:>9} {str(low).lower():>10} {peak / 2**20:>9.0f} "
                  f"{held / 2**20:>8.0f} {limit / 2**20:>8.0f} "
                  f"{max(row['read'] for row in rows) / total:>12.0%} {taken}", flush=True)


def main(
    layers: int = 18,  # blocks of 51 million parameters each, beside 131 million of embedding and head
    worlds: str = "1,2,4",  # numbers of processes to try
    train_types: str = "custom_qlora,hqq_lora",  # their bases are loaded
    threads: int = 2,  # of all processes together, theirs likewise
    rounds: int = 3,  # times that each is loaded for its time
    folder: str = "",  # where the checkpoint is, or is written and kept; without it a temporary one
    one_of: int = -1,  # used by the processes that this script starts
    low_memory: str = "True",  # likewise
):
    "Measure memory, bytes read and time while loading a 4-bit model, beside transformers' own loading."
    if one_of >= 0:
        row = ours(folder, train_types, low_memory == "True") if one_of else theirs(folder, train_types)
        (Path(os.environ["BENCH_OUT"]) / f"{row['rank']}.json").write_text(json.dumps(row))
        return
    with contextlib.ExitStack() as stack:
        place = Path(folder or stack.enter_context(tempfile.TemporaryDirectory()))
        if not (place / "config.json").is_file():
            place.mkdir(parents=True, exist_ok=True)
            write_checkpoint(place, layers)
        total = sum(path.stat().st_size for path in place.glob("*.safetensors"))
        print(f"checkpoint: {total / 2e9:.2f} G parameters, {total / 2**20:.0f} MiB in bf16; MiB of all "
              f"processes; {threads} threads together\n"
              f"{'train type':<13} {'processes':>9} {'low_memory':>10} {'peak':>9} {'held':>8} {'limit':>8} "
              f"{'read/process':>12} {'seconds':>8} ratio")
        for name in train_types.split(","):
            report(place, name, list(map(int, worlds.split(","))), threads, rounds)


if __name__ == "__main__":
    run_script(main)
