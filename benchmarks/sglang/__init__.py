"""Measure SGLang's engine with no host cache, with HiCache and with both doors of fdcache, in one run."""
