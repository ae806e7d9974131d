"""What run.sh runs: the parts of the check, each in a process of its own, and the table.

parity     the suite's own cases on the card, world 1, and `reference`, the same on the CPU of this machine
memory     peaks of steps on the card, and `plan`, what train.py --plan exact says of them
speed      tokens per second and share of the card's peak
trl        scripts/benchmark.py against TRL, where QSHARD_TRL_PYTHON names a Python that has it

Weights are random and lie on no disk (but for TRL). In a dry run everything is tiny and on the CPU, in one
process; then memory is counted tensor by tensor, and compared with a plan for a CPU.
"""

import contextlib
import functools
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
DRY = os.environ.get("QSHARD_DRY_RUN") == "1"
LAYERS = int(os.environ.get("QSHARD_LAYERS", 12))
STEPS, WARMUP = (3, 1) if DRY else (8, 3)

# Largest relative deviations from the CPU of (losses, first gradient norm, later norms). fp32 on both sides
# differs in the order of sums; later norms are Adam's, which divides rounding by itself.
CLOSE = {"fp32": (1e-5, 1e-5, 1e-3)}
LOOSE = (5e-3, 2e-2, 5e-2)  # 16-bit products are rounded differently by every library
ALLOCATED, RESERVED = 0.05, 0.15  # how far plans may be off, of what is measured
COUNTED = 0.005  # the same on a CPU

MEMORY = [
    dict(train_type="qlora", precision="bf16", batch_size=2, context_length=1024),
    dict(train_type="lora", precision="bf16", batch_size=1, context_length=2048, use_gradient_checkpointing=False),
    dict(train_type="qlora", precision="bf16", batch_size=2, context_length=1024, use_cpu_offload=True),
    dict(train_type="hqq_lora", precision="mp_bf16", batch_size=1, context_length=512),
]
SPEED = ["qlora", "lora", "hqq_lora", "bnb_dora"]


# ------------------------------------------------------------------------------------------------- the model


def model_content() -> dict:
    """config.json of the model whose memory and speed are measured."""
    import tiny
    from scripts.plan import SHAPES

    if DRY:
        return dict(model_type="llama", tie_word_embeddings=False, **tiny.SIZES)
    return SHAPES["Llama-3-8B"] | dict(num_hidden_layers=LAYERS)


def empty_folder(stack: contextlib.ExitStack) -> str:
    from scripts.plan import model_folder

    content = model_content()
    return str(stack.enter_context(model_folder(content, content["num_hidden_layers"], [])))


def random_weights():
    """Stands in for checkpoint.Checkpoint: normal numbers in bf16, cut out of one buffer."""
    import torch
    from scripts.plan_trace import NoWeights

    class Weights(NoWeights):
        numbers = torch.randn(2**22).mul_(0.02).bfloat16()

        def rows(self, name, low, high):
            found = super().rows(name, low, high).view(-1)
            for start in range(0, len(found), len(self.numbers)):
                part = found[start : start + len(self.numbers)]
                part.copy_(self.numbers[: len(part)])
            return found.view(high - low, *self.shape[name][1:])

    return Weights()


def configuration(folder: str, flags: dict):
    import train

    small = dict(context_length=16, batch_size=2) if DRY else {}
    base = dict(model_name=folder, dataset="dummy", output_dir="unused", lora_rank=16, gpu_memory=2**20)
    return train.Config(**base | flags | small)


def synchronize() -> None:
    import torch

    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


# ------------------------------------------------------------------------------------------------------ parts


def parity_cases() -> dict[str, dict]:
    """Name -> flags: every train type; every switch and precision of test_parity.py for two of them; --compile."""
    import train
    from test_parity import SWITCHES

    types, pair = list(train.TRAIN_TYPES), ("full", "qlora")
    switches = [*SWITCHES, *(dict(precision=p) for p in train.PRECISIONS), dict(compile=True)]
    if DRY:
        types, pair, switches = ["hqq_dora"], ("qlora",), SWITCHES[6:7]
    cases = [dict(train_type=t) for t in types]
    cases += [dict(train_type=t) | switch for switch in switches for t in pair]
    return {" ".join(f"{k}={v}" if k != "train_type" else v for k, v in c.items()): c for c in cases}


@contextlib.contextmanager
def quantized_on_the_cpu():
    """Solvers and kernels give other codes on a card: so that the rest can be compared, the CPU's are taken."""
    from unittest import mock

    from scripts.quantize import HQQ, NF4

    def moved(method):
        @functools.wraps(method)
        def call(self, tensor):
            found = method(self, tensor.cpu())
            if isinstance(found, dict):
                return {name: part.to(tensor.device) for name, part in found.items()}
            return tuple(part.to(tensor.device) for part in found)

        return call

    names = [(NF4, "quantize_rows"), (NF4, "quantize_statistics"), (HQQ, "quantize")]
    with contextlib.ExitStack() as stack:
        for kind, name in names:
            stack.enter_context(mock.patch.object(kind, name, moved(getattr(kind, name))))
        yield


def parity() -> dict:
    """Losses, norms, and whether all that is trained moved and nothing else, of each case; here is wherever this
    process finds itself."""
    import cases
    import tiny
    import train

    runtime, found = train.start_runtime(), {}
    with tempfile.TemporaryDirectory() as work, quantized_on_the_cpu():
        folder, expanded = f"{work}/llama", f"{work}/expanded"
        tiny.save_model("llama", folder)
        tiny.save_expanded(folder, expanded)
        for name, flags in parity_cases().items():
            new = train.TRAIN_TYPES[flags["train_type"]].new_blocks
            try:
                result = cases.fit(runtime, expanded if new else folder, dict(batch_size=4) | flags)
            except Exception as error:  # the other cases are still worth knowing
                found[name] = dict(error=f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}")
                continue
            moved = all(not t.equal(result["start"][key]) for key, t in result["end"].items())
            found[name] = dict(losses=result["losses"], norms=result["norms"],
                               right=moved and result["frozen"] == result["frozen_after"])  # fmt: skip
    train.stop_runtime()
    return found


def quantizers() -> dict:
    """Of codes on this device the part that is the CPU's, and the error of both sides' weights."""
    from scripts.quantized import FrozenQuantLinear
    import torch
    import train
    from scripts.quantize import QUANTIZERS

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    weight, found = torch.randn(256, 512, generator=torch.Generator().manual_seed(0)) * 0.02, {}
    for name, kind in QUANTIZERS.items():
        quantizer, sides = kind(train.Config(train_type="hqq_lora", precision="bf16")), []
        for place in ("cpu", device):
            linear = FrozenQuantLinear(torch.nn.Linear(512, 256, bias=False, device=place), quantizer)
            for part, value in quantizer.quantize(weight.to(place)).items():
                getattr(linear, part).data = value
            error = (linear.dequantize(torch.float32).cpu() - weight).norm() / weight.norm()
            sides.append((linear.weight.detach().cpu(), error.item()))
        (one, error), (other, there) = sides
        found[name] = dict(same=(one == other).float().mean().item(), errors=[error, there])
    return found


def memory() -> list[dict]:
    """Peaks, in bytes, of building and two steps on the card."""
    import torch
    import train
    from scripts import plan_trace

    runtime, found, kind = train.start_runtime(), [], torch.get_device_module()
    for flags in MEMORY:
        gc.collect()
        kind.empty_cache()
        kind.reset_peak_memory_stats()
        with contextlib.ExitStack() as stack:
            config = configuration(folder := empty_folder(stack), flags)
            model = train.build(config, Path(folder), runtime, random_weights())
            training = train.make_training(model, config, runtime, 10)
            for _ in range(2):
                batch, tokens = plan_trace.make_batch(config, runtime.device)
                train.train_step(training, [batch], tokens)
                del batch
                gc.collect()
        synchronize()
        found.append(dict(allocated=kind.max_memory_allocated(), reserved=kind.max_memory_reserved()))
        del model, training
    train.stop_runtime()
    return found


def plan() -> list[dict]:
    """What --plan exact says of the same. In a dry run with what is measured, since both are of this CPU."""
    from scripts import plan as planner

    found = []
    for flags in MEMORY[:2] if DRY else MEMORY:
        with contextlib.ExitStack() as stack:
            config = configuration(folder := empty_folder(stack), flags)
            if not DRY:
                made = planner.plan(config, 1, "exact")
                found.append(dict(allocated=made.allocated, reserved=made.reserved))
                continue
            import plan_cases

            small = dict(flags, context_length=16, batch_size=2)
            real = plan_cases.real(folder, small, 1)["peak"]
            planned = plan_cases.planned(folder, small, 1, "cpu")["together"]
            found.append(dict(allocated=planned, measured=real))
    return found


def speed() -> dict:
    """Tokens per second, share of the peak (None where it is unknown), last loss, and GiB, of each train type."""
    import torch
    import train
    from scripts import flops, plan_trace

    runtime, found = train.start_runtime(), {}
    for name in SPEED:
        gc.collect()
        with contextlib.ExitStack() as stack:
            flags = dict(train_type=name, precision="bf16", batch_size=4, context_length=1024)
            config = configuration(folder := empty_folder(stack), flags)
            model = train.build(config, Path(folder), runtime, random_weights())
        training, seconds = train.make_training(model, config, runtime, 100), []
        for _ in range(STEPS):
            batch, supervised = plan_trace.make_batch(config, runtime.device)
            batch["input_ids"].random_(0, model.module.config.vocab_size)
            synchronize()
            start = time.perf_counter()
            loss, norm = train.train_step(training, [batch], supervised)
            synchronize()
            seconds.append(time.perf_counter() - start)
        tokens, second = config.batch_size * config.context_length, statistics.median(seconds[WARMUP:])
        done = flops.of_step(model.facts["flops"], tokens, supervised, config.context_length)
        peak = flops.device_peak(runtime.device)
        found[name] = dict(tokens=tokens / second, share=peak and done / second / peak,
                           loss=loss.item() / supervised, norm=norm.item(), peak=runtime.peak_memory())  # fmt: skip
        del model, training
        if torch.accelerator.is_available():
            torch.get_device_module().reset_peak_memory_stats()
    train.stop_runtime()
    return found


def trl() -> dict:
    """scripts/benchmark.py on a model of two blocks, on disk: its exit code and what it printed."""
    import tiny
    import torch
    import train
    from safetensors.torch import save_file
    from scripts import checkpoint, plan as planner

    with contextlib.ExitStack() as stack:
        content = model_content() | dict(num_hidden_layers=2, architectures=["LlamaForCausalLM"])
        folder = stack.enter_context(planner.model_folder(content, 2, []))
        weights, slots = random_weights(), checkpoint.find_slots(train.empty_model(folder, torch.bfloat16))
        tensors = {name: weights.rows(name, 0, slot.shape[0]) for name, slot in weights.match(slots).items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        tiny.tokenizer().save_pretrained(folder)
        data = tiny.write_alpaca(folder / "data.jsonl", 64)
        flags = f"--model_name {folder} --dataset {data} --train_type lora --precision bf16 --world_size 1"
        done = subprocess.run([sys.executable, str(ROOT / "scripts/benchmark.py"), "--flags", flags, "--rounds", "1",
                               "--trl_python", os.environ["QSHARD_TRL_PYTHON"]],
                              capture_output=True, text=True)  # fmt: skip
        return dict(code=done.returncode, printed=done.stdout[-3000:], error=done.stderr[-1500:])


PARTS = dict(parity=parity, reference=parity, quantizers=quantizers, memory=memory, speed=speed, plan=plan, trl=trl)
ON_THE_CPU = ("reference", "plan")  # in a process that is shown no card


# ------------------------------------------------------------------------------------------------------ table


def deviation(found: list, wanted: list) -> float:
    return max(abs(a - b) / max(abs(b), 1e-12) if math.isfinite(a) else math.inf for a, b in zip(found, wanted))


def parity_rows(found: dict, wanted: dict):
    for name, case in wanted.items():
        here = found.get(name, dict(error="did not run"))
        if "error" in here or "error" in case:
            yield "parity", name, here.get("error", "no error"), case.get("error", "no error"), False
            continue
        limits = LOOSE if "precision=" in name and "fp32" not in name else CLOSE["fp32"]
        off = (deviation(here["losses"], case["losses"]), deviation(here["norms"][:1], case["norms"][:1]),
               deviation(here["norms"], case["norms"]))  # fmt: skip
        fine = all(a <= b for a, b in zip(off, limits)) and here["right"]
        text = "/".join(f"{a:.0e}" for a in off) + ("" if here["right"] else ", the wrong weights moved")
        yield "parity", name, text, "/".join(f"{b:.0e}" for b in limits), fine


def quantizer_rows(found: dict):
    for name, values in found.items():
        one, other = values["errors"]
        fine = abs(other / one - 1) < 0.02 and (values["same"] > 0.999 or name != "nf4")
        yield "quantiser", name, f"{values['same']:.2%} of codes, error {other:.4f}", f"error {one:.4f}", fine


def memory_rows(measured: list, planned: list):
    for flags, plan, real in zip(MEMORY, planned, measured):
        limits = dict(allocated=COUNTED if DRY else ALLOCATED, reserved=RESERVED)
        for what in real:
            off = plan[what] / real[what] - 1
            yield ("memory", " ".join(map(str, flags.values())) + f" {what}", f"{real[what] / 2**20:.1f} MiB",
                   f"plan {plan[what] / 2**20:.1f} MiB ({off:+.1%}, at most {limits[what]:.1%})",
                   abs(off) <= limits[what])  # fmt: skip
    if DRY:
        yield "memory", "reserved", "-", "skipped: there is no caching allocator on a CPU", True


def speed_rows(found: dict):
    for name, values in found.items():
        share = "peak unknown" if values["share"] is None else f"{values['share']:.1%} of the peak"
        fine = math.isfinite(values["loss"]) and math.isfinite(values["norm"]) and values["norm"] > 0
        yield ("speed", name, f"{values['tokens']:,.0f} tokens/s, {share}",
               f"{values['peak'] / 2**30:.1f} GiB, loss {values['loss']:.2f}", fine)  # fmt: skip


def trl_rows(found: dict | None):
    if found is None:
        yield "TRL", "-", "-", "skipped: QSHARD_TRL_PYTHON or scripts/benchmark.py is not there", True
    else:
        yield "TRL", "lora, 2 blocks", f"exit code {found['code']}", "see above", found["code"] == 0


def rows(results: dict):
    """(part, case, found, wanted, whether they agree)"""
    for part in [part for part, value in results.items() if value is None]:
        yield part, "-", "did not finish", "see above", False
    if results["parity"] and results["reference"]:
        yield from parity_rows(results["parity"], results["reference"])
    yield from quantizer_rows(results["quantizers"] or {})
    if results["plan"] and (DRY or results["memory"]):
        real = [dict(allocated=row["measured"]) for row in results["plan"]] if DRY else results["memory"]
        yield from memory_rows(real, results["plan"])
    yield from speed_rows(results["speed"] or {})
    yield from trl_rows(results.get("trl"))


# ----------------------------------------------------------------------------------------------------- running


def start(part: str, folder: Path) -> subprocess.Popen:
    env = dict(os.environ, **dict(CUDA_VISIBLE_DEVICES="") if part in ON_THE_CPU else {})
    return subprocess.Popen([sys.executable, __file__, part, str(folder / f"{part}.json")], env=env)


def processes(folder: Path, chosen: list[str]) -> dict:
    """Parts on the CPU beside those on the card, which come one after the other. None where one failed."""
    beside = [start(part, folder) for part in chosen if part in ON_THE_CPU]
    for part in chosen:
        if part not in ON_THE_CPU:
            start(part, folder).wait()
    for process in beside:
        process.wait()
    files = {part: folder / f"{part}.json" for part in chosen}
    return {part: json.loads(file.read_text()) if file.is_file() else None for part, file in files.items()}


def run_all() -> dict:
    chosen = [part for part in PARTS if part != "memory" or not DRY]
    ready = os.environ.get("QSHARD_TRL_PYTHON") and (ROOT / "scripts/benchmark.py").is_file() and not DRY
    chosen = [part for part in chosen if part != "trl" or ready]
    if DRY:
        return {part: PARTS[part]() for part in chosen}
    with tempfile.TemporaryDirectory() as folder:
        return processes(Path(folder), chosen)


def main(argv: list[str]) -> int:
    if argv:
        import bitsandbytes  # noqa: F401
        part, file = argv
        Path(file).write_text(json.dumps(PARTS[part]()))
        return 0
    import torch

    if not DRY and not torch.cuda.is_available():
        print("tests/gpu/run.sh: no CUDA card here; QSHARD_DRY_RUN=1 goes through it on the CPU", file=sys.stderr)
        return 2
    start, results = time.perf_counter(), run_all()
    if results.get("trl"):
        print(results["trl"]["printed"], results["trl"]["error"])
    content = model_content()
    print(f"{'CPU, a dry run' if DRY else torch.cuda.get_device_name()}; memory and speed: "
          f"{content['num_hidden_layers']} blocks of width {content['hidden_size']}")  # fmt: skip
    table = list(rows(results))
    for part, case, found, wanted, fine in table:
        print(f"{'ok' if fine else 'MISMATCH':<9}{part:<10} {case:<64} {found:<44} {wanted}")
    wrong = sum(not fine for *_, fine in table)
    print(f"{len(table)} rows, {wrong} mismatches, {time.perf_counter() - start:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
