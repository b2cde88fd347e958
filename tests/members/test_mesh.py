from __future__ import annotations

import pytest
import torch

from hf_bayes.members.mesh import ChainMesh


def test_chains_and_processes_that_do_not_divide_are_refused(monkeypatch):
    import torch.distributed as dist

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    for chains, processes in ((3, 2), (4, 3), (2, 3)):
        monkeypatch.setattr(dist, "get_world_size", lambda processes=processes: processes)
        with pytest.raises(ValueError, match=f"{chains} chains on {processes} processes: one must divide the other"):
            ChainMesh(chains, torch.device("cpu"))


def test_one_process_owns_all_chains_and_exchanges_nothing() -> None:
    mesh, values = ChainMesh(3, torch.device("cpu")), torch.arange(3.0)
    assert (mesh.num_processes, mesh.rank, mesh.chain_size, mesh.data_size) == (1, 0, 1, 1)
    assert mesh.chains == range(3)
    assert mesh.sum_over_data(values) is mesh.gather_chains(values) is mesh.from_first(values) is values
    assert mesh.exchange("a") == mesh.share("a") == ["a"]


def test_draws_are_gathered_on_the_device_of_the_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    def all_gather(pieces: list[torch.Tensor], tensor: torch.Tensor, group: object) -> None:
        assert {one.device.type for one in [*pieces, tensor]} == {"meta"}  # NCCL has no backend for the CPU

    mesh = ChainMesh(2, torch.device("cpu"))
    mesh.chain_size, mesh.device = 2, torch.device("meta")
    monkeypatch.setattr(dist, "all_gather", all_gather)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device: torch.empty_like(tensor, device=device))
    assert mesh.gather_chains(torch.ones(1, 3)).shape == (2, 3)
