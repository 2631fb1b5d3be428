"""Shared memory: a tensor that is sent stays where it is, and the message only says where that is.

Each node has a region of memory that its peers can map, and divides it into blocks. A large tensor is sent as a loan of
its block; one that lies elsewhere is copied into a block first. The receiver gets a view of the block, and returns the
loan when the last reference to the view is gone. A block is used again once the node itself holds no tensor in it and
all its loans are returned.

- Processes share no locks, and none waits for another. Every loan has a byte in the region: the owner sets it before
  it sends the message, and from then on only the receiver writes it, once. When no block or no byte is left, the tensor
  travels in the message. `models/handover.pml` describes this to a model checker.
- Loans to a dead peer count as returned. When the owner dies, its peers' mappings remain, and so do their views.
- A region is a file without a name, which peers open through a link in the run's directory to the owner's descriptor.
  Nothing remains of it however its processes end. It is as large as the machine's memory; pages that were never touched
  cost nothing.
"""

from __future__ import annotations

import bisect
import mmap
import os
import resource
import threading
import weakref
from collections import defaultdict, deque
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from tether.errors import RunError, WireError

#: a smaller tensor travels in the message, which costs less than a loan
SHARED_BYTES_MIN = 64 * 1024
#: how many loans there can be at a time; the region begins with a byte for each
LOANS_MAX = 4096


class Loan(msgspec.Struct, frozen=True, array_like=True):
    """Which bytes of the owner's region are lent; `number` is the position of the loan's own byte."""

    number: int
    start: int
    length: int


class _Block:
    """A piece of a region."""

    def __init__(self, start: int, size: int) -> None:
        self.start = start
        self.size = size
        #: the node itself has a tensor in it
        self.held = False
        #: how many loans of it are not returned yet
        self.loans = 0


class Memory:
    """A node's own region: the tensors that it will send are made here, and lent from here."""

    def __init__(self, directory: Path, name: str, *, size: int | None = None) -> None:
        self._region = _create_region_if_possible(directory, name, size or os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE)
        self._bytes = np.frombuffer(self._region, np.uint8)
        self._address = self._bytes.ctypes.data
        self._lock = threading.Lock()
        self._blocks: list[_Block] = []
        self._end = LOANS_MAX
        #: unused blocks, by their size
        self._free: defaultdict[int, list[_Block]] = defaultdict(list)
        #: the numbers that no loan has
        self._free_numbers = list(range(LOANS_MAX))
        #: by number: the block of a loan and the peer that has it
        self._loans: dict[int, tuple[_Block, str]] = {}
        #: blocks whose tensors are gone: finalizers add to it, and must not take the lock
        self._dropped: deque[_Block] = deque()

    def empty(self, count: int, *, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        """As `torch.empty`, but in the region if the tensor is large enough and there is room."""
        length = count * dtype.itemsize
        if length >= SHARED_BYTES_MIN and (device is None or device.type == "cpu"):
            with self._lock:
                block = self._allocate(length)
            if block is not None:
                view = memoryview(self._region)[block.start : block.start + length]
                weakref.finalize(view, self._dropped.append, block).atexit = False
                return torch.frombuffer(view, dtype=dtype)
        return torch.empty(count, dtype=dtype, device=device)

    def lend(self, to: str, values: bytes | memoryview) -> Loan | None:
        """Lend a peer these bytes, which must not change until it returns them; None if there is no room."""
        source = np.frombuffer(values, np.uint8)
        position = source.ctypes.data - self._address
        with self._lock:
            block = self._block_at(position)
            copied = block is None
            if not self._free_numbers:
                self._reclaim()
            if not self._free_numbers or (block is None and (block := self._allocate(len(source))) is None):
                return None
            number = self._free_numbers.pop()
        if copied:
            position = block.start
            self._bytes[position : position + len(source)] = source
        with self._lock:
            self._loans[number] = block, to
            block.loans += 1
            block.held = block.held and not copied
            self._region[number] = 1
        return Loan(number, position, len(source))

    def holds(self, values: Tensor) -> bool:
        """Whether these values are in the region, which lives as long as the process."""
        with self._lock:
            return self._block_at(values.data_ptr() - self._address) is not None

    def is_lent(self, values: Tensor) -> bool:
        """Whether a peer may be reading these values."""
        with self._lock:
            self._reclaim()
            block = self._block_at(values.data_ptr() - self._address)
            return block is not None and block.loans > 0

    def forget(self, peer: str) -> None:
        """Take back all loans to a dead peer."""
        with self._lock:
            for number, (_, to) in self._loans.items():
                if to == peer:
                    self._region[number] = 0
            self._reclaim()

    def close(self) -> None:
        """Let no other process attach the region any more. It is freed with the last tensor in it."""
        if isinstance(self._region, Region):
            self._region.close_descriptor()

    @property
    def used_bytes(self) -> int:
        """How much of the region is held or lent."""
        with self._lock:
            self._reclaim()
            return self._end - LOANS_MAX - sum(size * len(blocks) for size, blocks in self._free.items())

    def _allocate(self, length: int) -> _Block | None:
        """A block for the node itself. Sizes are powers of two; the unused last pages of a block are never touched."""
        self._reclaim()
        size = 1 << (length - 1).bit_length()
        if self._free[size]:
            block = self._free[size].pop()
        elif self._end + size <= len(self._region):
            block = _Block(self._end, size)
            self._blocks.append(block)
            self._end += size
        else:
            return None
        block.held = True
        return block

    def _block_at(self, position: int) -> _Block | None:
        if not LOANS_MAX <= position < self._end:
            return None
        return self._blocks[bisect.bisect_right(self._blocks, position, key=lambda block: block.start) - 1]

    def _reclaim(self) -> None:
        """Find the loans that have been returned and the tensors that are gone, and free their blocks."""
        for number in [number for number in self._loans if not self._region[number]]:
            block, _ = self._loans.pop(number)
            self._free_numbers.append(number)
            block.loans -= 1
            self._free_if_unused(block)
        while self._dropped:
            block = self._dropped.popleft()
            block.held = False
            self._free_if_unused(block)

    def _free_if_unused(self, block: _Block) -> None:
        if not block.held and not block.loans:
            self._free[block.size].append(block)


class PeerMemory:
    """The regions of peers, each mapped at its first loan."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._regions: dict[str, mmap.mmap] = {}

    def borrow(self, owner: str, loan: Loan) -> memoryview:
        """A view of the bytes that were lent; the loan is returned when nothing refers to the view any more."""
        if owner not in self._regions:
            self._regions[owner] = attach_region(self._directory, owner)
        region = self._regions[owner]
        number, start, length = loan.number, loan.start, loan.length
        if not (0 <= number < LOANS_MAX <= start and 0 < length <= len(region) - start):
            raise WireError(f"{loan} is outside the memory of {owner}")
        view = memoryview(region)[start : start + length]
        weakref.finalize(view, _return_loan, region, number, os.getpid()).atexit = False
        return view

    def forget(self, owner: str) -> None:
        """Release a dead peer's region; views of it remain valid."""
        self._regions.pop(owner, None)


def _return_loan(region: mmap.mmap, number: int, borrower: int) -> None:
    if os.getpid() == borrower:  # a fork of the borrower has borrowed nothing
        region[number] = 0


def _create_region_if_possible(directory: Path, name: str, size: int) -> mmap.mmap:
    """A region of this size; if that is impossible, one without room for blocks: all tensors travel in messages."""
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        with suppress(OSError):
            return create_region(directory, name, size)
    return mmap.mmap(-1, LOANS_MAX)


class Region(mmap.mmap):
    """Memory that other processes can attach until its descriptor is closed, and keep after that."""

    #: may be called more than once, and is called at the latest when the region is garbage
    close_descriptor: weakref.finalize[..., Any]


def create_region(directory: Path, name: str, size: int) -> Region:
    """Memory that other processes find under this name."""
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memfd_create")
    descriptor = os.memfd_create(_memfd_name(directory, name), os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
        (directory / f"{name}.memory").symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")
        region = Region(descriptor, size)
    except OSError:
        os.close(descriptor)
        raise
    region.close_descriptor = weakref.finalize(region, os.close, descriptor)
    region.close_descriptor.atexit = False
    return region


def attach_region(directory: Path, owner: str) -> mmap.mmap:
    """Map the region of a peer. If the peer has died, its region is gone and this is a `WireError`."""
    try:
        descriptor = os.open(directory / f"{owner}.memory", os.O_RDWR | os.O_CLOEXEC)
    except PermissionError as error:
        raise RunError(
            f"no access to the memory of {owner}: allow processes of one user to open /proc/PID/fd"
        ) from error
    except (OSError, ValueError) as error:
        raise WireError(f"no memory of {owner!r}: {error}") from error
    try:
        # the process id of a dead peer may belong to another process by now, which has other files
        if os.readlink(f"/proc/self/fd/{descriptor}") != f"/memfd:{_memfd_name(directory, owner)} (deleted)":
            raise WireError(f"the memory of {owner!r} is gone")
        return mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)


def _memfd_name(directory: Path, name: str) -> str:
    return f"{directory.name} {name}"
