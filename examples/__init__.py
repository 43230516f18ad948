"""Programs that show how fdcache is used."""
