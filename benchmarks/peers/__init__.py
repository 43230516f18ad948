"""fdcache beside the cache managers of other engines: equal traffic, the same calls, in one run.

``python -m benchmarks.peers.setup`` makes environments with the engines' published packages, which are imported as
they are. ``python -m benchmarks.peers`` measures. Processes of other environments import ``worker``, ``scenarios``,
``traffic`` and ``adapters``; these use NumPy and the standard library only.
"""
