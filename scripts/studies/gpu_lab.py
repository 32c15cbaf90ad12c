"""What the parts of the GPU study share: the device and its limits, sizes, the time left, and
finished cells.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from scripts.studies.harness import Parts

_COPIED = 1 << 32
_MATRIX = 8192  # bytes and rows: larger than a device's caches


class OutOfTime(Exception):
    """The minutes are over; the same command goes on."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large everything is."""

    shapes: tuple[str, ...] = ("8B", "1.5B", "32B")  # models of random numbers
    pairs: tuple[tuple[str, str], ...] = (("0.6B", "8B"), ("1.5B", "32B"))
    vocabulary: int = 151_936
    batches: tuple[int, ...] = (16, 1, 64, 256, 4, 128, 32, 8, 2)
    generate: tuple[int, ...] = (16, 1, 64, 256)
    tokens: int = 64  # written by each sequence
    prompt: int = 64
    prefix: int = 128  # known before a chunk that is scored
    chunk: int = 32
    requests: int = 32  # of the comparisons with a CPU
    samples: tuple[int, ...] = (16, 64, 8)
    questions: int = 24
    rollouts: tuple[int, ...] = (1, 16, 4, 64)  # of the speculation tables
    cache: int = 20_000  # tokens, of a pair's engines


TINY = Sizes(
    shapes=("8M",), pairs=(("", "8M"),), vocabulary=512, batches=(2,), generate=(2,), tokens=8, prompt=8, prefix=16,
    chunk=6, requests=3, samples=(2,), questions=1, rollouts=(2,), cache=4096,
)  # fmt: skip
"""Of the same parts where only the code is to be tried."""


class Lab:
    """A device, what is known of it, and the cells that are finished, on disk as soon as they are."""

    def __init__(self, device: str, sizes: Sizes, parts: Parts, until: float) -> None:
        self.device = torch.device(device)
        self.sizes = sizes
        self.parts = parts
        self._until = self._own_until = until  # by `time.time`, which the next process has as well

    @property
    def is_cuda(self) -> bool:
        """Whether it is a GPU."""
        return self.device.type == "cuda"

    @property
    def half(self) -> torch.dtype:
        """What weights are on it: a CPU computes in float32, for its speed in bfloat16 says
        nothing.
        """
        return torch.bfloat16 if self.is_cuda else torch.float32

    @property
    def left(self) -> float:
        """Seconds of the part that is going on."""
        return self._own_until - time.time()

    def begin(self, share: float) -> None:
        """A part begins, which may take that share of what is left."""
        self._own_until = time.time() + share * (self._until - time.time())

    def missing(self, names: Iterable[str], seconds: float) -> list[str]:
        """Those of these cells that are not finished; `seconds` is about how long it takes until
        the first of them is.

        :raises OutOfTime: there are some, and there is not so much left.
        """
        found = [name for name in names if name not in self.parts]
        if found and self.left < seconds:
            raise OutOfTime
        return found

    def cell(self, name: str, measure: Callable[[], Any], seconds: float = 0.0) -> Any:
        """A finished cell's value, measured now if it is not there; `seconds` is about how long
        that takes.

        :raises OutOfTime: there is not so much left.
        """
        if self.missing([name], seconds):
            self.parts.keep(name, measure())
            print(f"gpu: {name}: {str(self.parts[name])[:160]}", file=sys.stderr, flush=True)
        return self.parts[name]

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object]) -> float:
        """Of one call, with all that it started on the device."""
        self.synchronize()
        began = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - began

    def clear(self) -> None:
        """Give back what nothing refers to any more."""
        if self.is_cuda:
            gc.collect()
            torch.cuda.empty_cache()

    def look(self) -> dict[str, Any]:
        """What the device is, and two rates that nothing on it can pass: of memory, and of matrix
        products.
        """
        size, rows = (_COPIED, _MATRIX) if self.is_cuda else (1 << 24, 256)
        source = torch.randn(size // 4, device=self.device)
        copied = torch.empty_like(source)
        left = torch.randn(rows, rows, device=self.device).to(self.half)
        copying = min(self.seconds(lambda: copied.copy_(source)) for _ in range(6))
        product = min(self.seconds(lambda: left @ left) for _ in range(6))
        small = torch.zeros(8, device=self.device)
        launches = min(self.seconds(lambda: [small.add_(1) for _ in range(1000)]) for _ in range(3))
        return {
            "name": torch.cuda.get_device_name(self.device) if self.is_cuda else "CPU",
            "memory": torch.cuda.mem_get_info(self.device)[1] if self.is_cuda else 0,
            "torch": torch.__version__,
            "bytes": 2 * size / copying,  # a second, read and written
            "flops": 2 * rows**3 / product,
            "launch": launches / 1000,
        }
