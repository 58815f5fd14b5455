"""Which trials to run, and what their results mean. Pure: no torch, no files, no clock.

Every part is a pair: `propose(context, results)` returns the trials it needs given the results so far (an empty list
means done), and `conclude(context, results)` returns conclusions as values. Adaptive search and fixed sweeps therefore
have one form, and an old store can be interpreted again without a GPU.
"""
