"""Try a fine-tuned model: stream one answer, or count exact matches on a file.

    python scripts/generate.py --adapter OUT --prompt "How many cars are red?" --input "table cars (color)"
    python scripts/generate.py --adapter OUT --eval held_out.jsonl --show 5

OUT is what train.py wrote: a PEFT adapter folder, or a whole model as a Hugging Face folder.
"""
from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from any folder
from scripts import vocabulary
from scripts.data import DataError, chat_ids, load, pad_id, prompt_ids, render
from scripts.checkpoint import read_json
from scripts.flags import Refused, UserError, quiet, run_script, to_bool

EVAL_BATCH = 16


# ---------------------------------------------------------------------------------------------------- loading

class Source(NamedTuple):
    """What to load: `adapter` on top of `model`, or (adapter None) `model` alone; the tokenizer's folder."""
    model: str
    adapter: str | None
    tokenizer: str
    rope: dict = {}  # of config.json, where the run changed RoPE
    trust: bool = False  # run the model's own code


def recorded(folder: Path) -> dict:
    """run.json of a training run; {} where there is none."""
    file = folder / "run.json"
    return read_json(file) if file.is_file() else {}


def locate(folder: str, base: str = "", trust: bool = False) -> Source:
    """Tell an adapter folder from a model folder; DataError names what is missing and what to pass."""
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise DataError(f"there is no folder {folder}; --adapter takes the output folder of a training run")
    if not (path / "adapter_config.json").is_file():
        if not (path / "config.json").is_file():
            raise DataError(f"{folder} has neither adapter_config.json nor config.json; "
                            "pass the folder in which a run saved its final result")
        return Source(str(path), None, str(path), trust=trust)
    base = base or _recorded_base(path)
    if not (path / "adapter_model.safetensors").is_file():
        raise DataError(f"{folder}: adapter_model.safetensors is missing beside adapter_config.json; pass "
                        "the folder in which a run saved its final result")
    own_tokenizer = (path / "tokenizer_config.json").is_file()
    rope = recorded(path).get("model", {}).get("rope") or {}
    return Source(base, str(path), str(path) if own_tokenizer else base, rope, trust)


def _recorded_base(adapter: Path) -> str:
    """The model that the adapter was trained on."""
    file = adapter / "adapter_config.json"
    base = read_json(file).get("base_model_name_or_path")
    if not base:
        raise DataError(f"{file} does not name its base model; pass --base FOLDER")
    return _present(base, str(file))


def _present(model: str, named_by: str) -> str:
    """`model` if it is an existing folder or a name on the hub: at most one slash, no path's beginning."""
    is_path = model.startswith(("/", ".", "~")) or model.count("/") > 1 or "\\" in model
    if is_path and not Path(model).expanduser().is_dir():
        raise DataError(f"the base model folder {model} (from {named_by}) does not exist; pass --base FOLDER")
    return str(Path(model).expanduser()) if is_path else model


def read_model(source: Source):
    """(model, tokenizer) in eval mode, on the accelerator if there is one; DataError if not to be had."""
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.tokenizer, trust_remote_code=source.trust)
        model = AutoModelForCausalLM.from_pretrained(source.model, dtype="auto", **source.rope,
                                                     trust_remote_code=source.trust)
    except (OSError, ValueError, SafetensorError) as error:
        reason, own = str(error).splitlines()[0], "trust_remote_code" in str(error)
        help = "to run that code pass --trust_remote_code true" if own else "pass --base FOLDER"
        raise DataError(f"cannot load {source.model}: {reason}; {help}") from None
    if source.adapter:
        from peft import PeftModel
        rows = vocabulary.size(tokenizer)
        if rows > model.get_input_embeddings().weight.shape[0]:  # tokens were added; the adapter has rows
            model.resize_token_embeddings(rows, mean_resizing=False)
        try:
            model = PeftModel.from_pretrained(model, source.adapter)
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise DataError(f"cannot load the adapter {source.adapter} over {source.model}: "
                            f"{str(error).splitlines()[0]}; pass the --base it was trained on") from None
    return model.to(device).eval(), tokenizer


# ------------------------------------------------------------------------------------------------- generating

def dora_caching(model):
    """PEFT's own cache of what DoRA otherwise computes anew, densely, for every token."""
    if not hasattr(model, "peft_config"):
        return nullcontext()
    from peft.helpers import DoraCaching
    return DoraCaching()


def greedy(model, tokenizer, prompts: list[list[int]], max_new_tokens: int, streamer=None) -> list[str]:
    """The answers to a batch of prompts (token ids), without special tokens and outer white space."""
    import torch
    from transformers import GenerationConfig
    longest, pad = max(map(len, prompts)), pad_id(tokenizer)
    # Padded on the left, so that every answer starts in the same column.
    ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    # A config of its own: the model's may sample, or penalise the repetitions that copying a name needs.
    config = GenerationConfig(do_sample=False, max_new_tokens=max_new_tokens, pad_token_id=pad,
                              eos_token_id=tokenizer.eos_token_id)
    with torch.inference_mode(), dora_caching(model):
        out = model.generate(input_ids=ids, attention_mask=mask, generation_config=config, streamer=streamer)
    return [text.strip() for text in tokenizer.batch_decode(out[:, longest:], skip_special_tokens=True)]


def trained_on_chats(folder: str) -> bool:
    """Whether run.json says that every format went through the tokenizer's chat template."""
    return recorded(Path(folder).expanduser()).get("config", {}).get("chat_template", False)


def question_ids(tokenizer, prompt: str, input: str, chat: bool) -> list[int]:
    """The tokens to answer: the instruction and its input as training renders them."""
    if chat:
        return chat_ids([{"role": "user", "content": f"{prompt}\n\n{input}" if input else prompt}], tokenizer)
    return prompt_ids(render({"instruction": prompt, "input": input, "output": ""})[0], tokenizer)


def stream(source: Source, prompt: str, input: str, chat: bool, max_new_tokens: int) -> None:
    """Print the answer to one prompt, in the template of training, while it is generated."""
    from transformers import TextStreamer
    model, tokenizer = read_model(source)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    greedy(model, tokenizer, [question_ids(tokenizer, prompt, input, chat)], max_new_tokens, streamer)


# ------------------------------------------------------------------------------------------------- evaluating

def evaluate(source: Source, base: str, rows: list[dict], chat: bool, max_new_tokens: int, show: int) -> None:
    """Print exact matches before (the base, if there is one) and after, then the first `show` failures."""
    model, tokenizer = read_model(source)
    answers = {}
    if source.adapter:
        with model.disable_adapter():
            answers["base"] = answer_all(model, tokenizer, rows, chat, max_new_tokens)
    elif base:
        other, its = read_model(Source(base, None, base, trust=source.trust))
        answers["base"] = answer_all(other, its, rows, chat, max_new_tokens)
    name = "adapter" if source.adapter else "model"
    answers[name] = answer_all(model, tokenizer, rows, chat, max_new_tokens)
    print("exact match: " + ", ".join(f"{who} {score(texts, rows)}" for who, texts in answers.items()))
    wrong = [(row, text) for row, text in zip(rows, answers[name]) if text != row["output"].strip()]
    for row, text in wrong[:show]:
        print(f"\n{row['instruction']} {row.get('input') or ''}")
        print(f"  expected: {row['output']}\n  got:      {text}")


def answer_all(model, tokenizer, rows: list[dict], chat: bool, max_new_tokens: int) -> list[str]:
    """One answer per row, in the order of the rows."""
    from tqdm import tqdm
    prompts = [question_ids(tokenizer, row["instruction"], row.get("input", ""), chat) for row in rows]
    # Whatever is longer than every expected answer is wrong already.
    expected = [len(tokenizer(row["output"], verbose=False)["input_ids"]) for row in rows]
    limit = min(max_new_tokens, max(expected) + 8)
    order = sorted(range(len(rows)), key=lambda i: len(prompts[i]))  # alike lengths together: less padding
    answers = [""] * len(rows)
    for start in tqdm(range(0, len(rows), EVAL_BATCH), desc="answering", disable=None, leave=False):
        chosen = order[start:start + EVAL_BATCH]
        for i, text in zip(chosen, greedy(model, tokenizer, [prompts[i] for i in chosen], limit)):
            answers[i] = text
    return answers


def score(answers: list[str], rows: list[dict]) -> str:
    """Such as "55/60 (91.7%)"."""
    right = sum(text == row["output"].strip() for text, row in zip(answers, rows))
    return f"{right}/{len(rows)} ({100 * right / len(rows):.1f}%)"


# ----------------------------------------------------------------------------------------------- command line

def main(
    adapter: str = "output",  # output folder of a training run: a PEFT adapter or a whole model
    prompt: str = "",  # instruction to answer
    input: str = "",  # what the instruction is about, such as a table
    eval: str = "",  # .jsonl or .json file in alpaca form on which to count exact matches
    show: int = 0,  # with --eval: how many wrong answers to print
    max_new_tokens: int = 128,  # longest answer
    base: str = "",  # base model; default: the one that the adapter names
    chat: bool = False,  # put --prompt through the chat template; otherwise as the run did
    trust_remote_code: to_bool = False,  # run code that comes with the model, where it needs its own
):
    "Answer one prompt, or count exact matches on a file, with a fine-tuned model."
    try:
        if bool(prompt) == bool(eval):
            raise DataError("pass either --prompt TEXT or --eval FILE")
        if max_new_tokens < 1:
            raise DataError(f"--max_new_tokens {max_new_tokens}: must be at least 1")
        rows, chat = load(eval) if eval else [], chat or trained_on_chats(adapter)
        base = base and _present(base, "--base")
        source = locate(adapter, base, trust_remote_code)
        if sys.stderr.isatty():
            print(f"loading {source.model}" + (f" and {adapter}" if source.adapter else ""), file=sys.stderr)
        with quiet():
            if eval:
                evaluate(source, base, rows, chat, max_new_tokens, show)
            else:
                stream(source, prompt, input, chat, max_new_tokens)
    except UserError as error:
        raise Refused("generate.py", error) from None


if __name__ == "__main__":
    run_script(main)
