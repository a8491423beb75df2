"""Measurement over HTTP: load replay, reports."""
