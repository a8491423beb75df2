"""Bytes and floating-point operations that each speedrun scenario must move, against what the device can do."""
