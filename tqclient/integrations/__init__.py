"""Bridges that training frameworks plug in; each module imports nothing but this package and torch."""
