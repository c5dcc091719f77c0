"""What works on this machine, and for each thing that does not, the one change that mends it.

`probes.examine` collects facts, `rules.diagnose` judges them, `text` says what follows.
"""
