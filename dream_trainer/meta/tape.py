"""The tape: runs model-building code for real, except that large and empty tensors stay on meta and are recorded.

While a recording is on, `torch.empty` and its kin, and large results of `torch.zeros`, `torch.randn` and such, become
meta tensors. Whatever touches one of them runs on meta and is recorded; everything else runs as always, so tables,
masks and constants that a constructor computes are real. To the code that runs, the meta tensors look like CPU tensors;
when it asks one for values, the calls behind it are replayed on the spot.

What cannot be seen at this level, and is therefore not deferred or not replayed:

- `torch.Tensor(n, m)`, the legacy constructor, allocates for real: correct, but not lazy.
- `torch.manual_seed` inside a recording seeds the real draws after it, not the recorded ones, which have seeds of
  their own. Pass `generator=` to fix a draw: it is honoured exactly.
- Storages written behind torch's back (`numpy`, `from_dlpack`): the arrays handed out are read-only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakSet

from torch import Tensor, nn

from dream_trainer.compat.pytorch import without_torch_function
from dream_trainer.distributed.seeds import hash_seed, preserved_random_state, seed_cpu
from dream_trainer.meta.recorded_calls import RecordedCalls
from dream_trainer.meta.recorder import Recorder


class Tape:
    """Records how tensors are made, and makes them later, one at a time, the same bits on every rank.

    Args:
        seed: Random draws, recorded or real, depend on it and on the order of the calls alone.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.history = RecordedCalls(seed)
        self._initialised: WeakSet[nn.Module] = WeakSet()
        self._recordings = 0
        self._is_recording = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Defers and records for the length of the context; may be entered again, also from within.

        Real draws come from the global generators of torch (CPU), `random` and numpy, which are seeded on entry and
        restored on exit.
        """
        if self._is_recording:
            yield
            return
        self._is_recording = True
        self._recordings += 1
        try:
            with preserved_random_state():
                seed_cpu(hash_seed(b"recording", self.seed, self._recordings))
                with Recorder(self.history, self._initialised):
                    yield
        finally:
            self._is_recording = False

    def has_initialised(self, module: nn.Module) -> bool:
        """Whether `module.init_weights()` ran in a recording, and wrote to something: its constructor may call it."""
        return module in self._initialised

    def tracks(self, tensor: Tensor) -> bool:
        """Whether `tensor` is a meta tensor that this tape can replay."""
        with without_torch_function():
            return tensor.is_meta and self.history.knows(tensor)

    def is_untouched(self, tensor: Tensor) -> bool:
        """Whether `tensor` was allocated (here, or on meta before the recording) and never written to."""
        with without_torch_function():
            return tensor.is_meta and self.history.is_untouched(self.history.ref(tensor))

    def is_given(self, tensor: Tensor) -> bool:
        """Whether `tensor`'s values were copied from a real tensor, as loading weights does."""
        with without_torch_function():
            return self.tracks(tensor) and self.history.is_given(self.history.ref(tensor))

    def is_drawn(self, tensor: Tensor) -> bool:
        """Whether `tensor` is a recorded one into whose values random numbers go."""
        with without_torch_function():
            return self.tracks(tensor) and self.history.is_drawn(self.history.ref(tensor))

    def replay(self, tensor: Tensor) -> Tensor:
        """The full real CPU tensor that `tensor` (on meta) stands for; a real tensor is returned as it is.

        Memory: the storage behind `tensor`, plus what the calls that made it hold at once. What nobody wrote is NaN.
        """
        with without_torch_function():
            if not tensor.is_meta:
                return tensor
            ref = self.history.ref(tensor)
            return ref.view(self.history.replay(ref)[0])
