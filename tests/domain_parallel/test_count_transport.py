"""The transport that counts what collectives send."""

import torch

from credit_dp.domain_parallel.count_transport import CountingTransport


def test_collectives_are_counted_as_rings_of_ranks():
    transport = CountingTransport(1, 4)
    for entries in (2, 2, 5):
        gathered = transport.all_gather(torch.empty(entries, device="meta"))
        assert gathered.shape == (4, entries)
    transport.all_reduce(torch.empty(6, device="meta"))
    # A rank passes on all but one of four tensors; of a sum two times all but one quarter.
    assert transport.ring_collectives == {3 * 8: 2, 3 * 20: 1, 2 * 3 * 24 // 4: 1}
