"""Measures what loading needs: private memory and bytes read per process, against the quantised size.

    python scripts/bench_load.py [--layers 12] [--worlds 1,2,4]

Writes a random Llama checkpoint of 0.6 billion parameters (bf16, several files) once, loads it with
train.py's own code, and prints a row per number of processes, with --low_memory on and off. Memory: the
largest growth of private (anonymous) resident memory over what it was before loading, sampled every 5 ms;
mapped checkpoint pages are page cache, and are not counted.
"""
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # so that it runs from any folder


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


def load(folder: str, low_memory: bool) -> None:
    """One process: loads, and prints what it took as JSON."""
    import bitsandbytes  # noqa: F401
    import torch
    import transformers  # noqa: F401
    import accelerate  # noqa: F401
    import train
    runtime = train.start_runtime()
    flags = dict(train_type="custom_qlora", precision="bf16", low_memory=low_memory)
    config = train.Config(model_name=folder, **flags)
    train.empty_model(Path(folder), torch.bfloat16)  # imports the model's code before the measurement
    peak, start = Peak(), time.perf_counter()
    peak.start()
    model = train.build(config, Path(folder), runtime)
    seconds = time.perf_counter() - start
    held = sum(p.to_local().numel() * p.element_size() for p in model.module.parameters())
    row = dict(peak=peak.growth(), held=held, read=model.facts["bytes_read"], seconds=seconds)
    with open(Path(os.environ["BENCH_OUT"]) / f"{runtime.rank}.json", "w") as file:
        json.dump(row, file)
    del model
    train.stop_runtime()


def measure(folder: Path, world: int, low_memory: bool) -> list[dict]:
    with tempfile.TemporaryDirectory() as out:
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
        command = [*start, __file__, "--rank_of", str(folder), "--low_memory", str(low_memory)]
        # Freed row slices go back to the system at once, so that what is measured is what is in use.
        env = dict(os.environ, BENCH_OUT=out, MALLOC_MMAP_THRESHOLD_="65536", OMP_NUM_THREADS="1")
        subprocess.run(command, check=True, env=env, stderr=subprocess.DEVNULL)
        return [json.loads(path.read_text()) for path in sorted(Path(out).iterdir())]


def main(
    layers: int = 12,  # blocks of 51 million parameters each
    worlds: str = "1,2,4",  # numbers of processes to try
    rank_of: str = "",  # used by the processes that this script starts
    low_memory: str = "True",  # likewise
):
    "Measure the memory and the bytes read while loading a 4-bit model."
    if rank_of:
        return load(rank_of, low_memory == "True")
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), layers)
        total = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
        print(f"checkpoint: {total / 2e9:.2f} G parameters, {total / 2**20:.0f} MiB in bf16")
        print(f"{'processes':>9} {'low_memory':>10} {'peak MiB, all':>14} {'held MiB, all':>14} "
              f"{'peak/held':>9} {'above held, max':>15} {'read/process':>12} {'seconds':>8}")
        for world in map(int, worlds.split(",")):
            for low in (True, False):
                rows = measure(Path(folder), world, low)
                peak, held = (sum(row[key] for row in rows) / 2**20 for key in ("peak", "held"))
                above = max(row["peak"] - row["held"] for row in rows) / 2**20
                read, seconds = (max(row[key] for row in rows) for key in ("read", "seconds"))
                print(f"{world:>9} {str(low).lower():>10} {peak:>14.0f} {held:>14.0f} {peak / held:>9.2f} "
                      f"{above:>11.0f} MiB {read / total:>11.0%} {seconds:>8.1f}", flush=True)


if __name__ == "__main__":
    from fastcore.script import call_parse
    from scripts.data import kebab_flags
    sys.argv = kebab_flags(sys.argv)
    call_parse(main)
