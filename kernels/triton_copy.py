"""The Triton kernel that moves fragments between blocks and records on the device.

Importing this module needs Triton. `staged_copy` launches it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]  # Triton
def copy_fragments(  # type: ignore[no-untyped-def]  # the compiler reads tl types alone
    base,
    block_stride,
    record_offset,
    length,
    block_ids,
    records,
    jobs,
    fragments,
    record_bytes,
    GATHER: tl.constexpr,
    JOBS: tl.constexpr,
    WORDS: tl.constexpr,
    WORD: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Blocks into records (`GATHER`) or records into blocks.

    `base`, `block_stride`, `record_offset`, `length`: int64 [fragments], the columns of a
    `FragmentTable`; `block_ids`: int64 [blocks]; `records`: the address of the first record, the
    others follow without a gap. Job `j` is fragment `j % fragments` of block `j // fragments`.

    A program moves `JOBS` fragments at a time, `WORDS` elements of type `WORD` of each: so many
    bytes are in flight, whatever the length of a fragment. `VECTOR` elements are one access; every
    address and length is a multiple of it. Addresses are 64 bits wide throughout.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    lane = tl.arange(0, WORDS)
    unit: tl.constexpr = VECTOR * WORD.primitive_bitwidth // 8
    for first in range(program * JOBS, jobs, programs * JOBS):
        job = first + tl.arange(0, JOBS)
        real = job < jobs
        record = (job // fragments).to(tl.int64)
        fragment = job % fragments
        block = tl.load(block_ids + record, mask=real, other=0).to(tl.int64)
        start = tl.load(base + fragment, mask=real, other=0)
        stride = tl.load(block_stride + fragment, mask=real, other=0)
        offset = tl.load(record_offset + fragment, mask=real, other=0)
        # Written as a product, so that the compiler sees that a mask never splits a vector.
        words = tl.load(length + fragment, mask=real, other=0) // unit * VECTOR
        pages = (start + block * stride).to(tl.pointer_type(WORD))
        flat = (records + record * record_bytes + offset).to(tl.pointer_type(WORD))
        # A promise per row, on pointers: divisibility does not survive the cast from integers.
        pages = tl.multiple_of(pages, [unit])[:, None]
        flat = tl.multiple_of(flat, [unit])[:, None]
        for done in range(0, tl.max(words, 0), WORDS):
            place = done + lane
            mask = place[None, :] < words[:, None]
            if GATHER:
                moved = tl.load(pages + place[None, :], mask=mask, other=0)
                tl.store(flat + place[None, :], moved, mask=mask)
            else:
                moved = tl.load(flat + place[None, :], mask=mask, other=0)
                tl.store(pages + place[None, :], moved, mask=mask)
