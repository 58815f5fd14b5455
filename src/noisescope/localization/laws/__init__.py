"""The laws that `relations` tries: table.py lists them, one file a kind of operator says how each is tried.

table.py        every law as a value: what is done, what must follow, what it can't see
readings.py     what one law said; examined.py: what all laws of one call said, and what tells fault classes apart
roundoff.py     how far healthy arithmetic may be off where a law is not exact
calls.py        a call as it was made, to be made again; listening.py: where such calls are heard
linear.py, statistics.py, weights.py, norms.py, functions.py, attention.py     operators
sublayers.py, whole_model.py                                                   what lies between operators
suspects.py     further calls that only a suspect pays for
stations.py     which laws are tried where; book.py: all of it put together; classes.py: the kind of fault
"""
