"""Fits the machine at hand: where memory and time go, what to compute again, how to take a step within a budget."""
