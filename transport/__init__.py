"""Named byte ranges over an unreliable, shared, metered link.

    receiver                                              sender
    server = TransferServer(host, port).start()           client = TransferClient(options=ClientOptions(connections=4))
    landing = server.expect(transfer_id, secret, sizes,   spec = TransferSpec(server.address, transfer_id, secret, sizes)
        targets, on_done=..., deadline_s=...)             push = client.open(spec, source, on_done=...)
                                                          push.ready(i)        as range i appears; from any thread
    landing.bytes_landed, landing.missing()               push.stats           PushStats, live
    server.cancel(transfer_id, reason)                    push.abort(reason, keep_landing=False)
    LandingResult in on_done                              PushResult in on_done, or push.wait(timeout_s)
    server.counters, server.close()                       client.link(address) -> LinkState; client.close()

`targets(i)` and `source(i)` (or sequences) give the memory of range i as a list of byte views, usually pages of an arena;
within a host and over RDMA (`TransferSpec(..., via=Via.SHM)`, `Via.RDMA`) the source is a `path.shm.ArenaSource`. Both hold
still until on_done. Callbacks come from transport threads and must not block. A second sender with the same transfer id and
secret sends only what is missing. Reasons are `wire.frames.Code` labels.

Rooms; each imports only from those below it (contracts in pyproject.toml):

    batch, loopback, metrics   one-sided writes and reads; both ends joined in memory; Prometheus
    send │ receive             the two ends; neither knows the other
    coding │ rdma │ control    bytes made smaller; NICs; what processes say to each other besides
    wire                       frames, connections, seals: what both ends must agree on
    peers                      who the other end is by its certificate, and what it may do
    path                       sockets, shared memory, what a link carries and may carry
    errors

Pure (no sockets, no threads, time comes in): errors, turns, wire but for session and identity, peers.{name, rights},
path.governor, send.{reach,
sieve, spec}, send.schedule.{lanes, fairness}, receive.registry.{landing, landings, segments, activity, seats},
coding.{elements, quantise}, rdma.{rails, topology}.
Rim: send.{client, peer, lane}, receive.{server, connection}, path.{tcp, shm, link, pacing}, wire.{session, identity},
peers.{guard, revocation}, rdma.{device, verbs, inlet}, coding.{codec, choice, budget}, control.
For tests without sockets: loopback; without NICs: rdma.loopback.
"""
