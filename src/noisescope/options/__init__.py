"""One options value per command. The command line, files of options, Python signatures and the tables of docs/cli.md
are all read from these classes; what is checked is checked here, before torch is imported."""
