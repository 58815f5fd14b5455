"""What to do about findings: values in, decisions out. Does not import torch."""
