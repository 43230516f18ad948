"""A small continuous-batching engine on Paddle whose paged KV cache is managed by fdcache.

Read it in this order: ``config`` (sizes), ``model`` (the transformer), ``batch`` (the rows it computes), ``paged_kv``
(keys and values in fdcache's device planes), ``worker`` (one rank, with all calls of fdcache's controller),
``kv_cache`` (all calls of fdcache's manager, and a free list for comparison), ``engine`` (the scheduler), ``sampling``
(sampling and drafting), ``ranks`` (tensor parallelism). The demo is ``__main__``, ``workload`` and ``comparison`` (the
report).
"""

import os
import zlib  # noqa: F401  (before Paddle, whose releases before 3.0 replace the functions of one that is loaded later)

# A matrix product is reproducible only with a fixed number of threads and independent of its memory's alignment.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_CBWR", "AUTO")
