"""Devices behind one small interface: memory, streams, events, block copies."""
