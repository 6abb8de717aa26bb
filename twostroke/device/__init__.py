"""Streams, events, slots, the device-resident batch state, graphs. May import plan and torch."""
