"""Named byte ranges over an unreliable, shared, metered link.

    receiver                                              sender
    server = TransferServer(host, port).start()           client = TransferClient(options=ClientOptions(connections=4))
    landing = server.expect(transfer_id, secret, sizes,   push = client.open(server.address, transfer_id, secret, sizes,
        targets, on_done=..., deadline_s=...)                 source, on_done=..., same_host=False)
                                                          push.ready(i)        as range i appears; from any thread
    landing.bytes_landed, landing.missing()               push.stats           PushStats, live
    server.cancel(transfer_id, reason)                    push.abort(reason, keep_landing=False)
    LandingResult in on_done                              PushResult in on_done, or push.wait(timeout_s)
    server.counters, server.close()                       client.link(address) -> LinkState; client.close()

`targets(i)` and `source(i)` (or sequences) give the memory of range i as a list of byte views, usually pages of an
arena; for `same_host=True` and `over_rdma=True` the source is a `shm.ArenaSource`. Both hold still until on_done. Callbacks come
from transport threads and must not block. A second sender with the same transfer id and secret sends only what is missing.
Reasons are `frames.Code` labels.

Pure: errors, ranges, frames, connection, transfer, lanes, landings, governor, pacing, link, sieve, rdma_rails, rdma_topology.
Rim: client, push, peer, outlet and rdma_outlet (sending), server, inlet and rdma_inlet (receiving), tcp, shm, rdma, crypto. For
tests without sockets: loopback; without NICs: rdma_loopback. For one-sided writes and reads in batches: batch. For Prometheus:
metrics. What processes say to each other besides: messages, proto.
"""
