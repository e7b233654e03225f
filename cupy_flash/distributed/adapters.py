"""Which adapter belongs to what a user gives as a communicator, and what adapters are told besides."""

from __future__ import annotations

import sys
from typing import Any

from ..errors import shown
from .communicator import Communicator

NAMES = ("rank", "size", "on_devices", "gather", "start")  # of a `Communicator`
TIMEOUT = 300.0  # seconds: more than ranks are usually apart


def as_communicator(comm: Any) -> Communicator:
    """The adapter of what a user gives as `comm`.

    Raises
    ------
    TypeError
    """
    if all(hasattr(comm, name) for name in NAMES):  # isinstance of a protocol takes much longer
        return comm
    kind = type(comm)
    library = str(kind.__module__)
    if library.partition(".")[0] == "mpi4py":
        return mpi(comm)
    if "cupy" in sys.modules and library.startswith(("cupy.cuda.nccl", "cupy_backends.cuda.libs.nccl")):
        return nccl(comm)
    raise TypeError(
        "comm: expected a communicator of mpi4py, a cupy.cuda.nccl.NcclCommunicator, or an object with rank, size, on_devices, "
        f"gather and start, got {shown(comm)}"
    )


def mpi(comm: Any, *, timeout: float = TIMEOUT) -> Communicator:
    """A communicator of mpi4py with a time limit.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
        Such as ``MPI.COMM_WORLD``. `attention` takes it as it is as well, with the usual time limit.
    timeout : float
        Seconds after which waiting for another rank is an error. More than ranks may be apart.

    Returns
    -------
    Communicator

    Notes
    -----
    Start programs as ``mpiexec -n 4 python -m mpi4py program.py``: so an error on one rank ends all of them at once. A process that
    is killed is noticed by ``mpiexec``, which ends the others, or by this time limit.

    Messages have the tag 23117 of the communicator itself. Give a duplicate, ``comm.Dup()``, to a program that has such ones.

    Examples
    --------
    >>> from cupy_flash import distributed
    >>> def main():
    ...     from mpi4py import MPI
    ...     return distributed.mpi(MPI.COMM_WORLD, timeout=60)
    """
    from .over_mpi import MpiCommunicator  # late, as the other one

    return MpiCommunicator(comm, timeout)


def nccl(comm: Any, *, host: Any = None, timeout: float = TIMEOUT) -> Communicator:
    """A communicator of NCCL with a time limit, and with a way for processes to agree.

    Parameters
    ----------
    comm : cupy.cuda.nccl.NcclCommunicator
        Of the devices, in which each rank has one. `attention` takes it as it is as well.
    host : communicator, optional
        Of the same ranks, of mpi4py or another `Communicator` for host memory: through it ranks compare their calls, in each of
        them, without waiting for devices. Without it calls are compared once for each different one.
    timeout : float
        Seconds after which an exchange that has not ended is an error. More than ranks may be apart.

    Returns
    -------
    Communicator
        To be made once, and used for all calls. `close` ends what looks after time.

    Examples
    --------
    >>> from cupy_flash import distributed
    >>> def main():                                     # mpiexec -n 4 python -m mpi4py program.py
    ...     import cupy
    ...     from cupy.cuda import nccl
    ...     from mpi4py import MPI
    ...     ranks = MPI.COMM_WORLD
    ...     cupy.cuda.Device(ranks.rank % cupy.cuda.runtime.getDeviceCount()).use()
    ...     name = ranks.bcast(nccl.get_unique_id() if ranks.rank == 0 else None)
    ...     return distributed.nccl(nccl.NcclCommunicator(ranks.size, name, ranks.rank), host=ranks)
    """
    from .over_nccl import NcclCommunicator  # late: CuPy is for arrays on devices

    return NcclCommunicator(comm, None if host is None else as_communicator(host), timeout)
