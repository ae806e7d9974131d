"""The same training as train.py's, by TRL's SFTTrainer and PEFT: what scripts/benchmark.py compares with.

    trl/bin/python scripts/hf_train.py --train_type lora --model_name ./llama --dataset my_data.jsonl

Takes train.py's flags, as far as TRL has the same thing, and writes the same metrics.jsonl. The adapter
starts from the same numbers and a step gets the same examples, so the losses agree (--trl_data true: TRL
makes its own batches instead). Several processes train with DDP, or (--trl_fsdp true) with FSDP2 through
accelerate. It runs in an environment of its own, which scripts/benchmark.py says how to make.
"""
import dataclasses
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from any folder
import train
from scripts import adapters, checkpoint, data, launcher, logs, memory, optim, packing, places
from scripts.flags import UserError, option, parse_flags, refuse

OPTIMIZERS = {"adamw": "adamw_torch", "fused_adamw": "adamw_torch_fused"}
PRECISIONS = {"bf16": "bfloat16", "mp_bf16": "bfloat16", "mp_bf16_autocast": "float32", "fp32": "float32"}
USED = {"model_name", "dataset", "dataset_samples", "dataset_format", "dataset_columns", "chat_template",
        "train_on", "context_length", "truncation", "packing", "skip_bad_rows", "train_type", "lora_rank",
        "lora_alpha", "use_rslora", "lora_dropout", "lora_target_modules", "batch_size",
        "gradient_accumulation_steps", "max_steps", "lr", "lr_scheduler", "warmup_ratio", "warmup_steps",
        "min_lr", "optimizer", "wd", "apply_gradient_clipping", "grad_norm", "seed", "precision",
        "attn_implementation", "use_gradient_checkpointing", "world_size", "output_dir",
        "overwrite_output_dir", "save_model", "save_steps", "log_to", "trl_fsdp", "trl_data"}


@dataclass(frozen=True)
class Config(train.Config):
    trl_fsdp: bool = option(False, "FSDP2 through accelerate instead of DDP")
    trl_data: bool = option(False, "batches, packing and order as TRL makes them from the same samples")


def problems(config: Config) -> list[str]:
    """What TRL does not do, or this script does not ask it to."""
    unused = [spec.name for spec in dataclasses.fields(config)
              if spec.name not in USED and getattr(config, spec.name) != spec.default]
    found = [f"--{name} has no counterpart here" for name in unused]
    kind = config.type
    if kind.new_blocks or kind.base not in ("plain", "nf4") or kind.adapter == "custom":
        found.append(f"--train_type {config.train_type} has no counterpart in PEFT")
    if config.trl_fsdp and kind.base != "plain":
        found.append("--trl_fsdp goes with a plain base")
    for flag, table in (("precision", PRECISIONS), ("optimizer", OPTIMIZERS)):
        if (value := getattr(config, flag)) not in table:
            found.append(f"--{flag} {value}: choose from {', '.join(table)}")
    if config.max_steps < 1:
        found.append("--max_steps: say how many")
    return found


def parse(argv: list[str]) -> Config:
    """Flags -> Config. Raises UserError with everything that is wrong with them by themselves."""
    if "--help" in argv:
        print(__doc__)
        sys.exit(0)
    aliases = {"precision": train.PRECISION_ALIASES}
    config, found = parse_flags(Config, argv, aliases)
    refuse(found or problems(config))
    return config


# ----------------------------------------------------------------------------------------------- model, data

def load_model(config: Config, folder: Path):
    """The base, as people load it for TRL."""
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig
    dtype, extra = getattr(torch, PRECISIONS[config.precision]), {}
    if config.type.base == "nf4":
        extra["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=config.numbers.compute)
    attention = "sdpa" if config.attn_implementation == "auto" else config.attn_implementation
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention, **extra)


def start_adapter(model, seed: int) -> None:
    """The numbers that train.py's adapter starts from."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and adapters.is_own(name) and "magnitude" not in name:
            plain = name.removeprefix("base_model.model.")
            parameter.data.copy_(adapters.initial(plain, parameter.shape, seed))


def in_order(held: data.Held, config: Config) -> list[list[int]]:
    """The rows of all epochs that are needed, in train.py's order: the processes' batches one after another.
    """
    rows, epoch, wanted = [], 0, config.max_steps * config.batch_size * config.gradient_accumulation_steps
    while len(rows) < wanted * max(1, config.world_size):
        made = packing.rows_of_epoch(held.lengths, config, epoch)
        rows += [made[i] for i in packing.permutation(len(made), config.seed, epoch)]
        epoch += 1
    return rows


def make_dataset(held: data.Held, config: Config):
    """Tokens and labels for TRL: train.py's rows in its order, or the samples as they are."""
    from datasets import Dataset
    alone = [[i] for i in range(len(held.train))]
    rows = alone if config.trl_data else in_order(held, config)
    columns = dict(input_ids=[], labels=[], seq_lengths=[])
    for row in rows:
        samples = [held.train[i] for i in row]
        columns["input_ids"].append([i for sample in samples for i in sample.ids])
        columns["labels"].append([i for sample in samples for i in sample.labels])
        columns["seq_lengths"].append([len(sample.ids) for sample in samples])
    if not config.packing or config.trl_data:
        del columns["seq_lengths"]
    return Dataset.from_dict(columns)


def settings(config: Config):
    """SFTConfig: TRL's defaults where train.py has no flag for it."""
    import torch
    from trl import SFTConfig
    blocks = dict(auto_wrap_policy="TRANSFORMER_BASED_WRAP", reshard_after_forward=True, version=2)
    same = not config.trl_data
    return SFTConfig(
        output_dir=config.output_dir, per_device_train_batch_size=config.batch_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps, max_steps=config.max_steps,
        learning_rate=optim.peak_lr(config), weight_decay=config.wd, optim=OPTIMIZERS[config.optimizer],
        adam_beta1=optim.ADAM["betas"][0], adam_beta2=optim.ADAM["betas"][1], seed=config.seed,
        max_grad_norm=config.grad_norm if config.apply_gradient_clipping else 0.0,
        bf16=config.numbers.compute == torch.bfloat16, use_cpu=train.accelerator_count() == 0,
        gradient_checkpointing=config.use_gradient_checkpointing, logging_steps=1, save_strategy="no",
        report_to="none", disable_tqdm=True, packing=config.packing and not same,
        padding_free=config.packing and same, max_length=None if same else config.context_length,
        dataset_kwargs=dict(skip_prepare_dataset=same), fsdp=config.trl_fsdp or None,
        fsdp_config=blocks if config.trl_fsdp else None, remove_unused_columns=not same,
        train_sampling_strategy="sequential" if same else "random")


# --------------------------------------------------------------------------------------------------- training

class Rows:
    """metrics.jsonl, as train.py writes it; every rank makes its rows, the first one writes them."""

    def __init__(self, config: Config):
        self.clock, self.tokens, self.supervised = time.perf_counter(), 0, 0
        self.file = Path(config.output_dir) / "metrics.jsonl"

    def write(self, trainer, step: int, found: dict) -> None:
        import torch
        peak = torch.tensor(float(trainer.peak()), device=trainer.args.device)
        peak = trainer.accelerator.gather(peak.view(1)).max()
        now, tokens = time.perf_counter(), int(found["num_tokens"]) - self.tokens
        seconds, self.clock, self.tokens = now - self.clock, now, int(found["num_tokens"])
        row = dict(step=step, loss=found["loss"], grad_norm=found["grad_norm"], lr=found["learning_rate"],
                   tokens=tokens, supervised_tokens=self.supervised, peak_memory_bytes=int(peak),
                   tokens_per_second=tokens / seconds,
                   supervised_tokens_per_second=self.supervised / seconds)
        if trainer.accelerator.is_main_process:
            with open(self.file, "a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"step {step}/{trainer.args.max_steps}  {logs.describe(row)}", flush=True)


def make_trainer(config: Config, folder: Path, held: data.Held):
    """An SFTTrainer with train.py's schedule that writes train.py's rows."""
    import torch
    from trl import SFTTrainer

    class Trainer(SFTTrainer):
        peak = staticmethod(torch.accelerator.max_memory_allocated if train.accelerator_count()
                            else memory.peak)

        def create_scheduler(self, num_training_steps, optimizer=None):
            optimizer = getattr(optimizer or self.optimizer, "optimizer", optimizer or self.optimizer)
            self.lr_scheduler = optim.make_schedule(optimizer, config, num_training_steps)
            return self.lr_scheduler

        def compute_loss(self, *args, num_items_in_batch=None, **kwargs):
            self.rows.supervised = int(num_items_in_batch)
            return super().compute_loss(*args, num_items_in_batch=num_items_in_batch, **kwargs)

        def log(self, found, *args):
            super().log(found, *args)
            if "loss" in found:
                self.rows.write(self, self.state.global_step, found)

    model, peft = load_model(config, folder), None
    if config.type.adapter:
        targets = adapters.find_targets(model, train.blocks_of(model), config.lora_target_modules)
        peft = adapters.lora_config(config, targets)
    trainer = Trainer(model, settings(config), train_dataset=make_dataset(held, config), peft_config=peft,
                      processing_class=held.tokenizer)
    start_adapter(trainer.model, config.seed)
    trainer.rows = Rows(config)
    return trainer


def work(config: Config) -> int:
    """One rank, whose process group accelerate makes."""
    folder = checkpoint.find_folder(config.weights)
    held = data.load_all(config, folder)
    Path(config.output_dir).mkdir(parents=True, exist_ok=True)
    trainer = make_trainer(config, folder, held)
    if trainer.accelerator.is_main_process:
        trainer.rows.file.unlink(missing_ok=True)
    trainer.rows.clock = time.perf_counter()
    trainer.train()
    if config.save_model:
        trainer.save_model()
    del trainer
    if config.world_size > 1:
        train.stop_runtime()
    return 0


def main(argv: list[str]) -> int:
    try:
        config = parse(argv)
        place = places.place(os.environ, config.world_size, "localhost", 0, train.accelerator_count())
        if place.local_rank is None:
            return launcher.launch(__file__, argv, place)
        os.environ.update(place.environment())
        return work(dataclasses.replace(config, world_size=place.world))
    except UserError as error:
        print(f"hf_train.py: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
