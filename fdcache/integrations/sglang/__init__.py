"""SGLang keeps its pages in fdcache: one JSON option names ``FdcacheLinker`` or ``FdcacheStorage``; see docs/sglang.md.

``linker`` has the class of the cache linker, over one ``PoolTier`` for each device pool of the model. ``storage`` has
the class of HiCache's storage, ``client`` what that calls: look-ups, loads and stores that wait for their end, over an
``OffloadManager`` whose device blocks are the pages of SGLang's host pool.
"""
