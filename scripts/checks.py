"""What can be wrong with a configuration besides single values: combinations, packages, and what flags name.
Each function returns messages for people; all of them are shown together, before any work."""
import importlib.util
import os
import socket

import torch.distributed as dist

from scripts import checkpoint, compiled, data, logs, models, optim, places, profiling, state, vocabulary
from scripts.flags import UserError, refuse

PACKAGES = {"nf4": "bitsandbytes", "hqq": "hqq", "peft": "peft"}  # what a base or an adapter needs installed
PER_CORE = 32  # processes; more would fill the memory with interpreters
YEAR = 525600  # minutes; much larger ones overflow in torch
LOG_PACKAGES = ("wandb", "tensorboard")  # loggers that are packages, of the same name


def combinations(config) -> list[str]:
    """Problems of values that are fine by themselves."""
    counted = ("world_size", "max_steps", "loading_workers", "eval_steps", "save_steps")
    problems = [f"--{name} 0: must be at least 1 (or -1 for the default)"
                for name in counted if getattr(config, name) == 0]
    if config.lora_dropout >= 1:
        problems.append(f"--lora_dropout {config.lora_dropout}: must be below 1")
    if config.eval_fraction >= 1 or config.eval_fraction and config.eval_dataset:
        problems.append(f"--eval_fraction {config.eval_fraction}: must be below 1, without --eval_dataset")
    if config.eval_generate and not (config.eval_fraction or config.eval_dataset):
        problems.append("--eval_generate needs --eval_dataset or --eval_fraction")
    if config.attn_implementation == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        problems.append("--attn_implementation flash_attention_2 needs the package flash-attn")
    if config.rope_scaling is not None:
        try:
            models.parse_rope(config.rope_scaling)
        except UserError as error:
            problems.append(str(error))
    if config.hybrid_shard_size and not config.sharding_strategy.startswith("hybrid_"):
        problems.append("--hybrid_shard_size goes with --sharding_strategy hybrid_full_shard or "
                        "hybrid_shard_grad_op")
    if config.plan_json and not config.plan:
        problems.append("--plan_json goes with --plan")
    if config.timeout_minutes > YEAR:
        problems.append(f"--timeout_minutes {config.timeout_minutes:g}: must be at most {YEAR}, a year")
    if config.master_port > 65535:
        problems.append(f"--master_port {config.master_port}: ports end at 65535")
    logger = config.log_to
    if logger in LOG_PACKAGES and importlib.util.find_spec(logger) is None:
        problems.append(f"--log_to {logger} needs the package {logger}: pip install {logger}")
    elif logger == "wandb" and not logs.wandb_ready():
        problems.append("--log_to wandb: no API key is configured; run `wandb login`, set WANDB_API_KEY, or "
                        "set WANDB_MODE=offline")
    return problems + profiling.problems(config)


def train_type(config) -> list[str]:
    """Problems between the train type and the flags that only some types use, and packages it needs but
    lacks."""
    kind, name, problems = config.type, config.train_type, []
    if kind.new_blocks and config.llama_pro_path is None and not config.plan:
        problems.append(f"--train_type {name} needs --llama_pro_path, made by scripts/block_expansion.py")
    if not kind.new_blocks and config.llama_pro_path is not None:
        problems.append(f"--llama_pro_path goes with a llama_pro train type, not with {name}")
    if kind.base != "hqq" and config.n_bits is not None:
        problems.append(f"--n_bits goes with an hqq train type, not with {name}")
    if config.quantize_embeddings and (config.train_embeddings or config.add_tokens
                                       or not kind.adapter and not kind.new_blocks):
        problems.append("--quantize_embeddings goes with an embedding that is not trained: without "
                        "--train_embeddings, --add_tokens and --train_type full")
    if config.lora_experts and kind.adapter not in ("peft", "custom"):
        problems.append(f"--lora_experts goes with a LoRA train type, not with {name}"
                        + ": PEFT has no DoRA for experts' stacked weights" * (kind.adapter == "dora"))
    if config.lora_experts and config.lora_dropout:
        problems.append("--lora_experts: PEFT has no --lora_dropout for experts; leave it out")
    missing = [PACKAGES[part] for part in (kind.base, kind.adapter, "nf4" * bool(config.quantize_embeddings))
               if part in PACKAGES and importlib.util.find_spec(PACKAGES[part]) is None]
    problems += what_is_trained(config)
    return problems + [f"--train_type {name} needs the package {p}: pip install {p}" for p in missing]


def optimisation(config) -> list[str]:
    """Problems of learning rates and of what trains only some types."""
    kind, name, peak, problems = config.type, config.train_type, optim.peak_lr(config), []
    if config.warmup_ratio is not None and config.warmup_steps is not None:
        problems.append("--warmup_ratio and --warmup_steps: give one of them")
    if (config.warmup_ratio or 0) > 1:
        problems.append(f"--warmup_ratio {config.warmup_ratio}: must be at most 1")
    if config.min_lr is not None and config.lr_scheduler == "constant":
        problems.append("--min_lr goes with --lr_scheduler cosine or linear, not with constant")
    if (config.min_lr or 0) > peak:
        problems.append(f"--min_lr {config.min_lr}: is above the peak rate, {peak:g}")
    if config.label_smoothing >= 1:
        problems.append(f"--label_smoothing {config.label_smoothing}: must be below 1")
    for flag, default in (("use_rslora", False), ("loraplus_lr_ratio", 1.0)):
        if getattr(config, flag) != default and not kind.adapter:
            problems.append(f"--{flag} goes with an adapter train type, not with {name}")
    made = getattr(optim.OPTIMIZERS.get(config.optimizer), "func", None)
    if made is optim.LocalOptimizer and importlib.util.find_spec("bitsandbytes") is None:
        problems.append(f"--optimizer {config.optimizer} needs the package bitsandbytes: pip install "
                        "bitsandbytes")
    return problems + (in_backward(config) if config.optim_in_backward else [])


def among(config) -> list[str]:
    """Problems of flags with each other, of a configuration whose values are legal by themselves."""
    return combinations(config) + train_type(config) + optimisation(config)


def in_backward(config) -> list[str]:
    """What must be otherwise for --optim_in_backward, which steps before all gradients are known."""
    needs = {"--apply_gradient_clipping false": not config.apply_gradient_clipping,
             "--gradient_accumulation_steps 1": config.gradient_accumulation_steps == 1,
             "--skip_nonfinite_steps 0": not config.skip_nonfinite_steps,
             "a --precision without loss scaling": not config.numbers.scaler,
             "a full or llama_pro --train_type": not config.type.adapter}
    return [f"--optim_in_backward needs {wanted}" for wanted, met in needs.items() if not met]


def what_is_trained(config) -> list[str]:
    """Problems between the train type and the flags that choose what is trained."""
    kind, name = config.type, config.train_type
    blocks = f"{name} trains its new blocks, and its result holds these and nothing else"
    no_patterns = blocks if kind.new_blocks else kind.adapter and \
        f"{name} trains an adapter; --modules_to_save trains modules beside it"
    no_modules = blocks if kind.new_blocks else not kind.adapter and \
        f"{name} has no adapter to save them beside; --trainable says what it trains"
    refused = dict(trainable=no_patterns, freeze=no_patterns, train_embeddings=no_modules,
                   modules_to_save=no_modules, add_tokens=blocks if kind.new_blocks else None)
    return [f"--{flag}: {why}" for flag, why in refused.items() if why and getattr(config, flag)]


def dataset(name: str | None, flag: str) -> list[str]:
    try:
        if name is not None:
            data.parse_sources(name)
    except UserError as error:
        return [f"{flag}: {error}"]
    return []


def devices(config, processes: int, accelerators: int) -> list[str]:
    """Problems between the configuration and the accelerators of this machine, where `processes` start."""
    problems = []
    if 0 < accelerators < processes:
        problems.append(f"--world_size {config.world_size}: only {accelerators} accelerator(s) here")
    if not accelerators and processes > PER_CORE * places.cores():
        problems.append(f"--world_size {config.world_size}: {processes} processes on {places.cores()} "
                        f"core(s); at most {PER_CORE} per core start")
    if config.attn_implementation in ("flex_attention", "flash_attention_2") and not accelerators:
        problems.append(f"--attn_implementation {config.attn_implementation}: trains on accelerators only")
    return problems + (compiled.problems(accelerators) if config.compile else [])


def model_folders(config) -> list[str]:
    return [*checkpoint.check_folder(config.model_name, "--model_name"),
            *checkpoint.check_folder(config.llama_pro_path, "--llama_pro_path")]


def surroundings(config) -> list[str]:
    """What the flags name must exist and fit this machine."""
    earlier = state.check(config)  # says more than that the folder is not empty
    known = config.overwrite_output_dir or bool(config.resume or earlier)
    return [*model_folders(config), *dataset(config.dataset, "--dataset"),
            *dataset(config.eval_dataset, "--eval_dataset"),
            *checkpoint.check_output(config.output_dir, known),
            *checkpoint.check_writable(config.error_dir, "--error_dir"),
            *checkpoint.check_writable(config.profiling_output, "--profiling_output"),
            *vocabulary.check(config.add_tokens), *earlier]


def download(config) -> list[str]:
    """Fetches a model from the hub. What then starts here finds it in the cache and asks the hub no more."""
    try:
        checkpoint.find_folder(config.weights)
    except UserError as error:
        return [str(error)]
    os.environ["HF_HUB_OFFLINE"] = "1"
    return []


def every_node(config, runtime) -> None:
    """Each node needs the model: in a shared folder, or on its own disk. Collective. Raises UserError, on all
    ranks, naming the nodes that lack it."""
    found: list = [None] * runtime.world
    dist.all_gather_object(found, [(socket.gethostname(), text) for text in model_folders(config)])
    refuse({f"{host}: {text}": None for each in found for host, text in each})


def room(module, blocks, config, runtime) -> None:
    """Compares what this process keeps through training, by the sizes of its shards, with the memory that is
    free. Raises UserError where that and one gathered block alone are more (--force goes on), and warns where
    two blocks, and the blocks' inputs kept for backward, would not fit. `--plan` knows the rest."""
    trained = [p for p in module.parameters() if p.requires_grad]
    kept, own = optim.local_bytes(module.parameters()), optim.local_bytes(trained)
    kept += 0 if config.optim_in_backward else own  # gradients
    if not (config.optimizer.startswith("paged_") and runtime.device.type != "cpu"):  # those may leave
        kept += optim.state_bytes(config, sum(p.to_local().numel() for p in trained), own)
    block, free = sum(p.nbytes for p in blocks[0].parameters()), runtime.free_memory()
    hidden = module.get_output_embeddings().in_features * config.numbers.compute.itemsize
    inputs = len(blocks) * config.batch_size * config.context_length * hidden
    kept = 0 if config.use_cpu_offload and runtime.device.type != "cpu" else kept
    sizes = f"{kept / 2**30:.1f} GiB kept by each process, {block / 2**30:.1f} for a gathered block, " \
            f"{free / 2**30:.1f} GiB free"
    if kept + block > free and not config.force:
        raise UserError(f"this run cannot fit: {sizes}. `train.py --plan` with the same flags says what to "
                        "change (--force true starts anyway)")
    if kept + 2 * block + inputs > free and runtime.main:
        print(f"warning: memory is tight: {sizes}; `train.py --plan` with the same flags says what to change")
