"""Launches of the host as ops on a stream of their own, for layers in which the host waits for the GPU.

Where no token is dropped, the host must know how many tokens each expert has before it can launch their kernels: it
waits for the router, and all that was launched before it has ended (`cudaStreamSynchronize` in the token dispatchers of
Megatron-Core, megatron/core/transformer/moe/token_dispatcher.py). Nothing is then left in the queue of launches, and
the kernels of the experts begin one after another as the host launches them.

    host      launch norm | launch router | (waits)      | launch permute | launch dispatch | ...
    compute                 norm            router                          permute

Without such waits the times of all launches are known beforehand, and the engine adds them up (`Program.host`).
"""

from __future__ import annotations

from meshcast.simulator.ir.ops import Fragment, HostLaunch, Memory, Op

STREAM = "host"


def launch_on_host(fragment: Fragment) -> Fragment:
    """Returns the fragment with an op on the stream of the host before each of its ops, which waits for it."""
    made = fragment.copy()
    for issued in (made.forward, made.backward):
        issued[:] = [one for op in issued for one in _launch(op)]
    return made


def _launch(op: Op) -> list[Op]:
    """Returns an op between its launch and, if the host reads its result, the end of the wait for it."""
    if not op.issued:
        launched = [op]
    else:
        launch = Op(f"launch {op.name}", STREAM, HostLaunch(op.launches), [], op.phase, op.when)
        op.after, op.launches = [*op.after, launch], 0.0
        launched = [launch, op]
    if isinstance(op.work, Memory) and op.work.what == "router" and not op.work.backward and op.phase in "FR":
        launched.append(Op(f"wait for {op.name}", STREAM, HostLaunch(0.0), [op], op.phase, op.when))
    return launched
