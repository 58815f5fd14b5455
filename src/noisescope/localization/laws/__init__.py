"""The laws that `relations` tries: table.py lists them, one file per kind of operator says how each is tried.

table.py                every law: what is done, what must follow, what it can't see
evidence.py             what all laws of one call found; fault_classes.py: which class of fault that is
roundoff.py             how far healthy arithmetic may be off where a law is not exact
calls.py                a call as it was made, to be made again
linear.py, weights.py, output_statistics.py, norms.py, functions.py, attention.py     operators
sublayers.py, whole_model.py                                                          what lies between operators
dispatcher.py           which laws are tried where; results.py: suspects and detection limits of all of them
"""
