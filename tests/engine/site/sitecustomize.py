"""Loaded by every process of a server that has this directory on its PYTHONPATH.

The ranks and the engine core of vLLM wait for each other by yielding in a loop. On two cores, both
taken by ranks, a recent kernel (seen with 6.18) lets such loops run for half a minute while nobody
else runs at all: neither the store nor the test. Real machines have more cores than ranks; here the
loops sleep for a moment instead.
"""

import os
import time

PAUSE_S = 0.0002

os.sched_yield = lambda: time.sleep(PAUSE_S)
