"""The laws that `relations` tests: table.py lists them, and one file per kind of operator implements them.

table.py                    every law: what is done, what must follow, what it can't see
call_results.py             what all laws of one call found; fault_classes.py: where inside, and which class of fault
calls_with_other_inputs.py  a call made again, with inputs that the host made; what a module changes by that is put back
linear.py, linear_checksums.py, output_statistics.py, norms.py, functions.py, attention.py     operators
sublayers.py, whole_model.py                                                                   what lies between them
dispatcher.py               which laws are tried where, and when they are not; law_log.py: their results by site
"""
