"""What trials to ask for, and what their results mean. Pure: no torch, no files, no clock.

Every part is a pair: `propose(context, results)` gives the trials that are wanted given the results so far (an empty
list means done) and `conclude(context, results)` gives conclusions as values. So adaptive search and fixed sweeps have
one form, and an old store can be interpreted again without a GPU.
"""
