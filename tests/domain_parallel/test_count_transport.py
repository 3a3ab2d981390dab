"""The transport that counts what collectives send."""

import torch

from credit_dp.domain_parallel.count_transport import CountingTransport, RankTraffic


def test_a_collective_counts_its_payload_once():
    transport = CountingTransport(1, 4)
    for entries in (2, 2, 5):
        gathered = transport.all_gather(torch.empty(entries, device="meta"))
        assert gathered.shape == (4, entries)
    transport.all_reduce(torch.empty(6, device="meta"))
    assert transport.sent == (RankTraffic(0, 0, 4, 4 * (2 + 2 + 5 + 6)),) * 4
