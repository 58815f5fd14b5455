"""What trials to ask for, and what their results mean. Pure: no torch, no files, no clock.

Every part is a pair: `propose(frame, results)` gives the trials that are wanted given what is known (an empty list
means done) and `conclude(frame, results)` gives conclusions as plain data. So adaptive search and fixed sweeps look
alike, and an old store can be read anew without a GPU.
"""
