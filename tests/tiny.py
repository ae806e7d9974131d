"""Tiny random models and a tiny tokenizer, as ordinary Hugging Face folders."""

from pathlib import Path

SIZES = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=300,
    max_position_embeddings=512,
)
MODELS = {
    "llama": ("llama", {}),
    "llama-one": ("llama", dict(num_hidden_layers=1)),
    "llama-tied": ("llama", dict(tie_word_embeddings=True)),
    "llama-odd": (
        "llama",
        dict(intermediate_size=192, num_attention_heads=2, num_key_value_heads=1, vocab_size=301),
    ),
    "llama-in96": ("llama", dict(hidden_size=96, num_attention_heads=4)),
    "qwen2": ("qwen2", {}),  # biases on q, k, v
    "gemma2": ("gemma2", dict(head_dim=16, query_pre_attn_scalar=16, sliding_window=32)),  # soft caps, tied
    "mistral": ("mistral", dict(sliding_window=20)),
    "mixtral": ("mixtral", dict(num_local_experts=4)),
}
TEXTS = [
    "Name a fruit that is yellow.",
    "A banana is yellow.",
    "What is two plus two?",
    "Two plus two is four.",
    "Below is an instruction that describes a task.",
    "### Instruction:",
    "### Response:",
    "### Input:",
]


def tokenizer():
    """A byte-level BPE of 300 entries; <s> and </s> are 0 and 1, nothing is added by itself, pad is eos."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )


def model(name: str):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, changes = MODELS[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind, **SIZES | dict(bos_token_id=0, eos_token_id=1, pad_token_id=1) | changes
    )
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in made.parameters():  # norms of ones and biases of zeros would hide mistakes
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1) * 0.5, std=0.1)
    return made


def save_model(name: str, folder: str, **kwargs) -> None:
    model(name).save_pretrained(folder, **kwargs)
    tokenizer().save_pretrained(folder)


def save_expanded(source: str, target: str) -> None:
    """The model with a new block after each of its two."""
    from scripts import block_expansion

    block_expansion.main(model_name=source, output_dir=target, expansion_rate=1.0)


def samples(count: int, seed: int = 0, longest: int = 24, vocabulary: int = 300) -> list:
    """Random token sequences of unequal length with unequal numbers of supervised tokens."""
    import random
    from scripts.data import Sample

    rng, made = random.Random(seed), []
    for _ in range(count):
        length = rng.randint(6, longest)
        ids = [rng.randrange(2, vocabulary) for _ in range(length)]
        start = rng.randint(1, length - 1)
        made.append(Sample(ids, [-100] * start + ids[start:]))
    return made


def write_alpaca(path: Path, count: int = 12) -> Path:
    import json

    rows = [
        dict(instruction=f"What is {n} plus one?", input="", output=f"It is {n + 1}.") for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
