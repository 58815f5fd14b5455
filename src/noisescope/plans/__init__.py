"""What to do about findings: values in, decisions out. No torch here."""
