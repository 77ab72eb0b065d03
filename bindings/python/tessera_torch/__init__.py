"""Tessera's shared-memory collectives for torch.distributed.

    import torch.distributed as dist
    import tessera_torch

    dist.init_process_group("tessera")  # or "cpu:tessera,cuda:nccl"

Importing it registers the backend "tessera" for CPU tensors of ranks that run
on one host. See bindings/python/README.md.
"""

import os

import torch  # first: it brings the libraries that _C is linked with
import torch.distributed as dist

from tessera_torch import _C

if torch.__version__.split("+")[0] != _C.torch_version:
    raise ImportError(
        f"tessera_torch was built against torch {_C.torch_version}, but this is "
        f"torch {torch.__version__}: build it again, with "
        "'pip install --force-reinstall ./bindings/python'")


def _ranks_on_this_host(group_size):
    """How many ranks share the cores: that decides how long waiting spins."""
    if "LOCAL_WORLD_SIZE" in os.environ:  # torchrun
        return int(os.environ["LOCAL_WORLD_SIZE"])
    return dist.get_world_size() if dist.is_initialized() else group_size


def _make(options, backend_options):
    if backend_options is not None:
        raise ValueError("tessera: pg_options are not supported. Leave them out.")
    return _C.make_backend(
        store=options.store,
        group=options.group_id,
        ranks=options.global_ranks_in_group or list(range(options.group_size)),
        rank=options.group_rank,
        ranks_on_host=_ranks_on_this_host(options.group_size),
        timeout=options.timeout)


if dist.is_available() and "TESSERA" not in dist.Backend._plugins:
    # A list: torch iterates over a string by letter.
    dist.Backend.register_backend(
        "tessera", _make, extended_api=True, devices=["cpu"])
