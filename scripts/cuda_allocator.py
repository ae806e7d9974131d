"""A model of torch's CUDA caching allocator (c10/cuda/CUDACachingAllocator.cpp, default settings): what it
reserves from the card for a sequence of allocations, and whether it runs out.

Requests are rounded to 512 B and served from pools, one per stream and size class, by best fit; blocks are
split, and merged when freed. A pool without a fitting block asks the card for a segment. Where the card has
no room, all unused segments are given back first: such a retry costs time, and its success depends on details
of the card, so a plan that needs one is risky.
"""
import bisect
from collections import defaultdict

MIB = 2**20
ROUND, SMALL, SMALL_SEGMENT = 512, MIB, 2 * MIB
LARGE_FROM, LARGE_SEGMENT, HUGE_STEP = 10 * MIB, 20 * MIB, 2 * MIB
GAP = 2**40  # between the addresses of segments, so that blocks of two are never neighbours


def rounded(size: int) -> int:
    return -(-size // ROUND) * ROUND


def segment_size(size: int) -> int:
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < LARGE_FROM else -(-size // HUGE_STEP) * HUGE_STEP


class Block:
    """A piece of a segment, with its neighbours."""
    __slots__ = ("address", "size", "pool", "before", "after", "used")

    def __init__(self, address, size, pool, before=None, after=None):
        self.address, self.size, self.pool, self.used = address, size, pool, False
        self.before, self.after = before, after


class CachingAllocator:
    """`limit`: bytes the card has for it. `reserved`, `peak`: bytes taken from the card, now and at most;
    `retries`: how often the cache had to be emptied; `failed`: whether even that was not enough."""

    def __init__(self, limit: int = 1 << 62):
        self.limit, self.reserved, self.peak, self.retries, self.failed = limit, 0, 0, 0, False
        self.free: dict = defaultdict(list)  # pool -> [(size, address)], sorted
        self.blocks: dict[int, Block] = {}
        self.live: dict[int, Block] = {}
        self.top = 0

    def _add_free(self, block: Block) -> None:
        bisect.insort(self.free[block.pool], (block.size, block.address))

    def _take_free(self, block: Block) -> None:
        free = self.free[block.pool]
        free.pop(bisect.bisect_left(free, (block.size, block.address)))

    def _new_segment(self, size: int, pool) -> Block:
        size = segment_size(size)
        if self.reserved + size > self.limit:
            self.empty_cache()
            self.failed |= self.reserved + size > self.limit
        self.reserved += size
        self.peak = max(self.peak, self.reserved)
        block = Block(self.top, size, pool)
        self.top += GAP
        self.blocks[block.address] = block
        return block

    def allocate(self, key: int, size: int, stream: int) -> None:
        """`size` is rounded already."""
        pool = (stream, size <= SMALL)
        free = self.free[pool]
        at = bisect.bisect_left(free, (size, -1))
        block = self.blocks[free.pop(at)[1]] if at < len(free) else self._new_segment(size, pool)
        rest = block.size - size
        if rest >= ROUND and (size <= SMALL or rest > SMALL):
            after = Block(block.address + size, rest, pool, block, block.after)
            self.blocks[after.address] = after
            if block.after:
                block.after.before = after
            block.size, block.after = size, after
            self._add_free(after)
        block.used = True
        self.live[key] = block

    def release(self, key: int) -> None:
        block = self.live.pop(key)
        block.used = False
        for first, second in ((block, block.after), (block.before, block)):
            if first and second and not first.used and not second.used:
                self._take_free(second if first is block else first)
                first.size, first.after = first.size + second.size, second.after
                if second.after:
                    second.after.before = first
                del self.blocks[second.address]
                block = first
        self._add_free(block)

    def empty_cache(self) -> None:
        """Gives whole unused segments back to the card."""
        self.retries += 1
        for block in [b for b in self.blocks.values() if not (b.used or b.before or b.after)]:
            self._take_free(block)
            del self.blocks[block.address]
            self.reserved -= block.size


def replay(events, limit: int = 1 << 62) -> CachingAllocator:
    """`events`: (key, size, stream), where size 0 frees what `key` has."""
    allocator = CachingAllocator(limit)
    for key, size, stream in events:
        if size:
            allocator.allocate(key, size, stream)
        else:
            allocator.release(key)
    return allocator
