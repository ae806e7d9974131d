"""The vocabulary: tokens that are added, embeddings with rows for them, ids that have no row, tokens that no
one has trained yet."""
import json
import re
from pathlib import Path
from typing import Callable

from scripts.flags import UserError

CONTROL = re.compile(r"<\|.+\|>")  # how control tokens are written; in files of lines these are special
SAMPLE = 1_000_000  # ids of the data among which untrained tokens are looked for
TOKENIZERS = ("tokenizer*", "vocab.*", "*.model", "*.tiktoken")  # files, one of which a tokenizer has
LOW = 0.2  # a norm below this part of the usual one is that of a row that was hardly ever trained


# ----------------------------------------------------------------------------------------------- added tokens

def parse(text: str) -> list:
    """The tokens of a file: one a line (those written <|...|> are special), or a JSON list of strings and of
    objects such as {"content": "<tool>", "special": true}. Raises ValueError for anything else."""
    from tokenizers import AddedToken
    entries = [line.strip() for line in text.splitlines()]
    try:
        entries = json.loads(text) if text.lstrip()[:1] == "[" else entries
    except ValueError:
        if len(entries) < 2:  # [SEP] is a token
            raise
    tokens = []
    for entry in entries if isinstance(entries, list) else []:
        given = dict(content=entry) if isinstance(entry, str) else dict(entry)
        content = str(given.pop("content"))
        if content.strip():
            usual = dict(special=bool(CONTROL.fullmatch(content)), normalized=False)
            tokens.append(AddedToken(content, **usual | given))
    names = [token.content for token in tokens]
    if double := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{', '.join(double)} more than once")
    if not tokens:
        raise ValueError("no token in it")
    return tokens


def read(file: str) -> list:
    """The tokens of --add_tokens. Raises UserError."""
    try:
        path = Path(file).expanduser()
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json" and text.lstrip()[:1] != "[":
            raise ValueError("is no JSON list")
        return parse(text)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = getattr(error, "strerror", None) or str(error) or repr(error)
        raise UserError(f"--add_tokens {file}: {reason}; give one token a line, or a JSON list") from error


def check(file: str) -> list[str]:
    try:
        if file:
            read(file)
    except UserError as error:
        return [str(error)]
    return []


def tokenizer(folder: Path, add_tokens: str = "", trust_remote_code: bool = False):
    """The tokenizer of a model folder, with the tokens of the file. Raises UserError without one."""
    from transformers import AutoTokenizer

    from scripts import models
    if not trust_remote_code and not any(next(folder.glob(name), None) for name in TOKENIZERS):
        raise UserError(f"{folder}: no tokenizer in it ({', '.join(TOKENIZERS)}); copy the files of the "
                        f"model that it came from into it")
    try:
        with models.validated():
            made = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # a broken tokenizer.json is a plain Exception
        if "trust_remote_code" in str(error):
            raise UserError(models.problem(error, folder, "auto")) from error
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise UserError(f"{folder}: no tokenizer can be loaded: {reason}; copy the tokenizer's files of the "
                        f"model that it came from into it") from error
    if add_tokens:
        made.add_tokens(read(add_tokens))
    return made


def size(tokenizer) -> int:
    """Rows that the tokenizer's ids need."""
    return max(tokenizer.get_vocab().values()) + 1


# ------------------------------------------------------------------------------------------ model and weights

def make_room(config, folder: Path, add_tokens: str = "") -> None:
    """transformers' configuration of the model to train: nothing in it is quantised, and with added tokens
    its vocabulary holds them all (one that was padded may hold them already)."""
    vars(config).pop("quantization_config", None)
    if add_tokens:
        text = config.get_text_config()
        text.vocab_size = max(text.vocab_size, size(tokenizer(folder, add_tokens)))


def grown(stored, module, config):
    """`stored`, with as many rows of embedding and head as `module` has if tokens are added."""
    ends = (module.get_input_embeddings(), module.get_output_embeddings())
    own = {p for end in ends for p in end.parameters()} if config.add_tokens else ()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter in own and name in stored.shape and len(parameter) > stored.shape[name][0]:
            stored.grow(name, len(parameter))
    return stored


# ----------------------------------------------------------------------------------------- ids of the data

def check_ids(samples, tokenizer, folder: Path, add_tokens: str, trust_remote_code=False) -> None:
    """Raises UserError, with the token, if the data (or their padding) have an id that has no row."""
    from scripts import models
    try:
        config = models.read_config(folder, None, trust_remote_code)
        make_room(config, folder, add_tokens)
        rows = config.get_text_config().vocab_size
    except (OSError, ValueError, KeyError, AttributeError):  # building the model will say what is wrong
        return
    tables = samples.tables if samples else []
    highest = max([int(table.ids.max()) for table in tables if len(table.ids)], default=0)
    if highest >= rows:
        token = tokenizer.convert_ids_to_tokens(highest)
        raise UserError(f"the tokenizer gives {token!r} the id {highest}, but the model has {rows} rows "
                        f"(vocab_size): the two do not belong together; or put the tokens that the model "
                        f"lacks into a file, for --add_tokens FILE")


def untrained(rows, usual) -> list[int]:
    """Which of the rows (n, d) look as if never trained: far smaller than the `usual` ones, or the same as
    another."""
    norms, limit = rows.norm(dim=1), LOW * usual.norm(dim=1).median()
    same = (rows[:, None] == rows[None]).all(2).sum(1) > 1
    return [i for i, small in enumerate((norms < limit) | same) if small]


def warn(module, folder: Path, held, adapter: bool, say: Callable) -> None:
    """Names, through say(label, text), the control tokens of the data whose embeddings look untrained and
    stay frozen. Reads a few dozen rows. `adapter`: the train type can train them beside one."""
    import numpy as np
    import torch

    from scripts.prequantized import open_weights
    embedding = module.get_input_embeddings().weight
    if embedding.requires_grad:
        return
    stored = open_weights(folder)
    name = next((name for name, p in module.named_parameters(remove_duplicate=False)
                 if p is embedding and name in stored.shape), None)
    added = held.tokenizer.added_tokens_decoder
    ids = np.unique(np.concatenate([np.unique(table.ids[:SAMPLE]) for table in held.train.tables]))
    used = [int(i) for i in ids if int(i) in added]
    if name is None or not used:
        return
    plain = [int(i) for i in ids if int(i) not in added]

    def rows(chosen: list[int]):
        return torch.cat([stored.rows(name, i, i + 1).float() for i in chosen])
    usual = rows(plain[::max(1, len(plain) // 32)][:32] or used)
    if found := [str(added[used[i]]) for i in untrained(rows(used), usual)]:
        say("warning", f"the data have {', '.join(found)}, whose embeddings look untrained and are frozen"
            + "; --train_embeddings true trains them" * adapter)
