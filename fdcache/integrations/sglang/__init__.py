"""SGLang's HiCache stores its pages in fdcache: one JSON option names ``FdcacheStorage``; docs/sglang.md has it.

``storage`` has the class that SGLang loads by its path, ``client`` what it calls: look-ups, loads and stores that wait
for their end, over an ``OffloadManager`` whose device blocks are the pages of SGLang's host pool.
"""
