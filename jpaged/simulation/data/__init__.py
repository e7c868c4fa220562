"""Lengths of real requests, without their text."""
