"""GGUF files as ordinary model folders: converted once, by transformers, into a cache.

The weights are dequantised to bf16; tokenizer and chat template come with the file. transformers holds the
whole model in memory for that, once; training then reads the folder by rows like any other.
"""
import hashlib
import io
import os
import re
import tempfile
from contextlib import redirect_stderr
from pathlib import Path

from scripts.flags import UserError, quiet


def cache_root() -> Path:
    """Where converted models are kept: `$XDG_CACHE_HOME/qshard`, by default `~/.cache/qshard`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qshard"


def check(path: Path, flag: str) -> list[str]:
    """Problems of a GGUF file that can be seen without reading it."""
    if not path.is_file():
        return [f"{flag} {path}: no such file"]
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            return [f"{flag} {path}: no GGUF file: it does not begin with GGUF"]
    if re.search(r"-\d{5}-of-\d{5}$", path.stem):
        return [f"{flag} {path}: one of several parts; put them together first (llama-gguf-split --merge)"]
    return []


def folder_of(path: Path, say=print) -> Path:
    """The folder that a GGUF file was converted to; made where there is none. Raises UserError for a file
    that transformers cannot read."""
    stat = path.stat()
    said = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    folder = cache_root() / "gguf" / f"{path.stem}-{hashlib.sha256(said.encode()).hexdigest()[:12]}"
    if folder.is_dir():
        return folder
    say(f"gguf    converting {path.name} to bf16, once (the whole model in memory); kept in {folder}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".converting-") as work:
            convert(path, Path(work) / "ready")
            put_in_place(Path(work) / "ready", folder)
    except UserError:
        raise
    except Exception as error:  # gguf and transformers raise every type for files they cannot read
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise UserError(f"--model_name {path}: cannot be converted: {reason}; use the safetensors version of "
                        f"the model") from error
    return folder


def put_in_place(ready: Path, folder: Path) -> None:
    """Complete or not at all; another process may have been faster, and its folder is as good."""
    try:
        ready.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def convert(path: Path, folder: Path) -> None:
    """Writes a GGUF file as an ordinary Hugging Face folder: bf16 safetensors, configs, tokenizer. Raises
    UserError without the gguf package."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, GenerationConfig

    with quiet(), redirect_stderr(io.StringIO()):  # the bar of GGUF conversion has no switch of its own
        try:
            model = AutoModelForCausalLM.from_pretrained(
                path.parent, gguf_file=path.name, quantization_config=GgufConfig(dequantize=True),
                dtype=torch.bfloat16)
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        except ImportError as error:
            raise UserError("GGUF files need the gguf package: pip install gguf") from error
        vars(model.config).pop("_model_name_or_path", None)  # the name that one training run gave itself
        if hasattr(model.config, "rms_norm_eps"):
            model.config.rms_norm_eps = float(f"{model.config.rms_norm_eps:.3g}")  # GGUF keeps it in fp32
        model.generation_config = GenerationConfig(
            bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id)
        tokenizer.model_max_length = model.config.max_position_embeddings
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors writes 0600, which other users of a shared cache could not read
