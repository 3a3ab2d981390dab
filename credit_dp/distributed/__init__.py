"""Start the ranks of a run, or join the ranks that a launcher started.

`launch.launch(config)` is all that a command needs. In this order it

1. looks for a launcher in the environment (`launcher`),
2. settles the device and the number of data ranks (`placement`),
3. starts one process per rank (`local`), unless a launcher has,
4. sets each rank up and calls one function on it (`worker`),
5. reports a failure once and stops all ranks (`local`, or `peer_monitor` under a launcher).

No torch at module level: importing it takes seconds. Nothing is imported here, as the process that
ranks are forked from imports `forkserver` first of all.
"""
