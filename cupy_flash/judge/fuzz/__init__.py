"""Random tests without end: valid problems judged against the oracle, and malformed calls that have to be refused.

What is drawn is a pure function of a seed and a number, so one line repeats what failed.
``python -m cupy_flash.judge.fuzz`` runs them.
"""
