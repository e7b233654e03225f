"""Exceptions that have no built-in equivalent."""


class UnsupportedError(NotImplementedError):
    """A meaningful request that no kernel serves yet. Nothing was computed instead."""


class CompileError(RuntimeError):
    """A kernel did not compile. The message carries the compiler's log."""


class FaultError(RuntimeError):
    """A kernel run on the host used a barrier, the copy engine or a warpgroup against their rules. The message says where."""


class DeadlockError(FaultError):
    """A kernel run on the host came to a state in which every warp waits. The message says who waits on what."""


class SanitizerError(RuntimeError):
    """A sanitizer found a fault while a kernel ran on the host. The message carries its report."""
