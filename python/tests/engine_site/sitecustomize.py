"""Start-up of the interpreters of an engine of several workers, for tests: its workers leave the cores to others.

For a second after each message a worker of vLLM polls its queue and calls
``sched_yield`` in between. On two cores, with a kernel whose ``sched_yield`` moves
virtual run time (6.18), two such workers kept both cores from everybody else for that
second: a thread that slept 5 ms woke 1.0 to 1.6 s late, lookups and loads of the
connector (1.5 s allowed) ended as misses, which is right, and the test that wants hits
failed in one of five runs beside other work. A short sleep gives a core up for real.
"""

import os
import time

_SLEEP_S = 0.0002


def _give_up_core() -> None:
    time.sleep(_SLEEP_S)


os.sched_yield = _give_up_core
