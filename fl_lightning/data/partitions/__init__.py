"""The ways to divide labelled samples among clients, one family per file; `fl_lightning.data.partition` chooses.

Each function returns, for every client, the positions of its samples. All randomness comes from the generator that it
is given.
"""
