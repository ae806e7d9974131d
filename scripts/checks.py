"""What can be wrong with a configuration besides single values: combinations, packages, and what flags name.
Each function returns messages for people; all of them are shown together, before any work."""
import importlib.util

from scripts import checkpoint, data
from scripts.flags import UserError

PACKAGES = {"nf4": "bitsandbytes", "hqq": "hqq", "peft": "peft"}  # what a base or an adapter needs installed


STATES = {"sgd": 1, "lion": 1}  # tensors of optimiser state per trained one; for the others 2


def combinations(config) -> list[str]:
    """Problems of values that are fine by themselves."""
    counted = ("world_size", "max_steps", "loading_workers", "eval_steps")
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
    if config.master_port > 65535:
        problems.append(f"--master_port {config.master_port}: ports end at 65535")
    return problems


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
    if config.n_bits not in (None, 8, 4, 3, 2):
        problems.append(f"--n_bits {config.n_bits}: choose from 8, 4, 3, 2")
    missing = [PACKAGES[part] for part in (kind.base, kind.adapter)
               if part in PACKAGES and importlib.util.find_spec(PACKAGES[part]) is None]
    return problems + [f"--train_type {name} needs the package {p}: pip install {p}" for p in missing]


def dataset(name: str | None, flag: str) -> list[str]:
    try:
        if name is not None:
            data.parse_sources(name)
    except data.DataError as error:
        return [f"{flag}: {error}"]
    return []


def devices(config, accelerators: int) -> list[str]:
    """Problems between the configuration and the accelerators of this machine."""
    problems = []
    if 0 < accelerators < config.world_size:
        problems.append(f"--world_size {config.world_size}: only {accelerators} accelerator(s) here")
    if config.attn_implementation in ("flex_attention", "flash_attention_2") and not accelerators:
        problems.append(f"--attn_implementation {config.attn_implementation}: trains on accelerators only")
    return problems


def surroundings(config, accelerators: int) -> list[str]:
    """What the flags name must exist and fit this machine."""
    return [*checkpoint.check_folder(config.model_name, "--model_name"),
            *checkpoint.check_folder(config.llama_pro_path, "--llama_pro_path"),
            *dataset(config.dataset, "--dataset"), *dataset(config.eval_dataset, "--eval_dataset"),
            *checkpoint.check_output(config.output_dir, config.overwrite_output_dir),
            *devices(config, accelerators)]


def state_bytes(config, trained: int, stored: int) -> int:
    """Of the optimiser's state for `trained` elements that take `stored` bytes."""
    if "8bit" in config.optimizer:
        return STATES.get(config.optimizer.removesuffix("_8bit"), 2) * trained
    return STATES.get(config.optimizer, 2) * stored


def room(module, blocks, config, runtime) -> None:
    """Compares what this process keeps through training, by the sizes of its shards, with the memory that is
    free. Raises UserError where that and one gathered block alone are more (--force goes on), and warns where
    two blocks, and the blocks' inputs kept for backward, would not fit. `--plan` knows the rest."""
    def stored(parameters, whole=False):
        tensors = [p if whole else p.to_local() for p in parameters]
        return sum(t.numel() * t.element_size() for t in tensors)
    trained = [p for p in module.parameters() if p.requires_grad]
    kept = stored(module.parameters()) + stored(trained)
    kept += state_bytes(config, sum(p.to_local().numel() for p in trained), stored(trained))
    block, free = stored(blocks[0].parameters(), whole=True), runtime.free_memory()
    hidden = module.config.get_text_config().hidden_size * config.numbers.compute.itemsize
    inputs = len(blocks) * config.batch_size * config.context_length * hidden
    kept = 0 if config.use_cpu_offload and runtime.device.type != "cpu" else kept
    sizes = f"{kept / 2**30:.1f} GiB kept by each process, {free / 2**30:.1f} GiB free"
    if kept + block > free and not config.force:
        raise UserError(f"this run cannot fit: {sizes}. `train.py --plan` with the same flags says what to "
                        "change (--force true starts anyway)")
    if kept + 2 * block + inputs > free and runtime.main:
        print(f"warning: memory is tight: {sizes}; `train.py --plan` with the same flags says what to change")
