"""qshard: fine-tune language models with FSDP2 over a 4-bit (or plain) base, in pure PyTorch.

    python train.py                                # a real model, real data, 2 processes: no flags needed
    python train.py --train_type qlora --model_name meta-llama/Llama-2-70b-hf --batch_size 2 \\
        --context_length 512 --use_cpu_offload true --dataset my_data.jsonl        # two 24 GB cards
    torchrun --nproc-per-node 2 train.py ...       # or under a launcher of your own

Read it top to bottom: tables, configuration, runtime, loss, model, sharding and loading, step, saving,
training loop, main. Each section uses only what stands above it. In a hurry: `run` is a run in 30 lines,
`train` the loop, `train_step` one step, `build` and `load` make the sharded model. What is beside the
training path is in scripts/, by name; docs/code.md says what is in which file.
"""
import contextlib
import dataclasses
import datetime
import errno
import functools
import gc
import json
import math
import os
import shutil
import sys
import time
import traceback
import types
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

if __name__ == "__main__":
    from scripts import usage
    usage.answer(sys.argv[1:])  # --help and --completion come before torch is imported

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parent))  # so that `scripts` is found from any folder
from scripts import activations, adapters, attention, checkpoint, checks, compiled, data
from scripts import evaluation, experts, flops, launcher, logs, loss, memory, models, neftune, optim
from scripts import places, plan, prequantized, profiling, state, trained, vocabulary
from scripts.flags import UserError, option, parse_flags, refuse
from scripts.models import blocks_of
from scripts.quantize import QUANTIZERS
from scripts.quantized import quantize_ends, quantize_linears, quantized_elements


# ----------------------------------------------------------------------------------------------------- tables

@dataclass(frozen=True)
class TrainType:
    base: str                # how the frozen linears are stored: "plain" or a key of QUANTIZERS
    adapter: str | None      # a key of adapters.ADAPTERS
    new_blocks: bool = False  # train the blocks that scripts/block_expansion.py added, and nothing else

    @property
    def lr(self) -> float:
        """The learning rate when none is given."""
        return 2e-4 if self.adapter or self.new_blocks else 2e-5


TRAIN_TYPES = {
    "full": TrainType("plain", None),
    "lora": TrainType("plain", "peft"),
    "custom_lora": TrainType("plain", "custom"),
    "qlora": TrainType("nf4", "peft"),
    "custom_qlora": TrainType("nf4", "custom"),
    "hqq_lora": TrainType("hqq", "custom"),
    "dora": TrainType("plain", "dora"),
    "bnb_dora": TrainType("nf4", "dora"),
    "hqq_dora": TrainType("hqq", "dora"),
    "llama_pro": TrainType("plain", None, new_blocks=True),
    "bnb_llama_pro": TrainType("nf4", None, new_blocks=True),
    "hqq_llama_pro": TrainType("hqq", None, new_blocks=True),
}


@dataclass(frozen=True)
class Precision:
    frozen: torch.dtype                  # stored dtype of what is not trained (quantised weights aside)
    trained: torch.dtype                 # stored dtype of what is trained, and so of the optimiser's state
    param: torch.dtype | None = None     # FSDP casts gathered parameters to this
    reduce: torch.dtype | None = None    # FSDP reduces gradients in this
    autocast: torch.dtype | None = None
    scaler: bool = False                 # dynamic loss scaling, for fp16's narrow range

    @property
    def compute(self) -> torch.dtype:
        """What matrix products are made in."""
        return self.autocast or self.param or self.frozen


# Buffers (RoPE's inv_freq) are fp32 in every mode: rounded to bf16 they are wrong by 0.15 at position 128.
PRECISIONS = {
    "bf16": Precision(torch.bfloat16, torch.bfloat16),
    "fp32": Precision(torch.float32, torch.float32),
    "mp_bf16": Precision(torch.bfloat16, torch.float32, param=torch.bfloat16, reduce=torch.float32),
    "mp_fp16_autocast": Precision(torch.float32, torch.float32, reduce=torch.float32,
                                  autocast=torch.float16, scaler=True),
    "mp_bf16_autocast": Precision(torch.float32, torch.float32, reduce=torch.float32,
                                  autocast=torch.bfloat16),
    "mp_bf16_buffers_autocast": Precision(torch.bfloat16, torch.bfloat16, param=torch.bfloat16,
                                          reduce=torch.bfloat16, autocast=torch.bfloat16),
}
PRECISION_ALIASES = {name.removeprefix("mp_"): name for name in PRECISIONS if name.endswith("_autocast")}


@dataclass(frozen=True)
class Sharding:
    group: str     # who shares one copy of the model: all ("world"), a node's ranks ("node"), nobody ("rank")
    reshard: bool  # free the gathered parameters after forward and gather them again in backward


SHARDINGS = {
    "full_shard": Sharding("world", True),
    "shard_grad_op": Sharding("world", False),
    "ddp": Sharding("rank", True),  # gathering is a local copy here; freeing it saves a second whole model
    "hybrid_full_shard": Sharding("node", True),
    "hybrid_shard_grad_op": Sharding("node", False),
}
WRAP_POLICIES = ("decoder", "decoder_attention_mlp")


# ---------------------------------------------------------------------------------------------- configuration

@dataclass(frozen=True)
class Config(logs.Flags, profiling.Flags, plan.Flags):
    model_name: str | None = option(None, "Hugging Face folder or hub id; without it SmolLM2-135M-Instruct")
    trust_remote_code: bool = option(False, "run code that comes with the model, where it needs its own")
    rope_scaling: str | None = option(None, "RoPE for longer texts: linear:4, yarn:4, llama3:8")
    add_tokens: str = option("", "file of new tokens: embedding and head get rows for them, and are trained")
    dataset: str = option("demo", "demo, dummy, alpaca, alpaca_sample, guanaco, sql, orca_math; a file; a "
                                  "folder of `datasets`; a hub id[:split][@revision]; or several: a=1,b=0.5")
    dataset_samples: int | None = option(None, "use only the first N rows", low=1)
    dataset_format: str = option("auto", "form of the rows; auto goes by columns", ("auto", *data.FORMATS))
    dataset_columns: str = option("", "columns under other names: field=column,field=column")
    chat_template: bool = option(False, "the tokenizer's chat template for all formats, not only for chats")
    train_on: str = option("completions", "what is supervised: answers, everything, or the last answer",
                           ("completions", "all", "last"))
    context_length: int = option(512, "longest example in tokens", low=2)
    truncation: str = option("right", "what happens to longer examples", ("right", "left_prompt", "drop"))
    packing: bool = option(False, "several examples to a row of context_length tokens; none sees another")
    group_by_length: bool = option(False, "batches of examples of similar length: less padding")
    skip_bad_rows: bool = option(False, "count rows that cannot be used, and go on")
    eval_dataset: str | None = option(None, "a second dataset, as above, whose loss is measured")
    eval_fraction: float = option(0.0, "part of the dataset to hold out, without --eval_dataset", low=0)
    eval_steps: int = option(-1, "held-out loss first and every N steps; -1: at the end only", low=-1)
    eval_generate: int = option(0, "print N answers of the model at each evaluation", low=0)
    output_dir: str = option("output", "where everything is written")
    overwrite_output_dir: bool = option(False, "write into a folder that is not empty")
    save_model: bool = option(True, "save the adapter (or the model) at the end")
    save_steps: int = option(500, "a checkpoint every N steps; -1: only on a signal", low=-1)
    keep_checkpoints: int = option(2, "keep the newest N checkpoints", low=1)
    async_save: bool = option(True, "write checkpoints beside training, from a copy in host memory")
    resume: str | None = option(None, "go on from a checkpoint: its folder, or auto: the newest whole one in "
                                      "--output_dir, and a new run where there is none")

    train_type: str = option("qlora", "what is trained, over which base", tuple(TRAIN_TYPES))
    llama_pro_path: str | None = option(None, "folder of expanded Llama-Pro weights (llama_pro train types)")
    n_bits: int | None = option(None, "bits of a weight under HQQ (hqq_*); without it 4", (8, 4, 3, 2))
    quantize_embeddings: int = option(0, "bits of a frozen embedding and head; 0: as they are", (0, 8))
    hqq_group_size: int = option(64, "weights that share a scale and a zero point under HQQ", low=8)
    lora_rank: int = option(16, "rank of the adapters", low=1)
    lora_alpha: float = option(32, "adapters are scaled by alpha / rank", above=0)
    use_rslora: bool = option(False, "scale adapters by alpha / sqrt(rank) instead (rsLoRA)")
    lora_dropout: float = option(0.0, "dropout on the adapters' input", low=0)
    lora_target_modules: str = option("all", "all (every linear of the blocks), default (PEFT's choice for "
                                             "the model), or name endings such as q_proj,v_proj")
    lora_experts: bool = option(False, "LoRA also on the experts of a mixture of experts")
    train_embeddings: bool = option(False, "train embedding and head in full beside the adapter")
    modules_to_save: str = option("", "train these in full beside the adapter: name endings, as PEFT's")
    trainable: str = option("", "full: train only what these patterns name: *norm*,layers.20-29,lm_head")
    freeze: str = option("", "full: freeze what these patterns name: embed_tokens,layers.0-9")

    batch_size: int = option(4, "examples per process and micro-batch", low=1)
    gradient_accumulation_steps: int = option(1, "micro-batches per optimiser step", low=1)
    num_epochs: int = option(1, "passes over the data", low=1)
    max_steps: int = option(-1, "stop after this many optimiser steps; -1: no limit", low=-1)
    lr: float | None = option(None, "peak learning rate; without it 2e-4 for adapters (1e-3 on the small "
                                    "embedded model), 2e-5 for full", above=0)
    lr_scheduler: str = option("cosine", "learning rate over time", tuple(optim.SCHEDULES))
    warmup_ratio: float | None = option(None, "part of the steps over which the rate rises; without it 0.1 "
                                              "(constant: none)", low=0)
    warmup_steps: int | None = option(None, "steps over which the rate rises, not by a ratio", low=0)
    min_lr: float | None = option(None, "rate at the last step; without it cosine ends at 10% of the peak, "
                                        "linear just above zero", low=0)
    optimizer: str = option("adamw", "optimiser", tuple(optim.OPTIMIZERS))
    wd: float = option(0.01, "weight decay; not on norms, biases and DoRA's magnitudes", low=0)
    loraplus_lr_ratio: float = option(1.0, "LoRA+: learning rate of lora_B over that of lora_A", above=0)
    optim_in_backward: bool = option(False, "step parameters inside backward and free their gradients (full "
                                            "and llama_pro train types)")
    label_smoothing: float = option(0.0, "part of the target spread over the vocabulary, in training", low=0)
    neftune_alpha: float = option(0.0, "NEFTune: size of the noise on embedded tokens, in training", low=0)
    apply_gradient_clipping: bool = option(True, "clip the global gradient norm to --grad_norm")
    grad_norm: float = option(1.0, "largest global gradient norm", above=0)
    skip_nonfinite_steps: int = option(0, "leave out at most N steps with NaN or infinite gradients", low=0)
    seed: int = option(42, "seeds adapters, data order and dropout", low=0)
    deterministic: bool = option(False, "kernels that give the same bits every time, where torch has them")

    precision: str = option("mp_bf16", "dtypes: see docs/training.md", tuple(PRECISIONS))
    attn_implementation: str = option("auto", "attention; auto: flash-attn where it can be used, or sdpa "
                                              "document by document without padding, or "
                                              "eager where a model caps its scores",
                                      ("auto", "sdpa", "eager", "flex_attention", "flash_attention_2"))
    use_gradient_checkpointing: bool = option(True, "recompute blocks in backward, keep no activations")
    reentrant_checkpointing: bool = option(False, "the reentrant form of checkpointing")
    use_cpu_offload: bool = option(False, "keep parameters, gradients and optimiser state in host memory")
    use_activation_cpu_offload: bool = option(False, "keep saved activations in host memory until backward")
    compile: bool = option(False, "torch.compile every block: faster steps after a slow start")
    low_memory: bool = option(True, "read only this process's rows; false: every process reads whole tensors")
    loading_workers: int = option(-1, "threads per process that read and quantise; -1: one", low=-1)

    sharding_strategy: str = option("full_shard", "what the processes share", tuple(SHARDINGS))
    hybrid_shard_size: int | None = option(None, "processes that share one copy under hybrid_*; without it "
                                                 "those of a node", low=1)
    wrap_policy: str = option("decoder", "FSDP units: blocks, or also their attention and MLP", WRAP_POLICIES)
    prefetch_units: int = option(1, "FSDP units to gather ahead: 0 none (least memory), 1 in backward, more: "
                                    "in forward as well (slow networks)", low=0)
    reshard_last_block: bool = option(True, "false: the last block stays gathered from forward to backward: "
                                            "one gather less, a block more memory")
    no_sync: bool = option(False, "reduce gradients once per step, not per micro-batch; holds them whole")
    world_size: int = option(-1, "processes; -1: one per accelerator, on a CPU 2 (1 with one core)", low=-1)
    master_addr: str = option("localhost", "address of the first process")
    master_port: int = option(0, "port of the first process; 0: a free one", low=0)
    timeout_minutes: float = option(30, "how long a process waits for the others before all end", above=0)
    error_dir: str | None = option(None, "every process's errors go to a file of its own in this folder")

    @property
    def type(self) -> TrainType:
        return TRAIN_TYPES[self.train_type]

    @property
    def weights(self) -> str | None:
        """Where the model's weights are: its folder or hub id."""
        return self.llama_pro_path if self.type.new_blocks else self.model_name

    @property
    def numbers(self) -> Precision:
        return PRECISIONS[self.precision]


# The first option of each group of --help, in its order; the group goes on until the next one.
GROUPS = {"model_name": "model", "dataset": "data", "train_type": "what is trained, adapters",
          "batch_size": "optimisation", "precision": "precision and memory",
          "sharding_strategy": "sharding, processes and nodes", "output_dir": "saving and resuming",
          "log_to": "logging", "plan": "planning", "profile": "profiling"}


def read_flags(argv: list[str]) -> tuple[Config, list[str]]:
    """Flags -> Config, and everything that is wrong with them by themselves."""
    aliases = {"precision": PRECISION_ALIASES}
    config, problems = parse_flags(Config, argv, aliases)
    problems += checks.combinations(config)
    if config.train_type in TRAIN_TYPES:
        problems += checks.train_type(config)
    if config.train_type in TRAIN_TYPES and config.precision in PRECISIONS:
        problems += checks.optimisation(config)
    return config, problems


def parse(argv: list[str]) -> Config:
    """Flags -> Config. Raises UserError with everything that is wrong with them by themselves."""
    config, problems = read_flags(argv)
    refuse(problems)
    return config


# ---------------------------------------------------------------------------------------------------- runtime

@dataclass(frozen=True)
class Runtime:
    """Where this process stands, and the few things that differ between devices, bound once."""
    rank: int
    local_rank: int
    world: int
    local_world: int
    device: torch.device
    peak_memory: Callable[[], int]  # bytes: peak allocated on the accelerator; on a CPU the process's peak
    retries: Callable[[], int] = lambda: 0  # how often the allocator has had to empty its cache
    phase: Callable[[str], None] = lambda moment: None  # called at named moments; see memory.Memory
    free_memory: Callable[[], int] = lambda: 2**62  # bytes that are free for this process's tensors
    copies: torch.Stream | None = None  # where copies to and from the host run beside the computation

    @property
    def main(self) -> bool:
        return self.rank == 0

    def gather(self, *numbers: float) -> torch.Tensor:
        """(world, n) fp64: the numbers of every rank, on the host."""
        mine = torch.tensor([numbers], dtype=torch.float64)
        every = mine.new_empty(self.world, len(numbers))
        dist.all_gather_single(every, mine)
        return every


def accelerator_count() -> int:
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def start_runtime(env=os.environ, timeout_minutes: float = 30, error_dir: str | None = None) -> Runtime:
    """Device and process group. One process has a group too, so that it runs the same code as many."""
    place = places.variables(env) or places.ALONE
    device, backend, peak, copies = torch.device("cpu"), "gloo", memory.peak, None
    retries = Runtime.retries
    free = functools.partial(memory.host_free, place.local_world)
    if torch.accelerator.is_available():
        index = place.local_rank % accelerator_count()  # a task of srun may be shown its own one only
        device = torch.device(torch.accelerator.current_accelerator().type, index)
        torch.accelerator.set_device_index(index)
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
        peak = torch.accelerator.max_memory_allocated
        retries = lambda: torch.accelerator.memory_stats().get("num_alloc_retries", 0)  # noqa: E731
        free = lambda: torch.accelerator.get_memory_info()[0]  # noqa: E731
        copies = torch.Stream(device)
        launcher.record_collectives(error_dir)
    alone = dict(store=dist.HashStore(), rank=0, world_size=1) if place.world == 1 else {}
    dist.init_process_group(backend, timeout=datetime.timedelta(minutes=timeout_minutes), **alone)
    return Runtime(place.rank, place.local_rank, place.world, place.local_world, device, peak,
                   retries, free_memory=free, copies=copies)


def stop_runtime() -> None:
    """Collect what still holds communicators first: without it about 1 in 10 gloo runs died at exit."""
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def make_mesh(config: Config, runtime: Runtime):
    """Ranks of one row share a copy of the model; ranks of one column hold the same shard."""
    node = config.hybrid_shard_size or runtime.local_world
    size = {"world": runtime.world, "node": node, "rank": 1}[SHARDINGS[config.sharding_strategy].group]
    if runtime.world % size:
        raise UserError(f"--sharding_strategy {config.sharding_strategy}: {runtime.world} processes do not "
                        f"divide into groups of {size}; set --hybrid_shard_size")
    if size == runtime.world:
        return dist.init_device_mesh(runtime.device.type, (size,), mesh_dim_names=("shard",))
    return dist.init_device_mesh(runtime.device.type, (runtime.world // size, size),
                                 mesh_dim_names=("replicate", "shard"))


# ------------------------------------------------------------------------------------------------------- loss

def use_fused_loss(model: nn.Module, smoothing: float = 0.0) -> None:
    """model(input_ids, positions, labels) -> summed loss, with the head and the cross-entropy in one, and
    smoothed labels and balanced experts in training only; without labels the logits at `positions`.
    `position_ids` that start again in a row mark documents, which transformers keeps apart; `real` is false
    on padding.

    Only the supervised positions (flat indices, chosen on the host, so that no shape depends on a device
    value) reach the head. The head computes the loss inside its own forward: there FSDP has its weight
    gathered.
    """
    head, transform = model.get_output_embeddings(), loss.logit_transform(model.config)
    balance = experts.auxiliary_loss(model)
    one_row = model.config._attn_implementation.startswith("flash")  # it tells documents apart in one row

    def head_loss(self, hidden, labels):
        if labels is None:
            return transform(type(self).forward(self, hidden).float())
        spread = smoothing if self.training else 0.0
        if hasattr(self, "quantizer"):
            return loss.streamed_cross_entropy(hidden, self, labels, transform, spread)
        return loss.chunked_cross_entropy(hidden, self.weight, self.bias, labels, transform, spread)

    def forward(self, input_ids, positions, labels=None, documents=(), real=None, **packed):
        if packed and one_row:  # flat positions stay what they are
            input_ids, packed = input_ids.view(1, -1), {name: t.view(1, -1) for name, t in packed.items()}
        packed |= dict(documents=documents) if attention.used(model) else {}
        balanced = balance and self.training
        if balance:
            packed["output_router_logits"] = balanced
        out = self.base_model(input_ids=input_ids, use_cache=False, **packed)
        summed = head(out.last_hidden_state.flatten(0, 1).index_select(0, positions), labels)
        return summed + len(positions) * balance(out.router_logits, real) if balanced else summed
    head.forward = types.MethodType(head_loss, head)
    model.forward = types.MethodType(forward, model)


# ------------------------------------------------------------------------------------------------------ model

def empty_model(folder: Path, dtype: torch.dtype, attention: str = "auto", rope_scaling: str | None = None,
                trust_remote_code: bool = False, add_tokens: str = ""):
    """The model with parameters on the meta device and real buffers, so that RoPE's inv_freq is right from
    the start."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM
    options = dict(trust_remote_code=trust_remote_code)
    options |= {} if attention == "auto" else dict(attn_implementation=attention)
    try:
        config = models.read_config(folder, rope_scaling, trust_remote_code)
        vocabulary.make_room(config, folder, add_tokens)
        with init_empty_weights(include_buffers=False), models.validated():
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, **options)
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise UserError(models.problem(error, folder, attention)) from error
    model.tie_weights()  # meta initialisation made two parameters of tied ones
    model.config.use_cache = False
    return model


@torch.no_grad()
def map_parameters(model: nn.Module, change: Callable[[nn.Parameter], torch.Tensor]) -> None:
    """Replaces every parameter by `change(parameter)`; parameters that are one (tied) stay one."""
    new: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None:
                if old not in new:
                    new[old] = nn.Parameter(change(old), requires_grad=old.requires_grad)
                module._parameters[name] = new[old]


# --------------------------------------------------------------------------------------- sharding and loading

def shard(model: nn.Module, blocks: nn.ModuleList, config: Config, mesh) -> list[str]:
    """fully_shard in units: embedding, blocks (and their attention and MLP), final norm, head, root. Returns
    their names. The norm stands between the last block and the head so that, when the head is gathered, no
    block's gather buffer is held any more."""
    pin = accelerator_count() > 0
    offload = CPUOffloadPolicy(pin_memory=pin) if config.use_cpu_offload else OffloadPolicy()
    mixed = MixedPrecisionPolicy(param_dtype=config.numbers.param, reduce_dtype=config.numbers.reduce)
    common = dict(mesh=mesh, offload_policy=offload, mp_policy=mixed)
    reshard = SHARDINGS[config.sharding_strategy].reshard
    names = {module: name for name, module in model.named_modules()}
    units: list = []
    for block in blocks:
        if config.wrap_policy == "decoder_attention_mlp":
            units += models.parts(block)
        units.append(block)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding.weight is not head.weight:  # tied ones must share a unit, the root
        rest = [m for m in model.base_model.children() if m not in (embedding, blocks, *blocks)]
        units += [embedding, *(m for m in rest if list(m.parameters())), head]
    kept = {head} | (set() if config.reshard_last_block else set(blocks[-1].modules()))
    for unit in units:
        fully_shard(unit, reshard_after_forward=reshard and unit not in kept, **common)
    fully_shard(model, reshard_after_forward=False, **common)
    order_prefetch(model, blocks, config.prefetch_units)
    if embedding in units and not embedding.weight.requires_grad:
        embedding.set_unshard_in_backward(False)  # it would be gathered ahead, and nothing asks for it
    for module in model.modules():  # the loss is divided by the tokens of all ranks: gradients are summed
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return [names[unit] for unit in units] + ["root"]


def order_prefetch(model: nn.Module, blocks: nn.ModuleList, depth: int) -> None:
    """How many units FSDP gathers ahead of the one in use. 1 is its own way: the next one in backward; in
    forward the gathers of a GPU run ahead by themselves. Units inside blocks gather nothing ahead in forward:
    recomputation runs their hooks in backward, which has left what follows them."""
    units = [m for m in model.modules() if isinstance(m, FSDPModule)]  # as registered: mostly as used
    inner = {m for block in blocks for m in block.modules() if m is not block}
    for number, unit in enumerate(units if depth != 1 else ()):
        if depth and unit not in inner:
            unit.set_modules_to_forward_prefetch(units[number + 1:number + 1 + depth])
        before = units[max(0, number - depth):number]
        unit.set_modules_to_backward_prefetch(before[::-1] or [unit])  # an empty list would mean the default


def local_rows(rows: int, mesh) -> tuple[int, int]:
    """The rows [low, high) of a parameter that this rank keeps: FSDP2 cuts like torch.chunk."""
    size = -(-rows // mesh["shard"].size())
    low = min(rows, size * mesh["shard"].get_local_rank())
    return low, min(rows, low + size)


def share(slot: checkpoint.Slot, rows: int, mesh) -> tuple[slice, slice]:
    """Of the `rows` rows that something of this slot has: those that this rank keeps, and where they lie in
    its shard, in which the slots of a stack's experts follow one another."""
    (low, high), start = local_rows(rows * slot.count, mesh), rows * (slot.expert or 0)
    first = max(low, start)
    last = max(first, min(high, start + rows))
    return slice(first - start, last - start), slice(first - low, last - low)


@torch.no_grad()
def put(parameter: nn.Parameter, rows: torch.Tensor, where: slice = slice(None)) -> None:
    parameter.to_local()[where].copy_(rows)


def put_parts(slot: checkpoint.Slot, parts: dict[str, torch.Tensor], mesh) -> None:
    """Whole parts -> this rank's rows of each."""
    for name, part in parts.items():
        keep, where = share(slot, len(part), mesh)
        put(getattr(slot.module, name), part[keep], where)


def put_rows(slot: checkpoint.Slot, packed: torch.Tensor, absmax: torch.Tensor, mesh) -> None:
    """Packed rows of this rank, and their statistics, whose second level is made of those of all rows."""
    keep, where = share(slot, slot.rows, mesh)
    put(slot.module.weight, packed, where)
    every = absmax.new_zeros(slot.rows, absmax.shape[1])
    every[keep] = absmax
    dist.all_reduce(every, group=mesh["shard"].get_group())  # each row is one rank's: sums with zeros, exact
    put_parts(slot, slot.module.quantizer.quantize_statistics(every), mesh)


def put_part_rows(slot: checkpoint.Slot, parts: checkpoint.PartRows) -> None:
    """This rank's rows of each part, as a checkpoint has them."""
    for name, rows in parts.items():
        put(getattr(slot.module, name), rows)


def put_broadcast(slot: checkpoint.Slot, parts: dict | None, owner: int, device, mesh) -> None:
    """Whole parts on rank `owner` of the shard group (None elsewhere) -> each rank's rows."""
    group = mesh["shard"].get_group()
    for name, shape in slot.module.quantizer.shapes(*slot.shape).items():
        part = parts[name] if parts else torch.empty(shape, dtype=torch.uint8, device=device)
        dist.broadcast(part, dist.get_global_rank(group, owner), group=group)
        put_parts(slot, {name: part}, mesh)


def prefetch(jobs, work: Callable, workers: int):
    """Yields (job, work(job)) in order; at most `workers` are under way, so that memory stays bounded."""
    with ThreadPoolExecutor(workers) as pool:
        pending: deque = deque()
        for job in jobs:
            pending.append((job, pool.submit(work, job)))
            if len(pending) >= workers:
                done, future = pending.popleft()
                yield done, future.result()
        yield from ((done, future.result()) for done, future in pending)


@dataclass(frozen=True)
class Loader:
    """How a weight comes to this rank's rows. Four ways: plain and NF4 weights are read by rows; HQQ weights
    are quantised whole, by the ranks in turn; weights that are quantised already are taken as they are; with
    low_memory off every rank reads and quantises everything and keeps its rows: the same bits, more of all
    else."""
    stored: checkpoint.Checkpoint
    mesh: dist.DeviceMesh
    device: torch.device
    low_memory: bool

    def by_rows(self, slot: checkpoint.Slot) -> bool:
        return self.low_memory and (not slot.quantized or slot.module.quantizer.by_rows)

    @torch.no_grad()
    def read(self, job: tuple[int, str, checkpoint.Slot]) -> Callable[[], None]:
        """In a thread, without communication. Returns what then places the tensor, on all ranks at once."""
        turn, name, slot = job
        mesh, by_rows, owner = self.mesh, self.by_rows(slot), turn % self.mesh["shard"].size()
        broadcast = functools.partial(put_broadcast, slot, owner=owner, device=self.device, mesh=mesh)
        if self.low_memory and not by_rows and owner != mesh["shard"].get_local_rank():
            return functools.partial(broadcast, None)
        quantizer, limits = slot.quantized and slot.module.quantizer, functools.partial(local_rows, mesh=mesh)
        if parts := quantizer and self.stored.part_rows(name, quantizer, limits):
            return functools.partial(put_part_rows, slot, parts)
        keep, where = share(slot, slot.rows, mesh)
        span = keep if by_rows else slice(0, slot.rows)
        each = slot.shape[0] // slot.rows  # rows of the checkpoint that are one row of the parameter
        rows = self.stored.rows(name, span.start * each, span.stop * each).to(self.device)
        if not quantizer:
            parameter = getattr(slot.module, slot.attribute)
            rows = rows.view(span.stop - span.start, *parameter.shape[1:])
            return functools.partial(put, parameter, rows if by_rows else rows[keep], where)
        if by_rows:
            packed, absmax = quantizer.quantize_rows(rows)
            return functools.partial(put_rows, slot, packed, absmax, mesh)
        whole = quantizer.quantize(rows)
        return functools.partial(broadcast, whole) if self.low_memory else \
            functools.partial(put_parts, slot, whole, mesh)


def load(stored: checkpoint.Checkpoint, matched: dict, config: Config, runtime: Runtime, mesh) -> None:
    """Reads, quantises and places this rank's rows, tensor by tensor; little more than the shards is ever
    held. `matched`: names of the checkpoint -> where they go."""
    from tqdm import tqdm
    loader = Loader(stored, mesh, runtime.device, config.low_memory)
    files = list(dict.fromkeys(stored.file[name] for name in matched))
    for number, file in enumerate(files, 1):
        jobs = [(turn, *item) for turn, item in enumerate(matched.items()) if stored.file[item[0]] == file]
        bar = tqdm(total=len(jobs), unit="tensor", leave=False,
                   desc="planning" if config.plan else f"loading {number}/{len(files)}",
                   disable=not (runtime.main and sys.stderr.isatty()))
        turns = config.low_memory and not all(loader.by_rows(slot) for *_, slot in jobs)
        ahead = mesh["shard"].size() + 1 if turns else max(1, config.loading_workers)  # each rank at its own
        for _, place in prefetch(jobs, loader.read, ahead):
            place()
            bar.update()
        bar.close()
        stored.close(file)


@torch.no_grad()
def init_magnitudes(blocks: nn.ModuleList, mesh) -> None:
    """DoRA's start: magnitudes are the row norms of the base's (dequantised) weights, gathered block by
    block."""
    for block in blocks:
        layers = [m for m in block.modules() if hasattr(m, "lora_magnitude_vector")]
        units = [m for m in block.modules() if isinstance(m, FSDPModule)]
        for unit in units:
            unit.unshard()
        squares = [layer.row_squares() for layer in layers]
        for unit in units:
            unit.reshard()
        for layer, square in zip(layers, squares):
            low, high = local_rows(len(square), mesh)
            put(layer.base_squares, square[low:high].view(-1, 1).view(torch.uint8))
            put(layer.lora_magnitude_vector, square[low:high].sqrt())


@dataclass
class Model:
    """A sharded, loaded model and what the other sections want to know of it."""
    module: nn.Module
    mesh: dist.DeviceMesh
    targets: list[str]
    facts: dict  # parameter counts, quantised share, bytes read: for people and for run.json

    def trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}


def allocate(module: nn.Module, home: torch.device, device: torch.device) -> None:
    """Memory for this rank's shards, on `home`; buffers, which are never offloaded, go to `device`."""
    map_parameters(module, lambda p: torch.empty_like(p, device=home))
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            owner._buffers[name] = None if buffer is None else buffer.to(device)


def start_adapters(model: Model, blocks: nn.ModuleList, config: Config) -> None:
    for name, parameter in model.trained().items():
        if not (config.type.adapter and adapters.is_own(name)):
            continue
        low, high = local_rows(len(parameter), model.mesh)
        put(parameter, adapters.initial(name, parameter.shape, config.seed)[low:high])
    if config.type.adapter == "dora":
        init_magnitudes(blocks, model.mesh)


def change_forward(module: nn.Module, blocks: nn.ModuleList, config: Config) -> None:
    """What the model's and the blocks' forward do, outermost last; before sharding, so that FSDP's hooks
    stand around it."""
    use_fused_loss(module, config.label_smoothing)
    if config.neftune_alpha:
        neftune.add_noise(module, config.neftune_alpha)
    if config.compile:
        compiled.compile_blocks(blocks, config)
    if config.use_gradient_checkpointing:
        activations.recompute_blocks(blocks, config.reentrant_checkpointing)


def quantize_base(module: nn.Module, blocks: list, config: Config, stored, kept: set) -> dict:
    """Linears of `blocks`, and if asked for embedding and head, become quantised ones, still without memory;
    modules in `kept` stay plain. Returns facts."""
    facts: dict = dict(quantizer=None, bits=None)
    if config.type.base != "plain":
        quantizer = stored.quantizer(QUANTIZERS[config.type.base], config)
        quantize_linears(blocks, quantizer, kept | stored.kept_plain(module) | experts.routers(module))
        facts = dict(quantizer=quantizer.recipe, bits=quantizer.bits)
    facts["end_quantizer"] = quantize_ends(module, config, kept) if config.quantize_embeddings else None
    quantized = sum(map(quantized_elements, blocks))
    return facts | dict(quantized_parameters=quantized, structure=models.structure(module, blocks, quantized))


def choose_trained(module: nn.Module, blocks: nn.ModuleList, new: list[int], saved: dict, kept: set,
                   config: Config) -> dict:
    """What requires grad: everything, or the `new` blocks, or an adapter (added here) and beside it the
    `saved` modules, whose parts are `kept`. Returns facts."""
    kind, targets, stacked = config.type, [], []
    module.requires_grad_(kind.adapter is None and not kind.new_blocks)
    for number in new:
        blocks[number].requires_grad_()
    if kind.adapter:
        bare = experts.without_adapter(module, config.lora_target_modules)
        targets = adapters.find_targets(module, blocks, config.lora_target_modules, kept, bare)
        adapters.ADAPTERS[kind.adapter](module, config, targets, kept | bare)
        stacked = experts.attach(module, config, kept) if config.lora_experts else []
    for whole in saved.values():
        whole.requires_grad_()
    trained.choose(module, config)
    experts.check(module, config, kept)
    return dict(targets=targets, target_parameters=stacked,
                modules_to_save=trained.written_names(module, saved),
                trained_parameters=sum(p.numel() for p in module.parameters() if p.requires_grad))


def build(config: Config, folder: Path, runtime: Runtime, stored=None) -> Model:
    """Folder -> sharded model, with no rank ever holding more than its shards and one tensor's rows. `stored`
    is where weights come from, the folder's unless given."""
    module = empty_model(folder, config.numbers.frozen, config.attn_implementation, config.rope_scaling,
                         config.trust_remote_code, config.add_tokens)
    models.choose_attention(module, config, accelerator_count())
    stored = stored or vocabulary.grown(prequantized.open_weights(folder), module, config)
    runtime.phase("after_model_created")
    blocks = blocks_of(module)
    models.check_logits(module, loss.logit_transform(module.config))
    new = checkpoint.new_blocks(folder) if config.type.new_blocks else []
    facts = dict(architecture=module.config.model_type, blocks=len(blocks), new_blocks=new,
                 parameters=sum(p.numel() for p in module.parameters()),
                 positions=getattr(module.config, "max_position_embeddings", None),
                 rope=models.rope_of(module.config) if config.rope_scaling else None)
    saved = trained.find_saved(module, config)
    kept = {part for whole in saved.values() for part in whole.modules()}
    module.stored_names = experts.Names(module)  # before any parameter changes its name
    facts |= quantize_base(module, [b for n, b in enumerate(blocks) if n not in new], config, stored, kept)
    slots = checkpoint.find_slots(module)  # before there are adapters, which no checkpoint of a base has
    facts |= choose_trained(module, blocks, new, saved, kept, config)
    experts.translate(stored, slots, module.stored_names)
    matched = stored.match(slots)
    facts |= dict(flops=flops.per_token(module, blocks), notes=stored.notes())
    map_parameters(module, lambda p: p.to(config.numbers.trained) if p.requires_grad else p)
    change_forward(module, blocks, config)
    mesh = make_mesh(config, runtime)
    facts["units"] = shard(module, blocks, config, mesh)
    checks.room(module, blocks, config, runtime)
    allocate(module, torch.device("cpu") if config.use_cpu_offload else runtime.device, runtime.device)
    runtime.phase("after_model_wrap")
    load(stored, matched, config, runtime, mesh)
    runtime.phase("after_model_loaded")
    model = Model(module.train(), mesh, facts["targets"], facts | dict(bytes_read=stored.bytes_read))
    start_adapters(model, blocks, config)
    return model


# ---------------------------------------------------------------------------------- optimiser, schedule, step

@dataclass
class Training:
    """What a step needs, and the position in the run."""
    model: Model
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    scaler: torch.amp.GradScaler
    config: Config
    runtime: Runtime
    step: int = 0  # optimiser steps made

    def scope(self):
        """Autocast and activation offload, as configured, around forward."""
        stack, kind = contextlib.ExitStack(), self.runtime.device.type
        if dtype := self.config.numbers.autocast:
            stack.enter_context(torch.autocast(kind, dtype, cache_enabled=False))  # it keeps cast weights
        if self.config.use_activation_cpu_offload:
            stack.enter_context(activations.Offload(self.runtime.copies))
        return stack


def make_training(model: Model, config: Config, runtime: Runtime, total: int) -> Training:
    embeddings = [p for m in model.module.modules() if isinstance(m, nn.Embedding) for p in m.parameters()]
    optimizer = optim.make_optimizer(model.trained(), config, embeddings)
    schedule = optim.make_schedule(optimizer, config, total)
    scaler = torch.amp.GradScaler(runtime.device.type, enabled=config.numbers.scaler)
    return Training(model, optimizer, schedule, scaler, config, runtime)


@torch.no_grad()
def clip_gradients(training: Training, limit: float) -> torch.Tensor:
    """Scales gradients to a global norm of at most `limit`. Returns the norm before, fp32, over all ranks."""
    trained = training.model.trained().values()
    square = torch.stack(optim.gradient_norms(training.optimizer, trained)).square().sum()
    dist.all_reduce(square, group=training.model.mesh["shard"].get_group())
    norm = square.sqrt()
    if grads := [p.grad.to_local() for p in trained if p.grad is not None]:
        torch._foreach_mul_(grads, (limit / (norm + 1e-6)).clamp(max=1.0))
    return norm


def train_step(training: Training, batches: list[dict], tokens: float) -> tuple[torch.Tensor, torch.Tensor]:
    """One optimiser step. Returns this rank's summed loss and the global gradient norm, both still on the
    device.

    The loss of a step is the sum of token losses over all ranks and micro-batches divided by `tokens`, their
    number: so it does not depend on how the step's examples are split. Only loss scaling,
    --skip_nonfinite_steps and experts, whose row counts the host needs, read a value from the device.
    """
    module, scaler, config = training.model.module, training.scaler, training.config
    total = torch.zeros((), device=training.runtime.device)
    for number, batch in enumerate(batches, 1):
        module.set_requires_gradient_sync(number == len(batches) or not config.no_sync)
        module.set_is_last_backward(number == len(batches))
        training.runtime.phase("before_forward")
        with training.scope():
            summed = module(**batch)
        training.runtime.phase("after_forward")
        scaler.scale(summed / tokens).backward()
        training.runtime.phase("after_backward")
        total += summed.detach()
    scaler.unscale_(training.optimizer)  # before clipping, or the threshold would be off by the loss scale
    norm = clip_gradients(training, config.grad_norm if config.apply_gradient_clipping else math.inf)
    if not config.skip_nonfinite_steps or norm.isfinite():
        scaler.step(training.optimizer)
    training.runtime.phase("after_optimizer_step")
    scaler.update()
    training.optimizer.zero_grad()
    training.schedule.step()
    training.step += 1
    return total, norm


# ----------------------------------------------------------------------------------------------------- saving

def save(model: Model, config: Config, source: Path, tokenizer, runtime: Runtime) -> None:
    """A PEFT folder (adapters), the new blocks (llama_pro types), or a Hugging Face folder (full); with the
    tokenizer."""
    folder, adapter = Path(config.output_dir), bool(model.targets)
    stem = "adapter_model" if adapter else "blocks" if config.type.new_blocks else "model"
    named = trained.contents(model.module, config, source, runtime.main)
    checkpoint.write_tensors(folder, stem, named, runtime.main)
    if not runtime.main:
        return
    tokenizer.save_pretrained(folder)
    if adapter:
        base = config.model_name if checkpoint.is_hub_id(config.model_name or ".") else str(source.resolve())
        saved, tied = model.facts["modules_to_save"], len(named) > len(model.trained())
        adapters.lora_config(config, sorted(model.targets), base, saved, tied,
                             model.facts["target_parameters"]).save_pretrained(folder)
    elif not config.type.new_blocks:
        hf = model.module.config
        hf.use_cache, hf.dtype = True, config.numbers.trained
        hf.save_pretrained(folder)
        for path in (*source.glob("generation_config.json"), *source.glob("*.py")):
            shutil.copy(path, folder)


# ---------------------------------------------------------------------------------------------- training loop

def epochs(training: Training, held: data.Held, total: int):
    """(epoch, its windows) from where the training stands. Every epoch has the same number of steps."""
    config, runtime = training.config, training.runtime
    windows = functools.partial(data.plan, held.lengths, config, rank=runtime.rank, world=runtime.world)
    each = len(windows(epoch=0))
    for epoch in range(training.step // each, config.num_epochs):
        yield epoch, windows(epoch=epoch)[training.step - epoch * each:total - epoch * each]


def train(training: Training, held: data.Held, total: int, metrics: logs.Metrics, saver: state.Saver,
          stops: launcher.Stops, tick: Callable) -> bool:
    """The optimiser steps that are left, epoch by epoch; the last, smaller window of an epoch is a step like
    any other. Returns whether all were made: a signal to any rank ends training, saved, after a step."""
    config, runtime = training.config, training.runtime

    flat = attention.used(training.model.module)

    def prepare(window):  # on the host, by a thread, a step ahead
        return [data.prepared(held.collate(rows, config.packing, flat)) for rows in window]
    if held.eval and config.eval_steps > 0 and not training.step:
        evaluation.run(training, held, metrics, step=0, epoch=0)
    stops.at_once = False
    for epoch, windows in epochs(training, held, total):
        for window, prepared in metrics.waiting(prefetch(windows, prepare, 2)):
            tick()
            batches = [data.sent(made, runtime.device) for made, _ in prepared]
            mine = sum(count for _, count in prepared)
            counted, asked, statuses = runtime.gather(mine, stops.asked, saver.status).unbind(1)
            supervised, stop = int(counted.sum()), int(asked.max())
            saver.settle(statuses.tolist())
            lr, step = training.schedule.get_last_lr()[0], training.step + 1
            state.seed_step(config.seed, step, runtime.rank)
            summed, norm = train_step(training, batches, max(1, supervised))
            examples = [i for rows in window for row in rows for i in row]
            tokens = sum(held.lengths[i] for i in examples)
            if not summed.isfinite():  # record() waits for the device anyway
                print(f"rank {runtime.rank}: step {step}: the loss of {held.places(examples)} is not finite",
                      file=sys.stderr, flush=True)
            try:
                metrics.record(summed, norm, tokens, supervised, step=step, epoch=epoch, lr=lr)
            except UserError:  # on every rank
                saver.finish()
                raise
            if held.eval and (step == total or config.eval_steps > 0 and step % config.eval_steps == 0):
                evaluation.run(training, held, metrics, step=step, epoch=epoch)
            if stop or config.save_steps > 0 and step % config.save_steps == 0:
                saver.start(training)
                metrics.go_on()
            if stop and step < total:
                saver.finish()
                kept = "which is saved; --resume auto goes on from there" if saver.newest == step else \
                    "which could not be saved"
                metrics.show(f"{launcher.name_of(stop)}: stopped after step {step}, {kept}")
                return False
    saver.finish()
    return True


def open_output(config: Config, start: int, content: dict) -> None:
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint.write_json(folder / "run.json", content)  # the end adds the summary
    state.clean(folder)
    state.set_aside(folder, start)
    if config.dataset == "demo":
        from scripts import demo
        lines = [json.dumps(row) + "\n" for row in demo.examples("held_out")]
        (folder / "held_out.jsonl").write_text("".join(lines))


def first_here(runtime: Runtime, work: Callable):
    """work(), by one process of each node first: it downloads or writes what the others then find on its
    disk."""
    if runtime.local_rank:
        dist.barrier()
    result = work()
    if not runtime.local_rank:
        dist.barrier()
    return result


def describe(config: Config, runtime: Runtime, folder: Path, held: data.Held) -> dict:
    """What run.json and checkpoints say of a run: enough to repeat it and to recognise its base and data."""
    return dict(config=dataclasses.asdict(config), world_size=runtime.world, device=runtime.device.type,
                versions=logs.versions(), git_commit=logs.git_commit(),
                model=dict(folder=str(folder.resolve()), fingerprint=checkpoint.fingerprint(folder)),
                data=dict(fingerprint=held.train.fingerprint, **held.counts._asdict()))


def run(config: Config, runtime: Runtime, stops: launcher.Stops) -> int:
    """A whole training run on this rank: model folder, data, model, steps, result. Returns the exit code."""
    folder = first_here(runtime, lambda: checkpoint.find_folder(config.weights))
    held = first_here(runtime, lambda: data.load_all(config, folder))
    total = config.num_epochs * len(data.plan(held.lengths, config, epoch=0, rank=0, world=runtime.world))
    total = min(total, config.max_steps) if config.max_steps > 0 else total
    content = describe(config, runtime, folder, held)
    runtime = memory.watch(config, runtime)
    path, saved = state.choose(config, runtime, content)
    training = make_training(build(config, folder, runtime), config, runtime, total)
    content["model"] |= training.model.facts
    if path:
        state.load(path, saved, training)
    if runtime.main:
        open_output(config, training.step, content)
        logs.introduce(config, training.model.facts, folder, held, runtime, total)
        vocabulary.warn(training.model.module, folder, held, bool(config.type.adapter), logs.say)
        state.introduce(config, path, saved)
    start = time.perf_counter()
    metrics = logs.Metrics(config, runtime, total, content, training.step, saved.get("logger"))
    saver = state.Saver(config, runtime, content, metrics.state)
    gc.collect()
    gc.freeze()  # else each rank at times searches libraries and model for garbage, and the others wait
    with profiling.profiler(config, runtime, training.step) as tick:
        finished = train(training, held, total, metrics, saver, stops, tick)
    gc.unfreeze()  # before stop_runtime, which collects what holds communicators
    metrics.close()
    if finished and config.save_model:
        save(training.model, config, folder, held.tokenizer, runtime)
    if finished and runtime.main:
        content["summary"] = metrics.summary(time.perf_counter() - start)
        checkpoint.write_json(Path(config.output_dir) / "run.json", content)
        logs.finish(config, content["summary"])
    return 0 if finished else launcher.STOPPED


# ------------------------------------------------------------------------------------------------------- main

def fail(error: BaseException, rank: int, own_file: bool = False) -> None:
    """Says what happened and ends this process at once; the launcher then ends the others.

    A rank that only lost a peer waits first (or, where each has an `own_file` for its errors, after it has
    spoken): the launcher ends it, and the cause is what the person reads.
    """
    lost_peer = isinstance(error, dist.DistError) or "by peer" in str(error)
    disk = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
    theirs = isinstance(error, UserError) or disk
    seconds = 10 if lost_peer else 3 if isinstance(error, UserError) and rank > 0 else 0
    time.sleep(0 if own_file else seconds)
    if theirs:
        print(f"train.py: error: {error}", file=sys.stderr)
    else:
        end = f"rank {rank} waited for the others longer than --timeout_minutes" * ("Timed out" in str(error))
        print(f"rank {rank} failed:\n{''.join(traceback.format_exception(error))}{end}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(seconds if own_file else 0)
    os._exit(2 if theirs else 1)  # destructors would wait for peers that never come


def work(config: Config, problems: list[str], rank: int) -> int:
    """One rank, from process group to process group. Returns its exit code. `problems` of the flags are
    told, and those of what they name by the first rank, if no launcher has looked."""
    stops = launcher.Stops()
    if launcher.CHECKED in os.environ:
        launcher.end_with_parent()
    try:
        problems += checks.surroundings(config) if rank == 0 and launcher.CHECKED not in os.environ else []
        refuse(problems)
        state.choose_kernels(config.deterministic)
        runtime = start_runtime(timeout_minutes=config.timeout_minutes, error_dir=config.error_dir)
        checks.every_node(config, runtime)
        code = run(config, runtime, stops)
        stop_runtime()
        return code
    except BaseException as error:
        own_file = bool(config.error_dir) and launcher.CHECKED in os.environ
        fail(profiling.explained(error, config, rank), rank, own_file)


def main(argv: list[str]) -> int:
    try:
        config, problems = read_flags(argv)
        if config.plan and not problems:
            plan.answer(config)
            return 0
        place = places.place(os.environ, config.world_size, config.master_addr, config.master_port,
                             accelerator_count())
        if place.local_rank is not None:
            os.environ.update(place.environment())
            return work(config, problems, place.rank)
        problems += checks.surroundings(config) if place.node == 0 else []
        problems += checks.devices(config, place.local_world, accelerator_count())
        if not problems and not checkpoint.is_ready(config.weights):
            problems += checks.download(config)  # once a node, before there are several processes
        return launcher.launch(__file__, argv, place, problems, config.error_dir)
    except UserError as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # while it plans or downloads; a run takes signals itself
        print("train.py: stopped by Ctrl-C", file=sys.stderr)
        return launcher.AT_ONCE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
