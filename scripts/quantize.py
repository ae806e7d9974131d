"""Quantisers for frozen linears. Each gives a weight of (rows, columns) as uint8 parts, and the weight back
from them.

A part's first dimension is what FSDP shards, and every part is uint8, so that no mixed precision policy can
round it: floating-point statistics are kept as their bytes. Add a quantiser: one class with the members of
NF4, one row of QUANTIZERS.
"""
import functools
import logging
import math
from typing import Callable

import torch


PIECE_BYTES = 2**25  # of a weight dequantised at a time
CHUNK = 2**17  # weights quantised at a time on a CPU, so that what is made on the way stays in its cache


def as_bytes(column: torch.Tensor) -> torch.Tensor:
    """(n, ...) of any dtype -> the same memory as (n, bytes) uint8."""
    return column.contiguous().view(len(column), -1).view(torch.uint8)


def product_dtype(x: torch.Tensor) -> torch.dtype:
    """What autocast makes x, an operand of a matrix product."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


@functools.cache
def load_bitsandbytes():
    """The package, whose import registers torch.ops.bitsandbytes; optional kernels that it does not find are
    no news."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import bitsandbytes
    return bitsandbytes


@functools.cache
def dynamic_map(device: torch.device) -> torch.Tensor:
    return load_bitsandbytes().functional.create_dynamic_map().to(device)


@functools.cache
def linear_map(device: torch.device) -> torch.Tensor:
    return load_bitsandbytes().functional.create_linear_map(signed=True, total_bits=8).to(device)


@functools.cache
def nf4_bins() -> tuple[torch.Tensor, torch.Tensor]:
    """For each x in [-1, 1], int(32 x + 32) picks a bin: the bin's lowest code (uint8), and the limit above
    which x has the next one (fp32). Limits are midpoints of codes, and no bin holds two; rounding is
    monotone, so neither it nor a bin's edges can give a wrong code."""
    code = load_bitsandbytes().functional.get_4bit_type("nf4", device="cpu")
    limits = (code[:-1] + code[1:]) / 2
    held, bins = (limits * 32 + 32).int(), torch.arange(65)[:, None]
    above = torch.full((65,), math.inf)
    above[held.long()] = limits
    return (held < bins).sum(1).to(torch.uint8), above


def quantize_nf4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What torch.ops.bitsandbytes.quantize_4bit gives for blocks of 64 on a CPU, bit for bit and some 8 times
    as fast: (n, 64 k) of any float dtype -> packed (32 n k, 1) uint8, absmax (n k,) fp32."""
    flat, (codes, above) = weight.view(-1, 64), nf4_bins()
    packed = flat.new_empty(len(flat), 32, dtype=torch.uint8)
    absmax = flat.new_empty(len(flat), dtype=torch.float32)
    for low in range(0, len(flat), CHUNK // 64):
        x = flat[low:low + CHUNK // 64].to(torch.float32, copy=True)
        top = absmax[low:low + CHUNK // 64]
        torch.amax(x.abs(), 1, out=top)
        x = x.mul_((1.0 / top.clamp(min=1e-38))[:, None]).clamp_(-1, 1).nan_to_num_(1.0).flatten()
        index = (x * 32).add_(32).int()
        code = codes.index_select(0, index).add_(x > above.index_select(0, index)).view(-1, 64)
        packed[low:low + CHUNK // 64] = code[:, ::2] << 4 | code[:, 1::2]
    return packed.view(-1, 1), absmax


class Blockwise:
    """What quantisers of blocks along rows share: rows can be quantised by themselves."""
    by_rows = True
    block = 64
    per_byte: int  # weights in a byte; this and the next two are each quantiser's own
    quantize_rows: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    unpacked: Callable[..., torch.Tensor]

    def problem(self, rows: int, columns: int) -> str | None:
        """Why a weight of this shape cannot be quantised: a block would straddle rows."""
        return f"in_features must be a multiple of {self.block}" if columns % self.block else None

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """All parts of a whole weight."""
        packed, absmax = self.quantize_rows(weight)
        return dict(weight=packed, **self.quantize_statistics(absmax))

    def quantize_statistics(self, absmax: torch.Tensor) -> dict[str, torch.Tensor]:
        """(rows, columns/64) fp32 of the whole weight -> what is kept of it."""
        return dict(absmax=as_bytes(absmax))

    def statistics(self, parts) -> torch.Tensor:
        """(blocks,) fp32: the absmax of each."""
        return parts.absmax.view(torch.float32).flatten()

    def dequantize(self, parts, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """`parts`: anything with the parts, whole, as attributes."""
        return self.unpacked(parts.weight, self.statistics(parts), shape, dtype)

    def pieces(self, parts, shape: tuple[int, int], dtype: torch.dtype, dim: int):
        """(low, high, the weight's rows (dim 0) or columns (1) from low to high), one after the other, of
        about PIECE_BYTES at most."""
        absmax, count = self.statistics(parts), -(-shape[0] * shape[1] * dtype.itemsize // PIECE_BYTES)
        step = -(-shape[dim] // (count * self.block)) * self.block
        for low in range(0, shape[dim], step):
            high = min(low + step, shape[dim])
            packed, scale = (t.view(shape[0], -1).narrow(dim, low // k, (high - low) // k).contiguous()
                             for t, k in ((parts.weight, (1, self.per_byte)[dim]),
                                          (absmax, (1, self.block)[dim])))
            size = (high - low, shape[1]) if dim == 0 else (shape[0], high - low)
            yield low, high, self.unpacked(packed, scale.flatten(), size, dtype)


class NF4(Blockwise):
    """4-bit NormalFloat with double quantisation (QLoRA, arXiv:2305.14314), bit for bit as bitsandbytes'
    Linear4bit. Folders that bitsandbytes wrote may have FP4, other blocks, and statistics in fp32 (not
    `double`)."""
    block, block2, per_byte = Blockwise.block, 256, 2  # the second level needs the statistics of all rows

    def __init__(self, config=None, name: str = "nf4", block: int = block, double: bool = True):
        load_bitsandbytes()
        self.name, self.block, self.double = name, block, double
        self.bits = 4 + (8 / block + 32 / (block * self.block2) if double else 32 / block)
        self.recipe = dict(name=name, block=block, double_quantized=double)

    def shapes(self, rows: int, columns: int) -> dict[str, tuple[int, int]]:
        """Whole (unsharded) shapes of the parts."""
        blocks = rows * columns // self.block
        if not self.double:
            return dict(weight=(rows, columns // 2), absmax=(rows, columns // self.block * 4))
        return dict(weight=(rows, columns // 2), absmax=(rows, columns // self.block),
                    absmax2=(-(-blocks // self.block2), 4), offset=(1, 4))

    def quantize_rows(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(r, columns) -> packed (r, columns/2) uint8 and absmax (r, columns/64) fp32, of these rows alone.
        """
        weight, (rows, columns) = weight.contiguous(), weight.shape
        usual = (self.name, self.block, weight.device.type) == ("nf4", 64, "cpu")
        packed, absmax = quantize_nf4(weight) if usual else \
            torch.ops.bitsandbytes.quantize_4bit(weight, self.block, self.name, torch.uint8)
        return packed.view(rows, columns // 2), absmax.view(rows, columns // self.block)

    def quantize_statistics(self, absmax: torch.Tensor) -> dict[str, torch.Tensor]:
        """The second level, over the absmax of the whole weight: its mean, and 8-bit blocks of 256 across
        rows."""
        if not self.double:
            return super().quantize_statistics(absmax)
        flat, ops, table = absmax.flatten(), torch.ops.bitsandbytes, dynamic_map(absmax.device)
        offset = flat.mean()
        codes, absmax2 = ops.quantize_blockwise(flat - offset, table, self.block2)
        return dict(absmax=codes.view_as(absmax), absmax2=as_bytes(absmax2), offset=as_bytes(offset.view(1)))

    def statistics(self, parts) -> torch.Tensor:
        """(blocks,) fp32: the absmax of each, from its second level."""
        if not self.double:
            return super().statistics(parts)
        codes, table = parts.absmax.flatten(), dynamic_map(parts.absmax.device)
        absmax2, offset = (part.view(torch.float32).flatten() for part in (parts.absmax2, parts.offset))
        return torch.ops.bitsandbytes.dequantize_blockwise(
            codes, absmax2, table, self.block2, torch.float32).add_(offset)

    def unpacked(self, packed, absmax, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        return torch.ops.bitsandbytes.dequantize_4bit(packed, absmax, self.block, self.name, shape, dtype)


class Int8(Blockwise):
    """8 bits at equal distances, up to the largest value of each block of 64 along a row: bitsandbytes'
    blockwise kernels with its linear map. For embedding and head."""
    per_byte, bits = 1, 8 + 32 / Blockwise.block
    recipe = dict(name="int8", block=Blockwise.block)

    def __init__(self, config=None):
        load_bitsandbytes()

    def shapes(self, rows: int, columns: int) -> dict[str, tuple[int, int]]:
        return dict(weight=(rows, columns), absmax=(rows, columns // self.block * 4))

    def quantize_rows(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        table = linear_map(weight.device)
        codes, absmax = torch.ops.bitsandbytes.quantize_blockwise(weight.contiguous(), table, self.block)
        return codes.view(weight.shape), absmax.view(len(weight), weight.shape[1] // self.block)

    def unpacked(self, packed, absmax, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        return torch.ops.bitsandbytes.dequantize_blockwise(packed.view(shape), absmax,
                                                           linear_map(packed.device), self.block, dtype)


def hqq_start(w: torch.Tensor, top: int, n_bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(groups, group) fp32 -> (groups, 1) scale, by which weights are multiplied, and zero: where hqq's
    Quantizer.quantize starts its solver."""
    low, high = w.amin(1, keepdim=True), w.amax(1, keepdim=True)
    scale = torch.where(high - low <= 1e-4, 1.0, top / (high - low)).clamp(max=2e4)
    zero = -low * scale
    return scale, zero.round() if n_bits == 4 else zero  # as hqq's own default configuration does


def quantize_hqq(flat: torch.Tensor, n_bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What hqq's Quantizer.quantize gives on a CPU, bit for bit, a chunk of groups after the other: (groups,
    group) of any float dtype -> codes uint8, scale and zero (groups, 1) fp32. The solver stops when the mean
    error of the whole weight grows; that sum depends on its order, so all errors are kept for it."""
    from hqq.core.optimize import optimize_weights_proximal_legacy_step as step
    top, size = 2**n_bits - 1, max(1, CHUNK // flat.shape[1])
    chunks, best = [slice(low, low + size) for low in range(0, len(flat), size)], math.inf
    scale, zero = flat.new_empty(2, len(flat), 1, dtype=torch.float32)
    for part in chunks:
        scale[part], zero[part] = hqq_start(flat[part].float(), top, n_bits)
    errors = torch.empty_like(flat, dtype=torch.float32)
    for _ in range(20):
        for part in chunks:
            w = flat[part].float()
            found, _, zero[part], _ = step(w, scale[part], zero[part], [0, top], 1e1, 0.7, 1)
            torch.sub(w, found, out=errors[part]).abs_()
        error = errors.mean().item()
        if not error < best:
            break
        best = error
    del errors
    codes = torch.empty_like(flat, dtype=torch.uint8)
    for part in chunks:
        codes[part] = (flat[part].float() * scale[part] + zero[part]).round_().clamp_(0, top)
    return codes, 1.0 / scale, zero


class HQQ:
    """Half-quadratic quantisation (mobiusml.github.io/hqq_blog) in 8, 4, 3 or 2 bits, by hqq's own Quantizer,
    groups along rows (axis 1). Its solver stops on the error of the whole weight and its packing pairs
    distant groups, so a weight is quantised whole, by one rank, and sharded afterwards."""
    by_rows = False
    packed_per_group = {8: 1, 4: 2, 3: 10, 2: 4}  # groups that share a word: a byte, or for 3 bits an int32

    def __init__(self, config):
        self.n_bits, self.group = config.n_bits or 4, config.hqq_group_size
        self.dtype = config.numbers.compute  # of scale and zero, and of the arithmetic of dequantisation
        self.bits = self.n_bits + 16 * self.dtype.itemsize / self.group
        self.recipe = dict(name="hqq", n_bits=self.n_bits, group_size=self.group, axis=1,
                           dtype=str(self.dtype).removeprefix("torch."))

    def shapes(self, rows: int, columns: int) -> dict[str, tuple[int, int]]:
        groups, size = rows * columns // self.group, self.dtype.itemsize
        packed, width = -(-groups // self.packed_per_group[self.n_bits]), 4 if self.n_bits == 3 else 1
        return dict(weight=(packed, self.group * width), scale=(groups, size), zero=(groups, size))

    def problem(self, rows: int, columns: int) -> str | None:
        if columns % self.group:
            return (f"in_features must be a multiple of --hqq_group_size {self.group}; "
                    f"{math.gcd(columns, 1 << 20)} would do")
        together = self.packed_per_group[self.n_bits]
        if self.n_bits != 3 and rows * columns // self.group % together:
            return f"the number of groups must be a multiple of {together} for {self.n_bits} bits"

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        from hqq.core.quantize import Quantizer
        if weight.device.type == "cpu":
            codes, scale, zero = quantize_hqq(weight.reshape(-1, self.group), self.n_bits)
            packed = Quantizer.pack[Quantizer.bit_to_packing[self.n_bits]](codes)
        else:
            packed, meta = Quantizer.quantize(
                weight, nbits=self.n_bits, group_size=self.group, axis=1, device=str(weight.device),
                round_zero=self.n_bits == 4)
            scale, zero = meta["scale"], meta["zero"]
        scale, zero = (as_bytes(part.to(self.dtype)) for part in (scale, zero))
        return dict(weight=as_bytes(packed), scale=scale, zero=zero)

    def dequantize(self, parts, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """(codes - zero) * scale, group by group, as hqq's own."""
        packed = parts.weight.view(torch.int32) if self.n_bits == 3 else parts.weight
        scale, zero = (part.view(self.dtype) for part in (parts.scale, parts.zero))
        if aten := compiled_kernel(packed.device, self.n_bits, self.group, self.dtype):
            return aten(packed, scale, zero, shape).to(dtype)
        return self.unpacked(packed, scale, zero, shape).to(dtype)

    def pieces(self, parts, shape: tuple[int, int], dtype: torch.dtype, dim: int):
        """As NF4's, in one piece: groups are packed with distant ones."""
        yield 0, shape[dim], self.dequantize(parts, shape, dtype)

    def unpacked(self, packed, scale, zero, shape: tuple[int, int]) -> torch.Tensor:
        from hqq.core.quantize import Quantizer
        codes = Quantizer.unpack[Quantizer.bit_to_packing[self.n_bits]](packed, dtype=self.dtype)
        codes = codes[:math.prod(shape) // self.group]  # 3 bits are padded to ten groups a word
        return codes.sub_(zero).mul_(scale).view(shape)


@functools.cache
def compiled_kernel(device: torch.device, n_bits: int, group: int, dtype: torch.dtype):
    """hqq's compiled dequantisation, where it is installed and gives what plain torch gives on a trial
    weight."""
    from hqq.core import quantize
    if not getattr(quantize, "hqq_aten_is_available", False):
        return None
    packing = quantize.Quantizer.bit_to_packing[n_bits]

    def kernel(packed, scale, zero, shape):
        return quantize.hqq_aten_dequantize(packed, scale, zero, *shape, group, n_bits, 1, packing)
    plain = HQQ.__new__(HQQ)
    plain.n_bits, plain.group, plain.dtype = n_bits, group, dtype
    shape = (40, 4 * group)
    trial = plain.quantize(torch.linspace(-1, 1, math.prod(shape), device=device).sin().view(shape))
    packed = trial["weight"].view(torch.int32) if n_bits == 3 else trial["weight"]
    scale, zero = trial["scale"].view(dtype), trial["zero"].view(dtype)
    try:
        found = kernel(packed, scale, zero, shape).to(dtype)
        same = torch.allclose(found, plain.unpacked(packed, scale, zero, shape))
    except Exception:  # an extension built for something else fails in ways of its own
        return None
    return kernel if same else None


QUANTIZERS = {"nf4": NF4, "hqq": HQQ}  # of a train type's base
