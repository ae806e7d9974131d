"""Model folders whose weights are quantised already: read row by row as plain weights, or, bitsandbytes'
4-bit ones, taken as they are by the NF4 train types.

config.json's quantization_config says what a folder holds. Add a format: a subclass of Checkpoint with the
members of Fp8, one row of READERS.
"""
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from scripts.checkpoint import Checkpoint, PartRows, read_json
from scripts.flags import UserError
from scripts.quantize import NF4, as_bytes, dynamic_map, load_bitsandbytes

PIECE = 1024  # rows dequantised at a time


class Dequantized(Checkpoint):
    """Weights that are dequantised on reading, to the dtype that config.json names."""
    title = ""

    def __init__(self, folder: Path, settings: dict, dtype: str):
        super().__init__(folder)
        self.settings, self.read_as, self.packed = settings, dtype, set()
        try:
            for name in list(self.file):
                if weight := name in self.file and self.find(name):
                    self.packed.add(weight)
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.unreadable.append(f"{name}: no readable {self.title} weight ({error!r})")

    @property
    def note(self) -> str:
        return f"{len(self.packed)} {self.title} weights are dequantised on reading"

    def find(self, name: str) -> str | None:
        """The quantised weight that a stored tensor begins; what belongs to it is then hidden, and its shape
        and dtype are set."""
        raise NotImplementedError

    def dequantize(self, name: str, low: int, high: int):
        raise NotImplementedError

    def read(self, name: str, low: int, high: int):
        return self.dequantize(name, low, high) if name in self.packed else self.stored(name, low, high)

    def read_matrix(self, name: str, index: int, low: int, high: int):
        if name in self.packed:
            return self.dequantize(name, index, index + 1)[0, low:high]
        return super().read_matrix(name, index, low, high)


# -------------------------------------------------------------------------------- bitsandbytes, 4 and 8 bits

class Bnb4(Dequantized):
    """NF4 and FP4: packed bytes in a flat tensor, absmax of each block in fp32, or in 8-bit codes with
    statistics of their own (double quantisation); quant_state is JSON in bytes."""
    title = "bitsandbytes 4-bit"
    mark = ".quant_state.bitsandbytes__"

    def __init__(self, folder: Path, settings: dict, dtype: str):
        self.states: dict[str, dict] = {}
        self.recipes: Counter = Counter()
        self.asked = False  # for the weights as they are
        super().__init__(folder, settings, dtype)

    @property
    def note(self) -> str:
        taken = f"{len(self.packed)} {self.title} weights are taken as they are"
        return taken if self.asked else super().note

    def find(self, name: str) -> str | None:
        if self.mark not in name:
            return None
        weight, _, kind = name.partition(self.mark)
        state = json.loads(bytes(self.stored(name).tolist()))
        state["scale"] = {"U8": 1, "uint8": 1, "float16": 2, "bfloat16": 2, "float32": 4}[self.dtype[weight]]
        if math.prod(self.shape[weight]) * state["scale"] * 2 != math.prod(state["shape"]):
            raise ValueError(f"{self.shape[weight]} does not hold {state['shape']}")
        parts = ["absmax", "quant_map", *["nested_absmax", "nested_quant_map"] * ("nested_offset" in state)]
        if missing := [part for part in parts if not self.hide(f"{weight}.{part}")]:
            raise ValueError(f"{', '.join(missing)} missing")
        self.hide(name)
        self.states[weight], self.dtype[weight] = state, state["dtype"]
        self.shape[weight] = tuple(state["shape"])
        self.recipes[kind, state["blocksize"], state.get("nested_blocksize")] += 1
        return weight

    def absmax(self, name: str):
        """(blocks,) fp32 of a whole weight: a 32nd of its bytes, and codes are scaled across rows."""
        state, found = self.states[name], self.stored(f"{name}.absmax")
        if "nested_offset" not in state:
            return found.float()
        ops = torch.ops.bitsandbytes
        table, scales = (self.stored(f"{name}.nested_{part}") for part in ("quant_map", "absmax"))
        wide = ops.dequantize_blockwise(found, scales, table, state["nested_blocksize"], torch.float32)
        return wide + state["nested_offset"]

    def bytes_of(self, name: str, low: int, high: int):
        """Packed bytes of rows [low, high), two weights a byte."""
        of, scale = math.prod(self.shape[name][1:]), 2 * self.states[name]["scale"]
        return self.stored(name, low * of // scale, high * of // scale).view(torch.uint8).view(-1)

    def dequantize(self, name: str, low: int, high: int):
        load_bitsandbytes()
        state, shape = self.states[name], self.shape[name]
        block, columns = state["blocksize"], math.prod(shape[1:])
        first, last = (0, shape[0]) if columns % block else (low, high)  # blocks that go across rows
        absmax = self.absmax(name)[first * columns // block:-(-last * columns // block)]
        found = torch.ops.bitsandbytes.dequantize_4bit(
            self.bytes_of(name, first, last), absmax, block, state["quant_type"],
            (last - first, *shape[1:]), getattr(torch, state["dtype"]))
        return found[low - first:high - first]

    def quantizer(self, kind: type[Any], config):
        """For NF4: the folder's own quantiser. Raises UserError where its weights are of several kinds, or of
        a form that no library writes."""
        if not issubclass(kind, NF4):
            return kind(config)
        (name, block, nested), *others = self.recipes or {("nf4", NF4.block, NF4.block2): 1}
        if others or nested not in (None, NF4.block2) or not self.usual_tables():
            raise UserError(f"{self.folder}: its 4-bit weights are not of one kind that bitsandbytes writes: "
                            f"{dict(self.recipes)}; --train_type lora dequantises them")
        self.asked = True
        return kind(config, name=name, block=block, double=nested is not None)

    def holds(self, recipe: dict) -> bool:
        own = [NF4(None, name, block, nested is not None).recipe for name, block, nested in self.recipes]
        return recipe in own

    def usual_tables(self) -> bool:
        """Whether the statistics' codes mean what bitsandbytes' own mean: its kernels have them built in."""
        table = dynamic_map(torch.device("cpu"))
        nested = [name for name, state in self.states.items() if "nested_offset" in state]
        return all(self.stored(f"{name}.nested_quant_map").equal(table) for name in nested)

    def kept_plain(self, model) -> set:
        if not self.asked:
            return set()
        return {module for name, module in model.named_modules()
                if f"{name}.weight" in self.shape and f"{name}.weight" not in self.packed}

    def part_rows(self, name: str, quantizer, limits) -> PartRows | None:
        if name not in self.packed or not self.asked or not isinstance(quantizer, NF4):
            return None
        state, columns = self.states[name], self.shape[name][1]
        (low, high), groups = limits(self.shape[name][0]), columns // state["blocksize"]
        absmax = self.stored(f"{name}.absmax", low * groups, high * groups)
        parts = PartRows(weight=self.bytes_of(name, low, high).view(-1, columns // 2),
                         absmax=absmax.view(torch.uint8).view(high - low, groups * absmax.element_size()))
        if "nested_offset" in state:
            absmax2, offset = self.stored(f"{name}.nested_absmax"), torch.tensor([state["nested_offset"]])
            for part, whole in (("absmax2", as_bytes(absmax2)), ("offset", as_bytes(offset))):
                first, last = limits(len(whole))
                parts[part] = whole[first:last]
        return parts


class Bnb8(Dequantized):
    """LLM.int8 (arXiv:2208.07339): int8 rows, each with its largest absolute value."""
    title = "bitsandbytes 8-bit"

    def find(self, name: str) -> str | None:
        stem = name.removesuffix("weight")
        if not name.endswith(".weight") or not self.hide(f"{stem}SCB"):
            return None
        self.hide(f"{stem}weight_format")
        self.dtype[name] = self.read_as
        return name

    def dequantize(self, name: str, low: int, high: int):
        scale = self.stored(f"{name.removesuffix('weight')}SCB", low, high).view(-1, 1)
        wide = self.stored(name, low, high) * scale * (1 / 127)
        return wide.to(getattr(torch, self.read_as))


# --------------------------------------------------------------------------------------------- FP8 and MXFP4

class Fp8(Dequantized):
    """FP8 weights times scales: one for all, one a row, or one a block (DeepSeek-V3, arXiv:2412.19437: 128 x
    128; the last blocks may be smaller)."""
    title = "FP8"
    beside = ("input_scale", "activation_scale", "input_scale_ub")  # of activations: not needed

    def find(self, name: str) -> str | None:
        if not self.dtype[name].startswith("F8_E"):
            return None
        scale = next((scale for scale in (f"{name}_scale_inv", f"{name}_scale") if self.hide(scale)), None)
        if scale is None:
            raise ValueError("its scale is missing")
        for part in self.beside:
            self.hide(f"{name.removesuffix('weight')}{part}")
        self.dtype[name] = self.read_as
        self.blocks(name)
        return name

    def scales(self, name: str):
        """(rows of blocks, columns of blocks) fp32."""
        found = self.stored(next(s for s in (f"{name}_scale_inv", f"{name}_scale") if s in self.hidden))
        if found.dtype == torch.uint8:  # E8M0: an exponent
            return (found.float() - 127).exp2()
        found = found.float()
        return found.view(-1, 1) if found.ndim < 2 else found

    def blocks(self, name: str) -> list[int]:
        """Rows and columns of a block. Raises ValueError where the scales do not fit the weight."""
        shape, grid, sizes = self.shape[name], self.scales(name).shape, []
        for size, count, block in zip(shape, grid, self.settings.get("weight_block_size") or (0, 0)):
            sizes.append(block if block and -(-size // block) == count else max(1, size // count))
            if -(-size // sizes[-1]) != count:
                raise ValueError(f"{tuple(grid)} scales for a weight of {shape}")
        return sizes

    def dequantize(self, name: str, low: int, high: int):
        (rows, columns), scales = self.blocks(name), self.scales(name)
        out = torch.empty(high - low, self.shape[name][1], dtype=getattr(torch, self.read_as))
        for first in range(low, high, PIECE):
            last = min(high, first + PIECE)
            each = scales[torch.arange(first, last) // rows].repeat_interleave(columns, 1)[:, :out.shape[1]]
            out[first - low:last - low] = self.stored(name, first, last).float().mul_(each)
        return out


class Mxfp4(Dequantized):
    """gpt-oss' experts: FP4 values (E2M1), two a byte, and one exponent for 32 of them; (experts, rows,
    groups, 16 bytes) as stored, (experts, columns, rows) in the model."""
    title = "MXFP4"

    def find(self, name: str) -> str | None:
        stem = name.removesuffix("_blocks")
        if stem == name or f"{stem}_scales" not in self.file:
            return None
        experts, rows, groups, width = self.shape[name]
        self.file[stem], self.shape[stem] = self.file[name], (experts, groups * width * 2, rows)
        self.dtype[stem] = self.read_as
        self.hide(name)
        self.hide(f"{stem}_scales")
        return stem

    def dequantize(self, name: str, low: int, high: int):
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors
        made = []
        for expert in range(low, high):
            parts = (self.stored(f"{name}_{part}", expert, expert + 1) for part in ("blocks", "scales"))
            made.append(convert_moe_packed_tensors(*parts, dtype=getattr(torch, self.read_as)))
        return torch.cat(made)


# --------------------------------------------------------------------------------------------- which is which

def of_bitsandbytes(folder: Path, settings: dict, dtype: str) -> Checkpoint:
    return (Bnb8 if settings.get("load_in_8bit") else Bnb4)(folder, settings, dtype)


READERS = {"bitsandbytes": of_bitsandbytes, "fp8": Fp8, "fbgemm_fp8": Fp8, "compressed-tensors": Fp8,
           "mxfp4": Mxfp4}
COMPRESSED = ("float-quantized", "naive-quantized")  # those formats of compressed-tensors that are FP8


def method(settings: dict) -> str:
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        return "bitsandbytes"
    return str(settings.get("quant_method", "unknown method"))


def problem(config: dict) -> str | None:
    """Why a model with this config.json cannot be read, and what to do."""
    if not (settings := config.get("quantization_config")):
        return None
    found = method(settings)
    if found == "compressed-tensors" and settings.get("format") not in COMPRESSED:
        found += f" {settings.get('format')}"
    if found in READERS:
        return None
    return (f"its weights are quantised already ({found}), which is not read here; use the model they were "
            "made from (a 4-bit train type quantises it while loading), or a bitsandbytes or FP8 version")


def open_weights(folder: Path) -> Checkpoint:
    """The tensors of a model folder, as plain weights. Raises UserError for a quantisation that is not read.
    """
    config = read_json(folder / "config.json")
    if refused := problem(config):
        raise UserError(f"{folder}: {refused}")
    if not (settings := config.get("quantization_config")):
        return Checkpoint(folder)
    inner = config.get("text_config") or {}
    dtype = next((part[key] for part in (config, inner) for key in ("dtype", "torch_dtype") if part.get(key)),
                 "bfloat16")
    return READERS[method(settings)](folder, settings, dtype)
