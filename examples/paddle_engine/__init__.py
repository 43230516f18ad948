"""A small continuous-batching engine on Paddle whose paged KV cache is managed by fdcache.

Read it in this order: ``config`` (sizes), ``model`` (the transformer), ``batch`` (the rows it computes), ``paged_kv``
(keys and values in fdcache's device planes), ``worker`` (one rank: everything that fdcache's worker side is told),
``kv_cache`` (everything that its scheduler side is told), ``engine`` (the scheduler's loop over each ``task``). Beside
it stand ``sampling``, ``drafting`` (the draft layer) and ``ranks`` (tensor parallelism). The demo is ``__main__``,
``workload``, ``baseline`` (no cache) and ``comparison`` (the report).
"""

import os

# A matrix product gives the same bits twice only with the same number of threads and whatever its memory's alignment.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_CBWR", "AUTO")
