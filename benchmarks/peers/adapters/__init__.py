"""One module for each cache manager, with a function ``make(pool, **options)`` that returns an ``Adapter``."""
