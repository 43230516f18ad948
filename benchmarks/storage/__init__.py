"""The local storage tier: its speed beside fio, and loads of blocks while later ones are read."""
