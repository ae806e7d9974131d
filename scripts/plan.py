"""What a run needs, said beforehand and without a GPU: memory of each accelerator by phase and by use, host
memory, disk; whether it fits, what to change if not, how much more would fit if so.

    python train.py --plan [any flags]           # a few blocks are traced, and any number of them follows
    python train.py --plan exact [any flags]     # all of them, and what the CUDA allocator would reserve
    python scripts/plan.py --show published      # the ancestor's published runs beside ours
    python scripts/plan.py --show accuracy       # quick plans beside exact ones

Only a model's config.json is looked at, or the named shapes below. The numbers are those of train.py's own
build, step and saving on fake tensors (plan_trace.py), with full rows and every position supervised.
"""
import contextlib
import dataclasses
import json
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from scripts.flags import UserError, option, run_script

GIB = 2**30
# Estimates, since no GPU was there to measure them: CUDA context, NCCL's buffers, cuBLAS' workspaces ...
OVERHEAD = 0.8 * GIB
# ... and a process without tensors: 0.3 GiB of imports (measured on a CPU), the rest CUDA's libraries.
PROCESS = 1.5 * GIB
# What quick plans take for reserved / allocated. Exact plans of the runs in PUBLISHED give 1.1 to 1.5.
FRAGMENTATION = 1.25
FEW = (6, 7)  # blocks that a quick plan traces
PLACES = ("accelerator", "host", "pinned")
PHASES = ("load", "forward", "backward", "optimiser", "save")


@dataclass(frozen=True)
class Flags:
    plan: str | None = option(None, "only say what the run would need", ("quick", "exact"), bare="quick")
    plan_json: str | None = option(None, "write what --plan finds to this file as well")
    gpu_memory: float = option(24.0, "GiB of an accelerator that --plan plans for", above=0)
    host_memory: float = option(128.0, "GiB of host memory that --plan plans for", above=0)
    force: bool = option(False, "start also where the model cannot fit into the memory that is free")


# --------------------------------------------------------------------------------------------------- shapes

def _llama(hidden, layers, heads, kv_heads, mlp, vocabulary, kind="llama", **more) -> dict:
    return dict(model_type=kind, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
                num_key_value_heads=kv_heads, intermediate_size=mlp, vocab_size=vocabulary,
                max_position_embeddings=4096, tie_word_embeddings=False) | more


SHAPES = {
    "Llama-2-7B": _llama(4096, 32, 32, 32, 11008, 32000),
    "Llama-2-13B": _llama(5120, 40, 40, 40, 13824, 32000),
    "Llama-2-70B": _llama(8192, 80, 64, 8, 28672, 32000),
    "Llama-3-8B": _llama(4096, 32, 32, 8, 14336, 128256),
    "Llama-3-70B": _llama(8192, 80, 64, 8, 28672, 128256),
    "Mistral-7B": _llama(4096, 32, 32, 8, 14336, 32000, "mistral", sliding_window=None),
    "Qwen3-32B": _llama(5120, 64, 64, 8, 25600, 151936, "qwen3", head_dim=128),
    "Yi-34B": _llama(7168, 60, 56, 8, 20480, 64000),
    "SmolLM2-135M": _llama(576, 30, 9, 3, 1536, 49152, tie_word_embeddings=True),
}


def plain(name: str) -> str:
    """A model's name, as far as it says the shape: meta-llama/Llama-2-70b-chat-hf -> llama-2-70b."""
    words = name.split("/")[-1].lower().replace("meta-", "").replace("llama-3.1", "llama-3").split("-")
    return "-".join(w for w in words if w not in ("hf", "chat", "instruct", "base", "it")
                    and not w.startswith("v0."))


def model_content(name: str | None) -> dict:
    """config.json of a local folder, of a model in the hub cache, or of a named shape."""
    from scripts import checkpoint
    if name is None:
        return SHAPES["SmolLM2-135M"]
    if (Path(name).expanduser() / "config.json").is_file():
        return checkpoint.read_json(Path(name).expanduser() / "config.json")
    if checkpoint.is_hub_id(name):
        from huggingface_hub import try_to_load_from_cache
        cached = try_to_load_from_cache(name, "config.json") if "/" in name else None
        if isinstance(cached, str):
            return checkpoint.read_json(Path(cached))
        for shape, content in SHAPES.items():
            if plain(name) == plain(shape):
                return content
    raise UserError(f"--model_name {name}: --plan needs a folder with config.json, a model in the hub cache, "
                    f"or one of {', '.join(SHAPES)}")


def wanted_model(config) -> tuple[dict, list[int]]:
    """config.json's content and the numbers of new blocks (llama_pro types). Without --llama_pro_path the
    model is expanded as block_expansion.py does by default."""
    from scripts import block_expansion, checkpoint
    content = model_content(config.llama_pro_path or config.model_name)
    if not config.type.new_blocks:
        return content, []
    if config.llama_pro_path:
        return content, checkpoint.new_blocks(Path(config.llama_pro_path).expanduser())
    key, layers = block_expansion.layer_count(content)
    new = checkpoint.new_positions(layers, block_expansion.count_new(layers, 0.1))
    return content | {key: layers + len(new)}, new


@contextlib.contextmanager
def model_folder(content: dict, layers: int, new: list[int]):
    """A folder with the config.json of the model with so many blocks."""
    from scripts import block_expansion
    key, depth = block_expansion.layer_count(content)
    lists = block_expansion.per_layer_lists(content, depth)
    shorter = content | {key: layers} | {name: values[:layers] for name, values in lists.items()}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shorter))
        (Path(folder) / "llama_pro.json").write_text(json.dumps(dict(new_blocks=new)))
        yield Path(folder)


# ----------------------------------------------------------------------------------------------------- plans

@dataclass
class Plan:
    """Bytes of rank 0, which has the largest shard. `peak`: {(label, place): bytes}, a label being a phase,
    or a phase and an FSDP unit; `parts`: what they consist of; `reserved`: the accelerator's, where known."""
    config: Any
    world: int
    blocks: int
    mode: str
    peak: dict
    parts: dict
    facts: dict
    reserved: int | None = None
    retries: int = 0
    failed: bool = False
    seconds: float = 0.0
    events: list = field(default_factory=list, repr=False)

    def phase(self, name: str, place: str = "accelerator") -> int:
        return round(max((n for (label, where), n in self.peak.items()
                          if where == place and label.split()[0] == name), default=0))

    @property
    def top(self) -> tuple[str, str]:
        return max((key for key in self.peak if key[1] == "accelerator"), key=self.peak.get)

    @property
    def allocated(self) -> int:
        return round(self.peak[self.top])

    @property
    def host(self) -> int:
        """Of this process: the most that tensors take, and what a process takes anyway."""
        return round(PROCESS) + max(self.phase(phase, "host") for phase in PHASES)

    @property
    def model_bytes(self) -> int:
        return self.facts["parameters"] * 2

    @property
    def total(self) -> int:
        """On the accelerator, with what is no tensor; a quick plan guesses what the allocator wastes."""
        taken = self.allocated * FRAGMENTATION if self.reserved is None else self.reserved
        return round(OVERHEAD + taken)

    def verdict(self) -> tuple[str, str]:
        """(fits, risky or does not fit, why)."""
        room, host_room = self.config.gpu_memory * GIB, self.config.host_memory * GIB
        if self.allocated + OVERHEAD > room or self.failed:
            return "does not fit", f"needs more than {self.config.gpu_memory:g} GiB of accelerator memory"
        if self.host * self.world > host_room:
            return "does not fit", f"needs more than {self.config.host_memory:g} GiB of host memory"
        if self.retries:
            return "risky", f"only by emptying the allocator's cache {self.retries} times"
        if self.total > room:
            return "risky", "fits by a margin that fragmentation may use up; ask --plan exact"
        return "fits", ""


def extrapolated(few: list, layers: int) -> list:
    """The same nested numbers for `layers` blocks: each is linear in the number of blocks."""
    (low, a), (high, b) = few

    def line(a, b):
        if isinstance(a, dict):
            return {key: line(a.get(key, _zero(b[key])), b[key]) for key in b}
        return a + (b - a) / (high - low) * (layers - low) if isinstance(a, int) else b
    return line(a, b)


def _zero(value):
    return {key: _zero(inner) for key, inner in value.items()} if isinstance(value, dict) else 0


def plan(config, world: int, mode: str = "quick") -> Plan:
    """Traces the run that `config` asks for on `world` processes. Raises UserError for what cannot be traced.
    """
    import train
    from scripts import block_expansion, plan_trace
    content, new = wanted_model(config)
    depth, start = block_expansion.layer_count(content)[1], time.perf_counter()
    mode = "exact" if new or depth <= max(FEW) else mode  # new blocks are not like the others
    found = []
    for layers in (depth,) if mode == "exact" else FEW:
        with model_folder(content, layers, new) as folder:
            try:
                trace, facts = plan_trace.run(train, config, folder, world)
            except UserError as error:
                name = config.llama_pro_path or config.model_name or "model"
                raise UserError(str(error).replace(str(folder), name)) from error
        numbers = {name: value for name, value in facts.items() if isinstance(value, int)}
        found.append((layers, [trace.peak, trace.parts, numbers]))
    if mode == "exact":
        peak, parts, numbers = found[0][1]
    else:
        common = found[0][1][0].keys() & found[1][1][0].keys()
        peak, parts, numbers = (extrapolated([(n, values[i]) for n, values in found], depth)
                                for i in range(3))
        peak, parts = ({key: table[key] for key in table if key in common} for table in (peak, parts))
    made = Plan(config, world, depth, mode, peak, parts, numbers, seconds=time.perf_counter() - start)
    return add_reserved(made, trace.events) if mode == "exact" else made


def add_reserved(made: Plan, events: list) -> Plan:
    from scripts.cuda_allocator import replay
    capped = replay(events, int(made.config.gpu_memory * GIB - OVERHEAD))
    made.reserved, made.events = replay(events).peak, events
    made.retries, made.failed = capped.retries, capped.failed
    return made


# --------------------------------------------------------------------------------------- what else would do

def quantised_type(config):
    """The train type that differs from the configured one in its base only, which is NF4."""
    import train
    kind = config.type if config.type.adapter or config.type.new_blocks else train.TRAIN_TYPES["lora"]
    wanted = dataclasses.replace(kind, base="nf4")
    return next(name for name, kind in train.TRAIN_TYPES.items() if kind == wanted)


# What to change, cheapest first: values of flags, from a configuration, and what they cost. A change to what
# is already set is no change.
CHANGES = [
    (lambda c: dict(use_gradient_checkpointing=True), "a third more compute"),
    (lambda c: dict(optimizer="adamw_8bit"), "optimiser state in 8 bits"),
    (lambda c: dict(wrap_policy="decoder_attention_mlp"), "more, smaller gathers"),
    (lambda c: dict(quantize_embeddings=8), "embedding and head rounded to 8 bits"),
    (lambda c: dict(batch_size=1, gradient_accumulation_steps=c.gradient_accumulation_steps * c.batch_size),
     "as many examples per step, more micro-batches"),
    (lambda c: dict(use_activation_cpu_offload=True), "copies to the host and back"),
    (lambda c: dict(precision="bf16"), "trained weights in bf16: tiny steps are lost"),
    (lambda c: dict(train_type=quantised_type(c) if c.type.base == "plain" else c.train_type),
     "a 4-bit base"),
    (lambda c: dict(lora_rank=min(c.lora_rank, 16) if c.type.adapter else c.lora_rank), "smaller adapters"),
    (lambda c: dict(context_length=max(2, c.context_length // 2)), "longer examples are cut"),
    (lambda c: dict(use_cpu_offload=True), "every gather crosses the bus"),
]


def flags_of(changes: dict) -> str:
    return " ".join(f"--{name} {str(value).lower() if isinstance(value, bool) else value}"
                    for name, value in changes.items())


def changed(config, changes) -> tuple:
    """(configuration with the changes, those that are changes)."""
    import train
    new = {name: value for name, value in changes.items() if getattr(config, name) != value}
    made = dataclasses.replace(config, **new)
    return made, {} if train.checks.among(made) else new


def remedies(base: Plan, say=lambda row: None) -> list[dict]:
    """Changes in order, each upon those before that helped, until the plan fits (by quick plans)."""
    rows, current = [], base if base.mode == "quick" else plan(base.config, base.world)
    for change, cost in CHANGES:
        config, flags = changed(current.config, change(current.config))
        if not flags:
            continue
        tried = plan(config, base.world)
        gain = current.allocated - tried.allocated
        if gain < 0.005 * current.allocated:
            continue
        verdict = tried.verdict()[0]
        rows.append(dict(flags=flags_of(flags), cost=cost, allocated=tried.allocated, gain=gain,
                         host=tried.host, verdict=verdict))
        say(rows[-1])
        current = tried
        if verdict == "fits":
            break
    return rows


def largest(base: Plan, name: str, factor: float) -> int:
    """The largest value of the flag `name` that fits, others as they are: every label's peak is a line
    through its values at the present value and at twice that; what that gives is planned once more."""
    config, value = base.config, getattr(base.config, name)
    room = (config.gpu_memory * GIB - OVERHEAD) / factor
    double = plan(dataclasses.replace(config, **{name: 2 * value}), base.world)
    lines = [(base.peak[key], (double.peak[key] - base.peak[key]) / value)
             for key in base.peak if key[1] == "accelerator" and key in double.peak]
    fitting = min((value + (room - low) / slope for low, slope in lines if slope > 0), default=value)
    step = 1 if name == "batch_size" else 64
    found = int(fitting) // step * step
    while found > value:
        tried = plan(dataclasses.replace(config, **{name: found}), base.world)
        if tried.allocated <= room:
            return found
        found -= max(step, int(found * (1 - room / tried.allocated)) // step * step)
    return value


# ---------------------------------------------------------------------------------------------------- report

def gib(count: float) -> str:
    return f"{count / GIB:.2f}"


def phase_rows(made: Plan) -> list[str]:
    rows = [" " * 24 + "".join(f"{phase:>11}" for phase in PHASES)]
    for title, place in (("accelerator, allocated", "accelerator"), ("host", "host"),
                         ("of it pinned", "pinned")):
        rows.append(f"  {title:<22}" + "".join(f"{gib(made.phase(p, place)):>11}" for p in PHASES))
    return rows


def part_rows(made: Plan) -> list[str]:
    rows = [f"  peak: {gib(made.allocated)} GiB in {made.top[0]}, of which"]
    parts = sorted(made.parts[made.top].items(), key=lambda item: -item[1])
    shown = [(name, n) for name, n in parts if n >= 0.005 * made.allocated]
    rest = made.allocated - sum(n for _, n in shown)
    return rows + [f"    {name:<24}{gib(n):>7}" for name, n in [*shown, ("everything else", rest)]]


def summary_rows(made: Plan) -> list[str]:
    facts = made.facts
    reserved = "not known; ask --plan exact" if made.reserved is None else f"{gib(made.reserved)} GiB"
    result, checkpoint = (gib(n * made.world) for n in (facts["trained_bytes"],
                                                        facts["trained_bytes"] + facts["state_bytes"]))
    return [f"  reserved by the allocator: {reserved}; about {gib(OVERHEAD)} GiB for CUDA itself",
            f"  host, {made.world} processes: {gib(made.host * made.world)} GiB, and page cache for "
            f"{gib(made.model_bytes)} GiB of model if there is room",
            f"  disk: {result} GiB for the result, {checkpoint} for a checkpoint"]


def report(made: Plan) -> str:
    """At most 80 columns, unless names are long."""
    config = made.config
    name, (verdict, why) = config.weights or config.model_name or "SmolLM2-135M", made.verdict()
    title = (f"{name}, {config.train_type}, batch {config.batch_size} x {config.context_length} tokens, "
             f"{made.world} x {config.gpu_memory:g} GiB")
    how = f"  {made.mode} plan, {made.blocks} blocks, {made.seconds:.0f} s; GiB of the fullest process:"
    return "\n".join([title, how, *phase_rows(made), *part_rows(made), *summary_rows(made),
                      f"verdict: {verdict}" + (f" ({why})" if why else "")])


def show_change(row: dict) -> None:
    print(f"  {row['flags']}\n      {gib(row['allocated'])} GiB ({gib(-row['gain'])}); {row['cost']}; "
          f"{row['verdict']}", flush=True)


def as_json(made: Plan, rows: list, sizes: dict) -> dict:
    verdict, why = made.verdict()
    phases = {phase: {place: made.phase(phase, place) for place in PLACES}
              for phase in PHASES}
    return dict(mode=made.mode, world_size=made.world, blocks=made.blocks, verdict=verdict, why=why,
                allocated=made.allocated, reserved=made.reserved, retries=made.retries, overhead=OVERHEAD,
                host_per_process=made.host, host_node=made.host * made.world, page_cache=made.model_bytes,
                phases=phases, peak_in=made.top[0], parts=made.parts[made.top], facts=made.facts,
                changes=rows, largest=sizes, config=dataclasses.asdict(made.config))


def processes(config) -> int:
    import train
    return config.world_size if config.world_size > 0 else train.accelerator_count() or 2


def answer(config) -> None:
    """`train.py --plan`: prints the plan, then what to change, or how much more fits."""
    from scripts import checkpoint
    if problems := checkpoint.check_file(config.plan_json, "--plan_json"):
        raise UserError(problems[0])
    if config.compile:
        print("planned as without --compile: what compiled blocks hold on the way is not known beforehand")
        config = dataclasses.replace(config, compile=False)
    made, rows, sizes = plan(config, processes(config), config.plan), [], {}
    print(report(made), flush=True)
    if made.verdict()[0] == "fits":
        if sys.stderr.isatty():
            print("looking for the largest batch and context that fit (Ctrl-C: enough)", file=sys.stderr)
        factor = FRAGMENTATION if made.reserved is None else max(1.0, made.reserved / made.allocated)
        sizes = {name: largest(made, name, factor) for name in ("batch_size", "context_length")}
        print("would also fit, one at a time: " + ", ".join(f"--{n} {v}" for n, v in sizes.items()))
    else:
        print("cheapest changes, each upon those before it:", flush=True)
        rows = remedies(made, show_change)
    if config.plan_json:
        Path(config.plan_json).write_text(json.dumps(as_json(made, rows, sizes), indent=1) + "\n")


# -------------------------------------------------------------------------------------------- published runs

# AnswerDotAI/fsdp_qlora, benchmarks_03_2024.md: 2 cards of 24 GB, LoRA of rank 64 on all linears but o_proj.
# (model, train type, offload, batch, context, GiB reserved at the peak)
PUBLISHED: list[tuple] = [
    ("Llama-2-7B", "qlora", False, 1, 512, 4.98), ("Llama-2-7B", "qlora", False, 1, 2048, 5.21),
    ("Llama-2-7B", "qlora", False, 4, 2048, 11.22), ("Llama-2-7B", "qlora", False, 10, 2048, 20.97),
    ("Llama-2-7B", "lora", False, 4, 2048, 16.14), ("Llama-2-7B", "lora", False, 6, 2048, 21.35),
    ("Llama-2-7B", "qlora", True, 12, 2048, 22.38), ("Llama-2-7B", "lora", True, 10, 2048, 22.69),
    ("Yi-34B", "qlora", False, 2, 2048, 23.05), ("Yi-34B", "qlora", True, 4, 2048, 22.98),
    ("Llama-2-70B", "qlora", True, 2, 2048, 14.92),
]
TARGETS = "q_proj,k_proj,v_proj,up_proj,down_proj,gate_proj"


def published_config(model: str, train_type: str, offload: bool, batch: int, context: int):
    import train
    return train.Config(model_name=model, train_type=train_type, use_cpu_offload=offload, batch_size=batch,
                        context_length=context, precision="bf16", lora_rank=64, lora_dropout=0.1,
                        lora_target_modules=TARGETS, plan="exact")


def show_published(only: str) -> None:
    print("| model | type | offload | batch x context | published, reserved | reserved | allocated "
          "| host/process |\n|---|---|---|---|---:|---:|---:|---:|")
    for *work, reserved in (row for row in PUBLISHED if only in row[0]):
        made = plan(published_config(*work), 2, "exact")
        model, kind, offload, batch, context = work
        print(f"| {model} | {kind} | {'yes' if offload else 'no'} | {batch} x {context} | {reserved:.2f} | "
              f"{gib(made.reserved)} | {gib(made.allocated)} | {gib(made.host)} |", flush=True)


def show_accuracy(only: str) -> None:
    print("| model | type | offload | quick, allocated | exact, allocated | largest difference of a phase |")
    print("|---|---|---|---:|---:|---:|")
    for *work, _ in (row for row in PUBLISHED if only in row[0]):
        quick, exact = (plan(published_config(*work), 2, mode) for mode in ("quick", "exact"))
        worst = max(abs(quick.phase(phase, place) - exact.phase(phase, place)) for phase in PHASES
                    for place in PLACES)
        print(f"| {work[0]} | {work[1]} | {'yes' if work[2] else 'no'} | {gib(quick.allocated)} | "
              f"{gib(exact.allocated)} | {worst / GIB:.4f} |", flush=True)


def main(
    show: str = "published",  # published: the ancestor's runs beside ours; accuracy: quick beside exact plans
    only: str = "",  # models whose name has this in it
):
    "Tables of plans. One plan: python train.py --plan."
    {"published": show_published, "accuracy": show_accuracy}[show](only)


if __name__ == "__main__":
    run_script(main)
